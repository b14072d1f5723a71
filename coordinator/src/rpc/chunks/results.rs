//! Chunks of what an attempt sent home itself, from the results at home.

use limb_common::assignment::OutputNumber;
use limb_common::id::Digest;
use limb_common::identity::AgentIdentity;
use limb_common::manifest::Inode;

use super::{ResultChunkFuture, ResultReadError, ResultReader};
use crate::results::{AttemptId, ChunkReadError, ResultsHome};

impl ResultReader for ResultsHome {
    fn read_chunk(
        &self,
        who: &AgentIdentity,
        output: OutputNumber,
        file: u64,
        index: u64,
    ) -> ResultChunkFuture {
        let home = self.clone();
        let id = AttemptId { run: who.run.clone(), attempt: who.attempt };
        Box::pin(async move { home.result_chunk(&id, output, file, index).await.map_err(Into::into) })
    }

    fn read_moved(
        &self,
        who: &AgentIdentity,
        manifest: Digest,
        inode: Inode,
        index: u64,
    ) -> ResultChunkFuture {
        let home = self.clone();
        let id = AttemptId { run: who.run.clone(), attempt: who.attempt };
        Box::pin(async move { home.lower_chunk(&id, manifest, inode, index).await.map_err(Into::into) })
    }
}

impl From<ChunkReadError> for ResultReadError {
    fn from(error: ChunkReadError) -> Self {
        match error {
            ChunkReadError::NotFound => Self::NotFound,
            ChunkReadError::Changed => Self::Changed,
            ChunkReadError::Io(error) => Self::Io(std::io::Error::other(error)),
        }
    }
}

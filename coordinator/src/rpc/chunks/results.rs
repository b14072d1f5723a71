//! Chunks of what an attempt sent home itself, from the results at home.

use limb_common::assignment::OutputNumber;
use limb_common::identity::AgentIdentity;

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
        Box::pin(async move {
            home.result_chunk(&id, output, file, index).await.map_err(|error| match error {
                ChunkReadError::NotFound => ResultReadError::NotFound,
                ChunkReadError::Changed => ResultReadError::Changed,
                ChunkReadError::Io(error) => ResultReadError::Io(std::io::Error::other(error)),
            })
        })
    }
}

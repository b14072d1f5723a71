//! What among a run's results is a checkpoint.

use std::collections::BTreeMap;
use std::path::Path;

use limb_common::checkpoint::{self, Checkpoint};
use limb_proto::v1::ResultFile;

/// One of an output.
#[derive(Debug)]
pub(in crate::cli) struct OfOutput {
    pub(in crate::cli) output: String,
    /// Where the output lands at home.
    pub(in crate::cli) dest: String,
    pub(in crate::cli) checkpoint: Checkpoint,
}

impl OfOutput {
    fn holds(&self, file: &ResultFile) -> bool {
        let path = super::relative(file);
        let own = Path::new(std::ffi::OsStr::new(""));
        let root = super::path_of(&self.checkpoint.path);
        file.output == self.output
            && (root == own
                || path.starts_with(root)
                // `model` of `model-00001-of-00002.safetensors`.
                || self.checkpoint.files > 1
                    && path.parent() == root.parent()
                    && file.path.strip_prefix(&self.checkpoint.path[..]).is_some_and(|rest| rest.starts_with(b"-")))
    }
}

/// The one that came last at the end.
pub(in crate::cli) fn of(files: &[ResultFile]) -> Vec<OfOutput> {
    let mut outputs: BTreeMap<(&str, &str), Vec<checkpoint::ResultFile<'_>>> = BTreeMap::new();
    for file in files.iter().filter(|file| !file.b3sum.is_empty() || file.state == "partial") {
        outputs.entry((&file.output, &file.dest)).or_default().push(checkpoint::ResultFile {
            path: &file.path,
            bytes: file.size,
            published_unix_ms: file.published_unix_ms,
            whole: file.state == "published",
        });
    }
    let mut all: Vec<_> = outputs
        .into_iter()
        .flat_map(|((output, dest), files)| {
            let of_output =
                |checkpoint| OfOutput { output: output.to_owned(), dest: dest.to_owned(), checkpoint };
            checkpoint::checkpoints(&files).into_iter().map(of_output)
        })
        .collect();
    all.sort_by_key(|found| found.checkpoint.published_unix_ms);
    all
}

/// The files of the newest complete one; what stands in the way where there is none.
pub(super) fn newest(files: Vec<ResultFile>) -> anyhow::Result<Vec<ResultFile>> {
    let all = of(&files);
    let newest = all.iter().rev().find(|found| found.checkpoint.is_complete());
    let Some(newest) = newest else {
        let last = all.last().map(|found| {
            let lacks = found.checkpoint.lacks.as_deref().unwrap_or_default();
            format!(": {} is not complete ({lacks})", name(found))
        });
        anyhow::bail!("no complete checkpoint came home{}", last.unwrap_or_default());
    };
    Ok(files.into_iter().filter(|file| newest.holds(file)).collect())
}

/// Files that belong to a checkpoint which is not complete yet.
pub(super) fn unfinished(files: &[ResultFile]) -> impl Fn(&ResultFile) -> bool + use<> {
    let unfinished: Vec<_> = of(files).into_iter().filter(|found| !found.checkpoint.is_complete()).collect();
    move |file| unfinished.iter().any(|found| found.holds(file))
}

pub(in crate::cli) fn name(found: &OfOutput) -> String {
    let path = String::from_utf8_lossy(&found.checkpoint.path);
    super::clean(if path.is_empty() { "." } else { &path })
}

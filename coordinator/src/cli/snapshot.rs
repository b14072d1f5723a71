//! `limb snapshot create|ls|diff`: frozen working sets, straight from home's store.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use limb_common::class::DataClass;
use limb_common::id::Digest;
use limb_common::units::show_bytes;
use limb_proto::v1::HashProgress;
use serde_json::{Value, json};

use super::args::SnapshotCommand;
use super::talk::{Failure, Talk, clean, print, print_json};
use super::{follow, render, run};
use crate::settings::Settings;
use crate::snapshot::{LinkPolicy, Progress, Snapshot, SnapshotRequest, Snapshots};

/// What of a hash names a snapshot on the screen.
const SHOWN_DIGITS: usize = 12;

pub(super) async fn snapshot(
    settings: &Settings,
    talk: &Talk,
    command: &SnapshotCommand,
) -> Result<ExitCode, Failure> {
    let snapshots = Snapshots::open(&settings.state_dir).map_err(Failure::internal)?;
    match command {
        SnapshotCommand::Create { source, follow_links, copy, json } => {
            let source = std::path::absolute(source).map_err(Failure::refused)?;
            let request = SnapshotRequest {
                source,
                class: DataClass::default(),
                copy_all: *copy,
                links: if *follow_links { LinkPolicy::Follow } else { LinkPolicy::Keep },
            };
            let made = create(talk, &snapshots, request).await?;
            for link in &made.outside_links {
                talk.say(&format!(
                    "warning: {} leads out of the set",
                    clean(&String::from_utf8_lossy(&link.path))
                ));
            }
            if *json {
                print_json(&as_value(&made))?;
            } else {
                print(&made.id.to_string())?;
                let size = show_bytes(made.bytes);
                talk.say(&format!("{} files, {size}, class {}", made.files, made.class));
            }
        }
        SnapshotCommand::Ls { json } => {
            let all = snapshots.list().map_err(Failure::internal)?;
            if *json {
                print_json(&Value::Array(all.iter().map(as_value).collect()))?;
            } else if all.is_empty() {
                talk.say("no snapshots yet");
            } else {
                let zone = jiff::tz::TimeZone::system();
                print(&render::snapshots(all.iter().map(|snapshot| row(snapshot, &zone)).collect()))?;
            }
        }
        SnapshotCommand::Diff { before, after, json } => {
            let (before, after) = (find(&snapshots, before)?, find(&snapshots, after)?);
            let difference = snapshots.diff(before, after).map_err(Failure::internal)?;
            let texts = |paths: &[Vec<u8>]| -> Vec<String> {
                paths.iter().map(|path| String::from_utf8_lossy(path).into_owned()).collect()
            };
            let parts = [
                ("+", "added", texts(&difference.added)),
                ("-", "removed", texts(&difference.removed)),
                ("~", "changed", texts(&difference.changed)),
            ];
            if *json {
                let map: serde_json::Map<String, Value> =
                    parts.iter().map(|(_, word, paths)| ((*word).to_owned(), json!(paths))).collect();
                print_json(&Value::Object(map))?;
            } else {
                let lines = parts.iter().flat_map(|(sign, _, paths)| {
                    paths.iter().map(move |path| format!("{sign} {}", clean(path)))
                });
                print(&lines.collect::<Vec<_>>().join("\n"))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn create(talk: &Talk, snapshots: &Snapshots, request: SnapshotRequest) -> Result<Snapshot, Failure> {
    let source = request.source.display().to_string();
    let done = Arc::new(Mutex::new(Progress::default()));
    let seen = Arc::clone(&done);
    let mut wait = talk.wait("freezing");
    let work = snapshots.create_async(request, move |progress| {
        *seen.lock().unwrap_or_else(PoisonError::into_inner) = progress;
    });
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            made = work.as_mut() => return made.map_err(Failure::refused),
            () = tokio::time::sleep(follow::TICK) => {
                let Progress { files_done, bytes_done, bytes_total } =
                    *done.lock().unwrap_or_else(PoisonError::into_inner);
                let source = source.clone();
                wait.update(&run::hashing_line(&HashProgress { source, files_done, bytes_done, bytes_total }));
            }
        }
    }
}

fn row(snapshot: &Snapshot, zone: &jiff::tz::TimeZone) -> Vec<String> {
    vec![
        snapshot.id.to_hex()[..SHOWN_DIGITS].to_owned(),
        clean(&snapshot.source.to_string_lossy()),
        snapshot.class.to_string(),
        snapshot.files.to_string(),
        show_bytes(snapshot.bytes),
        render::moment(snapshot.created_unix_ms, zone),
    ]
}

fn as_value(snapshot: &Snapshot) -> Value {
    json!({
        "id": snapshot.id.to_hex(),
        "source": snapshot.source.to_string_lossy(),
        "class": snapshot.class.as_str(),
        "files": snapshot.files,
        "bytes": snapshot.bytes,
        "single_file": snapshot.single_file,
        "outside_links": snapshot.outside_links.len(),
        "skipped": snapshot.skipped.len(),
        "created_unix_ms": snapshot.created_unix_ms,
    })
}

/// A whole id, or the beginning of exactly one.
fn find(snapshots: &Snapshots, text: &str) -> Result<Digest, Failure> {
    if let Ok(id) = text.parse() {
        return Ok(id);
    }
    let all = snapshots.list().map_err(Failure::internal)?;
    let mut found = all.iter().filter(|snapshot| !text.is_empty() && snapshot.id.to_hex().starts_with(text));
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one.id),
        (Some(_), Some(_)) => Err(Failure::refused(anyhow::anyhow!("several snapshots begin with {text:?}"))),
        (None, _) => Err(Failure::refused(anyhow::anyhow!(
            "no snapshot begins with {text:?}; hint: `limb snapshot ls` lists them"
        ))),
    }
}

//! `limb results ls|get|verify`.
//!
//! Never: write outside of `--to`, follow a link among the results, or call a copy good whose
//! hash was not compared.

pub(super) mod checkpoints;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use limb_common::phase::LimbExit;
use limb_common::units::show_bytes;
use limb_proto::v1::{ListResultsRequest, ResultFile, RunInfo, VerifiedFile};
use serde_json::{Value, json};

use super::args::ResultsCommand;
use super::client::{self, Owner, Start};
use super::run::exit_code;
use super::talk::{Failure, Talk, clean, print, print_json};
use super::{json, render};
use crate::settings::Settings;

/// Read and hashed at a time.
const COPY_BYTES: usize = 1024 * 1024;

pub(super) async fn results(
    settings: &Settings,
    talk: &Talk,
    command: &ResultsCommand,
) -> Result<ExitCode, Failure> {
    let mut owner = client::connect(settings, Start::IfNeeded).await?;
    match command {
        ResultsCommand::Ls { run, checkpoints, json } => {
            let (_, files) = list(&mut owner, run).await?;
            ls(talk, &files, *checkpoints, *json)
        }
        ResultsCommand::Get { run, path, newest_checkpoint, watch, to, json } => {
            let mut getting = Getting::new(talk, path.as_deref(), to);
            if *watch {
                return getting.watch(settings, owner, run, *json).await;
            }
            let (_, mut files) = list(&mut owner, run).await?;
            if *newest_checkpoint {
                files = checkpoints::newest(files).map_err(Failure::refused)?;
            }
            getting.all(&files)?;
            getting.end(*json)
        }
        ResultsCommand::Verify { run, json } => verify(&mut owner, talk, run, *json).await,
    }
}

async fn list(owner: &mut Owner, run: &str) -> Result<(RunInfo, Vec<ResultFile>), Failure> {
    let run = client::find_run(owner, run).await?;
    let request = ListResultsRequest { run: run.run_id.clone() };
    let reply = owner.list_results(request).await.map_err(|status| Failure::status(&status))?;
    Ok((run, reply.into_inner().files))
}

async fn verify(owner: &mut Owner, talk: &Talk, run: &str, as_json: bool) -> Result<ExitCode, Failure> {
    let run = client::find_run(owner, run).await?;
    let failed = |status: tonic::Status| Failure::status(&status);
    let request = ListResultsRequest { run: run.run_id };
    let mut stream = owner.verify_results(request).await.map_err(failed)?.into_inner();
    let mut wait = talk.wait("hashing the results");
    let mut all: Vec<VerifiedFile> = Vec::new();
    while let Some(verified) = super::follow::ticking(&mut wait, stream.message()).await.map_err(failed)? {
        all.push(verified);
    }
    drop(wait);
    for verified in all.iter().filter(|verified| !verified.ok && !as_json) {
        print(&mismatch_line(verified))?;
    }
    let bad = all.iter().filter(|verified| !verified.ok).count();
    if as_json {
        print_json(&Value::Array(all.iter().map(json::verified).collect()))?;
    }
    if bad == 0 {
        let bytes = all.iter().filter_map(|v| v.file.as_ref()).map(|file| file.size).sum();
        talk.say(&format!("verified: {} files, {}, each equal to its hash", all.len(), show_bytes(bytes)));
        return Ok(ExitCode::SUCCESS);
    }
    talk.insist(&format!("NOT verified: {bad} of {} files differ", all.len()));
    Ok(exit_code(LimbExit::DataNotHome.code()))
}

fn mismatch_line(verified: &VerifiedFile) -> String {
    let name = verified.file.as_ref().map_or_else(String::new, |file| {
        format!("{}/{}", file.dest.trim_end_matches('/'), String::from_utf8_lossy(&file.path))
    });
    format!("{}: {}", clean(&name), clean(&verified.verdict))
}

fn ls(talk: &Talk, files: &[ResultFile], only_checkpoints: bool, as_json: bool) -> Result<ExitCode, Failure> {
    let found = checkpoints::of(files);
    let now_ms = limb_common::clock::unix_ms();
    match (as_json, only_checkpoints) {
        (true, false) => print_json(&Value::Array(files.iter().map(json::file).collect()))?,
        (true, true) => print_json(&Value::Array(found.iter().map(json::checkpoint).collect()))?,
        (false, true) if found.is_empty() => talk.say("no checkpoint came home"),
        (false, true) => print(&render::checkpoints(&found, now_ms))?,
        (false, false) if files.is_empty() => talk.say("no results came home"),
        (false, false) => {
            print(&render::results(files, &jiff::tz::TimeZone::system()))?;
            if !found.is_empty() {
                print("")?;
                print(&render::checkpoints(&found, now_ms))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Copying results somewhere, once or as they come.
struct Getting<'a> {
    talk: &'a Talk,
    only: Option<&'a Path>,
    to: &'a Path,
    /// What was put where, by hash.
    copied: HashMap<PathBuf, String>,
    rows: Vec<Value>,
    bytes: u64,
    left: usize,
}

impl<'a> Getting<'a> {
    fn new(talk: &'a Talk, only: Option<&'a Path>, to: &'a Path) -> Self {
        Self { talk, only, to, copied: HashMap::new(), rows: Vec::new(), bytes: 0, left: 0 }
    }

    /// Everything that is wanted of these and not there yet.
    fn all(&mut self, files: &[ResultFile]) -> Result<(), Failure> {
        // Directories are made as they are needed; links stay at home: they may point anywhere.
        let (chosen, left): (Vec<&ResultFile>, Vec<&ResultFile>) =
            files.iter().filter(|file| is_wanted(file, self.only)).partition(|file| !file.b3sum.is_empty());
        if chosen.is_empty() {
            return Err(Failure::refused(match self.only {
                Some(path) => anyhow::anyhow!(
                    "no result is called {}; hint: `limb results ls` lists them",
                    clean(&path.to_string_lossy())
                ),
                None => anyhow::anyhow!("no results came home"),
            }));
        }
        self.left = left.len();
        let several = files.iter().any(|file| file.output != files[0].output);
        chosen.into_iter().try_for_each(|file| self.one(file, several))
    }

    fn one(&mut self, file: &ResultFile, several: bool) -> Result<(), Failure> {
        let target = target(self.to, file, several).map_err(Failure::refused)?;
        let before = self.copied.get(&target).map(String::as_str);
        if before == Some(&file.b3sum) {
            return Ok(());
        }
        copy(file, &target, before).map_err(|error| Failure::new(LimbExit::DataNotHome, error))?;
        self.bytes += file.size;
        self.rows.push(json!({ "path": target.to_string_lossy(), "size": file.size, "b3sum": file.b3sum }));
        self.copied.insert(target, file.b3sum.clone());
        Ok(())
    }

    /// Until the run is over: each file once it is published, those of a checkpoint once all of it is.
    async fn watch(
        &mut self,
        settings: &Settings,
        mut owner: Owner,
        run: &str,
        as_json: bool,
    ) -> Result<ExitCode, Failure> {
        let mut wait = self.talk.wait("waiting for results");
        loop {
            let (info, files) = match list(&mut owner, run).await {
                Ok(listed) => listed,
                // It comes back: its supervisor sees to that.
                Err(failure) if matches!(failure.exit, LimbExit::NoCoordinator) => {
                    owner = super::follow::redial(settings).await?;
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            if super::follow::is_over(&info) {
                drop(wait);
                self.all(&files)?;
                return self.end(as_json);
            }
            let unfinished = checkpoints::unfinished(&files);
            let several = files.iter().any(|file| file.output != files[0].output);
            let only = self.only;
            let is_ready =
                |file: &&ResultFile| file.state == "published" && !file.b3sum.is_empty() && !unfinished(file);
            for file in files.iter().filter(|file| is_wanted(file, only)).filter(is_ready) {
                let before = self.rows.len();
                // It may be written anew in this moment: then it is listed again, as what it is now.
                if let Err(failure) = self.one(file, several) {
                    tracing::debug!(error = %failure.error, "a result was not copied yet");
                } else if self.rows.len() > before {
                    self.talk.say(&format!("copied {}", clean(&relative(file).to_string_lossy())));
                }
            }
            tokio::time::sleep(super::follow::TICK).await;
            wait.tick();
        }
    }

    fn end(&mut self, as_json: bool) -> Result<ExitCode, Failure> {
        if self.left > 0 {
            self.talk.say(&format!("not copied: {} directories and links, which have no hash", self.left));
        }
        let (count, bytes) = (self.rows.len(), show_bytes(self.bytes));
        self.talk.say(&format!("copied: {count} files, {bytes}, each equal to its hash"));
        if as_json {
            print_json(&Value::Array(std::mem::take(&mut self.rows)))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn relative(file: &ResultFile) -> &Path {
    path_of(&file.path)
}

fn path_of(bytes: &[u8]) -> &Path {
    Path::new(std::ffi::OsStr::from_bytes(bytes))
}

/// The file itself, anything below a directory of that name, or either with the output before it.
fn is_wanted(file: &ResultFile, only: Option<&Path>) -> bool {
    only.is_none_or(|only| {
        relative(file).starts_with(only) || Path::new(&file.output).join(relative(file)).starts_with(only)
    })
}

/// Names came from a box: nothing of them may leave `to`.
fn target(to: &Path, file: &ResultFile, several: bool) -> anyhow::Result<PathBuf> {
    let below = if several {
        Path::new(file.output.trim_start_matches('/')).join(relative(file))
    } else {
        relative(file).to_owned()
    };
    let plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    anyhow::ensure!(
        plain && below.components().next().is_some(),
        "the result {:?} has no safe name",
        clean(&below.to_string_lossy())
    );
    Ok(to.join(below))
}

/// Copies beside the target, compares the hash, and only then gives it its name; over what has it
/// only where that is still what was copied `before`.
fn copy(file: &ResultFile, target: &Path, before: Option<&str>) -> anyhow::Result<()> {
    let source = Path::new(&file.dest).join(relative(file));
    let kind = fs::symlink_metadata(&source)
        .with_context(|| format!("could not read {}; hint: was it moved or deleted?", source.display()))?;
    anyhow::ensure!(kind.is_file(), "{} is not a plain file any more", source.display());
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent).with_context(|| format!("could not make {}", parent.display()))?;
    }
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".limb-part");
    let part = target.with_file_name(name);
    let copied = hash_copy(&source, &part).with_context(|| format!("could not copy {}", source.display()));
    let result = copied.and_then(|hash| {
        anyhow::ensure!(
            hash == file.b3sum,
            "{} is not what came home: its hash is {hash}, not {}",
            source.display(),
            file.b3sum
        );
        put(&part, target, &file.b3sum, before)
    });
    // After a success the part has become the target, or was not needed.
    drop(fs::remove_file(&part));
    result
}

/// Gives the part its name, never over something else of the owner's.
fn put(part: &Path, target: &Path, hash: &str, before: Option<&str>) -> anyhow::Result<()> {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    match renameat2(AT_FDCWD, part, AT_FDCWD, target, RenameFlags::RENAME_NOREPLACE) {
        Ok(()) => Ok(()),
        Err(nix::errno::Errno::EEXIST) => {
            let mut hasher = blake3::Hasher::new();
            let read = File::open(target).and_then(|file| hasher.update_reader(file).map(drop));
            let there = read.is_ok().then(|| hasher.finalize().to_hex().to_string());
            if before.is_some() && there.as_deref() == before {
                return fs::rename(part, target)
                    .with_context(|| format!("could not make {}", target.display()));
            }
            anyhow::ensure!(
                there.as_deref() == Some(hash),
                "{} is there already and is another file; hint: move it away, or choose another --to",
                target.display()
            );
            Ok(())
        }
        Err(error) => Err(error).with_context(|| format!("could not make {}", target.display())),
    }
}

fn hash_copy(source: &Path, part: &Path) -> std::io::Result<String> {
    let mut from = File::open(source)?;
    let mut to = File::create(part)?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        to.write_all(&buffer[..read])?;
    }
    to.set_permissions(from.metadata()?.permissions())?;
    to.sync_all()?;
    Ok(hasher.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dest: &Path, path: &str, content: &[u8]) -> ResultFile {
        ResultFile {
            path: path.as_bytes().to_vec().into(),
            output: "/ckpt".into(),
            dest: dest.to_string_lossy().into_owned(),
            size: content.len() as u64,
            b3sum: blake3::hash(content).to_hex().to_string(),
            ..ResultFile::default()
        }
    }

    #[test]
    fn copies_are_compared_before_they_get_their_name() {
        let dir = tempfile::tempdir().unwrap();
        let (dest, to) = (dir.path().join("dest"), dir.path().join("to"));
        fs::create_dir_all(dest.join("sub")).unwrap();
        fs::write(dest.join("sub/a"), "good").unwrap();
        let good = file(&dest, "sub/a", b"good");
        copy(&good, &target(&to, &good, false).unwrap(), None).unwrap();
        assert_eq!(fs::read(to.join("sub/a")).unwrap(), b"good");
        let changed = file(&dest, "sub/a", b"other");
        let error = copy(&changed, &to.join("b"), None).unwrap_err();
        assert!(error.to_string().contains("is not what came home"), "{error}");
        assert_eq!(fs::read_dir(&to).unwrap().count(), 1, "a bad copy leaves nothing");
        std::os::unix::fs::symlink("/etc/passwd", dest.join("link")).unwrap();
        assert!(copy(&file(&dest, "link", b""), &to.join("c"), None).is_err());
    }

    #[test]
    fn a_file_of_the_owners_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let (dest, target) = (dir.path().join("dest"), dir.path().join("mine"));
        fs::create_dir_all(&dest).unwrap();
        fs::write(dest.join("a"), "result").unwrap();
        fs::write(&target, "mine").unwrap();
        let error = copy(&file(&dest, "a", b"result"), &target, None).unwrap_err();
        assert!(error.to_string().contains("is there already"), "{error}");
        assert_eq!(fs::read(&target).unwrap(), b"mine");
        fs::write(&target, "result").unwrap();
        let same = file(&dest, "a", b"result");
        copy(&same, &target, None).unwrap();
        // What was copied before gives way to what it became, unless the owner changed it.
        fs::write(dest.join("a"), "later").unwrap();
        let later = file(&dest, "a", b"later");
        assert!(copy(&later, &target, None).is_err());
        copy(&later, &target, Some(&same.b3sum)).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"later");
        fs::write(&target, "mine").unwrap();
        assert!(copy(&later, &target, Some(&same.b3sum)).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "no part is left");
    }

    #[test]
    fn no_name_of_a_box_leaves_the_directory() {
        for bad in ["../x", "/etc/x", "a/../../x", ""] {
            assert!(target(Path::new("/to"), &file(Path::new("/d"), bad, b""), false).is_err(), "{bad}");
        }
        let fine = file(Path::new("/d"), "a/b", b"");
        assert_eq!(target(Path::new("/to"), &fine, true).unwrap(), Path::new("/to/ckpt/a/b"));
    }

    #[test]
    fn what_has_no_hash_is_not_copied() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).unwrap();
        fs::write(dir.path().join("a"), "x").unwrap();
        let link = ResultFile { b3sum: String::new(), ..file(dir.path(), "link", b"") };
        let talk = Talk { quiet: true, verbose: false, terminal: false, colour: false };
        let to = dir.path().join("to");
        Getting::new(&talk, None, &to).all(&[link, file(dir.path(), "a", b"x")]).unwrap();
        assert_eq!(fs::read_dir(&to).unwrap().count(), 1);
    }

    #[test]
    fn a_path_chooses_files_and_directories() {
        let wanted =
            |path: &str, only: &str| is_wanted(&file(Path::new("/d"), path, b""), Some(Path::new(only)));
        assert!(wanted("a/b", "a") && wanted("a/b", "a/b") && wanted("a/b", "/ckpt/a"));
        assert!(!wanted("ab", "a") && !wanted("a", "/other"));
    }
}

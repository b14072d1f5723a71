//! Which result files are checkpoints, and which of these are whole: pure, from names alone.
//!
//! A directory is a checkpoint where a framework's layout says so, and complete when that
//! framework's own marker is there: `.metadata` (torch.distributed.checkpoint), `trainer_state.json`
//! (Hugging Face Trainer), `_CHECKPOINT_METADATA` or `commit_success.txt` under the final name
//! (Orbax; it writes under a temporary one). A file that a framework saves in one piece is one by
//! itself: it is published whole or not at all. Files `…-00001-of-00004` are one.
//!
//! Never: takes the highest number for the newest; calls complete what has a torn file in it.

use std::collections::{BTreeMap, BTreeSet};

/// A file among the results of one output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultFile<'a> {
    /// Below the output, components divided by `/`.
    pub path: &'a [u8],
    pub bytes: u64,
    pub published_unix_ms: u64,
    /// `false`: its writer was killed, or it has not been closed yet.
    pub whole: bool,
}

/// Who writes checkpoints like this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layout {
    /// One file, or its numbered parts.
    File,
    TorchDistributed,
    HuggingFace,
    Orbax,
}

/// Something that a job can resume from, or could once the rest of it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// A directory or a file below the output; empty where the output itself is one.
    pub path: Vec<u8>,
    pub layout: Layout,
    /// As its name says, of a training step or an epoch.
    pub step: Option<u64>,
    pub bytes: u64,
    pub files: u64,
    /// Of what came last.
    pub published_unix_ms: u64,
    /// What is missing; `None` where it is complete.
    pub lacks: Option<String>,
}

impl Layout {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::TorchDistributed => "torch-distributed",
            Self::HuggingFace => "huggingface",
            Self::Orbax => "orbax",
        }
    }
}

impl Checkpoint {
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.lacks.is_none()
    }
}

/// All checkpoints among these files, the one that came last at the end.
#[must_use]
pub fn checkpoints(files: &[ResultFile<'_>]) -> Vec<Checkpoint> {
    let roots: BTreeMap<&[u8], Layout> = files.iter().filter_map(|file| root_of(file.path)).collect();
    let mut groups: BTreeMap<Key<'_>, Group<'_>> = BTreeMap::new();
    for file in files {
        let key = match outer_root(&roots, file.path) {
            Some((path, layout)) => Key { path, layout, parts: 1 },
            None => match single_file(file.path) {
                Some(key) => key,
                None => continue,
            },
        };
        groups.entry(key).or_default().add(file, &roots);
    }
    let mut found: Vec<_> = groups.into_iter().map(|(key, group)| group.checkpoint(key)).collect();
    found.sort_by(|a, b| (a.published_unix_ms, &a.path).cmp(&(b.published_unix_ms, &b.path)));
    found
}

/// The one to resume from: of those that are complete the one that came last, whatever its number.
#[must_use]
pub fn newest_complete(checkpoints: &[Checkpoint]) -> Option<&Checkpoint> {
    checkpoints.iter().rev().find(|checkpoint| checkpoint.is_complete())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key<'a> {
    path: &'a [u8],
    layout: Layout,
    /// Files that it consists of, where their names say so.
    parts: u64,
}

#[derive(Debug, Default)]
struct Group<'a> {
    bytes: u64,
    files: u64,
    published_unix_ms: u64,
    torn: Option<&'a [u8]>,
    /// Directories of a framework in it, and what was found there of its marker.
    inner: BTreeMap<&'a [u8], (Option<Layout>, bool)>,
    parts: BTreeSet<&'a [u8]>,
}

impl<'a> Group<'a> {
    fn add(&mut self, file: &ResultFile<'a>, roots: &BTreeMap<&'a [u8], Layout>) {
        self.bytes += file.bytes;
        self.files += 1;
        self.published_unix_ms = self.published_unix_ms.max(file.published_unix_ms);
        if !file.whole {
            self.torn.get_or_insert(file.path);
        } else if let Some((_, part)) = numbered(file.path) {
            self.parts.insert(part);
        }
        if let Some((root, layout)) = nearest_root(roots, file.path) {
            let (known, marked) = self.inner.entry(root).or_default();
            *known = Some(layout);
            *marked |= file.whole && parent(file.path) == root && is_marker(layout, name(file.path));
        }
    }

    fn lacks(&self, key: Key<'_>) -> Option<String> {
        if let Some(torn) = self.torn {
            return Some(format!("{} is cut off", String::from_utf8_lossy(name(torn))));
        }
        if is_temporary(name(key.path)) {
            return Some("it has its temporary name".to_owned());
        }
        let parts = self.parts.len() as u64;
        if key.layout == Layout::File {
            return (key.parts > 1 && parts < key.parts).then(|| format!("{parts} of {} parts", key.parts));
        }
        let unmarked = self.inner.iter().find_map(|(root, (layout, marked))| {
            if is_temporary(name(root)) {
                return Some(format!("{} has its temporary name", String::from_utf8_lossy(name(root))));
            }
            (*layout).filter(|_| !marked).map(|layout| format!("no {} yet", marker_of(layout)))
        });
        unmarked.or_else(|| {
            (!self.inner.contains_key(key.path)).then(|| format!("no {} yet", marker_of(key.layout)))
        })
    }

    fn checkpoint(self, key: Key<'_>) -> Checkpoint {
        Checkpoint {
            path: key.path.to_vec(),
            layout: key.layout,
            step: step_of(&String::from_utf8_lossy(name(key.path))),
            bytes: self.bytes,
            files: self.files,
            published_unix_ms: self.published_unix_ms,
            lacks: self.lacks(key),
        }
    }
}

const ORBAX_TEMPORARY: &str = ".orbax-checkpoint-tmp";
const PARTIAL: &[u8] = b".partial";
/// What frameworks save in one piece.
const EXTENSIONS: [&str; 12] =
    ["safetensors", "pt", "pth", "ckpt", "npz", "h5", "hdf5", "keras", "msgpack", "eqx", "gguf", "bin"];

fn parent(path: &[u8]) -> &[u8] {
    path.iter().rposition(|&byte| byte == b'/').map_or(&[], |at| &path[..at])
}

fn name(path: &[u8]) -> &[u8] {
    path.iter().rposition(|&byte| byte == b'/').map_or(path, |at| &path[at + 1..])
}

/// Every directory above, the innermost first.
fn above(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::successors(Some(parent(path)), |path| (!path.is_empty()).then(|| parent(path)))
}

fn is_temporary(name: &[u8]) -> bool {
    let name = String::from_utf8_lossy(name);
    name.contains(ORBAX_TEMPORARY) || name.strip_prefix("tmp-").is_some_and(is_trainers)
}

/// `checkpoint-500`.
fn is_trainers(name: &str) -> bool {
    let number = name.strip_prefix("checkpoint-").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Names that the Trainer gives to what it saves.
fn is_of_trainer(name: &str) -> bool {
    const NAMES: [&str; 9] = [
        "trainer_state.json",
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "config.json",
        "generation_config.json",
        "adapter_config.json",
        "model.safetensors.index.json",
    ];
    const BEGINNINGS: [&str; 5] =
        ["model.safetensors", "model-0", "pytorch_model", "adapter_model", "rng_state"];
    NAMES.contains(&name) || BEGINNINGS.iter().any(|beginning| name.starts_with(beginning))
}

/// The directory that this file proves to be a checkpoint.
fn root_of(path: &[u8]) -> Option<(&[u8], Layout)> {
    let folder = parent(path);
    let temporary =
        above(path).filter(|above| String::from_utf8_lossy(name(above)).contains(ORBAX_TEMPORARY)).last();
    if let Some(folder) = temporary {
        return Some((folder, Layout::Orbax));
    }
    let file = String::from_utf8_lossy(name(path));
    let file = file.strip_suffix(".partial").unwrap_or(&file);
    if is_marker(Layout::Orbax, file.as_bytes()) {
        return Some((folder, Layout::Orbax));
    }
    if file == ".metadata" || file == ".metadata.tmp" || file.ends_with(".distcp") {
        return Some((folder, Layout::TorchDistributed));
    }
    let folder_name = String::from_utf8_lossy(name(folder));
    let trainers = is_trainers(folder_name.strip_prefix("tmp-").unwrap_or(&folder_name));
    (trainers && is_of_trainer(file)).then_some((folder, Layout::HuggingFace))
}

fn is_marker(layout: Layout, name: &[u8]) -> bool {
    match layout {
        Layout::File => false,
        Layout::TorchDistributed => name == b".metadata",
        Layout::HuggingFace => name == b"trainer_state.json",
        Layout::Orbax => matches!(name, b"_CHECKPOINT_METADATA" | b"commit_success.txt" | b"_METADATA"),
    }
}

fn marker_of(layout: Layout) -> &'static str {
    match layout {
        Layout::File => "file",
        Layout::TorchDistributed => ".metadata",
        Layout::HuggingFace => "trainer_state.json",
        Layout::Orbax => "_CHECKPOINT_METADATA",
    }
}

fn nearest_root<'a>(roots: &BTreeMap<&'a [u8], Layout>, path: &'a [u8]) -> Option<(&'a [u8], Layout)> {
    above(path).find_map(|folder| roots.get(folder).map(|&layout| (folder, layout)))
}

/// A checkpoint of the Trainer or of Orbax has others within; those of torch stand beside each other.
fn outer_root<'a>(roots: &BTreeMap<&'a [u8], Layout>, path: &'a [u8]) -> Option<(&'a [u8], Layout)> {
    let nearest = nearest_root(roots, path)?;
    let around = above(path).filter_map(|folder| roots.get(folder).map(|&layout| (folder, layout)));
    let holds_others = |(_, layout): &(_, Layout)| matches!(layout, Layout::HuggingFace | Layout::Orbax);
    Some(
        around
            .filter(holds_others)
            .last()
            .filter(|(folder, _)| folder.len() < nearest.0.len())
            .unwrap_or(nearest),
    )
}

/// A file without `.partial`.
fn stem(path: &[u8]) -> &[u8] {
    path.strip_suffix(PARTIAL).unwrap_or(path)
}

/// `model-00002-of-00004.safetensors`: what is before the number, and the number.
fn numbered(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = path.len() - name(path).iter().rev().position(|&byte| byte == b'.').map_or(0, |at| at + 1);
    let digits = |upto: usize| path[..upto].iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let of = end - digits(end);
    let before = path[..of].strip_suffix(b"-of-")?;
    let at = before.len() - digits(before.len());
    let base = before[..at].strip_suffix(b"-")?;
    (of < end && at < before.len()).then(|| (base, &before[at..]))
}

fn parts_of(path: &[u8]) -> u64 {
    let count = || {
        let (base, part) = numbered(path)?;
        let rest = &path[base.len() + 1 + part.len() + b"-of-".len()..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
    };
    count().unwrap_or(1)
}

/// What a file of no framework's directory is a checkpoint by.
fn single_file(path: &[u8]) -> Option<Key<'_>> {
    let stem = stem(path);
    let file = String::from_utf8_lossy(name(stem)).into_owned();
    let (base, extension) = file.rsplit_once('.')?;
    let named = EXTENSIONS.contains(&extension.to_ascii_lowercase().as_str());
    // Anything may be called `.bin`; what torch saves so has this name.
    let is_one = named && (extension != "bin" || base.starts_with("pytorch_model")) && !base.is_empty();
    // What was cut off stands beside what was there before, which is as good as ever.
    let (path, parts) = match numbered(path) {
        Some((base, _)) if stem.len() == path.len() => (base, parts_of(path)),
        _ => (path, 1),
    };
    is_one.then_some(Key { path, layout: Layout::File, parts })
}

/// What follows `step` in a name; else the last number in it that stands by itself.
fn step_of(name: &str) -> Option<u64> {
    let name = name.split(ORBAX_TEMPORARY).next()?.to_ascii_lowercase();
    let number_at = |at: usize| {
        let rest = &name[at..];
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse::<u64>().ok()
    };
    let after_step = name.match_indices("step").find_map(|(at, step)| {
        let at = at + step.len();
        number_at(at).or_else(|| name[at..].starts_with(['=', '_', '-']).then(|| number_at(at + 1))?)
    });
    let begins = |at: usize| {
        let before = name[..at].trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let word = &name[before.len()..at];
        matches!(word, "" | "epoch" | "iter" | "ckpt" | "checkpoint")
            && !name[..at].ends_with(|c: char| c.is_ascii_digit())
    };
    let is_start = |&(at, c): &(usize, char)| c.is_ascii_digit() && begins(at);
    after_step.or_else(|| name.char_indices().rfind(is_start).and_then(|(at, _)| number_at(at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Published in this order; a name that ends with `!` is torn.
    fn found(names: &[&str]) -> Vec<Checkpoint> {
        let files: Vec<_> = (1..)
            .zip(names)
            .map(|(at, name)| {
                let path = name.strip_suffix('!').unwrap_or(name).as_bytes();
                ResultFile { path, bytes: 10, published_unix_ms: at, whole: !name.ends_with('!') }
            })
            .collect();
        checkpoints(&files)
    }

    fn shown(names: &[&str]) -> Vec<String> {
        let show = |checkpoint: &Checkpoint| {
            format!(
                "{} {} {:?} {}",
                String::from_utf8_lossy(&checkpoint.path),
                checkpoint.layout.name(),
                checkpoint.step,
                checkpoint.lacks.as_deref().unwrap_or("complete")
            )
        };
        found(names).iter().map(show).collect()
    }

    #[test]
    fn a_directory_is_complete_with_its_frameworks_marker_and_not_before() {
        for (names, incomplete, complete) in [
            (
                &[
                    "s/step_7/__0_0.distcp",
                    "s/step_7/__1_0.distcp",
                    "s/step_7/.metadata.tmp",
                    "s/step_7/.metadata",
                ][..],
                "s/step_7 torch-distributed Some(7) no .metadata yet",
                "s/step_7 torch-distributed Some(7) complete",
            ),
            (
                &[
                    "out/checkpoint-500/model.safetensors",
                    "out/checkpoint-500/README.md",
                    "out/checkpoint-500/optimizer.pt",
                    "out/checkpoint-500/trainer_state.json",
                ],
                "out/checkpoint-500 huggingface Some(500) no trainer_state.json yet",
                "out/checkpoint-500 huggingface Some(500) complete",
            ),
        ] {
            for count in 1..names.len() {
                assert_eq!(shown(&names[..count]), [incomplete], "{count}");
            }
            assert_eq!(shown(names), [complete]);
        }
        // Orbax renames the whole.
        assert_eq!(
            shown(&[
                "100.orbax-checkpoint-tmp-17/default.orbax-checkpoint-tmp-18/d/x",
                "100.orbax-checkpoint-tmp-17/_CHECKPOINT_METADATA"
            ]),
            ["100.orbax-checkpoint-tmp-17 orbax Some(100) it has its temporary name"]
        );
        assert_eq!(
            shown(&["100/default/d/x", "100/default/_METADATA", "100/_CHECKPOINT_METADATA"]),
            ["100 orbax Some(100) complete"]
        );
        assert_eq!(shown(&["100/a", "100/commit_success.txt"]), ["100 orbax Some(100) complete"]);
        assert_eq!(
            shown(&["tmp-checkpoint-5/trainer_state.json"]),
            ["tmp-checkpoint-5 huggingface Some(5) it has its temporary name"]
        );
    }

    #[test]
    fn a_checkpoint_in_a_checkpoint_is_part_of_it_and_must_be_complete_too() {
        let names = [
            "checkpoint-9/trainer_state.json",
            "checkpoint-9/pytorch_model_fsdp_0/__0_0.distcp",
            "checkpoint-9/pytorch_model_fsdp_0/.metadata",
        ];
        assert_eq!(shown(&names[..2]), ["checkpoint-9 huggingface Some(9) no .metadata yet"]);
        assert_eq!(shown(&names), ["checkpoint-9 huggingface Some(9) complete"]);
        // The Trainer's last state beside its checkpoints swallows none of them.
        assert_eq!(
            found(&["trainer_state.json", "checkpoint-1/optimizer.pt", "checkpoint-2/optimizer.pt"]).len(),
            2
        );
        // Those of torch in each other do not depend on each other.
        assert_eq!(
            shown(&[".metadata", "a/__0_0.distcp"]),
            [" torch-distributed None complete", "a torch-distributed None no .metadata yet"]
        );
    }

    #[test]
    fn files_are_checkpoints_by_themselves_and_torn_ones_are_not_complete() {
        assert_eq!(
            shown(&[
                "epoch-003.safetensors",
                "notes.txt",
                "model-v2.pt",
                "data.bin",
                "last.pt",
                "last.pt.partial!",
                ".pt"
            ]),
            [
                "epoch-003.safetensors file Some(3) complete",
                "model-v2.pt file None complete",
                "last.pt file None complete",
                "last.pt.partial file None last.pt.partial is cut off"
            ]
        );
        assert_eq!(
            shown(&["d/__0_0.distcp!", "d/.metadata"]),
            ["d torch-distributed None __0_0.distcp is cut off"]
        );
        let parts =
            ["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors", "m-00002-of-00003.safetensors"];
        assert_eq!(shown(&parts[..2]), ["m file None 2 of 3 parts"]);
        assert_eq!(shown(&parts), ["m file None complete"]);
    }

    #[test]
    fn the_newest_is_what_came_last_and_not_the_highest_number() {
        let all = found(&["step-900.pt", "step-100.pt", "step-950.pt.partial!"]);
        assert_eq!(newest_complete(&all).and_then(|newest| newest.step), Some(100));
        assert_eq!(newest_complete(&found(&["step-1.pt.partial!"])), None);
    }

    #[test]
    fn a_step_is_read_from_the_ways_to_write_it() {
        for (name, step) in [
            ("epoch=3-step=300.ckpt", Some(300)),
            ("global_step1200", Some(1200)),
            ("step_0007", Some(7)),
            ("checkpoint-500", Some(500)),
            ("100", Some(100)),
            ("epoch12.pt", Some(12)),
            ("resnet50", None),
            ("model", None),
            ("stepping-stone", None),
            ("99999999999999999999999", None),
            ("schritt-ü-4", Some(4)),
        ] {
            assert_eq!(step_of(name), step, "{name}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_names_are_taken(names in proptest::collection::vec("[a-c/._0-9-]{0,12}(of-[0-9]{1,3})?(\\.pt|\\.distcp|/\\.metadata)?", 0..20)) {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let all = found(&names);
            proptest::prop_assert!(all.iter().map(|found| found.files).sum::<u64>() <= names.len() as u64);
        }
    }
}

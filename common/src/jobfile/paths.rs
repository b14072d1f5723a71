//! Paths of a job file: sources and destinations at home, mount points on the box.

use std::path::{Component, Path, PathBuf};

use super::nearest;

/// Trees of the box that belong to its kernel: a mount over them breaks the job in ways that
/// nobody would connect with the job file.
const KERNEL_TREES: [&str; 3] = ["/proc", "/dev", "/sys"];

/// Words that a destination may hold in braces.
const PLACEHOLDERS: [&str; 3] = ["name", "run", "attempt"];

/// Where an output lands at home: an absolute path with `{name}`, `{run}`, `{attempt}` in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DestTemplate(PathBuf);

impl DestTemplate {
    /// The template itself.
    #[must_use]
    pub fn as_path(&self) -> &Path {
        &self.0
    }

    /// Each attempt of a run gets its own place.
    #[must_use]
    pub fn names_attempt(&self) -> bool {
        self.0.to_string_lossy().contains("{attempt}")
    }

    /// Fills the placeholders in.
    #[must_use]
    pub fn render(&self, name: &str, run: &str, attempt: u32) -> PathBuf {
        // A job file is UTF-8 and so is every placeholder; a base directory that is not keeps
        // its bytes because each component is replaced on its own.
        self.0
            .components()
            .map(|component| match component.as_os_str().to_str() {
                Some(text) if text.contains('{') => PathBuf::from(
                    text.replace("{name}", name)
                        .replace("{run}", run)
                        .replace("{attempt}", &attempt.to_string()),
                ),
                Some(_) | None => PathBuf::from(component.as_os_str()),
            })
            .collect()
    }

    /// `text` is as the owner wrote it, `path` its absolute form.
    pub(super) fn new(text: &str, path: PathBuf) -> Result<Self, (String, Option<String>)> {
        let mut rest = text;
        while let Some(open) = rest.find('{') {
            let after = &rest[open + 1..];
            let (word, tail) = after
                .split_once('}')
                .ok_or_else(|| (format!("`{text}` has a `{{` without its `}}`"), None))?;
            if !PLACEHOLDERS.contains(&word) {
                let hint = nearest(word, &PLACEHOLDERS).map_or_else(
                    || "a destination may hold {name}, {run} and {attempt}".to_owned(),
                    |near| format!("did you mean {{{near}}}?"),
                );
                return Err((format!("unknown placeholder `{{{word}}}`"), Some(hint)));
            }
            rest = tail;
        }
        if rest.contains('}') {
            return Err((format!("`{text}` has a `}}` without its `{{`"), None));
        }
        Ok(Self(path))
    }
}

/// A path at home: `~` expanded, made absolute, `.` and `..` folded by name.
pub(super) fn at_home(text: &str, base: &Path, home: Option<&Path>) -> Result<PathBuf, String> {
    if text.is_empty() || text.contains('\0') {
        return Err(format!("{text:?} is not a path"));
    }
    let expanded = if text == "~" || text.starts_with("~/") {
        let home = home.ok_or_else(|| format!("`{text}` needs HOME, which is not set"))?;
        home.join(text[1..].trim_start_matches('/'))
    } else if text.starts_with('~') {
        return Err(format!("`{text}`: only `~/` is understood, not another user's home"));
    } else {
        PathBuf::from(text)
    };
    Ok(fold(&base.join(expanded)))
}

/// Folds `.` and `..` by name, as a shell's `cd -L` does.
fn fold(path: &Path) -> PathBuf {
    let mut folded = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                folded.pop();
            }
            Component::Prefix(_) | Component::RootDir | Component::Normal(_) => folded.push(component),
        }
    }
    folded
}

/// A mount point on the box.
pub(super) fn on_box(text: &str) -> Result<PathBuf, (String, &'static str)> {
    let hint = "name a directory of its own, like /data";
    if !text.starts_with('/') {
        return Err((format!("`{text}` is not an absolute path"), hint));
    }
    if text.chars().any(char::is_control) || text.len() > MAX_BOX_PATH_BYTES {
        return Err((format!("{text:?} cannot be a path on the box"), hint));
    }
    if Path::new(text).components().any(|part| part == Component::ParentDir)
        || text.split('/').any(|part| part == ".")
    {
        return Err((format!("`{text}` has `.` or `..` in it"), hint));
    }
    // Doubled and trailing slashes go.
    let path: PathBuf = Path::new(text).components().collect();
    if path == Path::new("/") {
        return Err(("nothing can be mounted over `/`".to_owned(), hint));
    }
    if let Some(tree) = KERNEL_TREES.iter().find(|tree| path.starts_with(tree)) {
        return Err((format!("nothing can be mounted in `{tree}`: it is the kernel's"), hint));
    }
    Ok(path)
}

/// PATH_MAX leaves room for names below.
const MAX_BOX_PATH_BYTES: usize = 1024;

/// One of the two holds the other, or they are the same.
pub(super) fn nested(a: &Path, b: &Path) -> bool {
    a.starts_with(b) || b.starts_with(a)
}

//! Names that a box asks for, checked before any of them reaches the file system.
//!
//! Never: let `..`, an absolute path, a reserved name or a NUL through. What is left is still only
//! resolved beneath the output's directory and without symlinks (see `disk`).

use nix::errno::Errno;

/// Longest path that Linux takes in one call.
const MAX_PATH_BYTES: usize = 4096;
const MAX_NAME_BYTES: usize = 255;
/// What limb itself keeps beside the owner's files.
const RESERVED: &[u8] = b".limb";

/// A path below an output: at least one component, each a legal name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ResultPath(Vec<u8>);

impl std::fmt::Debug for ResultPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.text())
    }
}

impl ResultPath {
    /// EINVAL for what is no path below the output, EPERM for reserved names, ENAMETOOLONG.
    pub(super) fn parse(path: &[u8]) -> Result<Self, Errno> {
        if path.is_empty() || path.contains(&0) {
            return Err(Errno::EINVAL);
        }
        if path.len() >= MAX_PATH_BYTES {
            return Err(Errno::ENAMETOOLONG);
        }
        for name in path.split(|&b| b == b'/') {
            if name.is_empty() || name == b"." || name == b".." {
                return Err(Errno::EINVAL);
            }
            if name.len() > MAX_NAME_BYTES {
                return Err(Errno::ENAMETOOLONG);
            }
            if name.starts_with(RESERVED) {
                return Err(Errno::EPERM);
            }
        }
        Ok(Self(path.to_vec()))
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Lossy, for people.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    pub(super) fn name(&self) -> &[u8] {
        self.0.rsplit(|&b| b == b'/').next().unwrap_or_default()
    }

    /// The directory it stands in; empty for the output itself.
    pub(super) fn parent(&self) -> &[u8] {
        self.0.iter().rposition(|&b| b == b'/').map_or(&[], |at| &self.0[..at])
    }

    /// The same directory, another name.
    pub(super) fn with_name(&self, name: &[u8]) -> Self {
        let mut path = self.parent().to_vec();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Self(path)
    }

    /// Where this path is after the directory `from` became `to`.
    pub(super) fn moved(&self, from: &Self, to: &Self) -> Option<Self> {
        let rest = self.0.strip_prefix(from.as_bytes())?;
        (rest.first() == Some(&b'/')).then(|| Self([to.as_bytes(), rest].concat()))
    }
}

/// `name` and an ending, cut so that it stays a legal name.
pub(super) fn with_ending(name: &[u8], ending: &str) -> Vec<u8> {
    let keep = name.len().min(MAX_NAME_BYTES.saturating_sub(ending.len()));
    [&name[..keep], ending.as_bytes()].concat()
}

/// A link may point only below the output: neither absolute nor up and out.
pub(super) fn target_stays_inside(link: &ResultPath, target: &[u8]) -> bool {
    if target.is_empty() || target.contains(&0) || target[0] == b'/' || target.len() >= MAX_PATH_BYTES {
        return false;
    }
    let mut depth = link.as_bytes().iter().filter(|&&b| b == b'/').count();
    for part in target.split(|&b| b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => match depth.checked_sub(1) {
                Some(up) => depth = up,
                None => return false,
            },
            _ => depth += 1,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_paths_are_refused_and_odd_ones_are_not() {
        let long = [b'a'; 256];
        let deep = [b"d/".repeat(2047).as_slice(), b"xxxx"].concat();
        let bad: [(&[u8], Errno); 14] = [
            (b"", Errno::EINVAL),
            (b"/etc/passwd", Errno::EINVAL),
            (b"../x", Errno::EINVAL),
            (b"a/../../x", Errno::EINVAL),
            (b"a/./b", Errno::EINVAL),
            (b".", Errno::EINVAL),
            (b"a//b", Errno::EINVAL),
            (b"a/", Errno::EINVAL),
            (b"a\0b", Errno::EINVAL),
            (b".limb/x.part", Errno::EPERM),
            (b"a/.limb", Errno::EPERM),
            (b"a/.limb-x", Errno::EPERM),
            (&long, Errno::ENAMETOOLONG),
            (&deep, Errno::ENAMETOOLONG),
        ];
        for (path, errno) in bad {
            assert_eq!(ResultPath::parse(path), Err(errno), "{:?}", String::from_utf8_lossy(path));
        }
        let good: [&[u8]; 6] = [b"a", b"a/b\n\x1b[0m", b"\xff\xfe", b"CON", b"trailing.", b".hidden/..x"];
        for path in good {
            assert_eq!(ResultPath::parse(path).unwrap().as_bytes(), path);
        }
    }

    #[test]
    fn links_stay_inside() {
        let link = ResultPath::parse(b"a/b/link").unwrap();
        for good in ["x", "../x", "../../x", "../../x/../y", "./../b/x"] {
            assert!(target_stays_inside(&link, good.as_bytes()), "{good}");
        }
        for bad in ["", "/x", "../../../x", "x/../../../../y", "..//../.."] {
            assert!(!target_stays_inside(&link, bad.as_bytes()), "{bad}");
        }
        assert!(!target_stays_inside(&ResultPath::parse(b"l").unwrap(), b"x/../.."));
    }

    #[test]
    fn parents_names_and_moves() {
        let path = ResultPath::parse(b"a/b/c").unwrap();
        assert_eq!((path.parent(), path.name()), (&b"a/b"[..], &b"c"[..]));
        assert_eq!(path.with_name(b"d").as_bytes(), b"a/b/d");
        let to = ResultPath::parse(b"z").unwrap();
        assert_eq!(path.moved(&ResultPath::parse(b"a").unwrap(), &to).unwrap().as_bytes(), b"z/b/c");
        assert_eq!(path.moved(&ResultPath::parse(b"a/b/c").unwrap(), &to), None);
        assert_eq!(with_ending(&[b'n'; 255], ".partial").len(), 255);
    }
}

//! The kernel's own view of a mount: the mount table, fusectl and bdi. Nothing here touches a
//! path inside a mount, so nothing here can wait for a file system.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

const FUSECTL: &str = "/sys/fs/fuse/connections";

/// One FUSE line of the mount table.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MountEntry {
    pub(super) path: PathBuf,
    pub(super) minor: u32,
}

/// The topmost mount on `path`, if that is a FUSE file system.
pub(super) fn find_mount(path: &Path) -> Option<MountEntry> {
    let table = read_table();
    // Later lines lie over earlier ones.
    let (fuse, entry) = parse(&table).filter(|(_, entry)| entry.path == path).last()?;
    fuse.then_some(entry)
}

fn read_table() -> Vec<u8> {
    fs::read("/proc/self/mountinfo").unwrap_or_default()
}

/// `(is it FUSE, entry)` of every line that belongs to no block device (major 0).
fn parse(table: &[u8]) -> impl Iterator<Item = (bool, MountEntry)> {
    table.split(|&b| b == b'\n').filter_map(|line| {
        let mut fields = line.split(|&b| b == b' ');
        let device = std::str::from_utf8(fields.nth(2)?).ok()?;
        let (major, minor) = device.split_once(':')?;
        let path = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
        let kind = fields.skip_while(|&field| field != b"-").nth(1)?;
        let fuse = major == "0" && (kind == b"fuse" || kind.starts_with(b"fuse."));
        Some((fuse, MountEntry { path, minor: minor.parse().ok()? }))
    })
}

/// The mount table writes blanks, newlines and backslashes as `\ooo`.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = (first == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

/// Opens the connection's abort file now, so that using it later needs no path. Where fusectl is
/// not mounted, root mounts it for a moment on a private directory; the open file outlives that.
pub(super) fn open_abort(minor: u32, root: bool) -> io::Result<File> {
    match open_in(Path::new(FUSECTL), minor) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && root => {}
        opened => return opened,
    }
    let private = PrivateDirectory::make()?;
    mount(Some("fusectl"), &private.0, Some("fusectl"), MsFlags::MS_NOSUID, None::<&str>)?;
    let opened = open_in(&private.0, minor);
    umount2(&private.0, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)?;
    opened
}

fn open_in(connections: &Path, minor: u32) -> io::Result<File> {
    OpenOptions::new().write(true).open(connections.join(minor.to_string()).join("abort"))
}

struct PrivateDirectory(PathBuf);

impl PrivateDirectory {
    fn make() -> io::Result<Self> {
        let template = std::env::temp_dir().join(format!("limb-fusectl-{}", "X".repeat(6)));
        Ok(Self(nix::unistd::mkdtemp(&template)?))
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            tracing::debug!(%error, "a private directory stays behind");
        }
    }
}

/// The kernel offers FUSE at most 128 KiB of read-ahead at INIT; only this file raises it.
pub(super) fn widen_read_ahead(minor: u32, kilobytes: u32, name: &str) {
    let path = format!("/sys/class/bdi/0:{minor}/read_ahead_kb");
    let told = fs::write(&path, kilobytes.to_string()).and_then(|()| fs::read_to_string(&path));
    match told {
        Ok(text) if text.trim() == kilobytes.to_string() => {}
        Ok(text) => {
            tracing::warn!(
                mount = name,
                "the kernel reads {} KiB ahead, not {kilobytes}: reads come in smaller pieces",
                text.trim()
            );
        }
        Err(error) => {
            tracing::warn!(mount = name, %error, "the kernel's read-ahead stays at 128 KiB: {path} cannot be set");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_table_is_read_with_escapes_and_optional_fields() {
        let table = b"22 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n\
            40 22 0:51 / /run/a\\040b\\012c ro,nosuid shared:7 master:2 - fuse.limb limb-x ro,user_id=0\n\
            41 22 0:52 / /run/a\\040b\\012c rw - tmpfs tmpfs rw\n\
            42 22 0:53 / /mnt\\134 rw - fuse src rw\n\
            garbage\n";
        let found: Vec<_> = parse(table).filter(|(fuse, _)| *fuse).map(|(_, entry)| entry).collect();
        assert_eq!(
            found,
            [
                MountEntry { path: "/run/a b\nc".into(), minor: 51 },
                MountEntry { path: "/mnt\\".into(), minor: 53 },
            ]
        );
    }
}

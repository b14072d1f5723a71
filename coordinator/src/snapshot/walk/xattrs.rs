//! Extended attributes of what a walk finds.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};

use super::Xattrs;

/// XATTR_LIST_MAX and XATTR_SIZE_MAX.
const XATTR_BYTES: usize = 64 * 1024;

/// The attributes that any owner may set, of a name in a directory. A file system without them has
/// none.
pub(super) fn xattrs_at(directory: &OwnedFd, name: &CStr) -> Xattrs {
    // Through /proc, since there is no *at() form and the absolute path may be too long.
    let path = [format!("/proc/self/fd/{}/", directory.as_raw_fd()).as_bytes(), name.to_bytes()].concat();
    let Ok(path) = CString::new(path) else { return Xattrs::new() };
    // SAFETY: the path ends with NUL; a length of 0 asks how long the list is.
    if unsafe { libc::llistxattr(path.as_ptr(), std::ptr::null_mut(), 0) } <= 0 {
        return Xattrs::new();
    }
    // SAFETY: the strings end with NUL, and the buffer is writable for the length given.
    let list = |buffer: &mut [u8]| unsafe {
        libc::llistxattr(path.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
    };
    // SAFETY: as above.
    let get = |name: &CStr, buffer: &mut [u8]| unsafe {
        libc::lgetxattr(path.as_ptr(), name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
    };
    collect_xattrs(list, get, &mut vec![0; XATTR_BYTES])
}

/// As [`xattrs_at`], of an open file.
pub(in super::super) fn xattrs_of(file: &File) -> Xattrs {
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open, and the buffer is writable for the length given.
    let list = |buffer: &mut [u8]| unsafe { libc::flistxattr(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    // SAFETY: as above; the name ends with NUL.
    let get = |name: &CStr, buffer: &mut [u8]| unsafe {
        libc::fgetxattr(fd, name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
    };
    // Nearly no file has any: a buffer only for one that has.
    // SAFETY: a length of 0 asks how long the list is.
    if unsafe { libc::flistxattr(fd, std::ptr::null_mut(), 0) } <= 0 {
        return Xattrs::new();
    }
    collect_xattrs(list, get, &mut vec![0; XATTR_BYTES])
}

fn collect_xattrs(
    list: impl Fn(&mut [u8]) -> isize,
    get: impl Fn(&CStr, &mut [u8]) -> isize,
    buffer: &mut [u8],
) -> Xattrs {
    let mut found = Xattrs::new();
    let len = list(buffer);
    let Some(names) = usize::try_from(len).ok().and_then(|len| buffer.get(..len)) else { return found };
    let names: Vec<CString> = names
        .split(|&byte| byte == 0)
        .filter(|name| name.starts_with(b"user."))
        .filter_map(|name| CString::new(name).ok())
        .collect();
    for name in names {
        let len = get(&name, buffer);
        if let Some(value) = usize::try_from(len).ok().and_then(|len| buffer.get(..len)) {
            found.insert(name.into_bytes(), value.to_vec());
        }
    }
    found
}

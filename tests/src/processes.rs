//! Which processes belong to a home: limb's own that name it, and all that descend from them.
//!
//! Never: read anything but `status` and `comm` of a process that is not limb's. Most other files
//! of /proc wait for a process that hangs in an execve, and no signal ends that wait.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;

use limb_common::life;

#[derive(Debug)]
struct Status {
    parent: i32,
    name: String,
}

fn status(pid: i32) -> Option<(Status, char)> {
    let text = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/status")).ok()?).into_owned();
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let state = field("State:")?.chars().next()?;
    Some((Status { parent: field("PPid:")?.parse().ok()?, name: field("Name:")?.to_owned() }, state))
}

fn table() -> BTreeMap<i32, Status> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid| status(pid).map(|(status, _)| (pid, status)))
        .collect()
}

/// Whether it waits in the kernel, where no signal reaches it.
#[must_use]
pub fn hangs(pid: i32) -> bool {
    status(pid).is_some_and(|(_, state)| state == 'D')
}

/// Pids and command lines (of limb's own) or names (of all others).
#[must_use]
pub fn of_home(root: &Path) -> Vec<(i32, String)> {
    let needle = root.to_string_lossy().into_owned();
    let table = table();
    let me = i32::try_from(std::process::id()).unwrap_or_default();
    let mut found: BTreeMap<i32, String> = BTreeMap::new();
    for (pid, _) in table.iter().filter(|(pid, status)| **pid != me && status.name.starts_with("limb")) {
        let text = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let command = String::from_utf8_lossy(&text("cmdline")).replace('\0', " ");
        let environment = String::from_utf8_lossy(&text("environ")).into_owned();
        if command.contains(&needle) || environment.contains(&needle) {
            found.insert(*pid, command);
        }
    }
    loop {
        let more: Vec<_> = table
            .iter()
            .filter(|(pid, status)| found.contains_key(&status.parent) && !found.contains_key(pid))
            .map(|(pid, status)| (*pid, status.name.clone()))
            .collect();
        if more.is_empty() {
            return found.into_iter().collect();
        }
        found.extend(more);
    }
}

/// Processes of this name with `mark` in their environment. The name must be that of a program on
/// a disk that answers.
#[must_use]
pub fn marked(name: &str, mark: &str) -> Vec<i32> {
    let has_mark = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(mark)
    };
    table()
        .into_iter()
        .filter(|(_, status)| status.name == name)
        .map(|(pid, _)| pid)
        .filter(has_mark)
        .collect()
}

/// The agents of the boxes in this directory.
#[must_use]
pub fn agents(boxes: &Path) -> Vec<i32> {
    let mut pids: Vec<i32> = fs::read_dir(boxes)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::File::options().append(true).open(entry.path().join("life")).ok())
        .filter_map(|file| life::holders(file.as_fd()).ok())
        .flatten()
        .filter(|holder| holder.is_agent)
        .filter_map(|holder| holder.pid)
        .collect();
    pids.sort_unstable();
    pids
}

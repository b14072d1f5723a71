//! The job's own control groups, as far as this system gives any: v2, v1 (memory and pids), or
//! none. The PID namespace is what ends the tree; a group makes that one step, counts
//! OOM kills, and keeps the job from starving the agent.
//!
//! Never: fail a job because a group could not be had.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// What the job may take. None: all there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    pub pids: Option<u64>,
}

/// What a group's name starts with; the agent's pid and a number follow.
const PREFIX: &str = "limb-job-";

/// Groups that exist for one job; removed when dropped.
#[derive(Debug, Default)]
pub struct Group {
    unified: Option<PathBuf>,
    memory_v1: Option<PathBuf>,
    pids_v1: Option<PathBuf>,
    /// The machine's OOM kills when the job started: what remains without a group.
    kills_before: u64,
}

impl Group {
    /// Makes what can be made under the agent's own groups.
    #[must_use]
    pub fn create(limits: Limits) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = &format!("{PREFIX}{}-{number}", std::process::id());
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let group = Self {
            unified: make(find(&mounts, &own, None), name),
            memory_v1: make(find(&mounts, &own, Some("memory")), name),
            pids_v1: make(find(&mounts, &own, Some("pids")), name),
            kills_before: machine_kills(),
        };
        group.limit(limits);
        group
    }

    fn limit(&self, limits: Limits) {
        if let Some(bytes) = limits.memory_bytes {
            put(self.unified.as_ref(), "memory.max", bytes);
            put(self.unified.as_ref(), "memory.swap.max", 0);
            put(self.memory_v1.as_ref(), "memory.limit_in_bytes", bytes);
            put(self.memory_v1.as_ref(), "memory.memsw.limit_in_bytes", bytes);
        }
        if let Some(pids) = limits.pids {
            put(self.unified.as_ref(), "pids.max", pids);
            put(self.pids_v1.as_ref(), "pids.max", pids);
        }
    }

    fn all(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.unified, &self.memory_v1, &self.pids_v1].into_iter().flatten()
    }

    /// The files that a process writes itself into.
    pub(crate) fn entrances(&self) -> Vec<String> {
        self.all().map(|path| path.join("cgroup.procs").display().to_string()).collect()
    }

    /// Whether memory is counted for this job alone.
    #[must_use]
    pub fn counts_memory(&self) -> bool {
        self.memory_v1.is_some()
            || self.unified.as_ref().is_some_and(|path| path.join("memory.events").exists())
    }

    /// Whether the number of processes is limited for this job alone.
    #[must_use]
    pub fn counts_processes(&self) -> bool {
        self.pids_v1.is_some() || self.unified.as_ref().is_some_and(|path| path.join("pids.max").exists())
    }

    /// Ends everything in the group at once, where the kernel can (v2, Linux 5.14).
    pub fn kill(&self) {
        put(self.unified.as_ref(), "cgroup.kill", 1);
    }

    /// How often the kernel killed one of the job's processes for want of memory. Without a
    /// group of the job's own: how often it killed anything since the job started.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        let counted = [(&self.unified, "memory.events"), (&self.memory_v1, "memory.oom_control")]
            .into_iter()
            .filter_map(|(path, file)| fs::read_to_string(path.as_ref()?.join(file)).ok())
            .filter_map(|text| field(&text, "oom_kill"))
            .max();
        counted.unwrap_or_else(|| machine_kills().saturating_sub(self.kills_before))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for path in self.all() {
            // Busy only while the tree is: then the agent is about to end with the box.
            let _removed = fs::remove_dir(path);
        }
    }
}

fn machine_kills() -> u64 {
    fs::read_to_string("/proc/vmstat").ok().and_then(|text| field(&text, "oom_kill")).unwrap_or(0)
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The directory of our own group in the hierarchy of `controller` (None: v2).
fn find(mounts: &str, own: &str, controller: Option<&str>) -> Option<PathBuf> {
    let mount = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (path, kind, options) = (words.next()?, words.next()?, words.next()?);
        let ours = match controller {
            None => kind == "cgroup2",
            Some(name) => kind == "cgroup" && options.split(',').any(|option| option == name),
        };
        ours.then_some(path)
    })?;
    let group = own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let ours = match controller {
            None => controllers.is_empty(),
            Some(name) => controllers.split(',').any(|part| part == name),
        };
        ours.then_some(path)
    })?;
    let whole = Path::new(mount).join(group.trim_start_matches('/'));
    // In a container the path is often that of the host, and the mount shows our group as root.
    if whole.is_dir() { Some(whole) } else { Some(PathBuf::from(mount)) }
}

fn make(parent: Option<PathBuf>, name: &str) -> Option<PathBuf> {
    let parent = parent?;
    remove_stale(&parent);
    let path = parent.join(name);
    fs::create_dir(&path).ok()?;
    if parent.join("cgroup.subtree_control").exists() {
        share_controllers(&parent);
    }
    Some(path)
}

/// Groups of agents that were killed, and with them their jobs.
fn remove_stale(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next());
        if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _removed = fs::remove_dir(entry.path());
        }
    }
}

/// v2: a group with processes of its own cannot give controllers to its children. When we are
/// alone in it (a unit with Delegate=yes) we step down into a child.
fn share_controllers(parent: &Path) {
    let give = || {
        for controller in ["+memory", "+pids"] {
            let _given = fs::write(parent.join("cgroup.subtree_control"), controller);
        }
        fs::read_to_string(parent.join("cgroup.subtree_control")).is_ok_and(|text| text.contains("memory"))
    };
    let offered = fs::read_to_string(parent.join("cgroup.controllers")).unwrap_or_default();
    if !offered.contains("memory") || give() {
        return;
    }
    let own = std::process::id().to_string();
    let alone = fs::read_to_string(parent.join("cgroup.procs")).is_ok_and(|text| text.trim() == own);
    let leaf = parent.join("agent");
    if alone && fs::create_dir_all(&leaf).is_ok() && fs::write(leaf.join("cgroup.procs"), &own).is_ok() {
        let _given = give();
    }
}

fn put(group: Option<&PathBuf>, file: &str, value: u64) {
    if let Some(group) = group
        && let Err(error) = fs::write(group.join(file), value.to_string())
    {
        tracing::debug!(group = %group.display(), file, %error, "not set");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_own_group_in_each_hierarchy() {
        let mounts = "cgroup /nowhere/memory cgroup rw,relatime,memory 0 0\n\
                      cgroup2 /nowhere/unified cgroup2 rw 0 0\n";
        let own = "4:memory:/a/b\n0::/c\n";
        assert_eq!(find(mounts, own, Some("memory")), Some("/nowhere/memory".into()));
        assert_eq!(find(mounts, own, None), Some("/nowhere/unified".into()));
        assert_eq!(find(mounts, own, Some("pids")), None);
    }

    #[test]
    fn a_field_is_a_whole_word() {
        assert_eq!(field("oom 3\noom_kill 2\n", "oom_kill"), Some(2));
        assert_eq!(field("oom_kill_disable 0\nunder_oom 0\n", "oom_kill"), None);
    }
}

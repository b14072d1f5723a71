//! The job's own control groups, as far as this system gives any: v2, v1 (memory and pids), or
//! none. The PID namespace is what ends the tree; a group makes that one step, counts
//! OOM kills, and keeps the job from starving the agent.
//!
//! Never: fail a job because a group could not be had.
//!
//! Memory: what the job's processes allocate, write to a tmpfs and keep in the page cache counts;
//! what they write to an output is the agent's.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// What the job may take. None: all there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<u64>,
    /// What is more than `memory_bytes` may go to the machine's swap, if it has any.
    pub may_swap: bool,
    pub pids: Option<u64>,
}

impl Limits {
    /// `asked`: the owner's limit, swap included. The job never gets what the agent needs, but
    /// half of a small box is its own; where nothing was asked, swap is as the machine has it.
    /// `box_bytes` is 0 where it is not known.
    #[must_use]
    pub fn of_memory(asked: Option<u64>, box_bytes: u64, agent_bytes: u64) -> Self {
        let rest = (box_bytes > 0).then(|| box_bytes - agent_bytes.min(box_bytes / 2));
        let memory_bytes = asked.into_iter().chain(rest).min();
        Self { memory_bytes, may_swap: asked.is_none(), pids: None }
    }
}

/// What a group's name starts with; the agent's pid and a number follow.
const PREFIX: &str = "limb-job-";

/// Groups that exist for one job; removed when dropped.
#[derive(Debug, Default)]
pub struct Group {
    unified: Option<PathBuf>,
    memory_v1: Option<PathBuf>,
    pids_v1: Option<PathBuf>,
    has_memory_limit: bool,
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
        let mut group = Self {
            unified: make(find(&mounts, &own, None), name),
            memory_v1: make(find(&mounts, &own, Some("memory")), name),
            pids_v1: make(find(&mounts, &own, Some("pids")), name),
            has_memory_limit: false,
            kills_before: machine_kills(),
        };
        group.limit(limits);
        group
    }

    fn limit(&mut self, limits: Limits) {
        if let Some(bytes) = limits.memory_bytes {
            self.has_memory_limit = put(self.unified.as_ref(), "memory.max", bytes)
                | put(self.memory_v1.as_ref(), "memory.limit_in_bytes", bytes);
            if !limits.may_swap {
                put(self.unified.as_ref(), "memory.swap.max", 0);
                put(self.memory_v1.as_ref(), "memory.memsw.limit_in_bytes", bytes);
            }
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
        self.all().map(|path| entrance(path)).collect()
    }

    /// Whether memory is counted for this job alone.
    #[must_use]
    pub fn counts_memory(&self) -> bool {
        self.memory_v1.is_some()
            || self.unified.as_ref().is_some_and(|path| path.join("memory.events").exists())
    }

    /// Whether [`Limits::memory_bytes`] holds, if these entrances could not be used.
    pub(crate) fn limits_memory(&self, outside: &[String]) -> bool {
        let group = self.memory_v1.as_ref().or(self.unified.as_ref());
        let is_inside = |path: &PathBuf| !outside.contains(&entrance(path));
        self.has_memory_limit && group.is_some_and(is_inside)
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

/// What this box may use of its machine's memory: all of it, or what the groups around us leave.
/// 0: not known.
#[must_use]
pub fn box_memory_bytes() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let v1 = find(&mounts, &own, Some("memory"))
        .and_then(|path| fs::read_to_string(path.join("memory.stat")).ok())
        .and_then(|text| field(&text, "hierarchical_memory_limit"));
    let unified = find(&mounts, &own, None);
    let v2 = unified
        .iter()
        .flat_map(|path| path.ancestors())
        .filter_map(|path| fs::read_to_string(path.join("memory.max")).ok()?.trim().parse().ok());
    total_bytes(&meminfo).into_iter().chain(v1).chain(v2).min().unwrap_or(0)
}

/// `MemTotal` of /proc/meminfo.
fn total_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

fn entrance(group: &Path) -> String {
    group.join("cgroup.procs").display().to_string()
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

/// Whether it is set.
fn put(group: Option<&PathBuf>, file: &str, value: u64) -> bool {
    let Some(group) = group else { return false };
    match fs::write(group.join(file), value.to_string()) {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!(group = %group.display(), file, %error, "not set");
            false
        }
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
    fn the_agent_keeps_what_it_needs_and_the_job_half_of_a_small_box() {
        let of = |asked, whole| Limits::of_memory(asked, whole, 3 << 20);
        let limits = |memory_bytes, may_swap| Limits { memory_bytes, may_swap, pids: None };
        assert_eq!(of(None, 10 << 20), limits(Some(7 << 20), true));
        assert_eq!(of(None, 4 << 20), limits(Some(2 << 20), true));
        assert_eq!(of(Some(1 << 20), 10 << 20), limits(Some(1 << 20), false));
        assert_eq!(of(Some(9 << 20), 10 << 20), limits(Some(7 << 20), false));
        assert_eq!(of(None, 0), limits(None, true));
        assert_eq!(of(Some(9 << 20), 0), limits(Some(9 << 20), false));
    }

    #[test]
    fn a_box_has_no_more_than_its_machine() {
        assert_eq!(total_bytes("MemTotal:       24683652 kB\nMemFree: 1 kB\n"), Some(24_683_652 << 10));
        let machine = total_bytes(&fs::read_to_string("/proc/meminfo").unwrap()).unwrap();
        assert!((1..=machine).contains(&box_memory_bytes()), "{} of {machine}", box_memory_bytes());
    }

    #[test]
    fn a_field_is_a_whole_word() {
        assert_eq!(field("oom 3\noom_kill 2\n", "oom_kill"), Some(2));
        assert_eq!(field("oom_kill_disable 0\nunder_oom 0\n", "oom_kill"), None);
    }
}

//! Assignments. The secrets in them become [`Secret`]s here and nowhere later.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use limb_proto::v1;

use super::{WireError, ms};
use crate::assignment::{
    Assignment, CacheSpec, Command, Durability, MountSpec, OutputNumber, OutputSpec, SetNumber, SetSpec,
};
use crate::id::{AttemptNumber, Digest};
use crate::secret::Secret;

impl From<&Assignment> for v1::Assignment {
    fn from(assignment: &Assignment) -> Self {
        let mut mounts: Vec<_> = assignment.mounts.iter().map(v1::MountSpec::from).collect();
        // The workdir is a set like the others, told apart by its number and its empty path.
        mounts.extend(assignment.workdir.as_ref().map(|set| set_message(set, Bytes::new(), false)));
        let (run, argv) = match &assignment.command {
            Command::Script(text) => (text.clone(), vec![]),
            Command::Argv(words) => (String::new(), words.iter().map(|w| w.clone().into()).collect()),
        };
        Self {
            run_id: assignment.run.to_string(),
            name: assignment.name.clone(),
            attempt: assignment.attempt.0,
            mounts,
            outputs: assignment.outputs.iter().map(v1::OutputSpec::from).collect(),
            workdir_set: assignment.workdir.as_ref().map(|set| set.set.0),
            env: assignment.env.iter().map(|(name, value)| env_message(name, value)).collect(),
            secrets: assignment
                .secrets
                .iter()
                .map(|(name, value)| env_message(name, value.expose()))
                .collect(),
            setup: assignment.setup.clone(),
            run,
            argv,
            workdir_changes_cap_bytes: assignment.workdir_changes_cap_bytes,
            memory_bytes: assignment.memory_bytes.unwrap_or(0),
            stop_grace_ms: ms(assignment.stop_grace),
            disconnect_grace_ms: ms(assignment.disconnect_grace),
            lower_results_set: 0,
            trace: assignment.trace,
            push: assignment.push,
            cache: Some(v1::CacheSpec::from(&assignment.cache)),
        }
    }
}

impl TryFrom<v1::Assignment> for Assignment {
    type Error = WireError;

    fn try_from(message: v1::Assignment) -> Result<Self, WireError> {
        let run =
            message.run_id.parse().map_err(|_| WireError::new("assignment.run_id", "is not a run id"))?;
        if message.disconnect_grace_ms == 0 {
            return Err(WireError::missing("assignment.disconnect_grace_ms"));
        }
        let mut mounts = Vec::new();
        let mut workdir = None;
        for mount in message.mounts {
            if message.workdir_set == Some(mount.set) && mount.path.is_empty() {
                workdir = Some(set_spec(&mount)?);
            } else {
                mounts.push(mount.try_into()?);
            }
        }
        if message.workdir_set.is_some() && workdir.is_none() {
            return Err(WireError::new("assignment.workdir_set", "names no set"));
        }
        let outputs = message.outputs.into_iter().map(OutputSpec::try_from).collect::<Result<_, _>>()?;
        let command = if message.argv.is_empty() {
            Command::Script(message.run)
        } else {
            Command::Argv(message.argv.into_iter().map(Vec::from).collect())
        };
        Ok(Self {
            run,
            name: message.name,
            attempt: AttemptNumber(message.attempt),
            mounts,
            workdir,
            outputs,
            env: message.env.into_iter().map(|v| env_pair("assignment.env", v)).collect::<Result<_, _>>()?,
            secrets: message
                .secrets
                .into_iter()
                .map(|v| env_pair("assignment.secrets", v).map(|(name, value)| (name, Secret::new(value))))
                .collect::<Result<_, _>>()?,
            setup: message.setup,
            command,
            workdir_changes_cap_bytes: message.workdir_changes_cap_bytes,
            memory_bytes: (message.memory_bytes > 0).then_some(message.memory_bytes),
            trace: message.trace,
            push: message.push,
            cache: message.cache.map(CacheSpec::try_from).transpose()?.unwrap_or_default(),
            stop_grace: Duration::from_millis(message.stop_grace_ms),
            disconnect_grace: Duration::from_millis(message.disconnect_grace_ms),
        })
    }
}

impl From<&CacheSpec> for v1::CacheSpec {
    fn from(cache: &CacheSpec) -> Self {
        let dir = cache.dir.iter().flat_map(|dir| dir.as_os_str().as_bytes()).copied().collect();
        Self { memory_bytes: cache.memory_bytes, disk_bytes: cache.disk_bytes, dir }
    }
}

impl TryFrom<v1::CacheSpec> for CacheSpec {
    type Error = WireError;

    fn try_from(message: v1::CacheSpec) -> Result<Self, WireError> {
        let v1::CacheSpec { memory_bytes, disk_bytes, dir } = message;
        if memory_bytes < Self::LEAST_MEMORY_BYTES {
            return Err(WireError::new("cache.memory_bytes", "is less than an agent can work with"));
        }
        let dir = (!dir.is_empty()).then(|| PathBuf::from(OsString::from_vec(dir.into())));
        if dir.as_ref().is_some_and(|dir| !dir.is_absolute()) {
            return Err(WireError::new("cache.dir", "is not absolute"));
        }
        Ok(Self { memory_bytes, disk_bytes, dir })
    }
}

impl From<&MountSpec> for v1::MountSpec {
    fn from(mount: &MountSpec) -> Self {
        set_message(&mount.set, mount.path.clone().into(), mount.single_file)
    }
}

impl TryFrom<v1::MountSpec> for MountSpec {
    type Error = WireError;

    fn try_from(message: v1::MountSpec) -> Result<Self, WireError> {
        Ok(Self {
            set: set_spec(&message)?,
            path: absolute("mount.path", &message.path)?,
            single_file: message.single_file,
        })
    }
}

impl From<&OutputSpec> for v1::OutputSpec {
    fn from(output: &OutputSpec) -> Self {
        let durability = match output.durability {
            Durability::Fsync => v1::Durability::Fsync,
            Durability::Close => v1::Durability::Close,
            Durability::None => v1::Durability::None,
        };
        let lower = output.lower.as_ref();
        Self {
            output: output.output.0,
            path: output.path.clone().into(),
            durability: durability.into(),
            lower_set: lower.map_or(0, |set| set.set.0),
            lower_manifest_id: lower
                .map_or_else(Bytes::new, |set| Bytes::copy_from_slice(&set.manifest_id.0)),
            lower_manifest_bytes: lower.map_or(0, |set| set.manifest_bytes),
            quota_bytes: output.quota_bytes.unwrap_or(0),
            quota_inodes: output.quota_inodes.unwrap_or(0),
        }
    }
}

impl TryFrom<v1::OutputSpec> for OutputSpec {
    type Error = WireError;

    fn try_from(message: v1::OutputSpec) -> Result<Self, WireError> {
        let unknown = || WireError::new("output.durability", format!("{} is unknown", message.durability));
        let durability = match v1::Durability::try_from(message.durability).map_err(|_| unknown())? {
            v1::Durability::Unspecified => return Err(unknown()),
            v1::Durability::Fsync => Durability::Fsync,
            v1::Durability::Close => Durability::Close,
            v1::Durability::None => Durability::None,
        };
        let lower = if message.lower_manifest_id.is_empty() {
            None
        } else {
            Some(SetSpec {
                set: SetNumber(message.lower_set),
                manifest_id: digest("output.lower_manifest_id", &message.lower_manifest_id)?,
                manifest_bytes: message.lower_manifest_bytes,
            })
        };
        Ok(Self {
            output: OutputNumber(message.output),
            path: absolute("output.path", &message.path)?,
            durability,
            lower,
            quota_bytes: (message.quota_bytes > 0).then_some(message.quota_bytes),
            quota_inodes: (message.quota_inodes > 0).then_some(message.quota_inodes),
        })
    }
}

fn set_message(set: &SetSpec, path: Bytes, single_file: bool) -> v1::MountSpec {
    v1::MountSpec {
        set: set.set.0,
        path,
        manifest_id: Bytes::copy_from_slice(&set.manifest_id.0),
        manifest_bytes: set.manifest_bytes,
        single_file,
    }
}

fn set_spec(message: &v1::MountSpec) -> Result<SetSpec, WireError> {
    Ok(SetSpec {
        set: SetNumber(message.set),
        manifest_id: digest("mount.manifest_id", &message.manifest_id)?,
        manifest_bytes: message.manifest_bytes,
    })
}

fn digest(field: &'static str, bytes: &[u8]) -> Result<Digest, WireError> {
    Digest::try_from(bytes).map_err(|error| WireError::new(field, error.to_string()))
}

fn absolute(field: &'static str, path: &[u8]) -> Result<Vec<u8>, WireError> {
    let plain = path.len() > 1
        && path[0] == b'/'
        && !path.contains(&0)
        && !path[1..].split(|b| *b == b'/').any(|part| matches!(part, b"." | b".."));
    if plain {
        Ok(path.to_vec())
    } else {
        Err(WireError::new(field, "must be an absolute path without `.` and `..`"))
    }
}

fn env_message(name: &[u8], value: &[u8]) -> v1::EnvVar {
    v1::EnvVar { name: Bytes::copy_from_slice(name), value: Bytes::copy_from_slice(value) }
}

fn env_pair(field: &'static str, variable: v1::EnvVar) -> Result<(Vec<u8>, Vec<u8>), WireError> {
    let bad = variable.name.is_empty()
        || variable.name.iter().any(|b| matches!(b, 0 | b'='))
        || variable.value.contains(&0);
    if bad {
        return Err(WireError::new(field, "has a name or value that an environment cannot hold"));
    }
    Ok((variable.name.into(), variable.value.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::RunId;

    fn sample() -> Assignment {
        let set = |n| SetSpec { set: SetNumber(n), manifest_id: Digest::of(&[7]), manifest_bytes: 99 };
        Assignment {
            run: RunId::random(),
            name: "train".into(),
            attempt: AttemptNumber(2),
            mounts: vec![MountSpec { set: set(1), path: b"/da\xffta".to_vec(), single_file: true }],
            workdir: Some(set(0)),
            outputs: vec![OutputSpec {
                output: OutputNumber(0),
                path: b"/ckpt".to_vec(),
                durability: Durability::Close,
                lower: Some(set(4)),
                quota_bytes: Some(5),
                quota_inodes: None,
            }],
            env: vec![(b"A".to_vec(), b"\xff=".to_vec())],
            secrets: vec![(b"TOKEN".to_vec(), Secret::new(b"hunter2".to_vec()))],
            setup: "pip".into(),
            command: Command::Argv(vec![b"a".to_vec(), b"".to_vec()]),
            workdir_changes_cap_bytes: 1 << 30,
            memory_bytes: Some(3 << 30),
            trace: true,
            push: true,
            cache: CacheSpec { memory_bytes: 1 << 30, disk_bytes: 5, dir: Some("/mnt/a".into()) },
            stop_grace: Duration::from_secs(30),
            disconnect_grace: Duration::from_secs(1200),
        }
    }

    #[test]
    fn an_assignment_travels_unchanged_and_its_secrets_are_never_printed() {
        let before = sample();
        let message = v1::Assignment::from(&before);
        assert!(!format!("{message:?}").contains("hunter2"));
        let after = Assignment::try_from(message).unwrap();
        assert_eq!(format!("{before:?}"), format!("{after:?}"));
        assert_eq!(before.secrets[0].1.expose(), after.secrets[0].1.expose());
        assert!(!format!("{after:?}").contains("hunter2"));
    }

    #[test]
    fn a_home_that_says_nothing_of_the_cache_means_the_default() {
        let message = v1::Assignment { cache: None, ..v1::Assignment::from(&sample()) };
        assert_eq!(Assignment::try_from(message).unwrap().cache, CacheSpec::default());
    }

    #[test]
    fn what_a_box_could_not_use_is_refused_with_the_field() {
        let refuse = |change: fn(&mut v1::Assignment), field| {
            let mut message = v1::Assignment::from(&sample());
            change(&mut message);
            assert_eq!(Assignment::try_from(message).unwrap_err().field, field);
        };
        refuse(|m| m.run_id = "x".into(), "assignment.run_id");
        refuse(|m| m.mounts[0].path = "data".into(), "mount.path");
        refuse(|m| m.mounts[0].path = "/a/../b".into(), "mount.path");
        refuse(|m| m.mounts[0].manifest_id = "short".into(), "mount.manifest_id");
        refuse(|m| m.outputs[0].durability = 0, "output.durability");
        refuse(|m| m.workdir_set = Some(77), "mount.path");
        refuse(
            |m| {
                m.mounts.truncate(1);
                m.workdir_set = Some(77)
            },
            "assignment.workdir_set",
        );
        refuse(|m| m.env[0].name = "A=B".into(), "assignment.env");
        refuse(|m| m.cache.as_mut().unwrap().memory_bytes = 1, "cache.memory_bytes");
        refuse(|m| m.cache.as_mut().unwrap().dir = "mnt".into(), "cache.dir");
        refuse(|m| m.disconnect_grace_ms = 0, "assignment.disconnect_grace_ms");
    }
}

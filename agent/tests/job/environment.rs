//! A job gets exactly what it was given.

use std::collections::BTreeSet;

use limb_agent::job::JobError;
use limb_common::secret::Secret;

use crate::support::{Place, argv, exit, run, text, try_run};

#[test]
fn the_environment_is_passed_byte_for_byte() {
    let place = Place::new();
    let mut spec = place.spec(argv(&["/usr/bin/env", "-0"]));
    let pairs: Vec<(&[u8], &[u8])> = vec![
        (b"SPACES", b" a  b "),
        (b"LINES", b"1\n2\n"),
        (b"BYTES", b"\xff\xfe"),
        (b"EMPTY", b""),
        (b"QUOTES", b"'\"`$(x)\\"),
        (b"EQUALS", b"a=b=c"),
        (b"TWICE", b"first"),
        (b"TWICE", b"second"),
    ];
    spec.env = pairs.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect();
    spec.secrets = vec![(b"TOKEN".to_vec(), Secret::new(b"s3cret value".to_vec()))];
    let (end, output) = run(spec);
    assert_eq!(end.how, exit(0));
    let found: BTreeSet<&[u8]> = output.split(|byte| *byte == 0).filter(|part| !part.is_empty()).collect();
    let wanted: BTreeSet<&[u8]> = [
        &b"SPACES= a  b "[..],
        b"LINES=1\n2\n",
        b"BYTES=\xff\xfe",
        b"EMPTY=",
        b"QUOTES='\"`$(x)\\",
        b"EQUALS=a=b=c",
        b"TWICE=second",
        b"TOKEN=s3cret value",
    ]
    .into_iter()
    .collect();
    assert_eq!(found, wanted);
}

#[test]
fn an_impossible_variable_is_refused_without_its_value() {
    let place = Place::new();
    let mut spec = place.script("true");
    spec.secrets = vec![(b"TOKEN".to_vec(), Secret::new(b"s3\0cret".to_vec()))];
    let refused = try_run(spec).unwrap_err();
    assert!(matches!(refused, JobError::BadEnvironment(_)));
    assert!(!format!("{refused} {refused:?}").contains("cret"), "{refused}");
}

#[test]
fn no_secret_is_in_any_argv() {
    // The brackets keep the patterns from finding themselves.
    let script = "cat /proc/[0-9]*/cmdline | grep -a -c '[n]eedle'; grep -a -c '[n]eedle' /proc/1/environ";
    let place = Place::new();
    let mut spec = place.script(script);
    spec.secrets = vec![(b"TOKEN".to_vec(), Secret::new(b"needle".to_vec()))];
    let (_, output) = run(spec);
    assert_eq!(text(&output), "0\n0");
}

#[test]
fn nothing_but_the_standard_descriptors_is_inherited() {
    // One of the agent's that nobody marked to be closed.
    let leaked =
        std::fs::File::open("/etc/hostname").or_else(|_| std::fs::File::open("/etc/passwd")).unwrap();
    nix::fcntl::fcntl(&leaked, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    let (_, output) = run(Place::new().spec(argv(&["python3", "-c", "import os; print(sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')), os.readlink('/proc/self/fd/0'), os.readlink('/proc/self/fd/1') == os.readlink('/proc/self/fd/2'))"])));
    // The fourth is the listing itself.
    assert_eq!(text(&output), "['0', '1', '2'] 4 /dev/null True");
}

#[test]
fn signals_start_from_their_defaults() {
    // The 31 ordinary signals: 32 and 33 are the C library's own.
    let script = "python3 -c 'import signal; print([s.name for s in signal.Signals if s < 32 and \
                  signal.getsignal(s) == signal.SIG_IGN])'; grep ^SigBlk /proc/self/status";
    let (_, output) = run(Place::new().script(script));
    // Python itself ignores these two.
    assert_eq!(text(&output), "['SIGPIPE', 'SIGXFSZ']\nSigBlk:\t0000000000000000");
}

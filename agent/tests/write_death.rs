//! Files whose writer was killed are not shown under their names; files that were closed in an
//! orderly way are, whatever became of other processes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/fake_results.rs"]
mod fake_results;
#[path = "support/results_rig.rs"]
mod results_rig;

use std::collections::BTreeSet;
use std::time::Duration;

use limb_common::assignment::Durability;
use results_rig::{Rig, WIDE, rig};

impl Rig {
    /// Python on the mount, with `half(name)` that opens, writes and leaves open. However it ends.
    fn python(&self, script: &str) {
        let common = "import os, signal, sys, threading, time\n\
                      def half(name, mode='wb', n=300000):\n  f = open(name, mode, buffering=0); f.write(b'h' * n); return f\n\
                      def die(s=signal.SIGKILL):\n  os.kill(os.getpid(), s); time.sleep(60)\n";
        self.shell(&format!("set +e; timeout 60 python3 - <<'END' 2>&1\n{common}{script}\nEND\nexit 0"));
    }

    /// The job is over: what is shown at home, and what is kept as partial files.
    fn end(&self) -> (BTreeSet<String>, BTreeSet<String>) {
        let runtime = self.runtime.as_ref().unwrap();
        assert!(runtime.block_on(self.output.released(Duration::from_secs(10))));
        self.output.abandon_open();
        let report = runtime.block_on(self.outbox.drain(Duration::from_secs(60)));
        assert!(report.complete, "{report:?}");
        let shelf = self.home.0.shelf.lock().unwrap();
        assert_eq!(shelf.offences, Vec::<String>::new());
        let text = |name: &Vec<u8>| String::from_utf8(name.clone()).unwrap();
        let partial: BTreeSet<String> = shelf.partial.keys().map(text).collect();
        // Of very many, some are named.
        for name in partial.iter().filter(|_| partial.len() < 100) {
            assert!(report.unsaved.contains(&format!("{name} (kept as .partial)")), "{report:?}");
        }
        (shelf.visible.keys().map(text).collect(), partial)
    }
}

fn names(list: &[&str]) -> BTreeSet<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn what_a_killed_process_was_writing_is_kept_as_partial() {
    let Some(rig) = rig("what_a_killed_process", WIDE, Durability::Fsync) else { return };
    rig.python("f = half('term'); die(signal.SIGTERM)");
    rig.python("f = half('kill'); die()");
    rig.python("f = half('abort'); os.abort()");
    rig.python("import ctypes; f = half('segv'); ctypes.string_at(0)");
    rig.python("f = half('threads'); [threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(8)]; die()");
    // A shell's child; the shell goes on.
    rig.shell("(echo half; exec sleep 60) > child & until [ -s child ]; do sleep 0.01; done; kill -9 $!; wait $! || true; echo whole > after");
    // Closed files of a process that dies later are whole.
    rig.python("half('closed').close(); f = half('open'); die()");
    let (visible, partial) = rig.end();
    assert_eq!(visible, names(&["after", "closed"]));
    assert_eq!(partial, names(&["abort", "child", "kill", "open", "segv", "term", "threads"]));
}

#[test]
fn what_is_closed_by_an_ordinary_exit_is_published() {
    let Some(rig) = rig("closed_by_an_ordinary_exit", WIDE, Durability::Fsync) else { return };
    rig.shell("head -c 300000 /dev/zero | cat > cat");
    rig.python("f = half('exit'); os._exit(0)");
    rig.python("f = half('failed'); os._exit(137)");
    let mut wanted = vec!["cat".to_owned(), "exit".to_owned(), "failed".to_owned()];
    // Which thread closes last, and how the kernel marks it, differs from time to time.
    for round in 0..15 {
        rig.python(&format!(
            "f = half('threads-{round}'); [threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(16)]; os._exit({round} % 2)"
        ));
        wanted.push(format!("threads-{round}"));
    }
    let (visible, partial) = rig.end();
    assert_eq!(visible, wanted.into_iter().collect());
    assert_eq!(partial, names(&[]));
}

#[test]
fn who_shares_a_file_with_a_dead_process_decides_by_what_they_do() {
    let Some(rig) = rig("who_shares_a_file", WIDE, Durability::Fsync) else { return };
    // The shell opened it and closes it: its own child's death is the shell's business.
    rig.shell("{ bash -c 'echo from the dead; kill -9 $$' || true; } > log");
    rig.shell("{ bash -c 'echo from the dead; kill -9 $$' || true; echo more; } > longer");
    // A worker that only inherited it says nothing about it.
    let orphan = |name: &str, act: &str| {
        format!(
            "f = half('{name}'); r, w = os.pipe()\nif os.fork() == 0:\n  os.close(w); os.read(r, 1)\n  {act}\n  os._exit(0)\ndie()"
        )
    };
    rig.python(&orphan("worker", "pass"));
    rig.python(&orphan("heir", "f.write(b'the rest')"));
    // Several writers of one file, of which one is killed.
    rig.python(
        "f = half('shared')\nif os.fork() == 0:\n  f.close(); g = half('shared', 'r+b', 10); die()\n\
         os.wait(); f.write(b'more'); f.close()",
    );
    let (visible, partial) = rig.end();
    assert_eq!(visible, names(&["heir", "log", "longer"]));
    assert_eq!(partial, names(&["shared", "worker"]));
}

#[test]
fn a_torn_file_can_be_gone_on_with() {
    let Some(rig) = rig("a_torn_file", WIDE, Durability::Fsync) else { return };
    rig.shell("echo old > overwritten");
    rig.check_home();
    let torn = [
        "finished",
        "rewritten",
        "cut",
        "moved",
        "synced",
        "removed",
        "touched",
        "read",
        "overwritten",
        "logged",
    ];
    for name in torn {
        rig.python(&format!("f = half('{name}', n=1500000); die()"));
    }
    rig.shell("test $(wc -c < read) = 1500000; test $(tr -d h < read | wc -c) = 0");
    rig.shell("rm removed; touch touched; mv moved target; truncate -s 100 cut; echo new > rewritten");
    rig.python("f = open('finished', 'r+b'); f.seek(1500000); f.write(b'end'); f.close()");
    rig.python("f = open('synced', 'r+b'); os.fsync(f.fileno()); die()");
    // Half a file does not become a log by what is appended to it.
    rig.python("f = half('logged', 'ab', 10); die()");
    // A log is a prefix whoever dies; so is what fsync has shown.
    rig.python("f = half('appended', 'ab'); die()");
    rig.python("f = half('durable'); os.fsync(f.fileno()); die()");
    let (visible, partial) = rig.end();
    let shown = ["appended", "cut", "durable", "finished", "overwritten", "rewritten", "synced", "target"];
    assert_eq!(visible, names(&shown));
    assert_eq!(partial, names(&["logged", "overwritten", "read", "touched"]));
    assert_eq!(*rig.home.file("overwritten").unwrap(), b"old\n");
    assert_eq!(rig.home.file("finished").unwrap().len(), 1_500_003);
    assert_eq!(rig.home.file("target").unwrap().len(), 1_500_000);
}

#[test]
fn where_close_waits_for_home_a_death_does_not_publish() {
    let Some(rig) = rig("where_close_waits", WIDE, Durability::Close) else { return };
    rig.python("half('closed').close(); f = half('half'); die()");
    rig.python("f = half('exit'); os._exit(0)");
    let (visible, partial) = rig.end();
    assert_eq!((visible, partial), (names(&["closed", "exit"]), names(&["half"])));
}

/// execve holds a lock of the process while it closes files, and readers of `/proc` wait for it.
#[test]
fn files_that_execve_closes_hold_nobody_up() {
    let Some(rig) = rig("files_that_execve_closes", WIDE, Durability::Fsync) else { return };
    rig.python("f = half('here')\nfor _ in range(40):\n  p = os.fork()\n  if p == 0:\n    os.execvp('true', ['true'])\n  os.waitpid(p, 0)\nf.close()");
    rig.python("f = half('there'); os.execvp('true', ['true'])");
    let (visible, partial) = rig.end();
    assert_eq!((visible, partial), (names(&["here", "there"]), names(&[])));
}

#[test]
fn hundreds_of_writers_that_end_in_every_way_hold_nobody_up() {
    let Some(rig) = rig("hundreds_of_writers", WIDE, Durability::Fsync) else { return };
    // Twenty at a time: a quarter exits, a quarter executes a program, a quarter kills itself,
    // a quarter is killed somewhere in its writes.
    rig.python(
        "def child(n, r):\n  f = half(f'{n % 4}-{n}', n=1000)\n  \
         if n % 4 == 0: os._exit(n % 2)\n  if n % 4 == 1: os.execvp('true', ['true'])\n  \
         if n % 4 == 2: die()\n  os.write(r, b'x')\n  \
         while True: f.seek(0); f.write(b'w' * 5000)\n\
         for first in range(0, 500, 20):\n  pids = []\n  \
         for n in range(first, first + 20):\n    r, w = os.pipe(); pid = os.fork()\n    \
         if pid == 0: child(n, w)\n    \
         if n % 4 == 3: os.read(r, 1); time.sleep(n % 7 / 1000); os.kill(pid, signal.SIGKILL)\n    \
         os.close(r); os.close(w); pids.append(pid)\n  \
         for pid in pids: os.waitpid(pid, 0)\n\
         open('all', 'w').close()",
    );
    let (mut visible, partial) = rig.end();
    assert!(visible.remove("all"), "the writers did not all end");
    let of = |ends: [usize; 2]| {
        (0..500).filter(move |n| ends.contains(&(n % 4))).map(|n| format!("{}-{n}", n % 4))
    };
    assert_eq!(visible, of([0, 1]).collect());
    assert_eq!(partial, of([2, 3]).collect());
}

#[test]
fn a_build_with_all_its_compilers_at_once() {
    let Some(rig) = rig("a_build", WIDE, Durability::Fsync) else { return };
    rig.shell(
        "for n in $(seq 80); do echo \"int f$n(void) { return $n; }\" > $n.c; done\n\
         { seq -f 'int f%g(void);' 80; echo 'int main(void) { return (0'; seq -f '+ f%g()' 80; echo ') != 3240; }'; } > main.c\n\
         printf 'all: $(patsubst %%.c,%%.o,$(wildcard *.c))\\n\\tcc -o all *.o\\n%%.o: %%.c\\n\\tcc -c -o $@ $<\\n' > Makefile\n\
         make -s -j\n./all",
    );
    rig.check_home();
    assert_eq!(rig.home.0.shelf.lock().unwrap().partial.len(), 0);
}

//! Real programs on the writable mount, over a home that checks every hash.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/fake_results.rs"]
mod fake_results;
#[path = "support/results_rig.rs"]
mod results_rig;

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fake_results::Seen;
use limb_agent::results::outbox::OutboxSettings;
use limb_common::assignment::Durability;
use results_rig::{WIDE, noise, rig, wait_for};

#[test]
fn programs_that_copy_trees() {
    let Some(rig) = rig("programs_that_copy_trees", WIDE, Durability::Fsync) else { return };
    let source = tempfile::tempdir().unwrap();
    let make = "mkdir -p s/sub/deep; head -c 3000000 /dev/urandom > s/big; echo hi > s/sub/small; \
                : > s/empty; ln -s small s/sub/link; chmod 751 s/sub/small; truncate -s 5M s/sparse";
    let done = Command::new("bash").args(["-ec", make]).current_dir(source.path()).status().unwrap();
    assert!(done.success());
    let from = source.path().join("s");
    let from = from.display();
    rig.shell(&format!("cp -a {from} copied; diff -r {from} copied"));
    rig.shell(&format!("mkdir t; tar -C {from} -cf - . | tar -C t -xf -; diff -r {from} t"));
    rig.shell(&format!("if command -v rsync; then rsync -a {from}/ r/; diff -r {from} r; fi"));
    rig.check_home();
}

#[test]
fn git_clones_into_it() {
    let Some(rig) = rig("git_clones_into_it", WIDE, Durability::None) else { return };
    let source = tempfile::tempdir().unwrap();
    let make = "git init -q -b main r; cd r; echo one > a; mkdir d; echo two > d/b; git add .; \
                git -c user.name=n -c user.email=e@x commit -qm first";
    let done = Command::new("bash").args(["-ec", make]).current_dir(source.path()).status().unwrap();
    assert!(done.success());
    rig.shell(&format!(
        "git clone -q --no-hardlinks {}/r c; cd c; git status --porcelain; git fsck",
        source.path().display()
    ));
    rig.shell("cd c; echo more >> a; git -c user.name=n -c user.email=e@x commit -qam second; git log --oneline | wc -l | grep -q 2");
    rig.check_home();
}

#[test]
fn sqlite_keeps_a_database_there() {
    let Some(rig) = rig("sqlite_keeps_a_database_there", WIDE, Durability::Fsync) else { return };
    let script = "import sqlite3\nd=sqlite3.connect('db')\nd.execute('create table t(x)')\n\
                  for n in range(20):\n  d.execute('insert into t values(?)',(n,)); d.commit()\n\
                  assert d.execute('select count(*) from t').fetchone()==(20,)\nd.close()\n";
    rig.shell(&format!("python3 - <<'END'\n{script}END"));
    rig.check_home();
}

#[test]
fn a_save_by_temporary_file_and_rename_shows_only_whole_files() {
    let Some(rig) = rig("a_save_by_temporary_file", WIDE, Durability::Fsync) else { return };
    let mut old = None;
    for round in 0..3_u64 {
        let bytes = noise(round, 3 * 1024 * 1024 + 11);
        let mut file = File::create(rig.path("m.tmp")).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        for part in bytes.chunks(700_000) {
            file.write_all(part).unwrap();
        }
        drop(file);
        fs::rename(rig.path("m.tmp"), rig.path("m")).unwrap();
        if let Some((mut open, was)) = old.take() {
            let (open, was): (&mut File, Vec<u8>) = (&mut open, was);
            let mut got = Vec::new();
            open.rewind().unwrap();
            open.read_to_end(&mut got).unwrap();
            assert!(got == was, "the replaced file changed under its reader");
        }
        old = Some((File::open(rig.path("m")).unwrap(), bytes));
    }
    rig.check_home();
    assert_eq!(*rig.home.file("m").unwrap(), noise(2, 3 * 1024 * 1024 + 11));
}

#[test]
fn what_only_home_has_is_read_back_and_outlives_its_name() {
    let limits = OutboxSettings { dirty_bytes: 64 << 20, clean_bytes: 0 };
    let Some(rig) = rig("what_only_home_has", limits, Durability::Fsync) else { return };
    let bytes = noise(6, 5_000_000);
    fs::write(rig.path("old"), &bytes).unwrap();
    rig.check_home();
    let mut open = File::open(rig.path("old")).unwrap();
    let mut edit = OpenOptions::new().write(true).open(rig.path("old")).unwrap();
    edit.seek(std::io::SeekFrom::Start(2_000_000)).unwrap();
    edit.write_all(b"edited").unwrap();
    drop(edit);
    rig.check_home();
    let mut wanted = bytes.clone();
    wanted[2_000_000..2_000_006].copy_from_slice(b"edited");
    assert!(*rig.home.file("old").unwrap() == wanted);
    fs::write(rig.path("new"), b"new").unwrap();
    fs::rename(rig.path("new"), rig.path("old")).unwrap();
    rig.check_home();
    // Not from the kernel's memory: from ours.
    let forget = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    nix::fcntl::posix_fadvise(&open, 0, 0, forget).unwrap();
    let mut got = Vec::new();
    open.read_to_end(&mut got).unwrap();
    assert!(got == wanted, "the replaced file is not what it was");
}

#[test]
fn a_shared_mapping_is_written_and_synced() {
    let Some(rig) = rig("a_shared_mapping", WIDE, Durability::Fsync) else { return };
    let script = "import mmap\nf=open('m','w+b'); f.truncate(3000000)\nm=mmap.mmap(f.fileno(),0)\n\
                  m[0:5]=b'hello'; m[2999990:2999995]=b'there'; m.flush()\nm[5:6]=b'!'\nm.close(); f.close()\n\
                  b=open('m','rb').read(); assert b[:6]==b'hello!' and b[2999990:2999995]==b'there'\n";
    rig.shell(&format!("python3 - <<'END'\n{script}END"));
    // The last dirty page comes before the release that publishes.
    rig.home.wait_until("the mapping's bytes", |shelf| {
        matches!(shelf.visible.get(&b"m"[..]), Some(Seen::File(bytes)) if bytes.starts_with(b"hello!"))
    });
    rig.check_home();
}

#[test]
fn a_log_grows_at_home_while_it_is_open() {
    let Some(rig) = rig("a_log_grows", WIDE, Durability::Fsync) else { return };
    let mut log = OpenOptions::new().append(true).create(true).open(rig.path("log")).unwrap();
    let mut written = Vec::new();
    for round in 0..3 {
        let line = format!("line {round}\n");
        log.write_all(line.as_bytes()).unwrap();
        written.extend_from_slice(line.as_bytes());
        rig.home.wait_until(
            "growth",
            |shelf| matches!(shelf.visible.get(&b"log"[..]), Some(Seen::File(bytes)) if **bytes == written),
        );
    }
    drop(log);
    rig.check_home();
}

#[test]
fn four_appenders_lose_nothing() {
    let Some(rig) = rig("four_appenders", WIDE, Durability::Fsync) else { return };
    rig.shell("for w in 1 2 3 4; do (for n in $(seq 200); do echo $w-$n; done >> all) & done; wait; test $(sort -u all | wc -l) = 800");
    rig.check_home();
}

#[test]
fn a_forked_child_that_closes_what_it_inherited_publishes_nothing() {
    for durability in [Durability::Fsync, Durability::Close] {
        let Some(rig) = rig("a_forked_child", WIDE, durability) else { return };
        let mut file = File::create(rig.path("half")).unwrap();
        file.write_all(&noise(3, 2_000_000)).unwrap();
        let flags = nix::fcntl::FdFlag::empty();
        nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_SETFD(flags)).unwrap();
        let fd = file.as_raw_fd();
        let child = Command::new("bash").args(["-c", &format!("exec {fd}>&-; exit 0")]).status().unwrap();
        assert!(child.success());
        // Something later arrives, so whatever the child caused would have arrived too.
        File::create(rig.path("later")).unwrap().sync_all().unwrap();
        rig.home.wait_until("the later file", |shelf| shelf.visible.contains_key(&b"later"[..]));
        assert!(rig.home.file("half").is_none(), "{durability:?}");
        drop(file);
        rig.home.wait_until("the file", |shelf| shelf.visible.contains_key(&b"half"[..]));
        rig.check_home();
    }
}

#[test]
fn overwriting_and_unlinking_while_open() {
    let Some(rig) = rig("overwriting_and_unlinking", WIDE, Durability::Fsync) else { return };
    for round in 0..20 {
        fs::write(rig.path("same"), noise(round, 1_500_000)).unwrap();
    }
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(rig.path("gone")).unwrap();
    file.write_all(b"still here").unwrap();
    fs::remove_file(rig.path("gone")).unwrap();
    file.write_all_at(b"STILL", 0).unwrap();
    let mut got = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut got).unwrap();
    assert_eq!((got.as_str(), file.metadata().unwrap().nlink()), ("STILL here", 0));
    drop(file);
    rig.check_home();
    assert_eq!(*rig.home.file("same").unwrap(), noise(19, 1_500_000));
}

#[test]
fn fsync_returns_only_after_home_has_said_durable() {
    let Some(rig) = rig("fsync_returns", WIDE, Durability::Fsync) else { return };
    rig.home.0.held.send_replace(true);
    let mut file = File::create(rig.path("f")).unwrap();
    file.write_all(b"important").unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&done);
    let syncing = std::thread::spawn(move || {
        file.sync_all().unwrap();
        told.store(true, Ordering::SeqCst);
    });
    rig.home.wait_until("the content at home", |shelf| shelf.visible.contains_key(&b"f"[..]));
    assert!(!done.load(Ordering::SeqCst), "fsync returned before the acknowledgement");
    assert!(!syncing.is_finished());
    rig.home.0.held.send_replace(false);
    syncing.join().unwrap();
    assert_eq!(*rig.home.file("f").unwrap(), b"important");
}

#[test]
fn a_full_budget_blocks_the_writer_and_nobody_else() {
    let limits = OutboxSettings { dirty_bytes: 4 << 20, clean_bytes: 1 << 20 };
    let Some(rig) = rig("a_full_budget", limits, Durability::Fsync) else { return };
    rig.home.0.held.send_replace(true);
    let path = rig.path("big");
    let bytes = noise(8, 12 << 20);
    let data = bytes.clone();
    let writer = std::thread::spawn(move || {
        let mut file = File::create(path).unwrap();
        for part in data.chunks(1 << 20) {
            file.write_all(part).unwrap();
        }
    });
    wait_for("a full budget", || rig.outbox.budget().is_over());
    for _ in 0..20 {
        fs::metadata(rig.path("big")).unwrap();
        fs::read_dir(rig.directory.path()).unwrap().count();
    }
    assert!(!writer.is_finished());
    assert!(rig.outbox.budget().used_bytes() <= 5 << 20);
    rig.home.0.held.send_replace(false);
    writer.join().unwrap();
    rig.check_home();
    assert!(fs::read(rig.path("big")).unwrap() == bytes);
}

#[test]
fn the_fence_keeps_half_written_files_private() {
    let Some(rig) = rig("the_fence", WIDE, Durability::Fsync) else { return };
    let mut half = File::create(rig.path("half")).unwrap();
    half.write_all(&noise(4, 1_200_000)).unwrap();
    fs::write(rig.path("whole"), b"whole").unwrap();
    rig.home.wait_until("the whole file", |shelf| shelf.visible.contains_key(&b"whole"[..]));
    rig.output.fence();
    drop(half);
    rig.home.wait_until("the partial file", |shelf| shelf.partial.contains_key(&b"half"[..]));
    let shelf = rig.home.0.shelf.lock().unwrap();
    assert!(!shelf.visible.contains_key(&b"half"[..]));
    assert_eq!(shelf.partial[&b"half"[..]], noise(4, 1_200_000));
}

#[test]
fn a_database_in_wal_mode_is_written_by_processes_at_once() {
    let Some(rig) = rig("a_database_in_wal_mode", WIDE, Durability::None) else { return };
    // The change to WAL waits for nobody, on any file system: it is made before they begin.
    let first = "import sqlite3\nd=sqlite3.connect('db')\n\
                 assert d.execute('pragma journal_mode=wal').fetchone()==('wal',)\n\
                 d.execute('create table t(w,x)')\nd.close()\n";
    rig.shell(&format!("python3 - <<'END'\n{first}END"));
    let script = "import sqlite3,sys\nd=sqlite3.connect('db',timeout=60)\n\
                  for n in range(30):\n  d.execute('insert into t values(?,?)',(sys.argv[1],n)); d.commit()\n\
                  d.close()\n";
    fs::write(rig.path("w.py"), script).unwrap();
    rig.shell("pids=; for w in 1 2 3; do python3 w.py $w & pids=\"$pids $!\"; done; for p in $pids; do wait $p; done");
    let look = "import sqlite3\nd=sqlite3.connect('db')\n\
                assert d.execute('pragma integrity_check').fetchone()==('ok',)\n\
                assert d.execute('select count(*),sum(x) from t').fetchone()==(90,3*435)\nd.close()\n";
    rig.shell(&format!("python3 - <<'END'\n{look}END"));
    rig.check_home();
}

#[test]
fn the_calls_that_copy_files_copy_or_say_that_they_cannot() {
    let Some(rig) = rig("the_calls_that_copy_files", WIDE, Durability::None) else { return };
    let bytes = noise(9, 3_500_777);
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("from"), &bytes).unwrap();
    fs::write(rig.path("from"), &bytes).unwrap();
    let script = "import os,sys,errno\nn=3500777\n\
        def copy(how,source,to):\n\
        \x20 s=os.open(source,os.O_RDONLY); t=os.open(to,os.O_WRONLY|os.O_CREAT,0o644); done=0\n\
        \x20 os.posix_fadvise(s,0,0,os.POSIX_FADV_DONTNEED)\n\
        \x20 while done<n:\n\
        \x20  try: got=how(s,t,n-done)\n\
        \x20  except OSError as e: assert e.errno==errno.EXDEV and done==0,e; os.unlink(to); return\n\
        \x20  assert got>0; done+=got\n\
        \x20 assert how(s,t,10)==0\n\
        copy(os.copy_file_range,'from','ranged')\n\
        assert os.path.getsize('ranged')==n\n\
        copy(os.copy_file_range,sys.argv[1],'ranged in')\n\
        copy(lambda s,t,k: os.sendfile(t,s,None,k),'from','sent')\n\
        copy(lambda s,t,k: os.sendfile(t,s,None,k),sys.argv[1],'sent in')\n";
    let from = outside.path().join("from");
    rig.shell(&format!("python3 - '{}' <<'END'\n{script}END", from.display()));
    rig.shell(&format!("cp --reflink=auto from cloned; cp --reflink=auto '{}' 'cloned in'", from.display()));
    rig.shell("! cp --reflink=always from 'never' 2> /dev/null; test ! -s never; rm -f never");
    for entry in fs::read_dir(rig.directory.path()).unwrap() {
        let path = entry.unwrap().path();
        assert!(fs::read(&path).unwrap() == bytes, "{}", path.display());
    }
    rig.check_home();
}

#[test]
fn space_and_numbers_are_what_programs_expect() {
    let Some(rig) = rig("space_and_numbers", WIDE, Durability::None) else { return };
    let script = "import os\nM=1<<20\nsizes=[0,1,511,512,513,4096,M-1,M,M+1,3*M+5]\n\
        os.mkdir('d'); os.symlink('d','link')\n\
        for s in sizes: open(f'd/{s}','wb').write(b'x'*s)\n\
        os.link('d/1','d/second'); open('d/sparse','wb').truncate(5*M)\n\
        def look():\n\
        \x20 for s in sizes: assert os.stat(f'd/{s}').st_blocks==-(-s//512),s\n\
        \x20 assert os.stat('d/sparse').st_blocks<=8, os.stat('d/sparse')\n\
        \x20 assert os.stat('d').st_blocks>=1 and os.stat('d').st_nlink>=1\n\
        \x20 seen={e.name:e.inode() for d in ('.','d') for e in os.scandir(d)}\n\
        \x20 assert all(i==os.lstat(n if os.path.lexists(n) else 'd/'+n).st_ino for n,i in seen.items())\n\
        \x20 assert seen.pop('second')==seen['1'] and len(set(seen.values()))==len(seen)\n\
        \x20 assert all(0<i<2**31 for i in seen.values()); return seen\n\
        before=look()\n\
        os.sync(); assert look()==before\n\
        name='\u{e9}'*127\n\
        open(name+'x','w').close(); assert name+'x' in os.listdir('.')\n\
        try: open(name+'xx','w'); assert False\n\
        except OSError as e: assert e.errno==36\n";
    rig.shell(&format!("python3 - <<'END'\n{script}END"));
    rig.check_home();
}

#[test]
fn a_listing_skips_nothing_while_names_go_and_sees_names_that_came() {
    let Some(rig) = rig("a_listing_skips_nothing", WIDE, Durability::None) else { return };
    let script = "import os,itertools\nos.mkdir('d')\n\
        for n in range(2000): open(f'd/{n}','w').close()\n\
        for n,e in enumerate(os.scandir('d')):\n\
        \x20 os.unlink(e.path)\n\
        \x20 if n%100==0: open(f'd/new {n}','w').close()\n\
        left=os.listdir('d'); assert all(x.startswith('new') for x in left), left[:9]\n\
        f=os.open('d',os.O_RDONLY); os.listdir(f)\n\
        assert not os.path.exists('d/late')\n\
        open('d/late','w').close(); assert os.path.exists('d/late') and 'late' in os.listdir(f)\n";
    rig.shell(&format!("python3 - <<'END'\n{script}END"));
    rig.check_home();
}

#[test]
fn sizes_beyond_the_limit_are_refused_and_cost_nothing() {
    let Some(rig) = rig("sizes_beyond_the_limit", WIDE, Durability::None) else { return };
    fs::write(rig.path("f"), "small").unwrap();
    let file = OpenOptions::new().read(true).write(true).open(rig.path("f")).unwrap();
    for far in [(4 << 40) + 1, 1 << 50, 1 << 62] {
        assert_eq!(file.set_len(far).unwrap_err().raw_os_error(), Some(nix::libc::EFBIG));
        assert_eq!(file.write_at(b"x", far).unwrap_err().raw_os_error(), Some(nix::libc::EFBIG));
        let reserved = nix::fcntl::posix_fallocate(&file, 0, i64::try_from(far).unwrap());
        assert_eq!(reserved, Err(nix::errno::Errno::EFBIG));
    }
    assert_eq!(fs::read(rig.path("f")).unwrap(), b"small");
    drop(file);
    rig.check_home();
}

//! The cache that a job asks for, from its file to the box's disk and back.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use limb_tests::home::{Home, lacks_fuse};

/// More than memory holds, three times, each time past the kernel's page cache.
const READ: &str = "for i in 1 2 3; do sha256sum < /data/large; \
                    dd if=/data/large iflag=nocache count=0 status=none; done > /out/sums";

fn job(cache: &str) -> String {
    format!(
        "mounts: {{/data: \"{{root}}/src/data\"}}\noutputs: {{/out: {{dest: \"{{root}}/dest/{{name}}\"}}}}\n\
         {cache}run: \"{READ}\"\n"
    )
}

#[test]
fn a_job_that_asks_for_a_disk_reads_back_from_it_what_memory_could_not_hold() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    home.write("src/data/large", (0..35_000_000_u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>());
    let run = |name: &str, cache: &str| {
        let ended = home.run(name, &job(cache));
        assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
        let sums = String::from_utf8(home.read(format!("dest/{name}/sums")).unwrap()).unwrap();
        let mut sums = sums.lines();
        let first = sums.next().unwrap();
        assert!(sums.clone().count() == 2 && sums.all(|sum| sum == first), "a round read other bytes");
        (home.events(name), first.to_owned())
    };
    let (said, sum) = run("disk", "cache: {memory: 64MiB, disk: 512MiB}\n");
    assert!(said.contains("cache on the box's disk, sealed: "), "{said}");
    assert!(!said.contains(" written, 0 B read back"), "{said}");
    // A place that is none: the job goes on, and its owner is told.
    let (said, without) = run("nowhere", "cache: {memory: 64MiB, disk: 512MiB, dir: \"{root}/none\"}\n");
    assert!(
        said.contains("goes on in memory alone") && said.contains("could not make a file there"),
        "{said}"
    );
    assert_eq!(sum, without);
    assert!(!said.contains("pushed into the page cache"), "{said}");
    let (said, pushed) = run("pushed", "push: on\n");
    let line =
        said.lines().find(|line| line.contains("pushed into the page cache before it was read: ")).unwrap();
    assert!(!line.contains(" of 0 chunks"), "{line}");
    assert_eq!(sum, pushed);
    let (said, _) = run("memory", "");
    assert!(!said.contains("cache on the box's disk") && !said.contains("goes on in memory alone"), "{said}");
    home.assert_no_box_left();
}

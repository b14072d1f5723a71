//! Each screen as it looks.

use jiff::tz::TimeZone;
use limb_proto::v1::{CostRow, Outcome, PlanOutput, PlanReply, PlanSet, ReapedBox, ResultFile, RunInfo};

use super::render::{self, Ending};

fn plan() -> PlanReply {
    PlanReply {
        name: "digits".into(),
        sets: vec![
            PlanSet {
                path: "/data".into(),
                source: "/tank/data".into(),
                files: 12,
                bytes: 1_400_000_000,
                class: "public".into(),
                outside_links: vec!["a -> /etc/x".into(), "b".into()],
            },
            PlanSet {
                path: "(workdir)".into(),
                source: "/home/ada/x\u{1b}[2J".into(),
                files: 1,
                bytes: 12,
                class: "internal".into(),
                outside_links: vec![],
            },
        ],
        outputs: vec![PlanOutput {
            path: "/ckpt".into(),
            dest: "/tank/runs/digits".into(),
            durability: "fsync".into(),
        }],
        provider: "lambda".into(),
        offer: "gpu_1x_h100".into(),
        price_micros_per_hour: 2_490_000,
        at_most_micros: 25_000_000,
        max_duration_ms: 6 * 3_600_000,
        warnings: vec!["the destination is inside of the workdir".into()],
        verdict: "public data may go to lambda".into(),
        allowed: true,
    }
}

fn run() -> RunInfo {
    RunInfo {
        run_id: "r-0123456789ab".into(),
        name: "digits".into(),
        state: "ended".into(),
        phase: "closed".into(),
        attempt: 1,
        provider: "local".into(),
        instance: "i-1".into(),
        submitted_unix_ms: 1_790_000_000_000,
        ended_unix_ms: 1_790_000_195_000,
        outcome: Some(outcome()),
        cost_micros: 0,
        billed_ms: 192_000,
        dests: Vec::new(),
    }
}

fn outcome() -> Outcome {
    Outcome {
        job: "exit 0".into(),
        data: "home".into(),
        destroy: "confirmed".into(),
        exit_code: 0,
        exit_origin: "job".into(),
        destroyed_unix_ms: 1_790_000_195_000,
        files_home: 12,
        bytes_home: 1_200_000_000,
        unsaved: vec![],
        r#final: true,
    }
}

fn ending(outcome: &Outcome, dests: &[&str]) -> String {
    let dests = dests.iter().map(|dest| (*dest).to_owned()).collect();
    let run = RunInfo { cost_micros: 1_337_000, dests, ..run() };
    render::ending(&Ending { run: &run, outcome }, &TimeZone::UTC).join("\n")
}

#[test]
fn the_plan_says_what_goes_where_and_what_it_costs_at_most() {
    insta::assert_snapshot!(render::plan(&plan()), @r"
Plan for digits
  reads   /data  ← /tank/data  (12 files, 1.4 GB, public)
          a -> /etc/x and 1 more lead out of the set and will dangle; hint: `links: follow`
  reads   (workdir)  ← /home/ada/x[2J  (1 file, 12 B, internal)
  writes  /ckpt  → /tank/runs/digits  (durability: fsync)
  runs    lambda, gpu_1x_h100, $2.49/h, for at most 6h00m
  costs   at most $25.00 (as long as home or a reaper is alive)
  data    allowed: public data may go to lambda
  warning: the destination is inside of the workdir
");
    let free = PlanReply {
        provider: "local".into(),
        offer: String::new(),
        price_micros_per_hour: 0,
        at_most_micros: 0,
        allowed: false,
        verdict: "data of class `sealed` never leaves home".into(),
        warnings: vec![],
        outputs: vec![],
        sets: vec![],
        ..plan()
    };
    insta::assert_snapshot!(render::plan(&free), @r"
Plan for digits
  runs    local, $0.00/h, for at most 6h00m
  costs   nothing: $0.00
  data    REFUSED: data of class `sealed` never leaves home
");
}

#[test]
fn a_good_end_has_three_lines() {
    insta::assert_snapshot!(ending(&outcome(), &["/tank/runs/digits/ckpt"]), @r"
job exit 0 · 3m12s
data home: 12 files, 1.2 GB, verified → /tank/runs/digits/ckpt
box destroyed: confirmed at 2026-09-21 14:16:35, cost $1.34
");
    let none = Outcome { files_home: 0, bytes_home: 0, ..outcome() };
    insta::assert_snapshot!(ending(&none, &[]), @r"
job exit 0 · 3m12s
data home: no files were written
box destroyed: confirmed at 2026-09-21 14:16:35, cost $1.34
");
}

#[test]
fn a_bad_end_never_sounds_good() {
    let lost = Outcome {
        job: "lost: no beat for 20m".into(),
        data: "incomplete".into(),
        destroy: "unconfirmed".into(),
        exit_code: 75,
        exit_origin: "limb: teardown not confirmed: money may be running".into(),
        unsaved: vec!["ckpt/\u{202e}last".into(), "log.txt".into()],
        files_home: 1,
        bytes_home: 3,
        ..outcome()
    };
    insta::assert_snapshot!(ending(&lost, &["/a", "/b"]), @r"
job lost: no beat for 20m · 3m12s
data NOT all home: 1 file, 3 B are, verified → /a and 1 more
  not saved: ckpt/last
  not saved: log.txt
box NOT confirmed destroyed: money may be running, cost so far $1.34; hint: `limb reap`
exit 75: limb: teardown not confirmed: money may be running
");
    let unknown = Outcome { exit_code: 70, ..Outcome::default() };
    insta::assert_snapshot!(ending(&unknown, &["/a"]), @r"
job unknown · 3m12s
data: NOT confirmed home
box NOT confirmed destroyed: money may be running, cost so far $1.34; hint: `limb reap`
exit 70: unknown
");
    let never = Outcome {
        job: "never started: no capacity".into(),
        data: "nothing".into(),
        destroy: "never created".into(),
        exit_code: 69,
        exit_origin: "limb: no box could be had".into(),
        ..outcome()
    };
    insta::assert_snapshot!(ending(&never, &[]), @r"
job never started: no capacity · 3m12s
data home: there was nothing to bring
box: never created, cost $1.34
exit 69: limb: no box could be had
");
}

#[test]
fn runs_and_costs_are_tables() {
    let live = RunInfo {
        name: "x\u{1b}]0;t\u{7}".into(),
        ended_unix_ms: 0,
        phase: "running".into(),
        outcome: None,
        cost_micros: 123,
        ..run()
    };
    insta::assert_snapshot!(render::runs(&[run(), live], 1_790_000_065_000), @r"
RUN             NAME    ATTEMPT  PHASE    ON       AGE   COST  OUTCOME
r-0123456789ab  digits        1  closed   local  3m15s  $0.00  exit 0 · data home · box confirmed
r-0123456789ab  x]0;t         1  running  local  1m05s  $0.01  -
");
    let row = CostRow {
        run_id: "r-0123456789ab".into(),
        name: "digits, =2".into(),
        attempt: 1,
        provider: "lambda".into(),
        offer: "gpu_1x".into(),
        price_micros_per_hour: 2_490_000,
        started_unix_ms: 1_790_000_000_000,
        ended_unix_ms: 1_790_000_192_000,
        billed_ms: 192_000,
        cost_micros: 132_800,
        open: false,
        outcome: "exit 0".into(),
    };
    let open = CostRow { attempt: 2, ended_unix_ms: 0, open: true, outcome: String::new(), ..row.clone() };
    insta::assert_snapshot!(render::costs(&[row.clone(), open.clone()], &TimeZone::UTC), @r"
RUN             NAME        ATTEMPT  ON      OFFER     PRICE  STARTED              DURATION    COST  OUTCOME
r-0123456789ab  digits, =2        1  lambda  gpu_1x  $2.49/h  2026-09-21 14:13:20     3m12s   $0.14  exit 0
r-0123456789ab  digits, =2        2  lambda  gpu_1x  $2.49/h  2026-09-21 14:13:20    3m12s+  $0.14+
total: $0.27 for 6m24s and counting: 1 not confirmed ended (+)
");
    insta::assert_snapshot!(render::costs_csv(&[CostRow { name: "=cmd()".into(), ..row }, open]), @r#"
run,name,attempt,provider,offer,price_micros_per_hour,started_unix_ms,ended_unix_ms,billed_ms,cost_micros,open,outcome
r-0123456789ab,'=cmd(),1,lambda,gpu_1x,2490000,1790000000000,1790000192000,192000,132800,false,exit 0
r-0123456789ab,"digits, =2",2,lambda,gpu_1x,2490000,1790000000000,,192000,132800,true,
"#);
}

#[test]
fn results_and_boxes_are_tables() {
    let file = ResultFile {
        path: b"sub/\xff\n.bin".to_vec().into(),
        output: "/ckpt".into(),
        dest: "/tank/x".into(),
        size: 1_400,
        b3sum: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262".into(),
        published_unix_ms: 1_790_000_000_000,
        state: "whole".into(),
        run_id: "r-0123456789ab".into(),
    };
    insta::assert_snapshot!(render::results(&[file], &TimeZone::UTC), @r"
OUTPUT  PATH          SIZE  PUBLISHED            STATE  B3SUM
/ckpt   sub/� .bin  1.4 kB  2026-09-21 14:13:20  whole  af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262
");
    let found = ReapedBox {
        provider: "local".into(),
        instance: "i-1".into(),
        run_id: String::new(),
        age_ms: 90_000,
        verdict: "destroyed".into(),
    };
    insta::assert_snapshot!(render::reaped(&[found]), @r"
ON     BOX  RUN    AGE  VERDICT
local  i-1       1m30s  destroyed
");
}

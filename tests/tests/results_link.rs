//! Both ends of the way that results take, put together: the box's tree, outbox and uplink
//! against home's journal and services, over a link that is cut and a home that dies.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "results_link/agent.rs"]
mod agent;
#[path = "results_link/cases.rs"]
mod cases;
#[path = "results_link/home.rs"]
mod home;
#[path = "results_link/mounted.rs"]
mod mounted;
#[path = "results_link/script.rs"]
mod script;

use agent::{Agent, WIDE};
use home::Home;
use script::Player;

fn play(seed: u64) -> Result<(), String> {
    let mut home = Home::new();
    let agent = Agent::new(&home, WIDE, None);
    Player::new(&mut home, &agent, seed).play(120)
}

fn play_all(seeds: impl Iterator<Item = u64>) {
    let failed: Vec<String> =
        seeds.filter_map(|seed| play(seed).err().map(|wrong| format!("seed {seed}: {wrong}"))).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

/// How many seeds: a few seconds' worth, or as many as the environment wants.
#[test]
fn random_scripts_arrive_whole() {
    if let Some(seed) = std::env::var("LIMB_TEST_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return play_all(std::iter::once(seed));
    }
    let long = std::env::var_os("LIMB_TEST_LONG").is_some();
    play_all(1..=if long { 300 } else { 8 });
}

/// A file made by a reader was never published; an fsync after its directory was renamed; a copy
/// that was written where the owner looks; bytes that the link forgot between a look and a write.
#[test]
fn seeds_that_failed_once() {
    play_all([10, 175, 14, 68, 62].into_iter());
}

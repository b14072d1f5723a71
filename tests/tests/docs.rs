//! The documents against the tree: every test that a promise names exists, every exit code is
//! explained, and nothing in them speaks of how they came to be.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use limb_common::phase::LimbExit;

const NONE: Vec<String> = Vec::new();

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests crate lies in the workspace").to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What stands between backticks and looks like `path.rs::name`.
fn named_tests(text: &str) -> Vec<(String, String)> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter_map(|code| code.split_once(".rs::"))
        .map(|(file, test)| (format!("{file}.rs"), test.to_owned()))
        .collect()
}

/// A function of this name with a test attribute above it.
fn is_test(source: &str, name: &str) -> bool {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let head = format!("fn {name}(");
    lines.iter().enumerate().any(|(at, line)| {
        let above =
            lines[..at].iter().rev().take_while(|line| line.starts_with("#[") || line.starts_with("///"));
        line.contains(&head)
            && above.into_iter().any(|line| line.starts_with("#[test]") || line.contains("::test"))
    })
}

#[test]
fn every_test_that_the_semantics_name_exists() {
    let mut sources = BTreeMap::new();
    let mut missing = BTreeSet::new();
    let named = named_tests(&read("docs/semantics.md"));
    assert!(named.len() > 100, "the document was not understood: {} tests", named.len());
    for (file, test) in named {
        let source = sources
            .entry(file.clone())
            .or_insert_with(|| fs::read_to_string(root().join(&file)).unwrap_or_default());
        if !is_test(source, &test) {
            missing.insert(format!("{file}::{test}"));
        }
    }
    assert_eq!(missing, BTreeSet::new(), "named in docs/semantics.md, not in the tree");
}

/// A promise is a list item; the last section says what is not promised.
#[test]
fn every_promise_names_a_test() {
    let text = read("docs/semantics.md");
    let (text, _) = text.split_once("\n## Not promised").unwrap();
    let mut items: Vec<String> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        if line.starts_with("- ") {
            items.push(line.to_owned());
            inside = true;
        } else if inside && line.starts_with("  ") {
            items.last_mut().unwrap().push_str(&format!("\n{line}"));
        } else {
            inside = false;
        }
    }
    assert!(items.len() > 50, "the document was not understood: {} promises", items.len());
    items.retain(|item| named_tests(item).is_empty());
    assert_eq!(items, NONE);
}

/// Codes by name, as the source of the type has them.
fn declared_codes() -> BTreeMap<String, i32> {
    let source = read("common/src/phase/outcome.rs");
    let body = source.split_once("pub enum LimbExit {").unwrap().1.split_once("\n}").unwrap().0;
    body.lines()
        .filter_map(|line| line.trim().trim_end_matches(',').split_once(" = "))
        .map(|(name, code)| (name.to_owned(), code.parse().unwrap()))
        .collect()
}

const EXITS: [LimbExit; 12] = [
    LimbExit::Refused,
    LimbExit::NoBox,
    LimbExit::Internal,
    LimbExit::Lost,
    LimbExit::BootFailed,
    LimbExit::LimitReached,
    LimbExit::DataNotHome,
    LimbExit::TeardownUnconfirmed,
    LimbExit::NoCoordinator,
    LimbExit::Stopped,
    LimbExit::AlreadyRunning,
    LimbExit::CannotStart,
];

#[test]
fn exit_codes_are_all_explained_in_the_codes_own_words() {
    let ours: BTreeMap<String, i32> = EXITS.iter().map(|exit| (format!("{exit:?}"), exit.code())).collect();
    assert_eq!(ours, declared_codes(), "EXITS above does not list every code");
    let expected: BTreeSet<(i32, String)> =
        EXITS.iter().map(|exit| (exit.code(), exit.words().to_owned())).collect();
    let text = read("docs/exit-codes.md");
    let (_, table) = text.split_once("## limb's own").unwrap();
    let documented: BTreeSet<(i32, String)> = table
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            Some((cells.get(1)?.parse().ok()?, (*cells.get(2)?).to_owned()))
        })
        .collect();
    assert_eq!(documented, expected);
}

/// Every document in the tree, with its path from the root.
fn documents() -> Vec<(String, String)> {
    let (root, mut open, mut found) = (root(), vec![root()], Vec::new());
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && !path.is_symlink() && name != "target" && !name.starts_with('.') {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                let shown = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
                found.push((shown, fs::read_to_string(path).unwrap()));
            }
        }
    }
    found
}

fn speaks_of_an_issue(line: &str) -> bool {
    let numbered = |rest: &str| rest.trim_start().starts_with(|c: char| c.is_ascii_digit());
    let lower = line.to_lowercase();
    let signs = lower.match_indices('#').any(|(at, _)| {
        let before = lower[..at].chars().next_back();
        before.is_none_or(|c| c.is_whitespace() || c == '(')
            && lower[at + 1..].starts_with(|c: char| c.is_ascii_digit())
    });
    signs || lower.match_indices("issue").any(|(at, word)| numbered(&lower[at + word.len()..]))
}

/// A reader knows neither our machines nor our tracker.
#[test]
fn documents_do_not_speak_of_where_they_were_written() {
    assert!(
        speaks_of_an_issue("as said in issue 7")
            && speaks_of_an_issue("see #12")
            && speaks_of_an_issue("(#3)")
    );
    assert!(!speaks_of_an_issue("## 3. Issues") && !speaks_of_an_issue("a.md#2-words"));
    let places = [["/work", "/"].concat(), ["/root", "/"].concat(), ["work", "tree"].concat()];
    let documents = documents();
    assert!(documents.iter().any(|(path, _)| path == "docs/semantics.md"));
    let mut found = NONE;
    for (path, text) in documents {
        for (number, line) in text.lines().enumerate() {
            if speaks_of_an_issue(line) || places.iter().any(|place| line.contains(place.as_str())) {
                found.push(format!("{path}:{}: {line}", number + 1));
            }
        }
    }
    assert_eq!(found, NONE);
}

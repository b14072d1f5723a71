//! "Did you mean": the nearest of a list of known words.

/// The known word that a typing mistake most likely meant, if one is near enough.
#[must_use]
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let word = word.to_ascii_lowercase().replace('-', "_");
    // A third of the letters wrong is another word, not a slip.
    let limit = (word.chars().count() / 3).clamp(1, 3);
    known
        .iter()
        .map(|candidate| (distance(&word, &candidate.to_ascii_lowercase()), *candidate))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Damerau-Levenshtein over adjacent letters: a swap is one mistake.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().take(MAX_LETTERS).collect();
    let b: Vec<char> = b.chars().take(MAX_LETTERS).collect();
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, right) in b.iter().enumerate() {
            let mut best = (last[j] + usize::from(left != right)).min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && a[i - 1] == *right && *left == b[j - 1] {
                best = best.min(before_last[j - 1] + 1);
            }
            row.push(best);
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

/// Longer words are cut: the comparison is quadratic.
const MAX_LETTERS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found_and_other_words_are_not() {
        let known = ["mounts", "outputs", "max_duration", "env"];
        assert_eq!(nearest("mount", &known), Some("mounts"));
        assert_eq!(nearest("otuputs", &known), Some("outputs"));
        assert_eq!(nearest("maxduration", &known), Some("max_duration"));
        assert_eq!(nearest("max-duration", &known), Some("max_duration"));
        assert_eq!(nearest("ENV", &known), Some("env"));
        assert_eq!(nearest("zebra", &known), None);
        assert_eq!(nearest("", &known), None);
    }
}

//! Files of tensors, known by their first bytes: whoever opens one nearly always reads all of it.
//! Names say less: in the cache of Hugging Face's hub a file is called by its hash.

/// The longest header that the safetensors library accepts.
const MAX_SAFETENSORS_HEADER: u64 = 100_000_000;

/// The newest is 3; text that begins so is far away from any.
const GGUF_VERSIONS: std::ops::RangeInclusive<u32> = 1..=15;

/// A file of this size that begins so holds tensors.
///
/// safetensors: the header's length (8 bytes, little-endian), then a JSON object
/// (<https://github.com/huggingface/safetensors#format>). GGUF: four letters and a version
/// (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>).
pub(super) fn holds_tensors(head: &[u8], file_bytes: u64) -> bool {
    if let Some(version) = head.strip_prefix(b"GGUF").and_then(<[u8]>::first_chunk) {
        let version = u32::from_le_bytes(*version);
        return [version, version.swap_bytes()].iter().any(|it| GGUF_VERSIONS.contains(it));
    }
    let Some((length, rest)) = head.split_first_chunk() else { return false };
    let length = u64::from_le_bytes(*length);
    let fits = (2..=MAX_SAFETENSORS_HEADER).contains(&length) && length + 8 < file_bytes;
    fits && rest.first() == Some(&b'{')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn safetensors(header_bytes: u64) -> Vec<u8> {
        [&header_bytes.to_le_bytes()[..], b"{\"a\":{}}"].concat()
    }

    #[test]
    fn both_formats_are_known_by_their_first_bytes() {
        assert!(holds_tensors(&safetensors(5000), 1 << 30));
        assert!(holds_tensors(b"GGUF\x03\0\0\0\x01\0", 1 << 30));
        assert!(holds_tensors(b"GGUF\0\0\0\x03\x01\0", 1 << 30), "big-endian");
    }

    #[test]
    fn what_only_looks_like_one_is_not() {
        for (head, file_bytes) in [
            (safetensors(5000), 5008),
            (safetensors(1), 1 << 30),
            (safetensors(MAX_SAFETENSORS_HEADER + 1), 1 << 40),
            (safetensors(u64::MAX), u64::MAX),
            ([&5000_u64.to_le_bytes()[..], b"[1]"].concat(), 1 << 30),
            (b"GGUFORGET ABOUT IT".to_vec(), 1 << 30),
            (b"GGUF\0\0\0\0".to_vec(), 1 << 30),
            (b"GGUF\x03".to_vec(), 1 << 30),
            (vec![0; 64], 1 << 30),
            (Vec::new(), 1 << 30),
        ] {
            assert!(!holds_tensors(&head, file_bytes), "{head:?}");
        }
    }
}

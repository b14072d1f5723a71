use proptest::prelude::*;

use super::*;

const MOST: usize = 1 << 20;

fn small(ram_bytes: usize, spill_bytes: u64) -> (Arc<LogBuffer>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (LogBuffer::new(dir.path(), LogLimits { ram_bytes, spill_bytes }), dir)
}

fn drain(buffer: &LogBuffer) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let (offset, bytes) = buffer.next(MOST, MOST);
        if bytes.is_empty() {
            return all;
        }
        assert_eq!(offset, all.len() as u64);
        all.extend(bytes);
        buffer.acknowledge(all.len() as u64).unwrap();
    }
}

#[test]
fn what_is_lost_is_said_where_it_was() {
    let (buffer, _dir) = small(10, 20);
    for n in 0..50_u8 {
        buffer.append(&[b'a' + n % 26]);
    }
    let all = String::from_utf8(drain(&buffer)).unwrap();
    let (marker, rest) = all.split_at(all.rfind('\n').unwrap() + 1);
    let dropped = 50 - rest.len();
    assert_eq!(marker, format!("\n[limb: {dropped} bytes dropped]\n"));
    assert!(rest.len() >= 20 && rest.ends_with("vwx"), "{rest}");
}

#[test]
fn without_a_place_to_spill_the_newest_bytes_stay() {
    let buffer =
        LogBuffer::new(Path::new("/no/such/directory"), LogLimits { ram_bytes: 4, spill_bytes: 100 });
    buffer.append(b"abcd");
    buffer.append(b"efg");
    assert_eq!(drain(&buffer), b"\n[limb: 4 bytes dropped]\nefg");
}

#[test]
fn a_resumed_stream_goes_on_where_home_is() {
    let (buffer, _dir) = small(100, 0);
    buffer.append(b"0123456789");
    assert_eq!(buffer.next(4, MOST), (0, b"0123".to_vec()));
    assert_eq!(buffer.next(4, MOST), (4, b"4567".to_vec()));
    buffer.resume(3).unwrap();
    assert_eq!(buffer.sendable(MOST), 7);
    assert_eq!(buffer.sendable(6), 6);
    assert_eq!(buffer.next(MOST, MOST), (3, b"34567".to_vec()));
    assert_eq!(buffer.next(MOST, MOST), (8, b"89".to_vec()));
    assert!(buffer.resume(2).is_err());
    assert!(buffer.resume(11).is_err());
    buffer.finish();
    assert!(!buffer.is_drained());
    buffer.acknowledge(10).unwrap();
    assert!(buffer.is_drained());
}

#[test]
fn the_window_holds_back() {
    let (buffer, _dir) = small(100, 0);
    buffer.append(b"0123456789");
    assert_eq!(buffer.next(MOST, 4).1.len(), 4);
    assert_eq!(buffer.next(MOST, 4).1.len(), 0);
    buffer.acknowledge(3).unwrap();
    assert_eq!(buffer.next(MOST, 4), (4, b"456".to_vec()));
}

#[test]
fn capture_reads_to_the_end() {
    let (buffer, _dir) = small(100, 1 << 20);
    let bytes: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
    capture(std::io::Cursor::new(bytes.clone()), buffer.clone()).unwrap().join().unwrap();
    assert_eq!(drain(&buffer), bytes);
    assert!(buffer.is_drained());
}

#[derive(Clone, Debug)]
enum Act {
    Append(Vec<u8>),
    Send(usize),
    Acknowledge(usize),
    Cut(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..40).prop_map(Act::Append),
        (1..30_usize).prop_map(Act::Send),
        (0..50_usize).prop_map(Act::Acknowledge),
        (0..50_usize).prop_map(Act::Cut),
    ];
    proptest::collection::vec(act, 0..60)
}

proptest! {
    /// Home ends up with what was printed, whatever is cut and however it is spilled.
    #[test]
    fn bytes_arrive_once_and_in_order(acts in acts()) {
        let (buffer, _dir) = small(16, 10_000);
        let (mut printed, mut home) = (Vec::new(), Vec::new());
        for act in acts {
            match act {
                Act::Append(bytes) => { buffer.append(&bytes); printed.extend(bytes); }
                Act::Send(most) => {
                    let (offset, bytes) = buffer.next(most, 64);
                    prop_assert!(bytes.len() <= most);
                    home.truncate(usize::try_from(offset).unwrap());
                    prop_assert_eq!(home.len() as u64, offset);
                    home.extend(bytes);
                }
                // What is acknowledged and what survives a cut is a prefix of what arrived.
                Act::Acknowledge(back) => {
                    let at = home.len().saturating_sub(back) as u64;
                    let at = at.max(buffer.lock().acknowledged);
                    buffer.acknowledge(at).unwrap();
                }
                Act::Cut(back) => {
                    let at = (home.len().saturating_sub(back) as u64).max(buffer.lock().acknowledged);
                    home.truncate(usize::try_from(at).unwrap());
                    buffer.resume(at).unwrap();
                }
            }
        }
        loop {
            buffer.acknowledge(home.len() as u64).unwrap();
            let (_, bytes) = buffer.next(1000, 64);
            if bytes.is_empty() { break }
            home.extend(bytes);
        }
        prop_assert_eq!(home, printed);
    }
}

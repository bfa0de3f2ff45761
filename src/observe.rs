//! What leaves the process: events, and names and owners in a form that may be logged.

/// Eight hexadecimal digits that stand for `text`: enough to tell two apart, useless to forge one.
pub(crate) fn digest(text: &str) -> String {
    // FNV-1a, folded: a fixed function, so that one owner has one digest in all processes.
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in text.bytes() {
        hash ^= u64::from(byte);
        hash = hash.wrapping_mul(0x0000_0100_0000_01b3);
    }
    format!("{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff))
}

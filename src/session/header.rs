//! The header of a session file, byte by byte.

use std::io;

use super::{
    facts::{Facts, numbers},
    part::Part,
};

/// The longest header that readers of safetensors accept, in bytes.
const LONGEST: usize = 100_000_000;

/// Sorts tensors as they stand in a file: the largest elements first, so that all are aligned, then by name.
pub(super) fn sort(parts: &mut [Part<'_>]) {
    parts.sort_by(|one, other| (other.size, one.name).cmp(&(one.size, other.name)));
}

/// The header for these tensors, in this order: its length in 8 bytes, the lowest first, then JSON without spaces,
/// padded with spaces to a multiple of 8 bytes.
pub(super) fn header(facts: &Facts, parts: &[Part<'_>]) -> io::Result<Vec<u8>> {
    let facts = facts.iter();
    let facts = facts.map(|(key, value)| format!("{}:{}", quoted(key), quoted(value)));
    let facts: Vec<String> = facts.collect();
    let mut json = format!("{{\"__metadata__\":{{{}}}", facts.join(","));
    let mut start = 0;
    for part in parts {
        let end = start + part.len();
        json += &format!(
            ",{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{start},{end}]}}",
            quoted(part.name),
            part.dtype,
            numbers(&part.shape),
        );
        start = end;
    }
    json.push('}');
    let length = json.len().next_multiple_of(8);
    if length > LONGEST {
        return Err(io::Error::other("more values than a header can name"));
    }
    let mut bytes = (length as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(8 + length, b' ');
    Ok(bytes)
}

/// A JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

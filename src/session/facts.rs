//! The facts in the header of a session, and the checksums.

use std::collections::{BTreeMap, HashMap};

use safetensors::Dtype;
use xxhash_rust::xxh3::Xxh3Default;

/// What the file states about itself, by key.
pub(super) type Facts = HashMap<String, String>;

/// The key of the checksum over all other facts.
pub(super) const CHECKSUM: &str = "checksum";

/// The beginning of the key of every option of a backend.
pub(super) const OPTION: &str = "option";

/// The key of a tensor's checksum.
pub(super) fn checksum_key(tensor: &str) -> String {
    format!("{CHECKSUM}.{tensor}")
}

/// The checksum of a tensor, including its name, dtype and shape.
pub(super) fn of_tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> String {
    let mut hash = Xxh3Default::new();
    hash.update(format!("{name} {dtype:?} {shape:?}\n").as_bytes());
    hash.update(bytes);
    format!("{:016x}", hash.digest())
}

/// The checksum of all facts except itself.
pub(super) fn of_facts(facts: &Facts) -> String {
    let mut hash = Xxh3Default::new();
    let sorted: BTreeMap<_, _> = facts.iter().filter(|(key, _)| *key != CHECKSUM).collect();
    for (key, value) in sorted {
        hash.update(format!("{} {key} {} {value}\n", key.len(), value.len()).as_bytes());
    }
    format!("{:016x}", hash.digest())
}

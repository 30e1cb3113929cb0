//! The facts in the header of a session, and the checksums.

use safetensors::Dtype;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::fields::{Fields, lines};

/// What the file states about itself, by key.
pub(super) type Facts = Fields;

/// The key of the checksum over all other facts.
pub(super) const CHECKSUM: &str = "checksum";

/// The beginning of the key of every size of the model.
pub(super) const MODEL: &str = "model";

/// The beginning of the key of every option of a backend.
pub(super) const OPTION: &str = "option";

/// The key of a tensor's checksum.
pub(super) fn checksum_key(tensor: &str) -> String {
    format!("{CHECKSUM}.{tensor}")
}

/// The facts whose keys begin with this word and a dot, without these.
pub(super) fn under(facts: &Facts, word: &str) -> Fields {
    let prefix = format!("{word}.");
    let fields = facts
        .iter()
        .filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?.to_owned(), value.clone())));
    fields.collect()
}

/// The word for a dtype in the header; `None` for one that no session has.
pub(super) const fn word(dtype: Dtype) -> Option<&'static str> {
    match dtype {
        Dtype::U64 => Some("U64"),
        Dtype::U32 => Some("U32"),
        Dtype::F64 => Some("F64"),
        Dtype::F32 => Some("F32"),
        Dtype::F16 => Some("F16"),
        Dtype::BF16 => Some("BF16"),
        _ => None,
    }
}

/// A shape as in the header: numbers with commas between.
pub(super) fn numbers(shape: &[usize]) -> String {
    let numbers: Vec<String> = shape.iter().map(usize::to_string).collect();
    numbers.join(",")
}

/// The checksum of a tensor, including its name, dtype and shape.
pub(super) fn of_tensor(name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) -> String {
    let mut hash = Xxh3Default::new();
    hash.update(format!("{name} {dtype} {}\n", numbers(shape)).as_bytes());
    hash.update(bytes);
    format!("{:016x}", hash.digest())
}

/// The checksum of all facts except itself.
pub(super) fn of_facts(facts: &Facts) -> String {
    let others = facts.iter().filter(|(key, _)| *key != CHECKSUM);
    let others: Facts = others
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    format!("{:016x}", xxh3_64(lines(&others).as_bytes()))
}

//! Reads a session. Nothing in it is used before its checksum was compared.

use std::{io::Read, path::Path};

use burn::tensor::{DType, Device, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::{
    FORMAT, SessionError, VERSION,
    facts::{CHECKSUM, Facts, MODEL, OPTION, checksum_key, of_facts, of_tensor, under, word},
};
use crate::{
    cache::{CacheBackend, CacheError, State, StateValue, wrong},
    files,
    fingerprint::Fingerprint,
};

/// Makes `cache` continue from the state of the cache that was [saved](super::save) to `path`. Tensors are read to
/// `device`. The cache must have the same backend and options, and the model must have the same fingerprint.
///
/// # Errors
/// [`SessionError`], which names what differs. The cache is then unchanged.
///
/// # Cost
/// The whole file is held together with the tensors that are read from it. These are held together with the cache's
/// old content and its new entries.
pub fn load<C>(
    path: &Path,
    cache: &mut C,
    model: &Fingerprint,
    device: &Device,
) -> Result<(), SessionError>
where
    C: CacheBackend + ?Sized,
{
    let state = read(path, model, device)?;
    cache
        .set_state(&state)
        .map_err(|source| SessionError::cache(path, source))
}

fn read(path: &Path, model: &Fingerprint, device: &Device) -> Result<State, SessionError> {
    let mut bytes = Vec::new();
    let length = files::open(path).and_then(|mut file| file.read_to_end(&mut bytes));
    length.map_err(|source| SessionError::Io {
        path: path.into(),
        source,
    })?;
    let broken = |source| SessionError::Safetensors {
        path: path.into(),
        source: Box::new(source),
    };
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(broken)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(broken)?;
    let facts = header.metadata().iter().flatten();
    let facts: Facts = facts.map(|(k, v)| (k.clone(), v.clone())).collect();
    check_facts(path, &facts, model)?;
    let backend = facts.get("backend").cloned().unwrap_or_default();
    let mut state = State::of(backend, under(&facts, OPTION), under(&facts, MODEL));
    for (name, view) in tensors.iter() {
        let refused = |source| SessionError::cache(path, source);
        let dtype = word(view.dtype()).ok_or_else(|| refused(no_value(name)))?;
        let found = of_tensor(name, dtype, view.shape(), view.data());
        check(path, name, facts.get(&checksum_key(name)), found)?;
        state.insert(name, value(name, &view, device).map_err(refused)?);
    }
    let sums = under(&facts, CHECKSUM);
    match sums.iter().find(|(name, _)| !state.contains(name)) {
        Some((name, sum)) => check(path, name, Some(sum), "missing".into()).map(|()| state),
        None => Ok(state),
    }
}

/// Checks that the file is a session, that its version can be read, that its facts are undamaged, and that it belongs
/// to this model.
fn check_facts(path: &Path, facts: &Facts, model: &Fingerprint) -> Result<(), SessionError> {
    let fact = |key: &str| facts.get(key).cloned();
    if fact("format").as_deref() != Some(FORMAT) {
        return Err(SessionError::Format {
            path: path.into(),
            found: fact("format"),
        });
    }
    let version = fact("version");
    if version.as_ref() != Some(&VERSION.to_string()) {
        return Err(SessionError::Version {
            path: path.into(),
            expected: VERSION,
            found: version,
        });
    }
    check(path, "the header", facts.get(CHECKSUM), of_facts(facts))?;
    let (expected, found) = (model.to_string(), fact("fingerprint").unwrap_or_default());
    if expected == found {
        return Ok(());
    }
    Err(SessionError::Model {
        path: path.into(),
        expected,
        found,
    })
}

fn check(
    path: &Path,
    part: &str,
    expected: Option<&String>,
    found: String,
) -> Result<(), SessionError> {
    if expected == Some(&found) {
        return Ok(());
    }
    Err(SessionError::Damaged {
        path: path.into(),
        part: part.into(),
        expected: expected.map_or_else(|| "missing".into(), Clone::clone),
        found,
    })
}

fn value(name: &str, view: &TensorView<'_>, device: &Device) -> Result<StateValue, CacheError> {
    let bytes = view.data();
    let words = || bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
    let dtype = match (view.dtype(), view.shape()) {
        (Dtype::U64, [_]) => {
            let eights = bytes.chunks_exact(8);
            let numbers = eights.map(|b| u64::from_le_bytes(std::array::from_fn(|i| b[i])));
            return Ok(StateValue::Integers(numbers.collect()));
        }
        (Dtype::U32, [_]) => return Ok(StateValue::Ids(words().map(u32::from_le_bytes).collect())),
        (Dtype::F32, [_]) => {
            return Ok(StateValue::Floats(
                words().map(f32::from_le_bytes).collect(),
            ));
        }
        (Dtype::F64, [_, _, _]) => DType::F64,
        (Dtype::F32, [_, _, _]) => DType::F32,
        (Dtype::F16, [_, _, _]) => DType::F16,
        (Dtype::BF16, [_, _, _]) => DType::BF16,
        _ => return Err(no_value(name)),
    };
    let data = TensorData::from_bytes_vec(bytes.to_vec(), view.shape().to_vec(), dtype);
    Ok(StateValue::Tensor(Tensor::from_data(data, (device, dtype))))
}

fn no_value(name: &str) -> CacheError {
    wrong(name, "no value has this dtype and rank")
}

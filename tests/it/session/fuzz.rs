//! Damaged and made-up session files: each loads or is refused, allocates no more than the file justifies, and what
//! loaded can be used. `KV_DIRECT_FUZZ_CASES` asks for more cases.

use std::{cell::Cell, fs, path::Path};

use burn::tensor::Device;
use kv_direct::{
    Fingerprint,
    cache::{CacheBackend, Draft, TokenIds},
    exact::PANEL,
    model::{Decoder, DecoderConfig, Input},
    session,
};
use proptest::{
    prelude::*,
    sample::{Index, select},
};

use super::parts::Parts;
use crate::support::{
    allocator::measure,
    caches::{CacheExt as _, zoo},
    cases::runner,
    feed::feed,
    fuzz::{CONSTANT, FACTOR, bytes, fuzz_cases},
    models::{random_decoder, with_windows},
    random::tokens,
};

impl Parts {
    fn changed(mut self, changes: &[Change]) -> Self {
        for change in changes {
            let names: Vec<String> = self.tensors.keys().cloned().collect();
            let Some(name) = (!names.is_empty()).then(|| change.tensor.get(&names)) else {
                return self;
            };
            let (dtype, shape, data) = &mut self.tensors.get_mut(name).expect("its own name");
            match &change.how {
                How::Word(at, word) if !data.is_empty() => {
                    let size = dtype.bitsize() / 8;
                    let at = at.index(data.len() / size) * size;
                    data[at..at + size].copy_from_slice(&word.to_le_bytes()[..size]);
                }
                How::Swap(one, other) if !data.is_empty() => {
                    let size = dtype.bitsize() / 8;
                    let count = data.len() / size;
                    let (one, other) = (one.index(count) * size, other.index(count) * size);
                    (0..size).for_each(|byte| data.swap(one + byte, other + byte));
                }
                How::Resize(count) => {
                    let token: usize = shape[1..].iter().product::<usize>() * dtype.bitsize() / 8;
                    shape[0] = *count;
                    data.resize(count * token, 0);
                }
                How::Turn if shape.len() == 3 => shape.swap(1, 2),
                How::Remove => drop(self.tensors.remove(name)),
                How::Become(other) => {
                    let taken = self.tensors[other.get(&names)].clone();
                    self.tensors.insert(name.clone(), taken);
                }
                _ => {}
            }
        }
        self
    }
}

#[derive(Debug, Clone)]
struct Change {
    tensor: Index,
    how: How,
}

#[derive(Debug, Clone)]
enum How {
    /// An element set to a word.
    Word(Index, u64),
    Swap(Index, Index),
    Resize(usize),
    Turn,
    Remove,
    /// What another entry is.
    Become(Index),
}

fn change() -> impl Strategy<Value = Change> {
    let words = vec![
        0,
        1,
        2,
        3,
        5,
        7,
        8,
        12,
        13,
        511,
        512,
        513,
        1024,
        5000,
        1 << 20,
        1 << 32,
        1 << 52,
        u64::from(u32::MAX) + 1,
        u64::MAX,
        u64::MAX - 1,
        u64::MAX / 2,
        0x7f80_0000,
        0x7fc0_0000,
    ];
    let how = prop_oneof![
        6 => (any::<Index>(), select(words)).prop_map(|(at, word)| How::Word(at, word)),
        2 => (any::<Index>(), any::<Index>()).prop_map(|(one, other)| How::Swap(one, other)),
        1 => (0_usize..6).prop_map(How::Resize),
        1 => Just(How::Turn),
        1 => Just(How::Remove),
        1 => any::<Index>().prop_map(How::Become),
    ];
    (any::<Index>(), how).prop_map(|(tensor, how)| Change { tensor, how })
}

/// Calls everything on a cache that was loaded. A call may be refused, but must not panic.
fn used(decoder: &Decoder, cache: &mut Box<dyn CacheBackend>) {
    let step = |count: usize, sequences| TokenIds::from(vec![vec![1_u32; count]; sequences]);
    let forward = |cache: &mut Box<dyn CacheBackend>, count| {
        let sequences = cache.lengths().len().max(1);
        drop(decoder.forward(Input::from(step(count, sequences)), cache));
    };
    for layer in 0..4 {
        drop(cache.cached(kv_direct::cache::LayerIndex::new(layer)));
    }
    drop((cache.memory(), cache.state()));
    let mut fork = cache.fork();
    forward(&mut fork, 2);
    drop((fork.park(), fork.state()));
    drop(fork.select_sequences(&[0]));
    forward(&mut fork, 2);
    drop(fork.truncate_all(fork.length(0).saturating_sub(3)));
    forward(cache, 1);
    drop(cache.begin_draft());
    forward(cache, 3);
    drop(cache.end_draft(Draft::Accept));
    forward(cache, 1);
}

/// What is fuzzed: a decoder, a kind of cache, the file of one, and where it lies.
struct Subject<'a> {
    decoder: &'a Decoder,
    model: Fingerprint,
    empty: Box<dyn CacheBackend>,
    path: &'a Path,
}

impl Subject<'_> {
    /// Whether the file was accepted.
    fn load(&self, file: &[u8]) -> Result<bool, TestCaseError> {
        fs::write(self.path, file).expect("written");
        let mut cache = self.empty.fork();
        let (loaded, peak, _) =
            measure(|| session::load(self.path, &mut cache, &self.model, &Device::flex()).is_ok());
        // Entries are held in whole panels of 32, in every layer and of every sequence.
        let token = self.decoder.shape().keys_values_per_token();
        let most =
            file.len() * FACTOR + CONSTANT + cache.lengths().len() * 4 * PANEL * (token + 64);
        prop_assert!(peak <= most, "{peak} bytes for a file of {}", file.len());
        if loaded {
            used(self.decoder, &mut cache);
        }
        Ok(loaded)
    }
}

fn fuzz<S: Strategy>(
    default: u32,
    decoder: &Decoder,
    strategy: impl Fn(Vec<u8>) -> S,
    file: impl Fn(&[u8], S::Value) -> Option<Vec<u8>>,
) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("session.safetensors");
    let model = decoder.fingerprint();
    let (accepted, refused) = (Cell::new(0_u32), Cell::new(0_u32));
    for (name, mut cache) in zoo(decoder, 8) {
        let empty = cache.fork();
        for step in [
            vec![tokens(1, 9), tokens(2, 4)],
            vec![tokens(3, 1); 2],
            vec![tokens(4, 4); 2],
        ] {
            feed(decoder, &mut cache, step);
        }
        session::save(&path, &cache, &model).expect("a state that can be written");
        let good = fs::read(&path).expect("a file");
        let subject = Subject {
            decoder,
            model,
            empty,
            path: &path,
        };
        assert!(subject.load(&good).is_ok_and(|loaded| loaded), "{name}");
        let result = runner(fuzz_cases(default)).run(&strategy(good.clone()), |case| {
            let Some(bytes) = file(&good, case) else {
                return Ok(());
            };
            let counter = if subject.load(&bytes)? {
                &accepted
            } else {
                &refused
            };
            counter.set(counter.get() + 1);
            Ok(())
        });
        if let Err(error) = result {
            panic!("{name}: {error}");
        }
    }
    let (accepted, refused) = (accepted.get(), refused.get());
    assert!(
        accepted > 0 && refused > 0,
        "{accepted} accepted, {refused} refused"
    );
}

pub fn small(windows: bool) -> Decoder {
    let mut config = DecoderConfig::new(97, 16, 2, 2, 2);
    config.max_positions = 9_000;
    let layers: &[usize] = if windows { &[0] } else { &[] };
    random_decoder(&with_windows(config, layers, 5))
}

#[test]
fn any_bytes_load_or_are_refused() {
    fuzz(60, &small(true), bytes, |_, bytes| Some(bytes));
}

/// Here the checksums are right: only the entries can be refused.
#[test]
fn any_entries_load_or_are_refused() {
    for windows in [false, true] {
        fuzz(
            100,
            &small(windows),
            |_| prop::collection::vec(change(), 1..4),
            |good, changes| Parts::read(good).changed(&changes).sealed(),
        );
    }
}

//! Golden cases: logits, cached positions, keys and values as other implementations compute them.

use std::{fs, path::PathBuf};

use burn::tensor::Device;
use kv_direct::{
    cache::{CacheBackend, LayerIndex},
    model::{Decoder, Input},
    pretrained::load,
};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::support::{
    caches::of_head,
    recorder::{ReadEntry, Recorder},
};

pub struct Case {
    pub decoder: Decoder,
    json: Value,
    tensors: Vec<u8>,
}

impl Case {
    pub fn read(model: &str, case: &str) -> Self {
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("tests/golden")
            .join(model);
        let json = fs::read(dir.join(format!("{case}.json"))).expect("golden data is committed");
        let tensors =
            fs::read(dir.join(format!("{case}.safetensors"))).expect("golden data is committed");
        let decoder = load(&dir, &Device::flex())
            .expect("a good model folder")
            .decoder;
        Self {
            decoder,
            json: serde_json::from_slice(&json).expect("JSON"),
            tensors,
        }
    }

    fn tensor(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.tensors).expect("safetensors");
        let data = file
            .tensor(name)
            .expect("the case has this tensor")
            .data()
            .to_vec();
        data.chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect()
    }

    /// Feeds the prompt and then token by token, and compares everything the case holds. Some cases hold only
    /// the positions after the prompt.
    pub fn holds(&self, cache: impl CacheBackend) {
        let mut cache = Recorder::new(cache, true);
        let ids: Vec<Vec<u32>> =
            serde_json::from_value(self.json["input_ids"].clone()).expect("ids");
        let prompt = self.json["prompt_len"].as_u64().expect("a number") as usize;
        let expected = self.tensor("logits");
        // Ties are broken by rounding: the sets then may differ from implementation to implementation.
        let gap = self.json["min_gap_at_cut"].as_f64();
        let sure = gap.is_none_or(|gap| gap > 1e-5);
        // There keys were rotated for the step; the logits compare them.
        let turned = self.json["policy"]["positions"] == "reindex"
            || self.json["press"]
                .as_str()
                .is_some_and(|press| press.contains("Rerotation"));
        let config = self.decoder.config();
        let (vocab, steps) = (config.vocab, ids[0].len() - prompt + 1);
        let steps_given = self.json["kept"].as_array().map_or(0, Vec::len);
        for step in 0..steps.min(steps_given) {
            let from = if step == 0 { 0 } else { prompt + step - 1 };
            let tokens: Vec<Vec<u32>> = ids
                .iter()
                .map(|sequence| sequence[from..prompt + step].to_vec())
                .collect();
            let logits = self
                .decoder
                .forward(Input::from(tokens).last_only(), &mut cache)
                .expect("a valid step");
            let logits = logits.try_into_vec_as::<f32>().expect("f32");
            for sequence in 0..ids.len() {
                let expected = &expected[(sequence * steps + step) * vocab..][..vocab];
                close(
                    &logits[sequence * vocab..][..vocab],
                    expected,
                    1e-4,
                    &format!("logits, step {step}, sequence {sequence}"),
                );
            }
            for layer in 0..config.layers.len() {
                let cached = cache.cached(LayerIndex::new(layer));
                for sequence in (0..ids.len()).filter(|_| sure) {
                    let expected: Vec<Vec<usize>> = serde_json::from_value(
                        self.json["kept"][step][layer.to_string()][sequence].clone(),
                    )
                    .expect("positions of a step");
                    for (head, theirs) in expected.iter().enumerate() {
                        assert_eq!(
                            of_head(cached.sequence(sequence), head),
                            theirs,
                            "cached, step {step}, layer {layer}, head {head}"
                        );
                    }
                }
            }
        }
        let reads = cache.take();
        let last = &reads[reads.len() - config.layers.len()..];
        for (layer, read) in last.iter().enumerate() {
            let cached = cache.cached(LayerIndex::new(layer));
            let [keys, values] = ["k", "v"].map(|name| self.tensor(&format!("{name}.{layer}")));
            let (mut our_keys, mut our_values) = (Vec::new(), Vec::new());
            for (sequence, heads) in read.iter().enumerate() {
                for (head, read) in heads.iter().enumerate() {
                    let cached = of_head(cached.sequence(sequence), head);
                    let held: Vec<&ReadEntry> = read
                        .iter()
                        .filter(|sequence| cached.contains(&sequence.0))
                        .collect();
                    assert_eq!(held.len(), cached.len(), "what is cached was read");
                    our_keys.extend(held.iter().flat_map(|(_, key, _)| key));
                    our_values.extend(held.iter().flat_map(|(.., value)| value));
                }
            }
            let [mut keys, mut values] = [keys, values];
            if self.json["press"].is_string() {
                // A press leaves its entries in the order of their scores.
                let entries = keys.len() / (ids.len() * config.kv_heads);
                for all in [&mut our_keys, &mut our_values, &mut keys, &mut values] {
                    *all = sorted(all, entries, config.head_dim);
                }
            }
            if !turned {
                near(&our_keys, &keys, 1e-5, "keys");
            }
            near(&our_values, &values, 1e-5, "values");
        }
    }
}

/// Vectors of `width` numbers, sorted within each head by their first number.
fn sorted(all: &[f32], of_head: usize, width: usize) -> Vec<f32> {
    let heads = all.chunks(of_head);
    let each = heads.flat_map(|head| {
        let mut entries: Vec<&[f32]> = head.chunks(width).collect();
        entries.sort_by(|one, other| one[0].total_cmp(&other[0]));
        entries
    });
    each.flatten().copied().collect()
}

/// f32 against f32 of another implementation: `bound` covers only the order of sums.
fn close(ours: &[f32], theirs: &[f32], bound: f32, what: &str) {
    off(
        ours,
        theirs,
        |ours, theirs| (ours - theirs).abs(),
        bound,
        what,
    );
}

/// As [`close`], absolute and relative together: keys and values reach 10.
fn near(ours: &[f32], theirs: &[f32], bound: f32, what: &str) {
    let distance = |ours: f32, theirs: f32| (ours - theirs).abs() / (1.0 + theirs.abs());
    off(ours, theirs, distance, bound, what);
}

fn off(ours: &[f32], theirs: &[f32], distance: impl Fn(f32, f32) -> f32, bound: f32, what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    assert!(
        ours.iter().all(|value| value.is_finite()),
        "{what}: not finite"
    );
    let worst = ours
        .iter()
        .zip(theirs)
        .map(|(&a, &b)| distance(a, b))
        .fold(0.0, f32::max);
    assert!(worst <= bound, "{what}: off by {worst}");
}

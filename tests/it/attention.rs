//! What backends to come will ask of attention: sums over queries, lists that differ between heads,
//! keys turned to other positions.

use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Tensor, TensorData};
use kv_direct::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, Observation, Observed, Span, Step},
    exact::{AttentionParams, KV_BLOCK, attention, attention_with_column_sums},
    model::{Decoder, Input},
    policy::FullKv,
    positions::{Positions, visible},
};

use crate::{
    families::{LLAMA3, YARN, config, scaled},
    random::{apart, random},
    support::{bits, feed, random as decoder, tiny, tokens},
};

fn tensor<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
    let data: Vec<f32> = random(seed).take(shape.iter().product()).collect();
    Tensor::from_data(TensorData::new(data, shape), &Device::flex())
}

fn floats<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.try_to_vec_as().expect("f32 on the CPU")
}

/// Two rows of 150 and 20 queries, two blocks, over slots in no order: probabilities by hand.
#[test]
fn column_sums_are_the_probabilities_of_all_real_queries_added_up() {
    const WIDTH: usize = 8;
    let (query, keys) = (
        tensor(1, [2, 4, 150, WIDTH]),
        tensor(2, [2, 2, WIDTH, KV_BLOCK]),
    );
    let values = tensor(3, [2, 2, KV_BLOCK, WIDTH]);
    let queries = Positions::contiguous(&[50, 5], &[150, 20]);
    // Slot `s` of a row holds position `7 s mod 509`, every third slot nothing.
    let slot = |s: usize| {
        if s.is_multiple_of(3) {
            Positions::EMPTY
        } else {
            s * 7 % 509
        }
    };
    let slots: Vec<usize> = (0..KV_BLOCK).map(slot).collect();
    let positions = Positions::shared(&[slots.clone(), slots.clone()]);
    let window = std::num::NonZeroUsize::new(60);
    let attend = AttentionParams::new(0.7).with_window(window);
    let (out, sums) =
        attention_with_column_sums(query.clone(), &keys, &values, &queries, &positions, &attend);
    let plain = attention(query.clone(), &keys, &values, &queries, &positions, &attend);
    assert!(bits(&out) == bits(&plain), "looking changes nothing");

    let (query, keys, mut expected) = (
        floats(&query),
        floats(&keys),
        vec![0.0f64; 2 * 4 * KV_BLOCK],
    );
    for (row, head) in (0..8).map(|i| (i / 4, i % 4)) {
        for (at, &position) in queries
            .slots(row, 0)
            .iter()
            .enumerate()
            .filter(|(_, p)| **p != Positions::EMPTY)
        {
            let score = |slot: usize| -> f64 {
                let product = |i: usize| {
                    let q = query[((row * 4 + head) * 150 + at) * WIDTH + i];
                    let k = keys[((row * 2 + head / 2) * WIDTH + i) * KV_BLOCK + slot];
                    f64::from(q) * f64::from(k)
                };
                (0..WIDTH).map(product).sum::<f64>() * 0.7
            };
            let seen: Vec<usize> = (0..KV_BLOCK)
                .filter(|&s| visible(position, slots[s], window))
                .collect();
            let total: f64 = seen.iter().map(|&s| score(s).exp()).sum();
            seen.iter()
                .for_each(|&s| expected[(row * 4 + head) * KV_BLOCK + s] += score(s).exp() / total);
        }
    }
    let off = apart(&floats(&sums), expected);
    assert!(off < 1e-4, "up to 150 probabilities in f32, off by {off}");
}

#[test]
fn heads_with_lists_of_their_own_are_what_each_is_alone() {
    let (query, keys) = (tensor(4, [1, 4, 30, 8]), tensor(5, [1, 2, 8, KV_BLOCK]));
    let values = tensor(6, [1, 2, KV_BLOCK, 8]);
    let queries = Positions::contiguous(&[470], &[30]);
    let lists: Vec<Vec<usize>> = vec![
        (0..KV_BLOCK).collect(),
        (0..KV_BLOCK).map(|s| (s + 100) % KV_BLOCK).collect(),
    ];
    let attend = AttentionParams::new(0.5);
    let both = Positions::per_head(std::slice::from_ref(&lists));
    let together = attention(query.clone(), &keys, &values, &queries, &both, &attend);
    let alone = (0..2).map(|head| {
        let part =
            |tensor: &Tensor<4>, heads: std::ops::Range<usize>| tensor.clone().slice_dim(1, heads);
        attention(
            part(&query, 2 * head..2 * head + 2),
            &part(&keys, head..head + 1),
            &part(&values, head..head + 1),
            &queries,
            &Positions::shared(&lists[head..=head]),
            &attend,
        )
    });
    assert!(bits(&together) == bits(&Tensor::cat(alone.collect(), 2)));
}

/// `FullKv` that asks for column sums and keeps them, and compares keys rotated by `shift` with keys projected there.
#[derive(Debug)]
struct Watcher {
    inner: FullKv,
    shift: usize,
    sums: Arc<Mutex<Vec<Vec<f32>>>>,
}

impl CacheBackend for Watcher {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.inner.begin(step)
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let here = span.positions;
        let there = self.moved(here);
        // The same rows, turned there or projected there.
        let turned = span
            .replay
            .rotate(span.projection.keys.clone(), here, &there)?;
        let fresh = span.replay.project(span.residual.clone(), &there)?.keys;
        let off = apart(&floats(&turned), floats(&fresh).into_iter().map(f64::from));
        assert!(off < 1e-4, "two rotations in f32 against one, off by {off}");
        let back = span.replay.rotate(turned, &there, here)?;
        let off = apart(
            &floats(&back),
            floats(&span.projection.keys).into_iter().map(f64::from),
        );
        assert!(off < 1e-4, "there and back, off by {off}");

        self.inner.keys_values(layer, span)
    }

    fn wants(&self, _: LayerIndex) -> Observation {
        Observation::ColumnSums
    }

    fn observe(&mut self, _: LayerIndex, seen: Observed) -> Result<(), CacheError> {
        let Observed::ColumnSums(sums) = seen else {
            panic!("sums were asked for")
        };
        self.sums
            .lock()
            .expect("nobody panics here")
            .push(floats(&sums));
        Ok(())
    }

    kv_direct::forward_backend!(self => self.inner; commit queries lifecycle clear fork);
}

impl Watcher {
    fn new(decoder: &Decoder, shift: usize) -> Self {
        Self {
            inner: FullKv::new(&decoder.shape()),
            shift,
            sums: Arc::default(),
        }
    }

    fn moved(&self, positions: &Positions) -> Positions {
        let rows: Vec<Vec<usize>> = (0..positions.sequences())
            .map(|row| {
                let shift = |&p: &usize| {
                    if p == Positions::EMPTY {
                        p
                    } else {
                        p + self.shift
                    }
                };
                positions.slots(row, 0).iter().map(shift).collect()
            })
            .collect();
        Positions::shared(&rows)
    }
}

#[test]
fn rotated_keys_are_those_projected_at_the_other_positions() {
    for config in [config(4, 2), scaled(LLAMA3), scaled(YARN)] {
        let decoder = decoder(&config);
        let mut cache = Watcher::new(&decoder, 700);
        for call in [&tokens(1, 30)[..], &tokens(2, 1), &tokens(3, 7)] {
            decoder.forward(call, &mut cache).expect("a good call");
        }
        assert_eq!(cache.lengths(), [38]);
    }
}

#[test]
fn a_backend_gets_the_sums_it_asks_for_at_every_layer_and_the_same_logits() {
    let decoder = tiny(2);
    let (mut plain, mut watcher) = (FullKv::new(&decoder.shape()), Watcher::new(&decoder, 0));
    let call = vec![tokens(1, 9), tokens(2, 4)];
    assert_eq!(
        feed(&decoder, &mut plain, call.clone()).len(),
        feed(&decoder, &mut watcher, call).len()
    );
    let sums = watcher.sums.lock().expect("nobody panics here");
    assert_eq!(sums.len(), 3);
    for sums in sums.iter() {
        for (index, head) in sums.chunks(KV_BLOCK).enumerate() {
            let queries = if index < 4 { 9.0 } else { 4.0 };
            assert!(
                (head.iter().sum::<f32>() - queries).abs() < 1e-5,
                "every real query gives 1"
            );
            assert!(
                head[queries as usize..].iter().all(|&sum| sum == 0.0),
                "nothing to free slots"
            );
        }
    }
}

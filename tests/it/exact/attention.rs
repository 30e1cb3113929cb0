//! Attention over positions in any order: column sums, and heads that differ.

use burn::tensor::{Device, Tensor, TensorData};
use kv_direct::{
    exact::{AttentionParams, KV_BLOCK, attention, attention_with_column_sums},
    positions::{Positions, visible},
};

use crate::support::{
    feed::{apart, bits, floats},
    random::random,
};

fn tensor<const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<D> {
    let data: Vec<f32> = random(seed).take(shape.iter().product()).collect();
    Tensor::from_data(TensorData::new(data, shape), &Device::flex())
}

/// Two sequences of 150 and 20 queries, two blocks, and slots in no order: probabilities by hand.
#[test]
fn column_sums_add_up_the_probabilities_of_real_queries() {
    const WIDTH: usize = 8;
    let (query, keys) = (
        tensor(1, [2, 4, 150, WIDTH]),
        tensor(2, [2, 2, WIDTH, KV_BLOCK]),
    );
    let values = tensor(3, [2, 2, KV_BLOCK, WIDTH]);
    let queries = Positions::contiguous(&[50, 5], &[150, 20]);
    // Slot `s` of a sequence holds position `7 s mod 509`; every third slot is free.
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
    let mut attend = AttentionParams::new(0.7);
    attend.window = window;
    let (out, sums) =
        attention_with_column_sums(query.clone(), &keys, &values, &queries, &positions, &attend);
    let plain = attention(query.clone(), &keys, &values, &queries, &positions, &attend);
    assert!(bits(&out) == bits(&plain), "column sums change no output");

    let (query, keys, mut expected) = (
        floats(&query),
        floats(&keys),
        vec![0.0f64; 2 * 4 * KV_BLOCK],
    );
    for (sequence, head) in (0..8).map(|i| (i / 4, i % 4)) {
        for (at, &position) in queries
            .slots(sequence, 0)
            .iter()
            .enumerate()
            .filter(|(_, p)| **p != Positions::EMPTY)
        {
            let score = |slot: usize| -> f64 {
                let product = |i: usize| {
                    let q = query[((sequence * 4 + head) * 150 + at) * WIDTH + i];
                    let k = keys[((sequence * 2 + head / 2) * WIDTH + i) * KV_BLOCK + slot];
                    f64::from(q) * f64::from(k)
                };
                (0..WIDTH).map(product).sum::<f64>() * 0.7
            };
            let seen: Vec<usize> = (0..KV_BLOCK)
                .filter(|&s| visible(position, slots[s], window))
                .collect();
            let total: f64 = seen.iter().map(|&s| score(s).exp()).sum();
            seen.iter().for_each(|&s| {
                expected[(sequence * 4 + head) * KV_BLOCK + s] += score(s).exp() / total
            });
        }
    }
    let off = apart(&floats(&sums), expected);
    assert!(off < 1e-4, "up to 150 probabilities in f32, off by {off}");
}

#[test]
fn heads_with_their_own_positions_equal_each_head_alone() {
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

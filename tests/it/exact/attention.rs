//! Attention over positions in any order: column sums, and heads that differ.

use std::{num::NonZeroUsize, ops::Range};

use burn::tensor::{Device, Tensor, TensorData};
use kv_direct::{
    exact::{
        ATTENTION_BLOCK, AttentionParams, PANEL, Segment, attention, attention_with_column_sums,
        attention_with_last_queries,
    },
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

/// One segment with all of these entries `[1, kv_heads, slots, head_dim]`.
fn whole(keys: &Tensor<4>, values: &Tensor<4>, positions: &[Vec<usize>]) -> Vec<Segment> {
    let rows = |of: &Tensor<4>| of.clone().squeeze_dim(0);
    vec![Segment::from_rows(
        rows(keys),
        rows(values),
        positions.to_vec(),
        0,
    )]
}

/// Two sequences of 150 and 20 queries, two blocks, and slots in no order: probabilities by hand.
#[test]
fn column_sums_add_up_the_probabilities_of_real_queries() {
    const WIDTH: usize = 8;
    const SLOTS: usize = 512;
    let (query, keys) = (
        tensor(1, [1, 4, 170, WIDTH]),
        tensor(2, [2, 2, SLOTS, WIDTH]),
    );
    let values = tensor(3, [2, 2, SLOTS, WIDTH]);
    let queries = Positions::contiguous(&[50, 5], &[150, 20]);
    // Slot `s` of a sequence holds position `7 s mod 509`; every third slot is free.
    let slot = |s: usize| {
        if s.is_multiple_of(3) {
            Positions::EMPTY
        } else {
            s * 7 % 509
        }
    };
    let slots: Vec<usize> = (0..SLOTS).map(slot).collect();
    let segments = [0, 1].map(|sequence| {
        let of = |all: &Tensor<4>| all.clone().slice_dim(0, sequence..sequence + 1);
        whole(&of(&keys), &of(&values), std::slice::from_ref(&slots))
    });
    let window = NonZeroUsize::new(60);
    let mut attend = AttentionParams::new(0.7);
    attend.window = window;
    let (out, sums) = attention_with_column_sums(query.clone(), &queries, &segments, &attend);
    let plain = attention(query.clone(), &queries, &segments, &attend);
    assert!(bits(&out) == bits(&plain), "column sums change no output");

    let (query, keys, mut expected) = (floats(&query), floats(&keys), vec![0.0f64; 2 * 4 * SLOTS]);
    for (sequence, head) in (0..8).map(|i| (i / 4, i % 4)) {
        for (at, &position) in queries.slots(sequence, 0).iter().enumerate() {
            let score = |slot: usize| -> f64 {
                let product = |i: usize| {
                    let row = queries.rows(sequence).start + at;
                    let q = query[(head * 170 + row) * WIDTH + i];
                    let k = keys[((sequence * 2 + head / 2) * SLOTS + slot) * WIDTH + i];
                    f64::from(q) * f64::from(k)
                };
                (0..WIDTH).map(product).sum::<f64>() * 0.7
            };
            let seen: Vec<usize> = (0..SLOTS)
                .filter(|&s| visible(position, slots[s], window))
                .collect();
            let total: f64 = seen.iter().map(|&s| score(s).exp()).sum();
            seen.iter().for_each(|&s| {
                expected[(sequence * 4 + head) * SLOTS + s] += score(s).exp() / total
            });
        }
    }
    let off = apart(&floats(&sums), expected);
    assert!(off < 1e-4, "up to 150 probabilities in f32, off by {off}");
}

#[test]
fn heads_with_their_own_positions_equal_each_head_alone() {
    const SLOTS: usize = 512;
    let (query, keys) = (tensor(4, [1, 4, 30, 8]), tensor(5, [1, 2, SLOTS, 8]));
    let values = tensor(6, [1, 2, SLOTS, 8]);
    let queries = Positions::contiguous(&[470], &[30]);
    let lists: Vec<Vec<usize>> = vec![
        (0..SLOTS).collect(),
        (0..SLOTS).map(|s| (s + 100) % SLOTS).collect(),
    ];
    let attend = AttentionParams::new(0.5);
    let both = whole(&keys, &values, &lists);
    let together = attention(query.clone(), &queries, &[both], &attend);
    let alone = (0..2).map(|head| {
        let part = |tensor: &Tensor<4>, heads: Range<usize>| tensor.clone().slice_dim(1, heads);
        let one = head..head + 1;
        let entries = whole(
            &part(&keys, one.clone()),
            &part(&values, one.clone()),
            &lists[one],
        );
        let query = part(&query, 2 * head..2 * head + 2);
        attention(query, &queries, &[entries], &attend)
    });
    assert!(bits(&together) == bits(&Tensor::cat(alone.collect(), 2)));
}

/// Entries at consecutive positions, cut into segments at these positions. A segment starts at its panel; what is in
/// front of its first entry there is free, and holds other numbers than 0.
fn cut(keys: &Tensor<3>, values: &Tensor<3>, first: usize, cuts: &[usize]) -> Vec<Segment> {
    let end = first + keys.dims()[1];
    let ends = cuts.iter().copied().chain([end]);
    let mut from = first;
    let segments = ends.map(|to| {
        let start = from / PANEL * PANEL;
        let part = |of: &Tensor<3>| {
            let rows = of.clone().slice_dim(1, from - first..to - first);
            let [heads, _, width] = rows.dims();
            let free = Tensor::full([heads, from - start, width], 3.5, &rows.device());
            match from > start {
                true => Tensor::cat(vec![free, rows], 1),
                false => rows,
            }
        };
        let free = std::iter::repeat_n(Positions::EMPTY, from - start);
        let positions = free.chain(from..to).collect();
        let segment = Segment::from_rows(part(keys), part(values), vec![positions], start);
        from = to;
        segment
    });
    segments.collect()
}

/// The first entries may be missing, as behind a window, and the others be cut anywhere.
#[test]
fn bits_do_not_depend_on_the_segments_that_hold_the_entries() {
    const END: usize = 3 * ATTENTION_BLOCK + 40;
    let (keys, values) = (tensor(7, [2, END, 8]), tensor(8, [2, END, 8]));
    let query = tensor(9, [1, 4, 70, 8]);
    let queries = Positions::contiguous(&[END - 70], &[70]);
    for (window, first) in [
        (None, 0),
        (NonZeroUsize::new(300), 430),
        (NonZeroUsize::new(90), 641),
    ] {
        let mut attend = AttentionParams::new(0.4);
        attend.window = window;
        let of = |first: usize, cuts: &[usize]| {
            let part = |all: &Tensor<3>| all.clone().slice_dim(1, first..END);
            [cut(&part(&keys), &part(&values), first, cuts)]
        };
        let expected = attention(query.clone(), &queries, &of(0, &[]), &attend);
        let cuts: [&[usize]; 5] = [
            &[],
            &[700],
            &[704, 768],
            &[690, 691, 710, 800],
            &[END - 70, END - 1],
        ];
        for cuts in cuts {
            let segments = of(first, cuts);
            let found = attention(query.clone(), &queries, &segments, &attend);
            assert!(
                bits(&found) == bits(&expected),
                "{window:?}, cut at {cuts:?}"
            );
            // The reports name the slots of the segments, one after another.
            let (_, sums) = attention_with_column_sums(query.clone(), &queries, &segments, &attend);
            let (_, last) =
                attention_with_last_queries(query.clone(), &queries, &segments, &attend, 70);
            let slots: usize = segments[0].iter().map(Segment::slots).sum();
            assert_eq!(
                (sums.dims(), last.dims()),
                ([1, 4, slots], [1, 4, 70, slots])
            );
            let positions = segments[0].iter().flat_map(|segment| segment.positions(0));
            let held: Vec<bool> = positions.map(|&p| p != Positions::EMPTY).collect();
            let sums = floats(&sums);
            let mut total = 0.0;
            for head in sums.chunks(slots) {
                total += head.iter().sum::<f32>();
                let free = head.iter().zip(&held).filter(|(_, held)| !**held);
                assert!(free.map(|(sum, _)| *sum).all(|sum| sum == 0.0));
            }
            assert!(
                (total - 280.0).abs() < 1e-2,
                "70 queries of 4 heads: {total}"
            );
            let added = floats(&last.sum_dim(2));
            assert!(apart(&added, sums.iter().copied().map(f64::from)) < 1e-4);
        }
    }
}

#[test]
fn a_sequence_is_computed_as_if_it_were_alone() {
    let attend = AttentionParams::new(0.4);
    let query = tensor(10, [1, 4, 23, 8]);
    let lengths = [20, 0, 3];
    let queries = Positions::contiguous(&[580, 0, 2], &lengths);
    let segments: Vec<Vec<Segment>> = [600, 0, 5]
        .into_iter()
        .map(|end| match end {
            0 => vec![],
            end => cut(&tensor(11, [2, end, 8]), &tensor(12, [2, end, 8]), 0, &[]),
        })
        .collect();
    let (together, sums) = attention_with_column_sums(query.clone(), &queries, &segments, &attend);
    assert_eq!(sums.dims(), [3, 4, 608]);
    assert!(floats(&together).iter().all(|x| x.is_finite()));
    for (sequence, _) in lengths.iter().enumerate().filter(|(_, n)| **n > 0) {
        let rows = queries.rows(sequence);
        let alone = attention(
            query.clone().slice_dim(2, rows.clone()),
            &Positions::shared(&[queries.slots(sequence, 0)]),
            &segments[sequence..sequence + 1],
            &attend,
        );
        let found = together.clone().slice_dim(1, rows);
        assert!(bits(&found) == bits(&alone), "sequence {sequence}");
    }
}

//! Attention on `flex`: segments taken apart into slices for the kernel.

use burn::{backend::flex::FlexTensor, tensor::Element};

use super::{Rows, inner_contiguous, primitive, tensor};
use crate::{
    exact::{
        PANEL, Segment,
        kernels::attention::{self, Call, Entries, Heads, Report, Sequence, Sight, Stored},
        ops::{Reads, Wanted},
    },
    positions::Positions,
};

/// Attention over segments whose elements are `T`.
pub(super) fn attend<T: Stored + Element + bytemuck::Pod>(
    query: FlexTensor,
    reads: Reads<'_>,
) -> (FlexTensor, FlexTensor) {
    let query = inner_contiguous(query);
    let rows = Rows::<f32>::of(&query);
    let [heads, tokens, head_dim] = [1, 2, 3].map(|dim| rows.shape[dim]);
    let (batch, longest) = (reads.segments.len(), reads.positions.longest());
    let segments: Vec<Vec<Storage<'_>>> = reads
        .segments
        .iter()
        .map(|segments| segments.iter().map(Storage::of).collect())
        .collect();
    let first = reads.segments.iter().flatten().next();
    let kv_heads = first.map_or(heads, |segment| segment.values().dims()[0]);
    let call = Call {
        heads: Heads {
            heads,
            kv_heads,
            head_dim,
        },
        query: &|row, head| rows.row(head * tokens + row),
        scale: reads.params.scale as f32,
        softcap: reads.params.softcap.map(|cap| cap as f32),
    };
    let slots = |segments: &Vec<Segment>| segments.iter().map(Segment::slots).sum::<usize>();
    let most = reads.segments.iter().map(slots).max().unwrap_or(0);
    let (shape, size) = match reads.report {
        Wanted::Nothing => (vec![0], 0),
        Wanted::ColumnSums => (vec![batch, heads, most], heads * most),
        Wanted::LastQueries(last) => {
            let last = last.min(longest);
            (vec![batch, heads, last, most], heads * last * most)
        }
    };
    let mut reported = vec![0.0; batch * size];
    let mut reports = reported.chunks_mut(size.max(1));
    let mut sequences: Vec<Sequence<'_, T>> = segments
        .iter()
        .enumerate()
        .map(|(sequence, segments)| {
            let positions = reads.positions.slots(sequence, 0);
            let real = positions.iter().rposition(|&p| p != Positions::EMPTY);
            let count = real.map_or(0, |last| last + 1);
            let sight = |&position: &usize| Sight::of(position, reads.params.window);
            Sequence {
                first_row: reads.positions.rows(sequence).start,
                sights: positions[..count].iter().map(sight).collect(),
                entries: (0..kv_heads)
                    .map(|head| segments.iter().map(|s| s.entries(head)).collect())
                    .collect(),
                report: report(
                    reads.report,
                    reports.next().unwrap_or_default(),
                    longest,
                    count,
                ),
            }
        })
        .collect();
    let mut out = vec![0.0; tokens * heads * head_dim];
    attention::attend(&call, &mut sequences, &mut out);
    drop(sequences);
    (
        tensor(out, vec![1, tokens, heads * head_dim]),
        tensor(reported, shape),
    )
}

/// The report of a sequence with `count` queries, where the longest has `longest`.
fn report(wanted: Wanted, out: &mut [f32], longest: usize, count: usize) -> Report<'_> {
    match wanted {
        Wanted::Nothing => Report::Nothing,
        _ if out.is_empty() => Report::Nothing,
        Wanted::ColumnSums => Report::ColumnSums {
            kept: Default::default(),
            out,
        },
        Wanted::LastQueries(last) => {
            let rows = last.min(longest);
            Report::LastQueries {
                kept: Default::default(),
                out,
                rows,
                first: count.saturating_sub(rows),
                row: rows.saturating_sub(count),
            }
        }
    }
}

/// The tensors of a segment.
struct Storage<'a> {
    segment: &'a Segment,
    keys: FlexTensor,
    values: FlexTensor,
}

impl<'a> Storage<'a> {
    fn of(segment: &'a Segment) -> Self {
        Self {
            segment,
            keys: primitive(segment.keys()).to_contiguous(),
            values: primitive(segment.values()).to_contiguous(),
        }
    }

    fn entries<T: Stored + Element + bytemuck::Pod>(&self, head: usize) -> Entries<'_, T> {
        fn part<T: Element + bytemuck::Pod>(x: &FlexTensor, head: usize) -> &[T] {
            let all: &[T] = x
                .as_slice()
                .expect("contiguous, and of the dtype that was asked");
            let size = all.len() / x.layout().shape().as_slice()[0].max(1);
            &all[head * size..(head + 1) * size]
        }
        let (keys, _) = part::<T>(&self.keys, head).as_chunks::<PANEL>();
        Entries {
            keys,
            values: part(&self.values, head),
            positions: self.segment.positions(head),
            start: self.segment.start(),
        }
    }
}

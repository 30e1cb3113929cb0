//! Attention: the result of a query does not depend on other queries. The only routine in the crate, for every
//! backend.

use std::num::NonZeroUsize;

use burn::tensor::Tensor;

#[cfg(feature = "flex")]
use super::ops::{self, Reads, Wanted};
use super::{PANEL, Segment, stock_attention::run};
use crate::positions::Positions;

/// The parameters of attention in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct AttentionParams {
    /// Factor on the scores: `1 / sqrt(head_dim)` in most models.
    pub scale: f64,
    /// How many keys a query sees, its own included; `None` for a full-attention layer.
    pub window: Option<NonZeroUsize>,
    /// Soft cap on the scores, `cap · tanh(score / cap)`, applied before the mask.
    pub softcap: Option<f64>,
}

impl AttentionParams {
    /// A full-attention layer without a soft cap.
    #[must_use]
    pub const fn new(scale: f64) -> Self {
        Self {
            scale,
            window: None,
            softcap: None,
        }
    }
}

/// Softmax attention of `query` over the entries of every sequence.
///
/// The result of a query depends only on that query, on the entries that it sees, and on the numbers of the slots that
/// hold them. [`visible`](crate::positions::visible) decides from two positions whether a query sees a slot. A query at
/// [`Positions::EMPTY`] is a pad: its result is finite and has no meaning. A slot at [`Positions::EMPTY`] is free: no
/// query sees it.
///
/// # Shapes
/// * `query`: `[1, heads, tokens, head_dim]`, after rotation, the tokens of all sequences one after another
/// * `query_positions`: a position for each of them
/// * `segments`: a list for each sequence, as [`Segment`] describes it. It may be empty for a sequence without tokens,
///   or with pads alone.
/// * result: `[1, tokens, heads · head_dim]`
///
/// Query head `h` reads KV head `h / (heads / kv_heads)`. Nothing is repeated in memory.
///
/// # Cost
/// Every sequence is computed by itself, so it costs what it costs alone. Blocks of slots that no query of a part sees
/// are skipped, which changes no bit. On `flex` in f32, entries are read where they are stored. Elsewhere scores are
/// held for 16 to 128 queries at a time: the more slots they see, the fewer queries. The keys and values of one block
/// are copied at a time.
///
/// # Panics
/// If the shapes do not fit one another.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::{exact::{AttentionParams, Segment, attention}, positions::Positions};
///
/// let device = Device::flex();
/// let query = Tensor::zeros([1, 2, 1, 4], &device);
/// let keys = Tensor::zeros([1, 3, 4], &device);
/// let values = Tensor::<3>::ones([1, 3, 4], &device);
/// let segment = Segment::from_rows(keys, values, vec![vec![0, 1, 2]], 0);
/// let params = AttentionParams::new(0.5);
/// let out = attention(query, &Positions::shared(&[[2]]), &[vec![segment]], &params);
/// assert_eq!(out.into_data().as_slice::<f32>().unwrap(), [1.0; 8]);
/// ```
#[must_use]
pub fn attention(
    query: Tensor<4>,
    query_positions: &Positions,
    segments: &[Vec<Segment>],
    params: &AttentionParams,
) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if ops::owns_attention(&query, segments) {
        let reads = checked(&query, query_positions, segments, params, Wanted::Nothing);
        return ops::attention::<1>(query, reads).0;
    }
    run(query, query_positions, segments, params, |_| {})
}

/// The same arguments for the kernel, checked.
#[cfg(feature = "flex")]
pub(super) fn checked<'a>(
    query: &Tensor<4>,
    positions: &'a Positions,
    segments: &'a [Vec<Segment>],
    params: &'a AttentionParams,
    report: Wanted,
) -> Reads<'a> {
    check_all(query, positions, segments);
    Reads {
        positions,
        segments,
        params,
        report,
    }
}

pub(super) fn check_all(query: &Tensor<4>, query_positions: &Positions, segments: &[Vec<Segment>]) {
    let [one, heads, tokens, head_dim] = query.dims();
    let sequences = query_positions.sequences();
    assert_eq!(
        (one, query_positions.tokens(), segments.len()),
        (1, tokens, sequences),
        "a position for every query, and a list of segments for every sequence"
    );
    for segment in segments.iter().flatten() {
        check(segment, heads, head_dim);
    }
}

fn check(segment: &Segment, heads: usize, head_dim: usize) {
    let [kv_heads, slots, width] = segment.values().dims();
    let panels = [kv_heads, slots / PANEL, head_dim, PANEL];
    assert!(
        segment.keys().dims() == panels
            && width == head_dim
            && slots.is_multiple_of(PANEL)
            && segment.start().is_multiple_of(PANEL)
            && heads.is_multiple_of(kv_heads)
            && (segment.lists() == 1 || segment.lists() == kv_heads)
            && (0..segment.lists()).all(|head| segment.positions(head).len() == slots),
        "a segment of {slots} slots with keys {:?} for {heads} heads of {head_dim}",
        segment.keys().dims(),
    );
}

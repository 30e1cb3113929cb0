//! Everything attention may read at one layer.

use crate::{
    cache::CacheError,
    exact::{PANEL, Segment},
};

/// Everything attention may read at one layer: for every sequence a short list of [`Segment`]s. Drop it before the next
/// call of the cache: while it lives, the next append copies.
///
/// Slots may be in any order. The position of each names its token. A sequence without entries has no segment.
///
/// How many free slots follow the last one in use depends on what the cache did before. Attention must not depend on
/// them. That of [`exact`](crate::exact) does not; one of your own leaves them out.
///
/// # Shapes
/// Those of [`Segment`], with the same `kv_heads` and `head_dim` in all.
#[derive(Debug)]
pub struct KeysValues {
    sequences: Vec<Vec<Segment>>,
}

impl KeysValues {
    /// The segments of every sequence.
    ///
    /// # Errors
    /// [`Shape`](CacheError::Shape) if keys, values and positions of a segment do not fit one another, if segments
    /// differ in heads or width, if one does not start at a whole panel, or if slots in use overlap. The first slot in
    /// use of a segment must have a higher number than the last one of the segment before.
    pub fn new(sequences: Vec<Vec<Segment>>) -> Result<Self, CacheError> {
        let first = sequences.iter().flatten().next();
        let like = first.map(|segment| segment.values().dims());
        for segments in &sequences {
            let mut free = 0;
            for segment in segments {
                check(segment, like.unwrap_or_default())?;
                if segments.len() == 1 {
                    continue;
                }
                let Some(used) = segment.used() else { continue };
                let first = segment.start().saturating_add(used.start);
                require(
                    "the first slot in use of a segment",
                    &[first.max(free)],
                    &[first],
                )?;
                free = segment.start().saturating_add(used.end);
            }
        }
        Ok(Self { sequences })
    }

    /// The segments of every sequence.
    #[must_use]
    pub fn sequences(&self) -> &[Vec<Segment>] {
        &self.sequences
    }

    /// The same without the entries at positions from `end` on: their slots count as free.
    pub(crate) fn below(&self, end: usize) -> Self {
        let segments = |segments: &Vec<Segment>| segments.iter().map(|s| s.below(end)).collect();
        Self {
            sequences: self.sequences.iter().map(segments).collect(),
        }
    }

    /// The segments of one sequence.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn segments(&self, sequence: usize) -> &[Segment] {
        &self.sequences[sequence]
    }
}

/// Checks one segment, with heads and width like those of `like`.
fn check(segment: &Segment, like: [usize; 3]) -> Result<(), CacheError> {
    let [kv_heads, _, head_dim] = like;
    let slots = segment.slots();
    let whole = slots.next_multiple_of(PANEL).max(PANEL);
    require(
        "values",
        &[kv_heads, whole, head_dim],
        &segment.values().dims(),
    )?;
    require(
        "keys",
        &[kv_heads, whole / PANEL, head_dim, PANEL],
        &segment.keys().dims(),
    )?;
    let lists = if segment.lists() == 1 { 1 } else { kv_heads };
    require("lists of positions", &[lists], &[segment.lists()])?;
    for head in 0..lists {
        let found = segment.positions(head).len();
        require("positions of the slots", &[slots], &[found])?;
    }
    let start = segment.start();
    require("the start of a segment", &[start / PANEL * PANEL], &[start])
}

fn require(what: &'static str, expected: &[usize], found: &[usize]) -> Result<(), CacheError> {
    if expected == found {
        return Ok(());
    }
    Err(CacheError::Shape {
        what,
        expected: expected.to_vec(),
        found: found.to_vec(),
    })
}

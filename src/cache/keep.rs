//! Which rows a policy gives up: arithmetic over slices, without a tensor.

use crate::positions::Positions;

/// The `count` slots with the lowest scores among those whose position is a `candidate`. Of equal
/// scores the lowest position stays; what is not a number counts as lowest. Fewer where there are fewer
/// candidates.
pub(crate) fn weakest(
    held: &[usize],
    scores: &[f32],
    count: usize,
    candidate: impl Fn(usize) -> bool,
) -> Vec<usize> {
    if count == 0 {
        return Vec::new();
    }
    let score = |slot: usize| scores.get(slot).copied().filter(|score| !score.is_nan());
    let rank = |&slot: &usize| {
        let score = score(slot).unwrap_or(f32::NEG_INFINITY);
        (TotalOrder(score), std::cmp::Reverse(held[slot]))
    };
    let mut slots: Vec<usize> = (0..held.len())
        .filter(|&slot| held[slot] != Positions::EMPTY && candidate(held[slot]))
        .collect();
    if count == 1 {
        return slots.into_iter().min_by_key(rank).into_iter().collect();
    }
    if count < slots.len() {
        slots.select_nth_unstable_by_key(count - 1, rank);
    }
    slots.truncate(count);
    slots
}

/// Makes what is held by batch row that of these rows; a row without an entry has the default.
pub(crate) fn select<T: Clone + Default>(held: &mut Vec<T>, rows: &[usize]) {
    let of = |&row: &usize| held.get(row).cloned().unwrap_or_default();
    *held = rows.iter().map(of).collect();
}

/// Lets go of what is held, by layer and batch row, for rows that are taken back from their length to a
/// shorter one in `to`.
pub(crate) fn forget<T>(held: &mut [Vec<Vec<T>>], lengths: &[usize], to: &[usize]) {
    for layer in held {
        for (held, (length, to)) in layer.iter_mut().zip(lengths.iter().zip(to)) {
            if to < length {
                *held = Vec::new();
            }
        }
    }
}

/// What `read(layer, row)` finds, by layer and batch row; the first error where it fails.
pub(crate) fn by_layer_and_row<T, E>(
    layers: usize,
    rows: usize,
    read: impl Fn(usize, usize) -> Result<T, E>,
) -> Result<Vec<Vec<T>>, E> {
    (0..layers)
        .map(|layer| (0..rows).map(|row| read(layer, row)).collect())
        .collect()
}

#[derive(PartialEq)]
struct TotalOrder(f32);

impl Eq for TotalOrder {}

impl PartialOrd for TotalOrder {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TotalOrder {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // 0 and -0 are equal scores.
        (self.0 + 0.0).total_cmp(&(other.0 + 0.0))
    }
}

/// A moving average or maximum over `kernel` neighbours, as torch's pooling with padding `kernel / 2`
/// and stride 1: beyond the ends an average counts zeros, a maximum nothing.
pub(crate) fn pooled(scores: &[f32], kernel: usize, average: bool) -> Vec<f32> {
    let half = kernel / 2;
    let around = |at: usize| &scores[at.saturating_sub(half)..(at + half + 1).min(scores.len())];
    let each = (0..scores.len()).map(|at| {
        let around = around(at).iter().copied();
        if average {
            around.sum::<f32>() / kernel as f32
        } else {
            around.fold(f32::NEG_INFINITY, f32::max)
        }
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: usize = Positions::EMPTY;

    #[test]
    fn a_protected_row_outlives_a_better_scored_one() {
        let held = [0, 1, 2, 3];
        let scores = [0.1, 0.9, 0.5, 0.2];
        assert_eq!(weakest(&held, &scores, 1, |p| p > 0 && p < 3), [2]);
        assert_eq!(weakest(&held, &scores, 1, |_| true), [0]);
        assert_eq!(weakest(&held, &scores, 9, |p| p == 3), [3]);
        assert!(weakest(&held, &scores, 0, |_| true).is_empty());
    }

    #[test]
    fn of_equal_scores_the_lowest_position_stays_wherever_it_is_stored() {
        let held = [7, FREE, 2, 5, 9];
        let scores = [1.0, 0.0, 1.0, -0.0, 0.0];
        assert_eq!(weakest(&held, &scores, 1, |_| true), [4], "9 before 5");
        let mut three = weakest(&held, &scores, 3, |_| true);
        three.sort_unstable();
        assert_eq!(three, [0, 3, 4], "7 before 2");
    }

    #[test]
    fn what_is_not_a_number_goes_first_and_what_was_never_scored_too() {
        let held = [0, 1, 2, 3];
        assert_eq!(
            weakest(&held, &[-1.0, f32::NAN, 5.0, 0.0], 1, |_| true),
            [1]
        );
        assert_eq!(weakest(&held, &[-1.0, 2.0, 5.0], 1, |_| true), [3]);
    }

    #[test]
    fn an_average_counts_zeros_beyond_the_ends_and_a_maximum_nothing() {
        assert_eq!(pooled(&[3.0, 6.0, 9.0], 3, true), [3.0, 6.0, 5.0]);
        assert_eq!(pooled(&[-3.0, -6.0, -9.0], 3, false), [-3.0, -3.0, -6.0]);
        assert_eq!(pooled(&[1.0, 2.0], 1, true), [1.0, 2.0]);
        assert!(pooled(&[], 5, true).is_empty());
    }
}

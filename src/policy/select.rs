//! Which entries score lowest: arithmetic over slices, without a tensor.

use crate::positions::Positions;

/// The `count` slots with the lowest scores among those whose position is `evictable`, or all of these if there are
/// fewer. Of equal scores the lowest position stays; NaN and a missing score count as lowest.
pub(super) fn lowest(
    held: &[usize],
    scores: &[f32],
    count: usize,
    evictable: impl Fn(usize) -> bool,
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
        .filter(|&slot| held[slot] != Positions::EMPTY && evictable(held[slot]))
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
/// and stride 1: beyond the ends an average counts zeros, a maximum counts nothing.
pub(super) fn pooled(scores: &[f32], kernel: usize, average: bool) -> Vec<f32> {
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
    fn a_protected_entry_outlives_a_better_scored_one() {
        let held = [0, 1, 2, 3];
        let scores = [0.1, 0.9, 0.5, 0.2];
        assert_eq!(lowest(&held, &scores, 1, |p| p > 0 && p < 3), [2]);
        assert_eq!(lowest(&held, &scores, 1, |_| true), [0]);
        assert_eq!(lowest(&held, &scores, 9, |p| p == 3), [3]);
        assert!(lowest(&held, &scores, 0, |_| true).is_empty());
    }

    #[test]
    fn of_equal_scores_the_lowest_position_stays() {
        let held = [7, FREE, 2, 5, 9];
        let scores = [1.0, 0.0, 1.0, -0.0, 0.0];
        assert_eq!(lowest(&held, &scores, 1, |_| true), [4], "9 before 5");
        let mut three = lowest(&held, &scores, 3, |_| true);
        three.sort_unstable();
        assert_eq!(three, [0, 3, 4], "7 before 2");
    }

    #[test]
    fn nan_and_missing_scores_are_lowest() {
        let held = [0, 1, 2, 3];
        assert_eq!(lowest(&held, &[-1.0, f32::NAN, 5.0, 0.0], 1, |_| true), [1]);
        assert_eq!(lowest(&held, &[-1.0, 2.0, 5.0], 1, |_| true), [3]);
    }

    #[test]
    fn pooling_treats_the_ends_as_torch_does() {
        assert_eq!(pooled(&[3.0, 6.0, 9.0], 3, true), [3.0, 6.0, 5.0]);
        assert_eq!(pooled(&[-3.0, -6.0, -9.0], 3, false), [-3.0, -3.0, -6.0]);
        assert_eq!(pooled(&[1.0, 2.0], 1, true), [1.0, 2.0]);
        assert!(pooled(&[], 5, true).is_empty());
    }
}

use super::*;

#[test]
fn a_new_token_takes_the_lowest_slot_that_was_freed() {
    let mut slots = Slots::default();
    slots.grow(5);
    assert_eq!(
        slots.take(&[0, 1, 2, 3]),
        [Run {
            from: 0,
            to: 0,
            len: 4
        }]
    );
    slots.retain(|position| position != 1);
    assert_eq!(
        slots.take(&[4, 5]),
        [
            Run {
                from: 0,
                to: 1,
                len: 1
            },
            Run {
                from: 1,
                to: 4,
                len: 1
            }
        ]
    );
    assert_eq!(slots.as_ref(), [0, 4, 2, 3, 5]);
    assert_eq!(
        (slots.cached(), slots.rising()),
        (vec![0, 2, 3, 4, 5], vec![0, 2, 3, 1, 4])
    );
}

#[test]
fn a_pad_takes_no_slot_and_parts_what_is_around_it() {
    let mut slots = Slots::default();
    slots.grow(3);
    let pad = Positions::EMPTY;
    assert_eq!(
        slots.take(&[7, pad, 8]),
        [
            Run {
                from: 0,
                to: 0,
                len: 1
            },
            Run {
                from: 2,
                to: 1,
                len: 1
            }
        ]
    );
    assert_eq!((slots.used(), slots.end()), (2, 2));
    slots.retain(|position| position == 8);
    assert_eq!((slots.used(), slots.as_ref()), (1, &[pad, 8, pad][..]));
}

#[test]
fn the_newest_positions_are_cut_off_wherever_they_stand() {
    let mut slots = Slots::default();
    slots.grow(6);
    slots.take(&[0, 1, 2, 3, 4]);
    assert_eq!(slots.truncate(3, 5), [3..5], "in order");
    slots.take(&[3]);
    slots.retain(|position| position != 0);
    slots.take(&[4, 5]);
    assert_eq!(slots.as_ref()[..5], [4, 1, 2, 3, 5]);
    assert_eq!(slots.truncate(3, 6), [0..1, 3..5], "out of order");
    assert_eq!((slots.cached(), slots.used()), (vec![1, 2], 2));
    assert_eq!(slots.take(&[3])[0].to, 0);
    let mut slots = Slots::anchored();
    slots.grow(PANEL);
    slots.take(&[PANEL + 2, PANEL + 3]);
    assert_eq!(slots.truncate(PANEL + 3, PANEL + 4), [3..4]);
    assert_eq!(slots.truncate(0, PANEL + 3), [2..3], "to nothing");
}

#[test]
fn runs_are_told_in_rising_order_of_what_they_hold() {
    let mut slots = Slots::default();
    slots.grow(6);
    slots.take(&[0, 1, 2, 3]);
    slots.retain(|position| position > 1);
    slots.take(&[4, 5, 6]);
    assert_eq!(slots.as_ref(), [4, 5, 2, 3, 6, Positions::EMPTY]);
    assert_eq!(slots.runs(|_| true), [2..4, 0..2, 4..5]);
    assert_eq!(slots.runs(|position| position != 5), [2..4, 0..1, 4..5]);
}

#[test]
fn slots_put_in_order_take_their_scores_along() {
    let mut slots = Slots::default();
    slots.grow(4);
    slots.take(&[5, 6, 7]);
    slots.add_scores([0.5, 0.6, 0.7, 0.0].into_iter());
    slots.free_slot(0);
    slots.reorder(&[1, 2], 3);
    assert_eq!(slots.as_ref(), [6, 7, Positions::EMPTY]);
    assert_eq!(slots.scores(), [0.6, 0.7, 0.0]);
    assert_eq!(slots.take(&[8])[0].to, 2);
}

#[test]
fn an_anchored_slot_follows_its_position_and_moves_by_blocks() {
    let mut slots = Slots::anchored();
    let positions: Vec<usize> = (PANEL - 2..2 * PANEL + 1).collect();
    assert_eq!(slots.needed(&positions), 2 * PANEL + 1);
    slots.grow(3 * PANEL);
    assert_eq!(slots.take(&positions)[0].to, PANEL - 2);
    assert_eq!(
        slots.slide(PANEL - 1),
        0,
        "the block is in use to its last slot"
    );
    assert_eq!(slots.slide(PANEL + 3), PANEL);
    assert_eq!((slots.as_ref()[3], slots.end()), (PANEL + 3, PANEL + 1));
    assert_eq!(slots.needed(&[2 * PANEL + 1]), PANEL + 2);
    assert_eq!(slots.slide(4 * PANEL), 0, "nothing is left");
    assert_eq!(slots.take(&[9 * PANEL + 5])[0].to, 5, "anchored anew");
}

//! Sequences of a batch: each begins, moves and repeats on its own.

use kv_direct::cache::Draft;

use crate::support::{
    kinds::{decoders, every_run, kinds},
    test_run::TestRun,
};

#[test]
fn one_sequence_begins_anew_among_others() {
    for mut run in every_run() {
        run.feed(&[9, 20, 14], false, 1);
        run.feed(&[1, 2, 0], false, 2);
        run.truncate(&[10, 0, 14]);
        run.move_to_another(false, true);
        run.feed(&[0, 5, 2], true, 3);
        run.feed(&[1, 4, 1], false, 4);
        run.truncate(&[0, 9, 17]);
        run.finish();
    }
}

#[test]
fn sequences_without_tokens_continue() {
    for mut run in every_run() {
        run.feed(&[9, 0, 3], false, 1);
        run.truncate(&[9, 0, 0]);
        run.select_sequences(&[1, 2, 1]);
        run.begin_draft();
        run.feed(&[2, 0, 4], false, 2);
        run.end_draft(Draft::Discard);
        for by_file in [false, true] {
            run.move_to_another(by_file, true);
        }
        run.resume(None);
        run.feed(&[2, 0, 1], false, 3);
        run.finish();
    }
}

#[test]
fn a_repeated_sequence_keeps_its_budget_while_idle() {
    for kind in kinds() {
        let mut run = TestRun::new(&decoders()[1], kind);
        run.feed(&[12], true, 1);
        run.select_sequences(&[0, 0]);
        run.feed(&[0, 4], false, 2);
        run.finish();
    }
}

/// Scores of an open prompt, sums, and rotated keys.
#[test]
fn scores_and_rotations_move_with_their_sequence() {
    for mut run in every_run() {
        let mut over = run.fork();
        run.feed(&[9, 14], true, 1);
        over.feed(&[9, 14], false, 1);
        over.feed(&[1, 1], false, 2);
        over.feed(&[1, 1], false, 3);
        for mut run in [run, over] {
            run.select_sequences(&[1, 0, 1]);
            run.move_to_another(true, false);
            run.feed(&[0, 1, 2], false, 4);
            run.finish();
        }
    }
}

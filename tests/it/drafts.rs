//! Drafts: what is left of them, and what they leave alone.

use crate::support::CacheExt as _;
use std::num::NonZeroUsize;

use kv_direct::{
    cache::{CacheBackend, Draft},
    model::{DecoderConfig, Input},
    policy::{FullKv, SnapKv, SnapKvConfig, TokenBudget, Window},
};

use crate::support::{PlanKind, feed, random, residual, seen, tiny, tokens};

/// The windows of a model do not move on in a draft, so the call before it can be undone when it is over.
#[test]
fn the_call_before_a_draft_can_be_undone_after_it() {
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    config.layers[0].window = NonZeroUsize::new(5);
    let decoder = random(&config);
    let full: Box<dyn CacheBackend> = Box::new(FullKv::new(&decoder.shape()));
    let hot = residual(&decoder, 3, PlanKind::Residuals);
    for mut cache in [full, Box::new(hot)] {
        feed(&decoder, &mut cache, &tokens(1, 10)[..]);
        let mut straight = cache.fork();
        feed(&decoder, &mut cache, &tokens(2, 4)[..]);
        cache.begin_draft().expect("no draft is open");
        feed(&decoder, &mut cache, &tokens(3, 6)[..]);
        cache.end_draft(Draft::Discard).expect("a draft is open");
        cache.truncate_all(10).expect("the last call");
        let next = &tokens(4, 3)[..];
        let expected = feed(&decoder, &mut straight, next);
        assert!(feed(&decoder, &mut cache, next) == expected);
    }
}

/// So can that of every row when rows have changed their places meanwhile.
#[test]
fn the_call_before_a_draft_can_be_undone_where_rows_were_selected() {
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    config.layers[0].window = NonZeroUsize::new(5);
    let decoder = random(&config);
    let mut cache = FullKv::new(&decoder.shape());
    feed(&decoder, &mut cache, vec![tokens(1, 10), tokens(2, 30)]);
    feed(&decoder, &mut cache, vec![tokens(3, 4), tokens(4, 1)]);
    cache.select_sequences(&[1, 0]).expect("there are two");
    cache.begin_draft().expect("no draft is open");
    feed(&decoder, &mut cache, vec![tokens(5, 2); 2]);
    cache.end_draft(Draft::Discard).expect("a draft is open");
    cache.truncate(&[30, 10]).expect("the last call");
}

/// A prompt that ended with tokens that were taken back goes on.
#[test]
fn a_prompt_whose_end_was_taken_back_is_not_over() {
    let decoder = tiny(2);
    let chunk = |seed, count, more| Input::from(&tokens(seed, count)[..]).more_follows(more);
    let run = |draft: bool| {
        let config = SnapKvConfig::new(4, 2);
        let mut cache = SnapKv::new(&decoder.shape(), config).expect("above the window");
        let feed = |cache: &mut SnapKv, input| {
            drop(decoder.forward(input, cache).expect("a good call"));
        };
        feed(&mut cache, chunk(1, 5, true));
        if draft {
            cache.begin_draft().expect("no draft is open");
            feed(&mut cache, chunk(2, 3, false));
            cache.truncate_all(5).expect("within the draft");
            feed(&mut cache, chunk(3, 4, false));
            cache.end_draft(Draft::Accept).expect("a draft is open");
        } else {
            feed(&mut cache, chunk(3, 4, false));
        }
        feed(&mut cache, chunk(4, 1, false));
        seen(&cache, 3)
    };
    assert_eq!(run(true), run(false));
}

/// A call of a draft ends the prompts of all rows, also of one that it passes by; once nothing is left of the
/// draft, no prompt has ended.
#[test]
fn a_draft_of_which_nothing_is_left_ended_no_prompt_of_a_row_it_passed_by() {
    let decoder = tiny(2);
    let half = TokenBudget::of_prompt(0.5).expect("a share");
    let chunk = |lengths: [usize; 2], more| {
        let rows = vec![tokens(1, lengths[0]), tokens(2, lengths[1])];
        Input::from(rows).more_follows(more)
    };
    let run = |draft: bool| {
        let mut cache = Window::new(&decoder.shape(), half).expect("a budget");
        let feed = |cache: &mut Window, input| {
            drop(decoder.forward(input, cache).expect("a good call"));
        };
        feed(&mut cache, chunk([5, 3], true));
        if draft {
            cache.begin_draft().expect("no draft is open");
            feed(&mut cache, chunk([2, 0], false));
            cache.truncate(&[5, 3]).expect("within the draft");
            cache.end_draft(Draft::Accept).expect("a draft is open");
        }
        feed(&mut cache, chunk([8, 9], false));
        seen(&cache, 3)
    };
    assert_eq!(run(true), run(false));
}

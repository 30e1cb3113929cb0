//! Steps that a cache refuses: each with its own typed error, and the cache stays as it was.

use kv_direct::{
    cache::{CacheBackend, CacheError, Step},
    generate::{GenerateError, Generation},
    model::{Decoder, ForwardError},
    policy::FullKv,
};

use crate::support::{
    caches::{CacheExt as _, backends, seen},
    feed::{feed, refusal},
    models::tiny,
    random::tokens,
};

/// Calls `call` on a cache of each backend that holds 9 tokens. Checks that it is refused with the expected
/// error, and that the cache then continues as if nothing had been called.
fn refused(
    call: impl Fn(&Decoder, &mut dyn CacheBackend) -> ForwardError,
    expected: impl Fn(&ForwardError) -> bool,
) {
    let decoder = tiny(2);
    let ids = tokens(1, 12);
    for (name, mut cache) in backends(&decoder) {
        feed(&decoder, &mut cache, &ids[..9]);
        let (mut untouched, before) = (cache.fork(), seen(&cache, 3));
        let error = call(&decoder, &mut *cache);
        assert!(expected(&error), "{name}: {error:?}");
        assert_eq!(seen(&cache, 3), before, "{name}");
        let next = feed(&decoder, &mut untouched, &ids[9..]);
        assert!(
            feed(&decoder, &mut cache, &ids[9..]) == next,
            "{name}: the next step works"
        );
    }
}

#[test]
fn an_empty_prompt_is_refused() {
    let empty = |e: &ForwardError| matches!(e, ForwardError::Cache(CacheError::EmptyStep { .. }));
    refused(|decoder, cache| refusal(decoder, cache, &[][..]), empty);
    refused(|decoder, cache| refusal(decoder, cache, vec![]), empty);
    refused(
        |decoder, cache| refusal(decoder, cache, vec![vec![], vec![]]),
        empty,
    );
    let decoder = tiny(2);
    let mut cache = FullKv::new(&decoder.shape());
    assert!(matches!(
        Generation::new(&decoder, &mut cache, &[]),
        Err(GenerateError::EmptyPrompt)
    ));
}

#[test]
fn a_token_outside_the_vocabulary_is_refused() {
    refused(
        |decoder, cache| refusal(decoder, cache, &[5, 97, 3][..]),
        |e| {
            matches!(
                e,
                ForwardError::Vocabulary {
                    sequence: 0,
                    index: 1,
                    token: 97,
                    vocab: 97
                }
            )
        },
    );
}

#[test]
fn more_positions_than_the_model_has_are_refused() {
    refused(
        |decoder, cache| refusal(decoder, cache, &vec![1; 2040][..]),
        |e| {
            matches!(
                e,
                ForwardError::ContextFull {
                    position: 2048,
                    max_positions: 2048
                }
            )
        },
    );
}

#[test]
fn another_number_of_sequences_is_refused() {
    refused(
        |decoder, cache| refusal(decoder, cache, vec![vec![1], vec![2]]),
        |e| {
            matches!(
                e,
                ForwardError::Cache(CacheError::Sequences {
                    expected: 1,
                    found: 2
                })
            )
        },
    );
}

#[test]
fn a_gap_and_an_overlap_are_refused() {
    for found in [10, 8] {
        let begin = |_: &Decoder, cache: &mut dyn CacheBackend| {
            let step = Step::new(vec![vec![1]].into(), &[found]).expect("a token");
            cache.begin(&step).expect_err("not at 9").into()
        };
        let gap = |e: &ForwardError| matches!(e, ForwardError::Cache(CacheError::Gap { sequence: 0, expected: 9, found: f }) if *f == found);
        refused(begin, gap);
    }
}

#[test]
fn a_truncation_beyond_the_end_is_refused() {
    refused(
        |_, cache| cache.truncate_all(10).expect_err("9 tokens").into(),
        |e| {
            matches!(
                e,
                ForwardError::Cache(CacheError::TruncateBeyond { to: 10, longest: 9 })
            )
        },
    );
}

#[test]
fn a_commit_without_a_begin_is_refused() {
    refused(
        |_, cache| cache.commit().expect_err("no step").into(),
        |e| {
            matches!(
                e,
                ForwardError::Cache(CacheError::Uncommittable {
                    called: 0,
                    layers: 3
                })
            )
        },
    );
}

#[test]
fn every_sequence_needs_a_start_within_reach() {
    let refused = Step::new(vec![vec![1], vec![2]].into(), &[0]);
    assert!(matches!(
        refused,
        Err(CacheError::Starts {
            sequences: 2,
            starts: 1
        })
    ));
    let far = Step::new(vec![vec![1, 2]].into(), &[usize::MAX]).expect("refused by the cache");
    let mut cache = FullKv::new(&tiny(2).shape());
    assert!(matches!(
        cache.begin(&far),
        Err(CacheError::Gap {
            found: usize::MAX,
            ..
        })
    ));
}

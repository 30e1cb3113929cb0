//! Steps that fail midway: only `clear` helps.

use burn::tensor::Tensor;
use kv_direct::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, Projection, Replay, Span, Step, TokenIds,
    },
    model::ForwardError,
    positions::Positions,
};

use crate::support::{
    caches::{CacheExt as _, backends},
    feed::{feed, refusal},
    models::tiny,
    random::tokens,
};

#[test]
fn a_step_that_failed_midway_refuses_all_but_clear() {
    let decoder = tiny(2);
    for (name, mut cache) in backends(&decoder) {
        feed(&decoder, &mut cache, &tokens(1, 9)[..]);
        let step = Step::new(vec![vec![4, 2]].into(), &[9]).expect("tokens");
        cache.begin(&step).expect("a valid step");
        let residual = decoder.embed(step.tokens()).expect("ids of the vocabulary");
        decoder
            .run(0..1, residual, &step, &mut cache)
            .expect("the first layer");
        assert!(
            matches!(
                cache.commit(),
                Err(CacheError::Uncommittable {
                    called: 1,
                    layers: 3
                })
            ),
            "{name}"
        );
        let poisoned = |e: &ForwardError| matches!(e, ForwardError::Cache(CacheError::Poisoned));
        assert!(
            poisoned(&refusal(&decoder, &mut *cache, &[1][..])),
            "{name}"
        );
        assert!(
            matches!(cache.truncate_all(5), Err(CacheError::Poisoned)),
            "{name}"
        );
        assert_eq!(cache.length(0), 9, "{name}");
        cache.clear();
        feed(&decoder, &mut cache, &[1][..]);
    }
}

#[test]
fn a_wrong_layer_or_a_foreign_span_fails_the_step() {
    let decoder = tiny(2);
    let step = Step::new(vec![vec![4, 2]].into(), &[0]).expect("tokens");
    let other = Step::new(vec![vec![4]].into(), &[0]).expect("tokens");
    let [residual, shorter] =
        [&step, &other].map(|step| decoder.embed(step.tokens()).expect("ids of the vocabulary"));
    let cache_error = |result: Result<_, ForwardError>| match result {
        Err(ForwardError::Cache(error)) => error,
        other => panic!("{other:?}"),
    };
    for (name, mut cache) in backends(&decoder) {
        let early = cache_error(decoder.run(1..2, residual.clone(), &step, &mut cache));
        assert!(
            matches!(
                early,
                CacheError::LayerOrder {
                    expected: None,
                    found: 1
                }
            ),
            "{name}: {early:?}"
        );

        cache
            .begin(&step)
            .expect("a refusal without a step harms nothing");
        let early = cache_error(decoder.run(1..2, residual.clone(), &step, &mut cache));
        assert!(
            matches!(
                early,
                CacheError::LayerOrder {
                    expected: Some(0),
                    found: 1
                }
            ),
            "{name}: {early:?}"
        );
        let late = cache_error(decoder.run(0..1, residual.clone(), &step, &mut cache));
        assert!(matches!(late, CacheError::Poisoned), "{name}: {late:?}");
        assert!(
            matches!(cache.commit(), Err(CacheError::Poisoned)),
            "{name}"
        );

        cache.clear();
        cache.begin(&step).expect("as new");
        let wrong = cache_error(decoder.run(0..1, shorter.clone(), &other, &mut cache));
        assert!(
            matches!(wrong, CacheError::SpanPositions { .. }),
            "{name}: {wrong:?}"
        );
        let expected =
            "the span has the positions [Some((0, 0))], the step announced [Some((0, 1))]";
        assert_eq!(wrong.to_string(), expected);
        assert!(
            matches!(cache.commit(), Err(CacheError::Poisoned)),
            "{name}"
        );
    }
}

/// A decoder that fails to rebuild entries.
struct FailingReplay;

impl Replay for FailingReplay {
    fn embed(&self, _: &TokenIds, _: &Positions) -> Result<Tensor<3>, CacheError> {
        Err(CacheError::NoEmbedding)
    }

    fn project(&self, _: Tensor<3>, _: &Positions) -> Result<Projection, CacheError> {
        Err(CacheError::NoEmbedding)
    }

    fn forward(
        &self,
        _: Tensor<3>,
        _: &Positions,
        _: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        Err(CacheError::NoEmbedding)
    }

    fn rotate(&self, _: Tensor<4>, _: &Positions, _: &Positions) -> Result<Tensor<4>, CacheError> {
        Err(CacheError::NoEmbedding)
    }
}

#[test]
fn a_failed_replay_fails_the_step() {
    let decoder = tiny(2);
    for (name, mut cache) in backends(&decoder)
        .into_iter()
        .filter(|(name, _)| name.starts_with("Residual"))
    {
        feed(&decoder, &mut cache, &tokens(1, 20)[..]);
        let step = Step::new(vec![vec![4]].into(), &[20]).expect("a token");
        cache.begin(&step).expect("a valid step");
        let zeros = Tensor::<4>::zeros([1, 2, 1, 16], decoder.device());
        let (residual, projection) = (
            Tensor::<3>::zeros([1, 1, 64], decoder.device()),
            Projection {
                keys: zeros.clone(),
                values: zeros,
            },
        );
        let span = Span::new(step.positions(), &residual, &projection, &FailingReplay);
        let failed = cache.keys_values(LayerIndex::new(0), span);
        assert!(matches!(failed, Err(CacheError::NoEmbedding)), "{name}");
        let next = cache.keys_values(LayerIndex::new(1), span);
        assert!(matches!(next, Err(CacheError::Poisoned)), "{name}");
        assert!(
            matches!(cache.commit(), Err(CacheError::Poisoned)),
            "{name}"
        );
        assert!(
            matches!(cache.begin(&step), Err(CacheError::Poisoned)),
            "{name}"
        );
    }
}

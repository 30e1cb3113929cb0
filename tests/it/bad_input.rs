//! Bad calls: each its own typed error, and a cache that is as it was.

use crate::support::CacheExt as _;
use burn::tensor::{DType, Device, Tensor};
use kv_direct::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, ModelShape, Projection, Replay, Span,
        Step, TokenIds,
    },
    exact::conformance::{Conformance, KernelShapes},
    generate::{GenerateError, Generation},
    model::{BuildError, ConfigError, Decoder, DecoderConfig, ForwardError},
    policy::{FullKv, Window},
    positions::Positions,
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{backends, feed, seen, tiny, tokens};

/// Makes `call` on a cache of each backend that holds 9 tokens, checks that it is refused as
/// `expected` says, and that the cache then goes on as if nothing had been asked.
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
            "{name}: the next call works"
        );
    }
}

fn fed(
    decoder: &Decoder,
    cache: &mut dyn CacheBackend,
    tokens: impl Into<TokenIds>,
) -> ForwardError {
    decoder
        .forward(tokens.into(), cache)
        .expect_err("a bad call")
}

#[test]
fn an_empty_prompt() {
    let empty = |e: &ForwardError| matches!(e, ForwardError::Cache(CacheError::EmptyStep { .. }));
    refused(|decoder, cache| fed(decoder, cache, &[][..]), empty);
    refused(|decoder, cache| fed(decoder, cache, vec![]), empty);
    refused(
        |decoder, cache| fed(decoder, cache, vec![vec![], vec![]]),
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
fn a_token_outside_the_vocabulary() {
    refused(
        |decoder, cache| fed(decoder, cache, &[5, 97, 3][..]),
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
fn more_positions_than_the_model_has() {
    refused(
        |decoder, cache| fed(decoder, cache, &vec![1; 2040][..]),
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
fn another_number_of_batch_rows() {
    refused(
        |decoder, cache| fed(decoder, cache, vec![vec![1], vec![2]]),
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
fn a_gap_and_an_overlap() {
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
fn a_truncation_beyond_the_end() {
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
fn a_commit_without_a_step() {
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
fn starts_for_another_number_of_rows() {
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

#[test]
fn after_a_step_that_failed_midway_only_clear_helps() {
    let decoder = tiny(2);
    for (name, mut cache) in backends(&decoder) {
        feed(&decoder, &mut cache, &tokens(1, 9)[..]);
        let step = Step::new(vec![vec![4, 2]].into(), &[9]).expect("tokens");
        cache.begin(&step).expect("a good step");
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
        assert!(poisoned(&fed(&decoder, &mut *cache, &[1][..])), "{name}");
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
fn a_layer_out_of_order_or_a_span_of_another_step_fails_the_step() {
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

#[test]
fn residuals_of_another_shape_and_layers_there_are_not() {
    let decoder = tiny(2);
    let mut cache = FullKv::new(&decoder.shape());
    let step = Step::new(vec![vec![4, 2]].into(), &[0]).expect("tokens");
    let residual = decoder.embed(step.tokens()).expect("ids of the vocabulary");
    cache.begin(&step).expect("a fresh cache");
    let beyond = decoder.run(2..4, residual.clone(), &step, &mut cache);
    assert!(
        matches!(beyond, Err(ForwardError::Layers { layers: 3, .. })),
        "{beyond:?}"
    );
    let short = decoder.run(0..3, residual.clone().slice_dim(1, 0..1), &step, &mut cache);
    let expected = "the residual has shape [1, 1, 64], the step asks for [1, 2, 64]";
    assert_eq!(short.expect_err("one row of two").to_string(), expected);
    decoder
        .run(0..3, residual, &step, &mut cache)
        .expect("nothing has happened yet");
}

/// A decoder that fails to rebuild rows.
struct FailingReplay;

impl Replay for FailingReplay {
    fn embed(&self, _: &TokenIds) -> Result<Tensor<3>, CacheError> {
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
fn a_replay_that_fails_fails_the_step() {
    let decoder = tiny(2);
    for (name, mut cache) in backends(&decoder)
        .into_iter()
        .filter(|(name, _)| name.starts_with("Residual"))
    {
        feed(&decoder, &mut cache, &tokens(1, 20)[..]);
        let step = Step::new(vec![vec![4]].into(), &[20]).expect("a token");
        cache.begin(&step).expect("a good step");
        let rows = Tensor::<4>::zeros([1, 2, 1, 16], decoder.device());
        let (residual, projection) = (
            Tensor::<3>::zeros([1, 1, 64], decoder.device()),
            Projection {
                keys: rows.clone(),
                values: rows,
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

#[test]
fn rows_of_another_dtype() {
    let decoder = tiny(2);
    let mut shape = decoder.shape();
    shape.dtype = DType::F16;
    let error = fed(&decoder, &mut FullKv::new(&shape), &[1, 2][..]);
    assert_eq!(error.to_string(), "keys are F32, expected F16");
}

#[test]
fn rows_of_another_shape() {
    let (two, four) = (tiny(2), tiny(4));
    let mut cache = FullKv::new(&two.shape());
    let error = fed(&four, &mut cache, &[1, 2][..]);
    let expected = "keys have shape [1, 4, 2, 16], expected [1, 2, 2, 16]";
    assert_eq!(error.to_string(), expected);
    assert!(matches!(
        error,
        ForwardError::Cache(CacheError::Shape { what: "keys", .. })
    ));
}

#[test]
fn budgets_that_cannot_work() {
    let shape = tiny(2).shape();
    assert!(matches!(
        Window::new(&shape, 0),
        Err(CacheError::Budget {
            found: 0,
            smallest: 1
        })
    ));
}

#[test]
fn residuals_that_save_nothing_are_refused_with_both_figures() {
    let decoder = tiny(1);
    let config = ResidualConfig::new(Plan::residuals(&decoder.shape()).with_hot(8));
    let refused = ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config.clone());
    assert_eq!(
        refused
            .expect_err("64 wide residuals against 2 · 16")
            .to_string(),
        "the plan holds 768 bytes a token, the keys and values it replaces 384: nothing is saved"
    );
    assert!(
        ResidualCheckpoint::new(
            &decoder.shape(),
            decoder.conformance(),
            config.even_if_larger()
        )
        .is_ok()
    );
    let mha = tiny(4);
    let config = Plan::residuals(&mha.shape()).with_hot(8);
    assert!(
        ResidualCheckpoint::new(&mha.shape(), mha.conformance(), config).is_ok(),
        "half the bytes"
    );
}

#[test]
fn a_probe_of_another_model_is_no_proof() {
    let (two, four) = (tiny(2), tiny(4));
    let plan = Plan::tokens(&two.shape()).with_hot(8);
    let refused = ResidualCheckpoint::new(&two.shape(), four.conformance(), plan);
    assert!(matches!(refused, Err(CacheError::Conformance { .. })));
    let text = refused.expect_err("other shapes").to_string();
    assert!(
        text.contains("is about 4 heads on 4 of 16")
            && text.contains("the model is 4 heads on 2 of 16")
    );
}

#[test]
fn sizes_of_nothing_are_refused_and_the_largest_budgets_are_not() {
    let decoder = tiny(2);
    let mut shape = decoder.shape();
    shape.kernels.kv_heads = 0;
    let plan = Plan::tokens(&shape).with_hot(8);
    let refused = ResidualCheckpoint::new(&shape, decoder.conformance(), plan);
    assert!(matches!(
        refused,
        Err(CacheError::ModelShape {
            what: "kv_heads",
            found: 0
        })
    ));
    let all = usize::MAX;
    let config = Plan::tokens(&decoder.shape()).with_hot(all);
    let mut caches: [Box<dyn CacheBackend>; 2] = [
        Box::new(Window::new(&decoder.shape(), all).expect("a budget")),
        Box::new(
            ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config)
                .expect("a budget"),
        ),
    ];
    for cache in &mut caches {
        feed(&decoder, cache, &tokens(1, 9)[..]);
        feed(&decoder, cache, &tokens(2, 1)[..]);
        assert_eq!(cache.cached(LayerIndex::new(0)).sequence(0)[0].len(), 10);
    }
}

#[test]
fn dtypes_the_kernels_do_not_keep_bits_in_are_reported_not_panicked_about() {
    let shape = tiny(2).shape();
    let found = Conformance::probe(&shape.kernels, &Device::flex(), DType::F16);
    assert!(
        !found.is_exact(),
        "one row alone is summed in half precision"
    );
    let brain = Conformance::probe(&shape.kernels, &Device::flex(), DType::BF16);
    assert!(!brain.checks().is_empty());
}

/// One column is the shape in which the kernels do not keep bits: a vocabulary of one token.
#[test]
fn a_device_that_fails_the_probe_is_refused_and_what_failed_is_named() {
    let mut shapes = KernelShapes::new(4, 2, 16);
    shapes.linears.push([600, 1]);
    let decoder = tiny(2);
    let found = Conformance::probe(&shapes, decoder.device(), DType::F32);
    assert!(!found.is_exact());
    let mut shape = ModelShape::new(3, 64, DType::F32, shapes);
    shape.windows = vec![None; 3];
    let config = ResidualConfig::new(Plan::tokens(&shape).with_hot(8));
    let config = config.with_certified_eviction(false);
    let refused = ResidualCheckpoint::new(&shape, &found, config);
    let error = refused.expect_err("not exact").to_string();
    assert!(error.contains("Linear [600, 1] in calls of"), "{error}");
}

#[test]
fn keys_values_that_do_not_fit_one_another() {
    let device = Device::flex();
    let keys = |slots| Tensor::<4>::zeros([1, 2, 4, slots], &device);
    let values = |slots| Tensor::<4>::zeros([1, 2, slots, 4], &device);
    let positions = |slots| Positions::shared(&[vec![0; slots]]);
    let what = |refused: Result<KeysValues, CacheError>| match refused {
        Err(CacheError::Shape { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        what(KeysValues::new(keys(500), values(500), positions(500))),
        "keys"
    );
    assert_eq!(
        what(KeysValues::new(keys(512), values(1024), positions(512))),
        "values"
    );
    assert_eq!(
        what(KeysValues::new(keys(512), values(512), positions(511))),
        "positions of the slots"
    );
    assert!(KeysValues::new(keys(512), values(512), positions(512)).is_ok());
}

#[test]
fn logits_that_are_not_finite_are_no_token() {
    let decoder = Decoder::from_weights(
        DecoderConfig::new(97, 64, 1, 4, 2),
        &Device::flex(),
        |name, shape| {
            let weight = if name == "final_norm" { f32::NAN } else { 0.5 };
            Ok::<_, std::convert::Infallible>(vec![weight; shape.iter().product()])
        },
    )
    .expect("a good configuration");
    let mut cache = FullKv::new(&decoder.shape());
    let next = Generation::new(&decoder, &mut cache, &[1])
        .expect("a prompt")
        .next();
    assert!(
        matches!(next, Some(Err(GenerateError::NotFinite { position: 1 }))),
        "{next:?}"
    );
}

#[test]
fn a_source_of_too_few_or_too_many_elements_is_refused() {
    let config = DecoderConfig::new(97, 64, 2, 4, 2);
    let build = |wrong: &str, more: isize| {
        let built = Decoder::from_weights(config.clone(), &Device::flex(), |name, shape| {
            let length = shape.iter().product::<usize>();
            let more = if name == wrong { more } else { 0 };
            let length = length.checked_add_signed(more).expect("a length");
            Ok::<_, std::convert::Infallible>(vec![0.5; length])
        });
        built.map(|_| ()).expect_err("a wrong number of elements")
    };
    for (wrong, size) in config.weights().expect("a good configuration") {
        let size: usize = size.iter().product();
        for more in [-1, 1, 70, -(size.cast_signed())] {
            let error = build(&wrong, more);
            let expected = size.checked_add_signed(more).expect("a length");
            assert!(
                matches!(&error, BuildError::Elements { name, found, .. }
                    if *name == wrong && *found == expected),
                "{error}"
            );
        }
    }
    let endless = Decoder::from_weights(config, &Device::flex(), |_, _| {
        Ok::<_, std::convert::Infallible>(std::iter::repeat(0.5))
    });
    assert!(matches!(endless, Err(BuildError::Elements { .. })));
}

#[test]
fn configurations_that_do_not_fit() {
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    config.head_dim = 15;
    assert_eq!(
        config.validate(),
        Err(ConfigError::OddHead { head_dim: 15 })
    );
    assert_eq!(
        DecoderConfig::new(97, 64, 0, 4, 2).validate(),
        Err(ConfigError::Zero { field: "layers" })
    );
    assert_eq!(
        DecoderConfig::new(97, 64, 3, 0, 2).validate(),
        Err(ConfigError::Zero { field: "heads" })
    );
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    config.final_softcap = Some(0.0);
    let expected = ConfigError::NotPositive {
        field: "final_softcap",
        value: 0.0,
    };
    assert_eq!(config.validate(), Err(expected));
}

#[test]
fn errors_and_caches_can_cross_threads() {
    fn ok<T: Send + Sync + 'static>() {}
    fn send<T: Send>() {}
    ok::<CacheError>();
    ok::<ForwardError>();
    ok::<GenerateError>();
    ok::<kv_direct::pretrained::LoadError>();
    ok::<Decoder>();
    send::<Box<dyn CacheBackend>>();
    send::<FullKv>();
    send::<Window>();
    send::<ResidualCheckpoint>();
}

//! Plans, probes and sizes that a `ResidualCheckpoint` refuses when it is made.

use burn::tensor::DType;
use kv_direct::{
    cache::{CacheBackend, CacheError, LayerIndex, ModelShape},
    exact::{Conformance, KernelShapes},
    model::DecoderConfig,
    policy::Window,
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{
    caches::checkpoint,
    feed::feed,
    models::{random_decoder, tiny},
    random::tokens,
};

#[test]
fn residuals_that_save_nothing_are_refused_with_both_sizes() {
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
fn a_probe_of_another_model_is_refused() {
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
fn zero_sizes_are_refused_and_the_largest_budgets_accepted() {
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
        Box::new(checkpoint(&decoder, config)),
    ];
    for cache in &mut caches {
        feed(&decoder, cache, &tokens(1, 9)[..]);
        feed(&decoder, cache, &tokens(2, 1)[..]);
        assert_eq!(cache.cached(LayerIndex::new(0)).sequence(0)[0].len(), 10);
    }
}

/// With one column the kernels do not repeat bits: a vocabulary of one token.
#[test]
fn a_device_that_fails_the_probe_is_refused_with_the_check() {
    // In half precision, stock kernels run.
    let mut shapes = KernelShapes::new(4, 4, 64);
    shapes.linears = vec![[520, 256], [520, 1_200], [600, 520]];
    let decoder = tiny(2);
    let found = Conformance::probe(&shapes, decoder.device(), DType::F16);
    assert!(!found.is_exact());
    let mut shape = ModelShape::new(3, 64, DType::F16, shapes);
    shape.windows = vec![None; 3];
    let config = ResidualConfig::new(Plan::tokens(&shape).with_hot(8));
    let config = config.with_certified_eviction(false);
    let refused = ResidualCheckpoint::new(&shape, &found, config);
    let error = refused.expect_err("not exact").to_string();
    assert!(error.contains("in calls of"), "{error}");
}

#[test]
fn a_larger_plan_and_one_of_other_layers_are_refused() {
    let decoder = random_decoder(&DecoderConfig::new(97, 64, 3, 4, 2));
    let shape = decoder.shape();
    let residual_first = Plan::residual_at(&shape, 2).expect("three layers");
    let config = |plan: Plan| ResidualConfig::new(plan.with_hot(4));
    let refused = ResidualCheckpoint::new(&shape, decoder.conformance(), config(residual_first));
    // Two layers of keys and values, and a residual as wide as those of the third.
    let bytes = 3 * 2 * 32 * 4;
    assert!(
        matches!(
            refused,
            Err(CacheError::Larger { residuals, keys_values }) if residuals == bytes && keys_values == bytes
        ),
        "{refused:?}"
    );
    let other = Plan::tokens(&random_decoder(&DecoderConfig::new(97, 64, 2, 4, 2)).shape());
    let refused = ResidualCheckpoint::new(&shape, decoder.conformance(), config(other));
    assert!(
        matches!(
            refused,
            Err(CacheError::PlanLayers {
                expected: 3,
                found: 2
            })
        ),
        "{refused:?}"
    );
}

//! Where keys and values are twice as wide as the residual, `Plan::residuals` halves what is held.

use kv_direct::{
    cache::CacheBackend,
    model::DecoderConfig,
    policy::FullKv,
    residual::{Plan, ResidualConfig},
};

use crate::support::{
    caches::{CacheExt as _, checkpoint},
    feed::feed,
    models::random_decoder,
    random::tokens,
};

/// Compares bits up to 2,000 tokens, then the bytes with those of `FullKv`.
fn halves(mut config: DecoderConfig) {
    (config.intermediate, config.max_positions) = (96, 4_096);
    let decoder = random_decoder(&config);
    let shape = decoder.shape();
    assert_eq!(
        2 * shape.residuals_per_token(),
        shape.keys_values_per_token()
    );
    let config = ResidualConfig::new(Plan::residuals(&shape).with_hot(16));
    let mut cache = checkpoint(&decoder, config);
    let mut full = FullKv::new(&shape);
    for step in [&tokens(1, 1_500)[..], &tokens(2, 498), &[3], &[4]] {
        assert!(feed(&decoder, &mut cache, step) == feed(&decoder, &mut full, step));
    }
    assert_eq!(cache.length(0), 2_000);
    let [found, all] = [cache.memory(), full.memory()];
    let in_use = (found.residuals + found.keys_values) as f64 / all.keys_values as f64;
    assert!((0.50..0.51).contains(&in_use), "{in_use} without slack");
    let share = found.total() as f64 / all.total() as f64;
    assert!(share < 0.52, "{share}");
}

/// An eighth of the widths of Qwen3-0.6B: hidden 128, 16 query and 8 KV heads of 16.
#[test]
fn residuals_take_half_the_bytes_at_the_widths_of_qwen3() {
    let mut config = DecoderConfig::new(97, 128, 4, 16, 8);
    (config.head_dim, config.qk_norm) = (16, true);
    config.query_scale = 1.0 / 16f64.sqrt();
    halves(config);
}

#[test]
fn residuals_take_half_the_bytes_without_shared_heads() {
    halves(DecoderConfig::new(97, 128, 4, 4, 4));
}

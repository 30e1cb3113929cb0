//! A shape that does not say its feed-forward width has no byte budget, no cost and no plan.

use kv_direct::{
    cache::{CacheBackend, CacheError, ModelShape},
    planner::{Planner, Throughput},
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{feed::feed, models::tiny, random::tokens};

fn is_unknown<T>(result: &Result<T, CacheError>) -> bool {
    matches!(result, Err(CacheError::UnknownSize { what }) if what.starts_with("intermediate"))
}

#[test]
fn an_unknown_width_is_no_width_of_zero() {
    let decoder = tiny(2);
    let known = decoder.shape();
    let shape = ModelShape::new(
        known.layers(),
        known.hidden,
        known.dtype,
        known.kernels.clone(),
    );
    assert_eq!((shape.intermediate, shape.vocab), (None, None));

    let plan = Plan::tokens(&shape).with_hot(4);
    let new =
        |config: ResidualConfig| ResidualCheckpoint::new(&shape, decoder.conformance(), config);
    let config = ResidualConfig::new(plan.clone());
    assert!(is_unknown(&new(config.clone().with_byte_budget(64 << 20))));
    assert!(is_unknown(&plan.cost(&shape, 100)));
    assert!(is_unknown(&plan.cost_within(&shape, 100, 64 << 20)));
    let speed = "read 9e9; 64 tokens: projection 5e10, block 6e10, attention 2e10";
    let throughput: Throughput = speed.parse().expect("a throughput");
    assert!(is_unknown(&Planner::new(&shape, &throughput, 100)));
    let measured = Throughput::measure(&shape, decoder.device(), 100, |layer| decoder.at(layer));
    assert!(is_unknown(&measured));

    // Without a byte budget nothing depends on it.
    let mut cache = new(config).expect("no budget");
    feed(&decoder, &mut cache, &tokens(1, 20)[..]);
    assert_eq!(cache.lengths(), [20]);
}

#[test]
fn an_unknown_vocabulary_leaves_the_head_out_of_a_cost() {
    let known = tiny(2).shape();
    let mut unknown = known.clone();
    unknown.vocab = None;
    let plan = Plan::tokens(&known);
    let [with, without] = [&known, &unknown].map(|shape| plan.cost(shape, 100).expect("a cost"));
    let vocab = known.vocab.expect("a decoder knows it");
    assert_eq!(
        with.flops - without.flops,
        2 * (known.hidden * vocab) as u64
    );
}

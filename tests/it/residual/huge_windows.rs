//! Sliding windows near the largest integer: no sum overflows, and a byte budget is that of the text.

use std::num::NonZeroUsize;

use kv_direct::{
    cache::CacheBackend,
    model::DecoderConfig,
    planner::{Planner, Throughput},
    policy::FullKv,
    residual::{Plan, ResidualConfig},
};

use crate::support::{
    caches::checkpoint,
    feed::feed,
    models::random_decoder,
    random::{VOCAB, tokens},
};

#[test]
fn the_largest_windows_overflow_nowhere_and_keep_the_bits() {
    for less in [0, 1, 511, 512, 513, 1024] {
        let mut config = DecoderConfig::new(VOCAB, 64, 3, 4, 2);
        let window = NonZeroUsize::new(usize::MAX - less);
        (config.layers[0].window, config.layers[2].window) = (window, window);
        let decoder = random_decoder(&config);
        let shape = decoder.shape();
        let speed = "read 9e9; 64 tokens: projection 5e10, block 6e10, attention 2e10";
        let throughput: Throughput = speed.parse().expect("a throughput");
        let planner = Planner::new(&shape, &throughput, 600).expect("sizes are known");
        let budget = planner.smallest();
        assert!(
            budget < 16 << 20,
            "{budget} bytes for 600 tokens of windows of {window:?}"
        );
        let plan = planner.plan(budget).expect("the smallest that works");
        let mut ours = checkpoint(&decoder, ResidualConfig::new(plan).with_byte_budget(budget));
        let mut full = FullKv::new(&shape);
        let text = tokens(1, 600);
        for step in text[..590].chunks(300).chain(text[590..].chunks(1)) {
            assert!(
                feed(&decoder, &mut ours, step) == feed(&decoder, &mut full, step),
                "a window of {window:?}"
            );
            let held = ours.memory();
            assert!(
                held.total() + held.scratch_peak <= budget,
                "{held:?} of {budget}"
            );
        }
        ours.truncate(&[500]).expect("every length can be reached");
        full.truncate(&[500]).expect("nothing has left the windows");
        let next = &text[500..510];
        assert!(feed(&decoder, &mut ours, next) == feed(&decoder, &mut full, next));
        let cost = Plan::tokens(&shape).cost(&shape, 600).expect("a cost");
        assert!(cost.peak() < 16 << 20, "{cost}");
    }
}

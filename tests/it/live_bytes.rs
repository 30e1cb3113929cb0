//! What a cache says it holds is what the process holds.

use kv_direct::{
    cache::CacheBackend,
    model::{Decoder, DecoderConfig},
    policy::FullKv,
};

use crate::{
    allocator::{live, measure_all},
    alone::passes_alone,
    support::{feed, random, tokens},
    zoo::zoo,
};

const MIB: usize = 1 << 20;

/// 6 KiB of keys and values a token; narrow otherwise, so that little but the cache is held.
fn decoder(windows: bool) -> Decoder {
    let mut config = DecoderConfig::new(97, 32, 6, 4, 4);
    (config.head_dim, config.intermediate, config.max_positions) = (32, 32, 8192);
    if windows {
        for layer in [0, 1, 3, 4] {
            config.layers[layer].window = std::num::NonZeroUsize::new(700);
        }
    }
    random(&config)
}

fn near(found: usize, told: usize) -> bool {
    found.abs_diff(told) <= told / 10 + MIB
}

/// For a step of one token: what it held at most, and what the cache says of it.
fn step(decoder: &Decoder, cache: &mut Box<dyn CacheBackend>, what: &str, base: isize) {
    let held = cache.memory().total();
    let (_, peak, change) = measure_all(|| drop(feed(decoder, cache, &[3][..])));
    let memory = cache.memory();
    let (live, most) = (live() - base, held + peak);
    let told = memory.total() + memory.scratch_peak;
    println!("{what}: held {live}, told {memory:?}; at most {most}, told {told}; change {change}");
    assert!(
        near(live.unsigned_abs(), memory.total()),
        "{what}: {live} bytes are held, told {memory:?}"
    );
    assert!(
        near(most, told.max(held)),
        "{what}: at most {most} bytes were held, told {told}"
    );
}

#[test]
#[ignore = "counts the bytes of the whole process: the other test starts it alone"]
fn live_bytes_by_themselves() {
    for windows in [false, true] {
        let decoder = decoder(windows);
        // What kernels make for themselves once, for shapes like these, is no cache's.
        let mut full = FullKv::new(&decoder.shape());
        for call in tokens(1, 4_090).chunks(1_000) {
            feed(&decoder, &mut full, call);
        }
        for token in tokens(2, 10) {
            feed(&decoder, &mut full, &[token][..]);
        }
        drop(full);
        for index in 0..zoo(&decoder, 512).len() {
            let mut caches = zoo(&decoder, 512);
            let (name, mut cache) = caches.swap_remove(index);
            drop(caches);
            // With windows for those backends that treat them apart.
            if windows && !["full_kv", "residual", "residual parked", "window"].contains(&name) {
                continue;
            }
            let base = live();
            let ids = tokens(1, 4_000);
            for call in ids.chunks(2_000) {
                feed(&decoder, &mut cache, call);
            }
            step(&decoder, &mut cache, &format!("{name} at 4,000"), base);
            feed(&decoder, &mut cache, &tokens(2, 95)[..]);
            step(
                &decoder,
                &mut cache,
                &format!("{name} at a whole piece"),
                base,
            );
            step(&decoder, &mut cache, &format!("{name} one beyond it"), base);
            // A fork counts as its own what it shares until one of the two writes.
            let fork = cache.fork();
            feed(&decoder, &mut cache, &[3][..]);
            let (held, both) = (
                live() - base,
                cache.memory().total() + fork.memory().total(),
            );
            assert!(
                held.unsigned_abs() <= both + MIB,
                "{name} and a fork: {held} bytes, told {both}"
            );
            drop(fork);
            cache.clear();
            let left = live() - base;
            assert!(
                left.unsigned_abs() < MIB / 16,
                "{name}: {left} bytes are left after clear"
            );
            feed(&decoder, &mut cache, &tokens(3, 600)[..]);
            drop(cache);
            let left = live() - base;
            assert!(
                left.unsigned_abs() < MIB / 16,
                "{name}: {left} bytes are left after drop"
            );
        }
    }
}

#[test]
fn what_a_cache_says_is_what_the_process_holds() {
    passes_alone("live_bytes::live_bytes_by_themselves");
}

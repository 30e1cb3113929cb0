//! What a cache reports is what the process holds.

use kv_direct::{
    cache::CacheBackend,
    model::{Decoder, DecoderConfig},
    policy::FullKv,
};

use crate::support::{
    allocator::{MIB, live, measure_all, near},
    caches::zoo,
    feed::feed,
    models::{random_decoder, with_windows},
    process::passes_alone,
    random::tokens,
};

/// 6 KiB of keys and values a token; narrow otherwise, so that the cache is most of what is held.
fn decoder(windows: bool) -> Decoder {
    let mut config = DecoderConfig::new(97, 32, 6, 4, 4);
    (config.head_dim, config.intermediate, config.max_positions) = (32, 32, 8192);
    let layers: &[usize] = if windows { &[0, 1, 3, 4] } else { &[] };
    random_decoder(&with_windows(config, layers, 700))
}

/// Feeds one token. Compares the most bytes held with what the cache reports.
fn step(decoder: &Decoder, cache: &mut Box<dyn CacheBackend>, what: &str, base: isize) {
    let held = cache.memory().total();
    let (_, peak, change) = measure_all(|| drop(feed(decoder, cache, &[3][..])));
    let memory = cache.memory();
    let (live, most) = (live() - base, held + peak);
    let reported = memory.total() + memory.scratch_peak;
    println!(
        "{what}: held {live}, reported {memory:?}; at most {most}, reported {reported}; change {change}"
    );
    assert!(
        near(live.unsigned_abs(), memory.total()),
        "{what}: {live} bytes are held, reported {memory:?}"
    );
    assert!(
        near(most, reported.max(held)),
        "{what}: at most {most} bytes were held, reported {reported}"
    );
}

#[test]
#[ignore = "counts the bytes of the whole process: the other test starts it in a process of its own"]
fn measured_alone() {
    for windows in [false, true] {
        let decoder = decoder(windows);
        // Buffers that kernels make once for shapes like these do not belong to a cache.
        let mut full = FullKv::new(&decoder.shape());
        for step in tokens(1, 4_090).chunks(1_000) {
            feed(&decoder, &mut full, step);
        }
        for token in tokens(2, 10) {
            feed(&decoder, &mut full, &[token][..]);
        }
        drop(full);
        for index in 0..zoo(&decoder, 512).len() {
            let mut caches = zoo(&decoder, 512);
            let (name, mut cache) = caches.swap_remove(index);
            drop(caches);
            // With windows only for backends that treat sliding-window layers apart.
            if windows && !["full_kv", "residual", "residual parked", "window"].contains(&name) {
                continue;
            }
            let base = live();
            let ids = tokens(1, 4_000);
            for step in ids.chunks(2_000) {
                feed(&decoder, &mut cache, step);
            }
            step(&decoder, &mut cache, &format!("{name} at 4,000"), base);
            feed(&decoder, &mut cache, &tokens(2, 95)[..]);
            step(
                &decoder,
                &mut cache,
                &format!("{name} at a whole block"),
                base,
            );
            step(&decoder, &mut cache, &format!("{name} one beyond it"), base);
            // A fork reports as its own what it shares until one of the two writes.
            let fork = cache.fork();
            feed(&decoder, &mut cache, &[3][..]);
            let (held, both) = (
                live() - base,
                cache.memory().total() + fork.memory().total(),
            );
            assert!(
                held.unsigned_abs() <= both + MIB,
                "{name} and a fork: {held} bytes, reported {both}"
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
fn the_process_holds_what_the_cache_reports() {
    passes_alone(module_path!(), "measured_alone");
}

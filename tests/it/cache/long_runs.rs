//! Long runs: memory stays flat, and results do not change.

use std::fs;

use burn::tensor::Device;
use kv_direct::{
    cache::CacheBackend,
    generate::Generation,
    model::{Decoder, DecoderConfig},
    policy::Window,
    session,
};

use crate::support::{
    allocator::{MIB, live},
    caches::{CacheExt as _, zoo},
    feed::feed,
    models::random_decoder,
    process::passes_alone,
    random::tokens,
};

fn small() -> Decoder {
    let mut config = DecoderConfig::new(97, 32, 2, 4, 2);
    config.max_positions = 16_384;
    random_decoder(&config)
}

/// Resident bytes of the process, where the system reports them.
fn resident() -> Option<isize> {
    let status = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: isize = status.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

/// Runs `round` for every number below `rounds`. After a tenth of them, neither live bytes nor the resident
/// memory may grow.
fn flat(what: &str, rounds: usize, slack: isize, mut round: impl FnMut(usize)) {
    (0..rounds / 10).for_each(&mut round);
    let (held, pages) = (live(), resident());
    (rounds / 10..rounds).for_each(&mut round);
    let (now, pages_now) = (live(), resident());
    println!("{what}: {held} bytes live, then {now}; resident {pages:?}, then {pages_now:?}");
    assert!(
        (now - held).abs() <= slack,
        "{what}: {held} bytes, then {now}"
    );
    if let (Some(pages), Some(now)) = (pages, pages_now) {
        assert!(
            now - pages < 4 * MIB as isize,
            "{what}: {pages} bytes resident, then {now}"
        );
    }
}

#[test]
#[ignore = "counts the bytes of the whole process: the other test starts it in a process of its own"]
fn measured_alone() {
    let decoder = small();

    // 10,000 steps in a window, twice: a cleared cache gives the same bits again.
    let ids = tokens(1, 10_000);
    let mut cache = Window::new(&decoder.shape(), 100).expect("a budget");
    // The decoder's table of rotations grows once, to the longest text.
    for step in ids.chunks(2_000) {
        feed(&decoder, &mut cache, step);
    }
    cache.clear();
    let mut ends = Vec::new();
    for _ in 0..2 {
        let mut last = Vec::new();
        flat(
            "10,000 steps in a window",
            ids.len(),
            MIB as isize / 16,
            |step| {
                last = feed(&decoder, &mut cache, &ids[step..=step]);
            },
        );
        assert_eq!((cache.length(0), cache.lengths().len()), (10_000, 1));
        ends.push(last);
        cache.clear();
    }
    assert!(ends[0] == ends[1], "the same text twice");

    // 1,000 generations in all, each on a cache that was cleared.
    for (name, mut cache) in zoo(&decoder, 8) {
        let mut first = Vec::new();
        flat(name, 100, MIB as isize / 16, |_| {
            cache.clear();
            let prompt = tokens(3, 12);
            let generation = Generation::new(&decoder, &mut *cache, &prompt).expect("a prompt");
            let generated: Result<Vec<u32>, _> = generation.with_max_new(8).collect();
            let generated = generated.expect("ids");
            if first.is_empty() {
                first.clone_from(&generated);
            }
            assert!(generated == first, "{name}");
        });
    }

    // 200 rounds through a file, a token after each.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (path, model) = (
        folder.path().join("session.safetensors"),
        decoder.fingerprint(),
    );
    for (name, mut cache) in zoo(&decoder, 8) {
        let mut straight = cache.fork();
        feed(&decoder, &mut cache, &tokens(4, 30)[..]);
        feed(&decoder, &mut straight, &tokens(4, 30)[..]);
        flat(name, 200, MIB as isize / 2, |round| {
            session::save(&path, &cache, &model).expect("a state");
            cache.clear();
            session::load(&path, &mut cache, &model, &Device::flex()).expect("its own file");
            let next = &tokens(round as u64, 1)[..];
            let expected = feed(&decoder, &mut straight, next);
            assert!(
                feed(&decoder, &mut cache, next) == expected,
                "{name}, round {round}"
            );
        });
    }
}

#[test]
fn memory_is_flat_and_results_repeat() {
    passes_alone(module_path!(), "measured_alone");
}

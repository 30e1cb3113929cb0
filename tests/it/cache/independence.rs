//! Caches share nothing that changes, and cross threads.

use kv_direct::{
    cache::{CacheBackend, CacheError},
    generate::GenerateError,
    model::{Decoder, ForwardError},
    policy::{FullKv, Window},
    residual::ResidualCheckpoint,
};

use crate::support::{caches::backends, feed::feed, models::tiny, random::tokens};

#[test]
fn a_fork_and_its_origin_share_nothing_that_changes() {
    let decoder = tiny(2);
    let ids = tokens(6, 40);
    for (name, mut cache) in backends(&decoder) {
        feed(&decoder, &mut cache, &ids[..20]);
        let mut fork = cache.fork();
        feed(&decoder, &mut fork, &tokens(50, 20)[..]);
        let mut alone = cache.fork();
        alone.clear();
        feed(&decoder, &mut alone, &ids[..20]);
        let expected = feed(&decoder, &mut alone, &ids[20..]);
        assert!(feed(&decoder, &mut cache, &ids[20..]) == expected, "{name}");
    }
}

#[test]
fn two_caches_alternate_on_one_decoder() {
    let decoder = tiny(2);
    let (a, b) = (tokens(1, 24), tokens(2, 24));
    for ((name, mut one), (_, mut two)) in backends(&decoder).into_iter().zip(backends(&decoder)) {
        let mut alone = one.fork();
        let expected: Vec<_> = a
            .chunks(5)
            .map(|part| feed(&decoder, &mut alone, part))
            .collect();
        for (index, (part, other)) in a.chunks(5).zip(b.chunks(5)).enumerate() {
            assert!(feed(&decoder, &mut one, part) == expected[index], "{name}");
            feed(&decoder, &mut two, other);
        }
    }
}

#[test]
fn errors_decoders_and_caches_cross_threads() {
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

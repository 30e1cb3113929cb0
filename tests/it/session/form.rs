//! The form of a file: fields and tensors as documented, and the same bytes for the same content.

use std::{fs, path::Path};

use burn::tensor::Device;
use kv_direct::{
    Fingerprint,
    cache::CacheBackend,
    model::DecoderConfig,
    policy::{TokenBudget, Window},
    session,
};

use crate::support::{
    caches::zoo,
    feed::feed,
    models::{random_decoder, sliding, tiny, with_windows},
    random::tokens,
};

/// The bytes of a cache in a file.
fn saved(path: &Path, cache: &dyn CacheBackend, model: &Fingerprint) -> Vec<u8> {
    session::save(path, cache, model).expect("a state");
    fs::read(path).expect("a file")
}

#[test]
fn the_same_content_gives_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("session.safetensors");
    for decoder in [tiny(2), sliding(5)] {
        let model = decoder.fingerprint();
        for (name, mut cache) in zoo(&decoder, 8) {
            let mut other = cache.fork();
            for (count, seed) in [(0, 1), (20, 2), (1, 3), (1, 4), (3, 5), (70, 6)] {
                if count > 0 {
                    feed(
                        &decoder,
                        &mut cache,
                        vec![tokens(seed, count), tokens(9, 1)],
                    );
                }
                let once = saved(&path, &cache, &model);
                assert!(saved(&path, &cache, &model) == once, "{name}: saved twice");
                assert!(
                    saved(&path, &cache.fork(), &model) == once,
                    "{name}: a fork"
                );
                session::load(&path, &mut other, &model, &Device::flex()).expect("its own file");
                assert!(saved(&path, &other, &model) == once, "{name}: read back");
            }
        }
    }
}

/// Buffers that grew in other steps have other capacities, and their free slots hold other numbers.
#[test]
fn nothing_of_the_buffers_is_written() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("session.safetensors");
    let decoder = tiny(2);
    let model = decoder.fingerprint();
    let text = tokens(1, 90);
    for (name, mut whole) in zoo(&decoder, 1_000) {
        if name == "h2o" {
            // Its scores are sums in another order.
            continue;
        }
        feed(&decoder, &mut whole, &text[..20]);
        let mut in_steps = whole.fork();
        feed(&decoder, &mut whole, &text[20..]);
        for step in text[20..].chunks(7) {
            feed(&decoder, &mut in_steps, step);
        }
        feed(&decoder, &mut in_steps, &tokens(2, 40)[..]);
        in_steps.truncate(&[90]).expect("nothing was evicted");
        assert!(
            saved(&path, &in_steps, &model) == saved(&path, &whole, &model),
            "{name}"
        );
    }
}

/// The header, with the fingerprint and checksums cut out.
fn header(file: &[u8], model: &Fingerprint) -> String {
    let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    assert_eq!(length % 8, 0, "{length}");
    let text = std::str::from_utf8(&file[8..8 + length]).expect("JSON");
    let is_sum = |part: &str| part.len() == 16 && part.bytes().all(|b| b.is_ascii_hexdigit());
    let cut = |part| if is_sum(part) { "SUM" } else { part };
    let parts: Vec<&str> = text.trim_end_matches(' ').split('"').map(cut).collect();
    parts.join("\"").replace(&model.to_string(), "MODEL")
}

#[test]
fn the_header_is_as_documented() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("session.safetensors");
    let decoder = random_decoder(&with_windows(DecoderConfig::new(97, 16, 2, 2, 1), &[0], 5));
    let model = decoder.fingerprint();
    let quarter = TokenBudget::of_prompt(0.25).expect("a share");
    let mut cache = Window::new(&decoder.shape(), quarter).expect("a budget");
    feed(&decoder, &mut cache, &tokens(1, 3)[..]);
    let expected = concat!(
        r#"{"__metadata__":{"backend":"window","checksum":"SUM","#,
        r#""checksum.layer.0.keys.0":"SUM","checksum.layer.0.positions.0":"SUM","#,
        r#""checksum.layer.0.values.0":"SUM","checksum.layer.1.keys.0":"SUM","#,
        r#""checksum.layer.1.positions.0":"SUM","checksum.layer.1.slots.0":"SUM","#,
        r#""checksum.layer.1.values.0":"SUM","checksum.lengths":"SUM","checksum.prompts":"SUM","#,
        r#""fingerprint":"MODEL","format":"kv-direct session","model.cache_dtype":"f32","#,
        r#""model.dtype":"f32","model.head_dim":"8","model.heads":"2","model.hidden":"16","#,
        r#""model.kv_heads":"1","model.layers":"2","model.windows":"5,full","#,
        r#""option.size":"prompt*0.25","version":"2"},"#,
        r#""layer.0.positions.0":{"dtype":"U64","shape":[3],"data_offsets":[0,24]},"#,
        r#""layer.1.positions.0":{"dtype":"U64","shape":[1],"data_offsets":[24,32]},"#,
        r#""layer.1.slots.0":{"dtype":"U64","shape":[1],"data_offsets":[32,40]},"#,
        r#""lengths":{"dtype":"U64","shape":[1],"data_offsets":[40,48]},"#,
        r#""prompts":{"dtype":"U64","shape":[1],"data_offsets":[48,56]},"#,
        r#""layer.0.keys.0":{"dtype":"F32","shape":[1,3,8],"data_offsets":[56,152]},"#,
        r#""layer.0.values.0":{"dtype":"F32","shape":[1,3,8],"data_offsets":[152,248]},"#,
        r#""layer.1.keys.0":{"dtype":"F32","shape":[1,1,8],"data_offsets":[248,280]},"#,
        r#""layer.1.values.0":{"dtype":"F32","shape":[1,1,8],"data_offsets":[280,312]}}"#,
    );
    assert_eq!(header(&saved(&path, &cache, &model), &model), expected);
}

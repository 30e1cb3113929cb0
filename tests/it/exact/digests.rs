//! The logits of small decoders have the bits of `docs/exactness.md`, whatever vector instructions and threads compute
//! them.

use std::{env, num::NonZeroUsize, path::Path};

use burn::tensor::Device;
use kv_direct::{
    exact::SimdLevel,
    model::{Decoder, DecoderConfig},
    policy::FullKv,
    session,
};
use xxhash_rust::xxh3::Xxh3;

use crate::support::{
    feed::feed,
    models::{LLAMA3, gemma, qwen2, qwen3, random_decoder, scaled},
    process::alone,
    random::tokens,
};

/// What `KV_DIRECT_SIMD` asks for. A CPU that lacks it runs the widest level it has.
const LEVELS: [&str; 3] = ["scalar", "avx2", "avx512"];

const THREADS: [&str; 4] = ["1", "2", "3", "5"];

/// A prompt across the edge of a block of 256 slots, single tokens, and a chunk.
const STEPS: [usize; 5] = [270, 1, 1, 7, 1];

/// A decoder of each family, with layers wide enough that threads share a single row.
fn families() -> [(&'static str, DecoderConfig); 5] {
    let mut capped = gemma();
    // Windows of less than a panel, and of more.
    capped.layers[2].window = NonZeroUsize::new(48);
    let mut gemma = capped.clone();
    gemma.final_softcap = None;
    let families = [
        ("llama", scaled(LLAMA3)),
        ("qwen2", qwen2()),
        ("qwen3", qwen3()),
        ("gemma3", gemma),
        ("gemma3, final soft cap", capped),
    ];
    families.map(|(name, mut config)| {
        config.intermediate = 1100;
        (name, config)
    })
}

/// The digests of each family, in fused and in separate rounding.
const DIGESTS: [(&str, u64, u64); 5] = [
    ("llama", 0x625c_277c_168e_98ce, 0x7ef8_95b8_90bf_6078),
    ("qwen2", 0xe9e0_7e9e_307b_ddc8, 0xa33d_0537_daaa_5ef0),
    ("qwen3", 0xdf2a_8dab_14c8_581c, 0xd931_b38f_7807_e8d6),
    ("gemma3", 0x9b0e_5416_5aff_d76f, 0x81a9_d8e2_cc75_2070),
    (
        "gemma3, final soft cap",
        0x72b0_faf8_4fa8_1c3c,
        0x905f_1d77_f9a3_7481,
    ),
];

#[test]
fn the_document_shows_these_digests() {
    let document = include_str!("../../../docs/exactness.md");
    for (name, fused, separate) in DIGESTS {
        let row = format!("| {name} | `{fused:016x}` | `{separate:016x}` |");
        assert!(document.lines().any(|line| line == row), "no line {row}");
    }
}

/// The digest of all logits of all steps, each as four bytes, lowest first.
fn digest(decoder: &Decoder) -> u64 {
    let (mut hash, ids) = (Xxh3::new(), tokens(9, STEPS.iter().sum()));
    let (mut cache, mut left) = (FullKv::new(&decoder.shape()), &ids[..]);
    for count in STEPS {
        let (step, rest) = left.split_at(count);
        for bits in feed(decoder, &mut cache, step) {
            hash.update(&bits.to_le_bytes());
        }
        left = rest;
    }
    hash.digest()
}

#[test]
#[ignore = "prints for a process with its own instructions and threads: another test starts it"]
fn prints_the_digests_of_this_process() {
    println!("\nlevel: {}", SimdLevel::current());
    for (name, config) in families() {
        println!("{name}: {:016x}", digest(&random_decoder(&config)));
    }
}

/// The lines that a test prints in a process of its own.
fn lines(test: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let output = alone(module_path!(), test)
        .envs(variables.iter().copied())
        .output();
    let output = output.expect("this program can be started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{test}, {variables:?}: {text}\n{errors}"
    );
    text.lines().map(str::to_owned).collect()
}

/// Checks that the process ran the level that was asked for, and tells where the CPU lacks it.
fn check_level(lines: &[String], level: &str) {
    let found = lines.iter().find_map(|line| line.strip_prefix("level: "));
    let found = found.expect("a level");
    let rank = |level: &str| LEVELS.iter().position(|&other| other == level);
    assert!(rank(found) <= rank(level), "{level} ran as {found}");
    if found != level {
        println!("this CPU has no {level}: {found} ran in its place");
    }
}

#[test]
fn logits_have_the_bits_of_the_document() {
    for level in LEVELS {
        for threads in THREADS {
            check_digests("fused", level, threads, |(_, fused, _)| fused);
        }
    }
}

#[test]
fn logits_have_the_bits_of_the_document_in_separate_rounding() {
    for (level, threads) in LEVELS.into_iter().zip(["1", "2", "3"]) {
        check_digests("separate", level, threads, |(_, _, separate)| separate);
    }
}

/// Computes the digests in a process of this rounding, with these instructions and threads.
fn check_digests(
    rounding: &str,
    level: &str,
    threads: &str,
    digest: impl Fn((&str, u64, u64)) -> u64,
) {
    let variables = [
        ("KV_DIRECT_ROUNDING", rounding),
        ("KV_DIRECT_SIMD", level),
        ("RAYON_NUM_THREADS", threads),
    ];
    let lines = lines("prints_the_digests_of_this_process", &variables);
    check_level(&lines, level);
    for row in DIGESTS {
        let line = format!("{}: {:016x}", row.0, digest(row));
        assert!(
            lines.contains(&line),
            "{variables:?}: no {line} in {lines:#?}"
        );
    }
}

const PATH: &str = "KV_DIRECT_SESSION_FILE";

/// Tokens of the prompt that the file holds, and those after it.
fn conversation() -> [Vec<u32>; 2] {
    let mut ids = tokens(10, 300);
    let rest = ids.split_off(280);
    [ids, rest]
}

fn speaker() -> Decoder {
    random_decoder(&scaled(LLAMA3))
}

#[test]
#[ignore = "writes a session file for another process: another test starts it"]
fn writes_a_session() {
    let path = env::var(PATH).expect("the test that starts it names the path");
    let (decoder, [prompt, _]) = (speaker(), conversation());
    let mut cache = FullKv::new(&decoder.shape());
    feed(&decoder, &mut cache, &prompt[..]);
    session::save(Path::new(&path), &cache, &decoder.fingerprint()).expect("a state");
    println!("\nlevel: {}", SimdLevel::current());
}

#[test]
#[ignore = "reads a session file of another process: another test starts it"]
fn continues_a_session() {
    let path = env::var(PATH).expect("the test that starts it names the path");
    let (decoder, [prompt, rest]) = (speaker(), conversation());
    let mut read = FullKv::new(&decoder.shape());
    session::load(
        Path::new(&path),
        &mut read,
        &decoder.fingerprint(),
        &Device::flex(),
    )
    .expect("a session");
    let mut own = FullKv::new(&decoder.shape());
    feed(&decoder, &mut own, &prompt[..]);
    for step in rest.chunks(3) {
        let (read, own) = (
            feed(&decoder, &mut read, step),
            feed(&decoder, &mut own, step),
        );
        assert!(read == own, "other logits than those of this process");
    }
    println!("\nlevel: {}", SimdLevel::current());
}

#[test]
fn a_session_goes_on_under_another_level_with_the_same_bits() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("session.safetensors");
    let path = path.to_str().expect("a name in UTF-8");
    let mut files = Vec::new();
    for (from, to) in [("scalar", "avx512"), ("avx512", "scalar")] {
        for (test, level) in [("writes_a_session", from), ("continues_a_session", to)] {
            check_level(
                &lines(test, &[("KV_DIRECT_SIMD", level), (PATH, path)]),
                level,
            );
        }
        files.push(std::fs::read(path).expect("a file"));
    }
    // The fields of the header are in no order.
    let tensors = |file: &[u8]| {
        let header = file.first_chunk().map(|size| u64::from_le_bytes(*size));
        file[8 + header.expect("its size") as usize..].to_vec()
    };
    assert!(
        tensors(&files[0]) == tensors(&files[1]),
        "both levels store the same bits"
    );
}

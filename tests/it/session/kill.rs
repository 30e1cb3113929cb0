//! A process that is killed while it saves leaves the old file or the new one.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::Path,
    process::Stdio,
    thread,
    time::Duration,
};

use burn::tensor::Device;
use kv_direct::{model::Decoder, policy::FullKv, session};

use crate::support::{
    caches::CacheExt as _, feed::feed, models::random_decoder, process::alone, random::tokens,
};

const PATH: &str = "KV_DIRECT_SAVES_TO";

fn decoder() -> Decoder {
    random_decoder(&kv_direct::model::DecoderConfig::new(97, 64, 2, 4, 4))
}

/// Two sessions: one of 600 tokens, and the same after one more.
fn sessions(decoder: &Decoder) -> [FullKv; 2] {
    [600, 601].map(|length| {
        let mut cache = FullKv::new(&decoder.shape());
        feed(decoder, &mut cache, &tokens(1, length)[..]);
        cache
    })
}

#[test]
#[ignore = "runs for ever: the other test starts it as a process of its own, and kills it"]
fn saves_until_it_ends() {
    let path = env::var(PATH).expect("the test that starts it names the path");
    let (decoder, path) = (decoder(), Path::new(&path));
    let (sessions, model) = (sessions(&decoder), decoder.fingerprint());
    for index in 0.. {
        session::save(path, &sessions[index % 2], &model).expect("a state that can be written");
        if index == 0 {
            println!("\nsaved");
        }
    }
}

#[test]
fn the_old_file_or_the_new_one_remains() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("session.safetensors");
    let decoder = decoder();
    let model = decoder.fingerprint();
    let expected = sessions(&decoder).map(|mut cache| feed(&decoder, &mut cache, &[5][..]));
    let mut found = [0, 0];
    for kill in 0..200_u64 {
        let mut child = alone(module_path!(), "saves_until_it_ends")
            .env(PATH, &path)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("this program can be started");
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let saved = lines.map_while(Result::ok).find(|line| line == "saved");
        assert!(saved.is_some(), "the process ended before its first save");
        // At any moment within some saves, spread by a number that shares no factor with their length.
        thread::sleep(Duration::from_micros(kill * 7_919 % 25_000));
        child.kill().expect("it runs for ever");
        child.wait().expect("it was killed");
        let mut cache = FullKv::new(&decoder.shape());
        session::load(&path, &mut cache, &model, &Device::flex()).expect("a whole file");
        let which = cache.length(0) - 600;
        found[which] += 1;
        assert!(
            feed(&decoder, &mut cache, &[5][..]) == expected[which],
            "kill {kill}"
        );
    }
    // What interrupted saves leave: whole folders, recognised by their names.
    for entry in fs::read_dir(folder.path()).expect("a folder") {
        let name = entry.expect("an entry").file_name();
        let name = name.to_string_lossy();
        let aside = name.starts_with(".kv-direct-") && name.ends_with(".tmp");
        assert!(aside || name == "session.safetensors", "{name}");
    }
    assert!(
        found.iter().all(|&times| times > 0),
        "{found:?}: never killed between two saves"
    );
}

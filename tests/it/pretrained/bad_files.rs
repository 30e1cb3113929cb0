//! Bad model folders: every error names the file and both sides.

use std::fs;

use kv_direct::pretrained::LoadError;
use safetensors::Dtype;

use crate::support::folder::{Folder, ONE};

const KEY: &str = "model.layers.1.self_attn.k_proj.weight";

#[test]
fn a_folder_without_config_or_weights_is_refused() {
    let folder = Folder::new("missing");
    fs::remove_file(folder.0.join(ONE)).expect("removed");
    assert!(matches!(folder.refused(), LoadError::NoWeights { .. }));
    fs::remove_file(folder.0.join("config.json")).expect("removed");
    let error = folder.refused();
    assert!(
        matches!(&error, LoadError::Io { path, .. } if path.ends_with("config.json")),
        "{error}"
    );
}

#[test]
fn missing_and_unexpected_tensors_are_named_all_at_once() {
    let folder = Folder::new("tensors");
    folder.weights(|mut all| {
        let key = all.remove(KEY).expect("there");
        all.remove("model.norm.weight").expect("there");
        all.insert("model.layers.1.self_attn.k_proj.bias".into(), key);
        vec![(ONE, all.into_iter().collect())]
    });
    let LoadError::Tensors {
        missing,
        unexpected,
        ..
    } = folder.refused()
    else {
        panic!("tensors")
    };
    assert_eq!(missing, [KEY, "model.norm.weight"]);
    assert_eq!(unexpected, ["model.layers.1.self_attn.k_proj.bias"]);
}

#[test]
fn a_tensor_of_another_shape_or_dtype_is_refused() {
    let folder = Folder::new("shape");
    folder.weights(|mut all| {
        all.get_mut(KEY).expect("there").shape = vec![64, 32];
        vec![(ONE, all.into_iter().collect())]
    });
    let expected = format!(
        "{KEY} in {} has shape [64, 32], the configuration asks for [32, 64]",
        folder.0.join(ONE).display()
    );
    assert_eq!(folder.refused().to_string(), expected);

    let folder = Folder::new("dtype");
    folder.weights(|mut all| {
        all.get_mut(KEY).expect("there").dtype = Dtype::I32;
        vec![(ONE, all.into_iter().collect())]
    });
    assert!(
        matches!(folder.refused(), LoadError::Dtype { tensor, found, .. } if tensor == KEY && found == "I32")
    );
}

#[test]
fn every_damage_is_refused() {
    let folder = Folder::new("damaged");
    let path = folder.0.join(ONE);
    let good = fs::read(&path).expect("there");
    let header = u64::from_le_bytes(good[..8].try_into().expect("eight")) as usize;
    let length = |found: usize| move |e: &LoadError| matches!(e, LoadError::Length { found: f, .. } if *f == found as u64);
    let refused = |bytes: &[u8], expected: &dyn Fn(&LoadError) -> bool| {
        fs::write(&path, bytes).expect("written");
        let error = folder.refused();
        assert!(expected(&error), "{error:?}");
    };
    for cut in [0, 5, 8, 8 + header / 2, 8 + header, good.len() - 1] {
        refused(&good[..cut], &length(cut));
    }
    refused(&[&good[..], &[0]].concat(), &length(good.len() + 1));
    let huge = [&u64::MAX.to_le_bytes()[..], &good[8..]].concat();
    refused(&huge, &length(good.len()));
    let mut garbled = good.clone();
    garbled[8..12].copy_from_slice(b"\xff{[!");
    let header = |e: &LoadError| matches!(e, LoadError::Header { .. });
    refused(&garbled, &header);
    // Offsets that overlap: the header's own check.
    let text = String::from_utf8(
        good[8..]
            .iter()
            .copied()
            .take_while(|&b| b != b'}')
            .collect(),
    )
    .expect("text");
    let at = text.find("data_offsets").expect("offsets");
    let mut moved = good;
    let digit = moved[8 + at..]
        .iter()
        .position(u8::is_ascii_digit)
        .expect("a digit")
        + 8
        + at;
    moved[digit] = b'9';
    refused(&moved, &header);
}

#[test]
fn files_beyond_any_model_are_not_read() {
    let folder = Folder::new("large");
    let grow = |file: &str, to: u64| {
        let file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(folder.0.join(file));
        file.expect("a file").set_len(to).expect("a sparse file");
        folder.refused()
    };
    let too_large = |error: &LoadError, file: &str, size: u64| {
        assert!(
            matches!(error, LoadError::TooLarge { path, bytes, .. }
                if path.ends_with(file) && *bytes == size),
            "{error}"
        );
    };
    let index = "model.safetensors.index.json";
    let one = folder.0.join(ONE);
    let aside = folder.0.join("aside.safetensors");
    fs::rename(&one, &aside).expect("renamed");
    too_large(&grow(index, (64 << 20) + 1), index, (64 << 20) + 1);
    fs::rename(&aside, &one).expect("renamed");
    for file in ["generation_config.json", "config.json"] {
        too_large(&grow(file, (16 << 20) + 1), file, (16 << 20) + 1);
    }
}

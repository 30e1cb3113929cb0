//! What a folder leaves open or contradicts itself in: all cases are defined, and reported.

use kv_direct::pretrained::Warning;
use serde_json::{Value, json};

use crate::support::folder::{Folder, ONE, logits};

const HEAD: &str = "lm_head.weight";

fn without_head(folder: &Folder) {
    folder.weights(|mut all| {
        all.remove(HEAD).expect("there");
        vec![(ONE, all.into_iter().collect())]
    });
}

#[test]
fn a_contradiction_about_the_tied_head_is_reported() {
    let load = |test: &str, tied: Value, stored: bool| {
        let folder = Folder::new(test);
        folder.config(|config| config["tie_word_embeddings"] = tied);
        if !stored {
            without_head(&folder);
        }
        let model = folder.load().expect("a good folder");
        (
            model.decoder.config().tied_head,
            logits(&model),
            model.warnings,
        )
    };
    let (tied, own, warnings) = load("own-head", json!(false), true);
    assert!(!tied && warnings.is_empty());
    let (tied, shared, warnings) = load("tied", json!(true), false);
    assert!(tied && warnings.is_empty() && shared != own);

    let (tied, logits, warnings) = load("ignored-head", json!(true), true);
    assert!(tied && logits == shared);
    let tensor = || HEAD.to_owned();
    assert_eq!(warnings, [Warning::HeadIgnored { tensor: tensor() }]);
    assert_eq!(
        warnings[0].to_string(),
        "lm_head.weight differs from the embedding and is ignored, since tie_word_embeddings is true"
    );

    let (tied, logits, warnings) = load("no-head", json!(false), false);
    assert!(tied && logits == shared);
    assert_eq!(warnings, [Warning::HeadAbsent { tensor: tensor() }]);
    assert_eq!(
        warnings[0].to_string(),
        "lm_head.weight is not stored, so the head is the embedding although tie_word_embeddings is false"
    );

    // Without the flag, a stored head is used, and otherwise the embedding.
    let (tied, logits, warnings) = load("no-flag", Value::Null, false);
    assert!(tied && logits == shared && warnings.is_empty());
    let (tied, logits, warnings) = load("no-flag-own", Value::Null, true);
    assert!(!tied && logits == own && warnings.is_empty());
}

#[test]
fn a_stored_copy_of_the_embedding_gives_none() {
    let folder = Folder::new("copy");
    folder.config(|config| config["tie_word_embeddings"] = json!(true));
    let copy = |last: u8, rows: usize| {
        folder.weights(|mut all| {
            let mut head = all["model.embed_tokens.weight"].clone();
            *head.data.last_mut().expect("numbers") ^= last;
            head.shape = vec![rows, head.shape.iter().product::<usize>() / rows];
            all.insert(HEAD.into(), head);
            vec![(ONE, all.into_iter().collect())]
        });
        folder.load().expect("a good folder").warnings.len()
    };
    assert_eq!(copy(0, 97), 0);
    assert_eq!(copy(1, 97), 1, "the last number differs");
    assert_eq!(copy(0, 64), 1, "the shape differs");
}

#[test]
fn an_absent_theta_is_reported() {
    let folder = Folder::new("no-theta");
    folder.config(|config| {
        config["rope_theta"] = Value::Null;
        config["rope_parameters"] = Value::Null;
    });
    let model = folder.load().expect("a good folder");
    assert_eq!(model.warnings, [Warning::DefaultTheta { theta: 10_000.0 }]);
    assert_eq!(
        model.warnings[0].to_string(),
        "rope_theta is absent and taken to be 10000"
    );
    assert_eq!(model.decoder.config().layers[0].rope.theta, 10_000.0);
}

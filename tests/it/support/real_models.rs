//! Real models: SmolLM2-135M-Instruct and Gemma 3 270M, where `KV_DIRECT_MODELS` names their folder.

use std::{env, path::PathBuf};

use burn::tensor::Device;
use kv_direct::pretrained::{Pretrained, load};
use serde::Deserialize;

#[derive(Deserialize)]
pub struct Case {
    pub kind: String,
    pub prompt: Option<String>,
    pub prompt_ids: Vec<u32>,
    pub new_ids: Vec<u32>,
    pub text: String,
    pub gaps: Vec<f32>,
}

pub const SMOLLM2: &str = "smollm2-135m-instruct";

pub const GEMMA3: &str = "gemma3-270m";

/// The folder of models. Without one, a note on stderr says that the test was skipped.
pub fn models(test: &str) -> Option<PathBuf> {
    let models = env::var_os("KV_DIRECT_MODELS").map(PathBuf::from);
    if models.is_none() {
        // Not captured: a skipped test must be seen.
        let note = format!("SKIPPED {test}: KV_DIRECT_MODELS does not name a folder of models\n");
        let _ = std::io::Write::write_all(&mut std::io::stderr(), note.as_bytes());
    }
    models
}

pub fn real(model: &str, test: &str) -> Option<Pretrained> {
    let loaded = load(models(test)?.join(model), &Device::flex());
    Some(loaded.unwrap_or_else(|error| panic!("KV_DIRECT_MODELS holds {model}: {error}")))
}

pub fn cases(model: &str) -> Vec<Case> {
    let json: serde_json::Value =
        serde_json::from_str(include_str!("../../golden/real.json")).expect("JSON");
    serde_json::from_value(json["cases"][model].clone()).expect("cases")
}

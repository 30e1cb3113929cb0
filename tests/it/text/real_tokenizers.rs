//! Tokenizers of real models, where `KV_DIRECT_MODELS` names a folder of them.

use kv_direct::text::{Message, Tokenizer};

use crate::support::{
    real_models::{Case, cases, models},
    streams::streams,
};

/// The tokenizer of a real model with the golden cases of transformers.
fn real(test: &str, model: &str) -> Option<(Tokenizer, Vec<Case>)> {
    let dir = models(test)?.join(model);
    let tokenizer = Tokenizer::from_dir(dir).expect("a model folder");
    Some((tokenizer, cases(model)))
}

/// Checks the ids of every prompt, the text of every reply, and that it streams.
fn equals_transformers(tokenizer: &Tokenizer, cases: &[Case], kinds: [usize; 2]) {
    let mut tested = [0, 0];
    for case in cases {
        let text = tokenizer.decode(&case.new_ids).expect("ids");
        assert_eq!(text, case.text);
        streams(tokenizer, &case.new_ids);
        streams(tokenizer, &case.prompt_ids);
        let Some(prompt) = &case.prompt else {
            continue;
        };
        let chat = case.kind == "chat";
        let ids = if chat {
            tokenizer.encode_chat(&[Message::new("user", prompt)], true)
        } else {
            tokenizer.encode(prompt)
        };
        assert_eq!(ids.expect("text"), case.prompt_ids, "{prompt}");
        tested[usize::from(chat)] += 1;
    }
    assert_eq!(tested, kinds, "plain prompts and chats");
}

/// Checks streams of many ids spread over the vocabulary, and of characters that fall into bytes.
fn streams_everything(tokenizer: &Tokenizer, vocab: u32) {
    let mut id = 1;
    for count in 1..200 {
        let ids: Vec<u32> = (0..count % 40)
            .map(|_| {
                id = (id * 48271_u64) % 0x7fff_ffff;
                (id % u64::from(vocab)) as u32
            })
            .collect();
        streams(tokenizer, &ids);
    }
    let rare = "👩‍👩‍👧 🦊𓀀𒀀\u{e000} 世界 ßﬁ";
    let ids = tokenizer.encode(rare).expect("text");
    assert_eq!(tokenizer.decode(&ids).expect("ids"), rare);
    for at in 0..=ids.len() {
        streams(tokenizer, &ids[..at]);
        streams(tokenizer, &ids[at..]);
    }
}

#[test]
fn smollm2_equals_transformers() {
    let Some((tokenizer, cases)) = real("smollm2_equals_transformers", "smollm2-135m-instruct")
    else {
        return;
    };
    equals_transformers(&tokenizer, &cases, [2, 1]);
    streams_everything(&tokenizer, 49152);
}

#[test]
fn gemma_equals_transformers() {
    let Some((tokenizer, cases)) = real("gemma_equals_transformers", "gemma3-270m") else {
        return;
    };
    equals_transformers(&tokenizer, &cases, [2, 0]);
    streams_everything(&tokenizer, 262_144);
    // One begin of text, whether the text or the tokenizer writes it.
    let ids = tokenizer.encode("<bos>Hi").expect("text");
    assert_eq!(ids, tokenizer.encode("Hi").expect("text"));
    assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 1);
}

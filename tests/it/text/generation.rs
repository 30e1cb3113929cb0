//! Generated text: how it ends, and how a conversation continues.

use kv_direct::{
    cache::CacheBackend,
    generate::{FinishReason, Generation, Sampling},
    model::{Decoder, DecoderConfig},
    policy::FullKv,
    text::{Chat, Message, Stops, TextError, TextGeneration, TextStream, Tokenizer},
};

use crate::support::{
    models::{random_decoder, tiny as tiny_decoder},
    tokenizer_folder::{Folder, TINY, tiny},
};

/// A decoder over the byte tokenizer's ids below 97, and ids sampled from it after a prompt.
fn sampled<'a>(
    decoder: &'a Decoder,
    cache: &'a mut FullKv,
) -> Generation<&'a Decoder, &'a mut FullKv> {
    let sampling = Sampling::new().with_temperature(1.0).expect("in range");
    let generation = Generation::new(decoder, cache, &[1, 2, 3]).expect("a prompt");
    generation
        .with_sampling(sampling.with_seed(3))
        .with_max_new(30)
}

#[test]
fn text_ends_before_a_stop_string_with_the_reason() {
    let (decoder, tokenizer) = (tiny_decoder(2), tiny());
    let mut cache = FullKv::new(&decoder.shape());
    let mut all = TextGeneration::new(sampled(&decoder, &mut cache), &tokenizer);
    let text = all.by_ref().collect::<Result<String, _>>().expect("text");
    assert_eq!(all.finish_reason(), Some(FinishReason::Length));
    assert_eq!(all.ids().len(), 30);
    assert_eq!(tokenizer.decode(all.ids()).expect("ids"), text);
    assert!(text.is_ascii() && text.len() == 30, "{text:?}");

    let stop = &text[12..15];
    let at = text.find(stop).expect("it is in there");
    cache.clear();
    let stopped = TextGeneration::new(sampled(&decoder, &mut cache), &tokenizer);
    let mut stopped = stopped.with_stop(stop).expect("not empty");
    assert_eq!(stopped.finish_reason(), None);
    let pieces: Vec<String> = stopped.by_ref().collect::<Result<_, _>>().expect("text");
    assert_eq!(pieces.concat(), text[..at]);
    assert!(pieces.iter().all(|piece| !piece.is_empty()));
    let reason = FinishReason::StopString(stop.to_owned());
    assert_eq!(stopped.finish_reason(), Some(reason));
    assert_eq!(
        stopped.ids().len(),
        at + 3,
        "nothing is generated behind it"
    );
    assert!(stopped.next().is_none());
}

/// A special token has no text, so its string stands for the token.
#[test]
fn the_string_of_a_special_token_stops_at_the_token() {
    let decoder = tiny_decoder(2);
    let mut cache = FullKv::new(&decoder.shape());
    let ids: Vec<u32> = sampled(&decoder, &mut cache)
        .collect::<Result<_, _>>()
        .expect("finite");
    let at = (4..30)
        .find(|&i| !ids[..i].contains(&ids[i]))
        .expect("a new id");
    let token = tiny().decode(&ids[at..=at]).expect("an id");
    let folder = Folder::tiny("special-stop");
    let path = folder.0.join("tokenizer.json");
    let text = std::fs::read_to_string(&path).expect("a tokenizer");
    let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    json["added_tokens"] = serde_json::json!([{
        "id": ids[at], "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    }]);
    folder.write("tokenizer.json", &json.to_string());
    let tokenizer = folder.tokenizer();
    cache.clear();
    let text = TextGeneration::new(sampled(&decoder, &mut cache), &tokenizer);
    let mut text = text.with_stop(&*token).expect("a special token");
    let shown = text.by_ref().collect::<Result<String, _>>().expect("text");
    assert_eq!(shown, tiny().decode(&ids[..at]).expect("ids"));
    assert_eq!(text.ids(), &ids[..=at]);
    assert_eq!(
        text.finish_reason(),
        Some(FinishReason::StopString(token.clone()))
    );
    cache.clear();
    let text = TextGeneration::new(sampled(&decoder, &mut cache), &tokenizer);
    let error = text
        .with_stop(format!("so {token}"))
        .expect_err("never in the text");
    assert!(matches!(error, TextError::SpecialStop { .. }), "{error}");
}

#[test]
fn the_end_of_text_adds_no_text() {
    let (decoder, tokenizer) = (tiny_decoder(2), tiny());
    let mut cache = FullKv::new(&decoder.shape());
    let ids: Vec<u32> = sampled(&decoder, &mut cache)
        .collect::<Result<_, _>>()
        .expect("finite");
    let at = (4..30)
        .find(|&i| !ids[..i].contains(&ids[i]))
        .expect("a new id");
    cache.clear();
    let eos = [ids[at]];
    let ended = sampled(&decoder, &mut cache).with_eos(&eos);
    let mut ended = TextGeneration::new(ended, &tokenizer);
    let text = ended.by_ref().collect::<Result<String, _>>().expect("text");
    assert_eq!(text, tokenizer.decode(&ids[..at]).expect("ids"));
    let reason = FinishReason::EndOfText(ids[at]);
    assert_eq!(ended.finish_reason(), Some(reason));
    assert_eq!(ended.ids(), &ids[..=at]);
}

#[test]
fn an_error_ends_generated_text_once() {
    let (decoder, tokenizer) = (tiny_decoder(2), tiny());
    let mut cache = FullKv::new(&decoder.shape());
    let generation = Generation::new(&decoder, &mut cache, &[97]).expect("a prompt");
    let mut text = TextGeneration::new(generation, &tokenizer);
    let error = text.next().expect("one item");
    assert!(matches!(error, Err(TextError::Generate(_))), "{error:?}");
    assert!(text.next().is_none());
    assert_eq!(text.finish_reason(), None);
    // A generation that has failed before.
    let mut failed = Generation::new(&decoder, &mut cache, &[97]).expect("a prompt");
    assert!(failed.next().expect("one item").is_err());
    assert!(TextGeneration::new(failed, &tokenizer).next().is_none());
}

#[test]
fn a_conversation_continues_from_the_common_prefix() {
    let (decoder, folder) = (tiny_decoder(2), Folder::tiny("conversation"));
    let template = "{% for m in messages %}{{ m.role[0] ~ m.content }};{% endfor %}";
    folder.write("chat_template.jinja", template);
    let tokenizer = folder.tokenizer();
    let mut messages = vec![Message::new("user", "one")];
    let first = tokenizer.encode_chat(&messages, true).expect("good");
    messages.push(Message::new("assistant", "two"));
    let second = tokenizer.encode_chat(&messages, true).expect("good");
    assert_eq!(second[..first.len()], first);
    let mut cache = FullKv::new(&decoder.shape());
    let next = |cache: &mut FullKv, ids: &[u32]| {
        let generation = Generation::new(&decoder, cache, ids).expect("a prompt");
        generation.with_max_new(3).collect::<Result<Vec<_>, _>>()
    };
    let cold = next(&mut cache, &second).expect("finite");
    cache.clear();
    next(&mut cache, &first).expect("finite");
    cache.truncate(&[first.len()]).expect("back");
    let warm = next(&mut cache, &second[first.len()..]).expect("finite");
    assert_eq!(warm, cold);
}

#[test]
fn tokenizers_streams_and_errors_cross_threads() {
    fn ok<T: Send + std::fmt::Debug>() {}
    ok::<Tokenizer>();
    ok::<TextStream<'_>>();
    ok::<Stops>();
    ok::<TextGeneration<'_, &Decoder, FullKv>>();
    ok::<TextGeneration<'_, std::sync::Arc<Decoder>, Box<dyn CacheBackend>>>();
    ok::<Chat<'_>>();
    fn error<T: Send + Sync + std::error::Error + 'static>() {}
    error::<TextError>();
    error::<kv_direct::generate::SamplingError>();
}

/// The context of the model ends a text in the middle of what could be a stop string.
#[test]
fn held_back_text_is_shown_before_an_error() {
    let tokenizer = Tokenizer::from_dir(TINY).expect("the built-in tokenizer");
    let mut config = DecoderConfig::new(256, 32, 1, 2, 2);
    config.max_positions = 12;
    let decoder = random_decoder(&config);
    let text = |stop: Option<String>| {
        let mut cache = FullKv::new(&decoder.shape());
        let ids = Generation::new(&decoder, &mut cache, &[72, 105]).expect("a prompt");
        let mut pieces = TextGeneration::new(ids, &tokenizer);
        if let Some(stop) = stop {
            pieces = pieces.with_stop(stop).expect("a stop string");
        }
        let (mut shown, mut errors) = (String::new(), 0);
        for piece in pieces.by_ref() {
            match piece {
                Ok(piece) => shown += &piece,
                Err(error) => {
                    assert!(matches!(error, TextError::Generate(_)), "{error:?}");
                    errors += 1;
                }
            }
        }
        assert_eq!((errors, pieces.finish_reason()), (1, None));
        assert_eq!(shown, tokenizer.decode(pieces.ids()).expect("ids"));
        shown
    };
    let plain = text(None);
    assert!(!plain.is_empty());
    assert_eq!(text(Some(format!("{plain}!"))), plain);
}

//! Conversations that continue from what a cache holds.

use kv_direct::{
    cache::CacheBackend,
    generate::Generation,
    model::{Decoder, DecoderConfig},
    policy::{FullKv, H2o, H2oConfig},
    text::{Chat, Message, TextGeneration, Tokenizer},
};

use crate::support::{caches::CacheExt as _, models::random_decoder, tokenizer_folder::Folder};

/// One for all bytes.
fn decoder() -> Decoder {
    random_decoder(&DecoderConfig::new(256, 64, 2, 4, 2))
}

const PLAIN: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

/// Leaves out earlier replies.
const FORGETFUL: &str =
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }};{% endif %}{% endfor %}";

fn tokenizer(name: &str, template: &str) -> Tokenizer {
    let folder = Folder::tiny(name);
    folder.write("chat_template.jinja", template);
    folder.tokenizer()
}

/// One turn of `new` ids. Returns the ids that the prompt processed.
fn turn<C: CacheBackend>(
    chat: &mut Chat<'_>,
    cache: &mut C,
    tokenizer: &Tokenizer,
    new: usize,
) -> Vec<u32> {
    let decoder = self::decoder();
    let prompt = chat.prompt(cache).expect("a prompt");
    let before = cache.lengths().first().copied().unwrap_or(0);
    assert_eq!(
        before + prompt.len(),
        chat.ids().len(),
        "the cache holds the rest"
    );
    let ids = Generation::new(&decoder, &mut *cache, &prompt).expect("a prompt");
    let mut reply = TextGeneration::new(ids.with_max_new(new), tokenizer);
    let text: String = reply.by_ref().collect::<Result<_, _>>().expect("text");
    chat.push_reply(text, reply.ids()).expect("ids");
    prompt
}

#[test]
fn a_turn_processes_what_the_template_adds() {
    let tokenizer = tokenizer("chat-plain", PLAIN);
    let mut cache = FullKv::new(&decoder().shape());
    let mut chat = Chat::new(&tokenizer);
    chat.push(Message::new("system", "be brief"));
    chat.push(Message::new("user", "one"));
    turn(&mut chat, &mut cache, &tokenizer, 5);
    let said = chat.ids().to_vec();
    let reply = chat.messages()[2].content.clone();
    chat.push(Message::new("user", "two"));
    let prompt = turn(&mut chat, &mut cache, &tokenizer, 5);
    let rest = tokenizer
        .encode_plain("\nuser: two\nassistant: ")
        .expect("ids");
    let added = [&said[said.len() - 1..], &rest].concat();
    // Where the reply is text, its ids stay. Otherwise it is encoded anew, from its first id that differs.
    match tokenizer.decode(&said).expect("ids").ends_with(&reply) {
        true => assert_eq!(prompt, added),
        false => assert!(prompt.len() >= rest.len()),
    }
    // The cache has the bits of one that processed all of it at once.
    let (decoder, ids) = (self::decoder(), chat.ids().to_vec());
    let processed = cache.length(0);
    let mut fresh = FullKv::new(&decoder.shape());
    decoder
        .forward(&ids[..processed], &mut fresh)
        .expect("it fits");
    let next = |cache: &mut FullKv| {
        let logits = decoder
            .forward(&ids[processed - 1..processed], cache)
            .expect("it fits");
        logits.into_data()
    };
    assert_eq!(next(&mut cache), next(&mut fresh));
}

#[test]
fn a_template_that_changes_earlier_text_costs_what_comes_after() {
    let tokenizer = tokenizer("chat-forgetful", FORGETFUL);
    let mut cache = FullKv::new(&decoder().shape());
    let mut chat = Chat::new(&tokenizer);
    for (text, expected) in [("one", "one;"), ("two", "two;"), ("three", "three;")] {
        chat.push(Message::new("user", text));
        let prompt = turn(&mut chat, &mut cache, &tokenizer, 4);
        assert_eq!(tokenizer.decode(&prompt).expect("ids"), expected);
    }
}

#[test]
fn a_cache_that_cannot_be_truncated_starts_anew() {
    let tokenizer = tokenizer("chat-lossy", FORGETFUL);
    let shape = decoder().shape();
    let mut cache = H2o::new(&shape, H2oConfig::new(8, 4)).expect("a budget");
    let mut chat = Chat::new(&tokenizer);
    for text in ["a longer question", "another one"] {
        chat.push(Message::new("user", text));
        turn(&mut chat, &mut cache, &tokenizer, 4);
    }
    let ids = tokenizer
        .encode_plain("a longer question;another one;")
        .expect("ids");
    assert_eq!(chat.ids()[..ids.len()], ids);
}

#[test]
fn ids_beyond_a_stop_string_are_dropped() {
    let tokenizer = tokenizer("chat-stop", PLAIN);
    let mut chat = Chat::new(&tokenizer);
    let mut cache = FullKv::new(&decoder().shape());
    chat.push(Message::new("user", "one"));
    chat.prompt(&mut cache).expect("a prompt");
    let before = chat.ids().len();
    let ids = tokenizer.encode_plain("so STOP and more").expect("ids");
    chat.push_reply("so ", &ids).expect("ids");
    assert_eq!(chat.ids().len(), before);
    chat.push(Message::new("user", "two"));
    chat.prompt(&mut cache).expect("a prompt");
    let text = tokenizer.decode(chat.ids()).expect("ids");
    assert_eq!(text, "user: one\nassistant: so \nuser: two\nassistant: ");
}

//! The pieces that a stream of ids gives.

use kv_direct::text::Tokenizer;

/// The pieces of a stream, its end included.
pub fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream();
    let pushed = ids.iter().map(|&id| stream.push(id).expect("a good id"));
    let mut pieces: Vec<String> = pushed.collect();
    pieces.push(stream.finish().expect("an end"));
    assert_eq!(stream.finish().expect("another end"), "", "it begins anew");
    pieces
}

/// Checks that the pieces together are the text. Only its end may be a broken character.
pub fn streams(tokenizer: &Tokenizer, ids: &[u32]) {
    let text = tokenizer.decode(ids).expect("good ids");
    assert_eq!(pieces(tokenizer, ids).concat(), text, "{ids:?}");
}

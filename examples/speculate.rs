//! Greedy decoding with drafts from the text itself (prompt lookup decoding, Saxena 2023). What followed the
//! last tokens earlier is the draft. One step feeds it with the newest token. Tokens that greedy decoding also
//! chooses are accepted.
//!
//! `cargo run --example speculate` on the small built-in model, or
//! `cargo run --release --example speculate -- --model DIR --chat --prompt "Repeat: ..." --cache residual`.

mod common;
#[path = "common/kind.rs"]
mod kind;

use std::{path::PathBuf, time::Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use kind::Kind;
use kv_direct::{
    cache::{CacheBackend, Draft},
    generate::{Generation, argmax},
    model::{Decoder, Input},
    pretrained::Pretrained,
    text::{Message, Tokenizer},
};

/// Greedy decoding with drafts from the text itself, against greedy decoding without.
#[derive(Parser)]
struct Args {
    /// Folder with config.json, safetensors and tokenizer.json.
    #[arg(long, default_value = common::BUILT_IN)]
    model: PathBuf,
    /// Text to go on from.
    #[arg(long, default_value = "a rose is a rose is a rose is a rose")]
    prompt: String,
    /// Puts the prompt into the folder's chat template.
    #[arg(long)]
    chat: bool,
    /// Tokens to generate at most.
    #[arg(long, short = 'n', default_value_t = 128)]
    sample_len: usize,
    /// Tokens that have to stand earlier in the text as well.
    #[arg(long, default_value_t = 3)]
    ngram: usize,
    /// Tokens of a draft at most.
    #[arg(long, default_value_t = 8)]
    draft: usize,
    /// Cache to decode through: full, window, streaming_llm, h2o, tova, snap_kv, residual or residuals.
    #[arg(long, default_value = "full")]
    cache: String,
    /// Entries that stay in the cache; ignored by full.
    #[arg(long, default_value_t = 128)]
    budget: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        args.sample_len > 1 && args.ngram > 0,
        "sample-len must be 2 or more, ngram 1"
    );
    let tokenizer = Tokenizer::from_dir(&args.model)?;
    let prompt = match args.chat {
        true => tokenizer.encode_chat(&[Message::new("user", &args.prompt)], true)?,
        false => tokenizer.encode(&args.prompt)?,
    };
    let model = common::load(&args.model)?;
    let plain = plain(&model, &prompt, &args)?;
    let drafting = drafting(&model, &prompt, &args)?;

    println!("{}\n", tokenizer.decode(&drafting.ids)?);
    println!("               tokens  steps  tokens/s");
    for (name, run) in [("greedy", &plain), ("with drafts", &drafting)] {
        let (tokens, steps) = (run.ids.len(), run.steps);
        // Both process the prompt in the same way, and choose the first token with it.
        let speed = (tokens - 1) as f64 / run.seconds;
        println!("{name:>12} {tokens:>8} {steps:>6} {speed:>9.1}");
    }
    let saved = plain.steps as i64 - drafting.steps as i64;
    let equal = plain.ids == drafting.ids;
    println!(
        "steps saved: {saved}, drafted: {}, accepted: {}, tokens equal: {equal}",
        drafting.drafted, drafting.accepted
    );
    let lossless = ["full", "residual", "residuals"].contains(&&*args.cache);
    ensure!(equal || !lossless, "a lossless cache gave other tokens");
    if !equal {
        println!("(what a lossy cache evicts depends on how tokens were split into steps)");
    }
    Ok(())
}

/// The results of decoding. The seconds are those after the first token.
struct Run {
    ids: Vec<u32>,
    steps: usize,
    drafted: usize,
    accepted: usize,
    seconds: f64,
}

/// One token a step.
fn plain(model: &Pretrained, prompt: &[u32], args: &Args) -> Result<Run> {
    let mut cache = cache(args, &model.decoder)?;
    let mut generation = Generation::new(&model.decoder, &mut *cache, prompt)?
        .with_eos(&model.eos)
        .with_max_new(args.sample_len);
    let first = generation.next().context("there is a first token")?;
    let start = Instant::now();
    let ids: Vec<u32> = [first]
        .into_iter()
        .chain(generation)
        .collect::<Result<_, _>>()?;
    Ok(Run {
        steps: ids.len(),
        drafted: 0,
        accepted: 0,
        seconds: start.elapsed().as_secs_f64(),
        ids,
    })
}

/// The newest token and a draft behind it in every step.
fn drafting(model: &Pretrained, prompt: &[u32], args: &Args) -> Result<Run> {
    let mut cache = cache(args, &model.decoder)?;
    let (mut steps, mut drafted, mut accepted) = (1, 0, 0);
    let mut text = prompt.to_vec();
    text.extend(choices(
        model,
        Input::from(prompt).last_only(),
        &mut *cache,
    )?);
    let start = Instant::now();
    let end = prompt.len() + args.sample_len;
    let ends =
        |text: &[u32]| text.len() == end || text.last().is_some_and(|id| model.eos.contains(id));
    while !ends(&text) {
        let held = cache.lengths().first().copied().unwrap_or(0);
        let newest = text.len() - 1;
        // A step yields one token more than its draft, and none beyond the end is wanted.
        let most = args.draft.min(end - text.len() - 1);
        let draft = lookup(&text, args.ngram, most);
        cache.begin_draft()?;
        let fed = [&text[newest..], draft].concat();
        let chosen = choices(model, Input::from(&fed[..]), &mut *cache)?;
        let agreed = draft.iter().zip(&chosen).take_while(|(a, b)| a == b);
        let agreed = agreed.count();
        cache.truncate(&[held + 1 + agreed])?;
        cache.end_draft(Draft::Accept)?;
        (steps, drafted, accepted) = (steps + 1, drafted + draft.len(), accepted + agreed);
        // The id after the last accepted token is greedy decoding's choice too.
        for &id in &chosen[..=agreed] {
            if !ends(&text) {
                text.push(id);
            }
        }
    }
    Ok(Run {
        ids: text.split_off(prompt.len()),
        steps,
        drafted,
        accepted,
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// What followed the last `ngram` tokens of a text where they stood first: `most` tokens, or fewer.
fn lookup(text: &[u32], ngram: usize, most: usize) -> &[u32] {
    let Some(last) = text.len().checked_sub(ngram) else {
        return &[];
    };
    let mut earlier = text[..text.len() - 1].windows(ngram);
    let Some(at) = earlier.position(|tokens| *tokens == text[last..]) else {
        return &[];
    };
    let follow = &text[at + ngram..];
    &follow[..most.min(follow.len())]
}

/// The id that greedy decoding chooses behind every token fed.
fn choices(model: &Pretrained, input: Input, cache: &mut dyn CacheBackend) -> Result<Vec<u32>> {
    let logits = model.decoder.forward(input, cache)?;
    let [_, _, vocab] = logits.dims();
    let logits: Vec<f32> = logits.try_into_vec_as()?;
    let rows = logits.chunks(vocab).map(argmax);
    rows.map(|id| id.context("the logits are not finite"))
        .collect()
}

/// An empty cache of the kind asked for.
fn cache(args: &Args, decoder: &Decoder) -> Result<Box<dyn CacheBackend>> {
    let kind = match &*args.cache {
        "full" => Some(Kind::Full {}),
        name => Kind::with_budget(name, args.budget),
    };
    let kind = kind.with_context(|| format!("there is no cache {}", args.cache))?;
    Ok(kind.cache(decoder)?)
}

//! Many chats on one model within one byte budget: `cargo run --example conversations` on the small
//! built-in model, `-- --model DIR` on a real one.
//!
//! Idle chats are parked, at 4 bytes a token. They resume by a prefill of their ids.
//! Each reply is compared, bit by bit, with that of the same chat run alone on `FullKv`.

#[path = "../common/bits.rs"]
mod bits;
#[path = "../common/chart.rs"]
mod chart;
mod chat;
#[path = "../common/mod.rs"]
mod common;
mod plot;
mod sessions;

use std::{path::PathBuf, str::FromStr};

use anyhow::{Context, Result, ensure};
use bits::same_bits;
use chat::{Alone, alone, from_empty};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use kv_direct::text::Tokenizer;
use sessions::Sessions;

/// Many chats on one model within one byte budget.
#[derive(Parser)]
struct Args {
    /// Folder with config.json, safetensors, tokenizer.json and a chat template.
    #[arg(long, default_value = common::BUILT_IN)]
    model: PathBuf,
    /// Chats that take turns.
    #[arg(long, default_value_t = 8)]
    chats: usize,
    /// Turns of every chat.
    #[arg(long, default_value_t = 20)]
    turns: usize,
    /// Memory for all chats together: a number of chats at their final length, as FullKv holds them, or
    /// bytes (64MiB). One chat needs scratch beside its entries while it resumes: a small share of them in
    /// a real model, more than all of them in the built-in one.
    #[arg(long, default_value = "3")]
    memory: Memory,
    /// Tokens of a reply at most.
    #[arg(long, default_value_t = 16)]
    new: usize,
    /// Prints a line for every turn as well.
    #[arg(long)]
    verbose: bool,
    /// Draws bytes over turns into this SVG file.
    #[arg(long)]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy)]
enum Memory {
    Chats(f64),
    Bytes(usize),
}

impl FromStr for Memory {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        for (unit, shift) in [("KiB", 10), ("MiB", 20), ("GiB", 30)] {
            if let Some(number) = text.strip_suffix(unit) {
                let bytes = number.parse::<usize>()?.checked_mul(1 << shift);
                return Ok(Self::Bytes(bytes.context("more bytes than there are")?));
            }
        }
        Ok(Self::Chats(text.parse()?))
    }
}

/// The results of a round: one turn of every chat.
#[derive(Default)]
pub(crate) struct Round {
    tokens: usize,
    /// Bytes of the keys and values of all chats at its end.
    keys_values: usize,
    /// Bytes of the `FullKv`s that hold them, slack included.
    full: usize,
    /// Bytes that the sessions hold after the turn that leaves most.
    held: usize,
    /// The most bytes held within it, scratch included.
    peak: usize,
    /// Chats that hold keys and values at its end.
    resident_chats: usize,
    /// Seconds of a chat that resumed: the resume alone, to the first token, and to the first token from an
    /// empty `FullKv`.
    waited: Option<[f64; 3]>,
}

pub(crate) const MIB: f64 = 1024.0 * 1024.0;

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(
        args.chats > 0 && args.turns > 0 && args.new > 0,
        "chats, turns and new must not be 0"
    );
    let tokenizer = Tokenizer::from_dir(&args.model)?;
    let mut model = common::load(&args.model)?;
    model.eos.extend(tokenizer.eos());
    let bar = ProgressBar::new(2 * (args.chats * args.turns) as u64);
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {pos}/{len} turns, {eta} left, {msg}",
    )?);

    let mut references: Vec<Vec<Alone>> = Vec::new();
    for number in 0..args.chats {
        bar.set_message(format!("chat {number} alone"));
        references.push(alone(&model, &tokenizer, number, args.turns, args.new)?);
        bar.inc(args.turns as u64);
    }
    let finals = references.iter().filter_map(|chat| chat.last());
    let largest = finals.map(|turn| turn.memory.total()).max().unwrap_or(0);
    let byte_budget = match args.memory {
        Memory::Chats(chats) => (chats * largest as f64) as usize,
        Memory::Bytes(bytes) => bytes,
    };

    let mut sessions = Sessions::new(&model, &tokenizer, args.chats, byte_budget)?;
    let mut rounds = Vec::new();
    for turn in 0..args.turns {
        let alone: Vec<&Alone> = references.iter().map(|chat| &chat[turn]).collect();
        rounds.push(round(&args, &mut sessions, turn, &alone, &bar)?);
    }
    bar.finish_and_clear();
    report(&args, &rounds, byte_budget);
    if let Some(path) = &args.plot {
        let title = format!("{} chats of {} turns", args.chats, args.turns);
        plot::draw(path, &title, &rounds, byte_budget)?;
    }
    Ok(())
}

/// A turn of every chat, each held against the same turn of the chat `alone`.
fn round(
    args: &Args,
    sessions: &mut Sessions<'_>,
    turn: usize,
    alone: &[&Alone],
    bar: &ProgressBar,
) -> Result<Round> {
    let mut round = Round {
        tokens: alone.iter().map(|turn| turn.ids.len()).sum::<usize>() / args.chats,
        keys_values: alone.iter().map(|turn| turn.memory.keys_values).sum(),
        full: alone.iter().map(|turn| turn.memory.total()).sum(),
        ..Round::default()
    };
    for (number, alone) in alone.iter().enumerate() {
        let done = sessions.turn(number, args.new, bar)?;
        ensure!(
            alone.ids == [&done.ids[..], &done.reply.ids].concat(),
            "chat {number} generates other ids in turn {turn}"
        );
        ensure!(
            same_bits(&alone.last_logits, &done.reply.last_logits),
            "chat {number} has other logits in turn {turn}"
        );
        let held = sessions.held();
        round.held = round.held.max(held);
        round.peak = round.peak.max(done.peak);
        round.resident_chats = sessions.resident_chats();
        // One chat per round: the time of a prefill without any cache.
        if let (Some(resumed), true) = (done.resumed, number == turn % args.chats) {
            let anew = from_empty(sessions.model, &done.ids, &done.reply)?;
            let [resumed, first] = [resumed, done.to_first].map(|time| time.as_secs_f64());
            round.waited = Some([resumed, first, anew]);
        }
        if args.verbose {
            let peak = done.peak;
            bar.suspend(|| {
                println!("turn {turn}, chat {number}: {held} bytes held, peak {peak}");
            });
        }
        bar.inc(1);
    }
    Ok(round)
}

fn report(args: &Args, rounds: &[Round], byte_budget: usize) {
    println!(
        "{} chats, replies of {} tokens at most, budget {:.1} MiB\n",
        args.chats,
        args.new,
        byte_budget as f64 / MIB
    );
    println!(
        "turn  tokens/chat    KV MiB  FullKv MiB  parked MiB  ratio  peak MiB  resident | resume s  to first  anew s"
    );
    for (turn, round) in rounds.iter().enumerate() {
        let bytes = [round.keys_values, round.full, round.held, round.peak];
        let [keys_values, full, held, peak] = bytes.map(|bytes| bytes as f64 / MIB);
        print!(
            "{:>4} {:>12} {keys_values:>9.1} {full:>11.1} {held:>11.1} {:>6.2} {peak:>9.1} {:>9} |",
            turn + 1,
            round.tokens,
            full / held,
            round.resident_chats,
        );
        match round.waited {
            Some([resume, first, anew]) => println!(" {resume:>8.3} {first:>9.3} {anew:>7.3}"),
            None => println!("        -         -       -"),
        }
    }
    let peak = rounds.iter().map(|round| round.peak).max().unwrap_or(0);
    println!("\npeak {peak} bytes, within the budget of {byte_budget}");
    println!("bits equal: true (all tokens, and the last logits of every turn)");
    let waited: Vec<[f64; 3]> = rounds.iter().filter_map(|round| round.waited).collect();
    if let Some([resume, first, anew]) = medians(&waited) {
        println!(
            "first token of a chat that was parked, median of {}: {first:.3} s, of which resume {resume:.3} s; with an empty FullKv {anew:.3} s",
            waited.len()
        );
    }
    print!("{LEGEND}");
}

/// The middle of each column.
fn medians(rows: &[[f64; 3]]) -> Option<[f64; 3]> {
    let column = |at: usize| {
        let mut column: Vec<f64> = rows.iter().map(|row| row[at]).collect();
        column.sort_by(f64::total_cmp);
        column.get(column.len() / 2).copied()
    };
    Some([column(0)?, column(1)?, column(2)?])
}

/// What the columns mean, and what they do not.
const LEGEND: &str = "
KV: keys and values of all chats; FullKv: what a FullKv for each chat holds. These grow by an eighth, in panels
of 32 tokens. parked: all bytes of all chats, after the turn that left most; peak: the most held within the round, with
the scratch of the active chat. resident: chats that hold keys and values at the end of the round. resume, to first
(token), anew (a prefill of the whole text with an empty FullKv, same logits): one chat of the round.
A resume is a prefill of the ids, so it costs about as much as a prefill of the whole text.
What parking saves is memory; what it promises is the same bits.
";

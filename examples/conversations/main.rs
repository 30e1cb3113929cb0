//! Many chats on one model in one budget of memory: `cargo run --example conversations` on the small
//! built-in model, `-- --model DIR` on a real one.
//!
//! Whoever is silent is parked, down to 4 bytes a token, and comes back by a prefill of the ids it kept.
//! Every answer is compared with that of the same chat run alone with everything kept, to the bit.

mod chat;
#[path = "../common/mod.rs"]
mod common;
mod plot;
mod sessions;

use std::{path::PathBuf, str::FromStr};

use anyhow::{Context, Result, ensure};
use chat::{Alone, alone, from_nothing, same_bits};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use kv_direct::text::Tokenizer;
use sessions::Sessions;

/// Many chats on one model in one budget of memory.
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
    /// bytes (64MiB). One chat needs scratch beside its rows while it comes back: a small share of them in
    /// a real model, more than all of them in the built-in one.
    #[arg(long, default_value = "3")]
    memory: Memory,
    /// Tokens of an answer at most.
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

/// What a round of turns, one of every chat, came to.
#[derive(Default)]
pub(crate) struct Round {
    tokens: usize,
    /// Bytes of keys and values that all chats have at its end, and of the `FullKv`s that hold them, which
    /// grow by whole pieces.
    rows: usize,
    full: usize,
    /// Bytes that the sessions hold after the turn that leaves most.
    resident: usize,
    /// The most bytes held within it, scratch included.
    peak: usize,
    awake: usize,
    /// Seconds of a chat that came back: the resume alone, to the first token, and to the first token
    /// from nothing.
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
    let model = common::load(&args.model)?;
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
    let budget = match args.memory {
        Memory::Chats(chats) => (chats * largest as f64) as usize,
        Memory::Bytes(bytes) => bytes,
    };

    let mut sessions = Sessions::new(&model, &tokenizer, args.chats, budget)?;
    let mut rounds = Vec::new();
    for turn in 0..args.turns {
        let alone: Vec<&Alone> = references.iter().map(|chat| &chat[turn]).collect();
        rounds.push(round(&args, &mut sessions, turn, &alone, &bar)?);
    }
    bar.finish_and_clear();
    report(&args, &rounds, budget);
    if let Some(path) = &args.plot {
        let title = format!("{} chats of {} turns", args.chats, args.turns);
        plot::draw(path, &title, &rounds, budget)?;
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
        rows: alone.iter().map(|turn| turn.memory.keys_values).sum(),
        full: alone.iter().map(|turn| turn.memory.total()).sum(),
        ..Round::default()
    };
    for (number, alone) in alone.iter().enumerate() {
        let spoken = sessions.turn(number, args.new, bar)?;
        ensure!(
            alone.ids == [&spoken.ids[..], &spoken.answer.ids].concat(),
            "chat {number} says something else in turn {turn}"
        );
        ensure!(
            same_bits(&alone.last_logits, &spoken.answer.last_logits),
            "chat {number} has other logits in turn {turn}"
        );
        let resident = sessions.resident();
        round.resident = round.resident.max(resident);
        round.peak = round.peak.max(spoken.peak);
        round.awake = sessions.awake();
        // Every chat in its turn: what it would have cost to keep nothing at all.
        if let (Some(resumed), true) = (spoken.resumed, number == turn % args.chats) {
            let anew = from_nothing(sessions.model, &spoken.ids, &spoken.answer)?;
            let [resumed, first] = [resumed, spoken.to_first].map(|time| time.as_secs_f64());
            round.waited = Some([resumed, first, anew]);
        }
        if args.verbose {
            let peak = spoken.peak;
            bar.suspend(|| {
                println!("turn {turn}, chat {number}: {resident} bytes resident, peak {peak}");
            });
        }
        bar.inc(1);
    }
    Ok(round)
}

fn report(args: &Args, rounds: &[Round], budget: usize) {
    println!(
        "{} chats, answers of {} tokens at most, budget {:.1} MiB\n",
        args.chats,
        args.new,
        budget as f64 / MIB
    );
    println!(
        "turn  tokens/chat  rows MiB  FullKv MiB  parked MiB  ratio  peak MiB  awake | resume s  to first  anew s"
    );
    for (turn, round) in rounds.iter().enumerate() {
        let bytes = [round.rows, round.full, round.resident, round.peak];
        let [rows, full, resident, peak] = bytes.map(|bytes| bytes as f64 / MIB);
        print!(
            "{:>4} {:>12} {rows:>9.1} {full:>11.1} {resident:>11.1} {:>6.2} {peak:>9.1} {:>6} |",
            turn + 1,
            round.tokens,
            full / resident,
            round.awake,
        );
        match round.waited {
            Some([resume, first, anew]) => println!(" {resume:>8.3} {first:>9.3} {anew:>7.3}"),
            None => println!("        -         -       -"),
        }
    }
    let peak = rounds.iter().map(|round| round.peak).max().unwrap_or(0);
    println!("\npeak {peak} bytes of a budget of {budget}: kept");
    println!("bits equal: true (all tokens, and the last logits of every turn)");
    let waited: Vec<[f64; 3]> = rounds.iter().filter_map(|round| round.waited).collect();
    if let Some([resume, first, anew]) = medians(&waited) {
        println!(
            "first token of a chat that was parked, median of {}: {first:.3} s, of which resume {resume:.3} s; from nothing {anew:.3} s",
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
rows: keys and values of all chats; FullKv: what caches of their own hold for them, which grow by whole
pieces of 512 tokens. parked: all chats together, everything included, after the turn that left most; peak:
the most held within the round, with the scratch of the chat at work. awake: chats that hold keys and values
at the end of the round. resume, to first (token), anew (the whole text into an empty FullKv, same logits):
one chat of the round.
A resume is a prefill of the ids that were kept, so it costs about what taking the text in anew costs.
What parking saves is memory; what it promises is the same bits.
";

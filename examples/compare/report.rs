//! A comparison as a table for people and as JSON for machines (`docs/trace.md` has the format).

use std::fmt::Write;

use serde_json::{Value, json};

use crate::measure::Measurement;

/// What was run.
pub(crate) struct Head<'a> {
    pub(crate) model: &'a str,
    pub(crate) context: usize,
    pub(crate) new: usize,
    pub(crate) prompts: usize,
}

pub(crate) fn json(head: &Head<'_>, rows: &[Measurement]) -> Value {
    let full = rows[0].ms_per_token();
    let rows: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "backend": row.cache["kind"],
                "options": options(&row.cache),
                "budget_rows": row.budget,
                "token_match": row.token_match(),
                "first_divergence": row.first_divergence,
                "teacher_forced": {
                    "max_abs_dlogit": row.forced.max_abs_dlogit,
                    "mean_kl": row.forced.mean_kl(),
                    "max_kl": row.forced.max_kl,
                    "top1": row.forced.top1(),
                },
                "bits_equal": row.bits_equal,
                "bytes": {
                    "keys_values": row.memory.keys_values,
                    "residuals": row.memory.residuals,
                    "tokens": row.memory.tokens,
                    "scores": row.memory.scores,
                    "reserved": row.memory.reserved,
                    "scratch_peak": row.memory.scratch_peak,
                    "total_peak": row.total_peak,
                    "per_old_token": row.per_old_token,
                },
                "ms_per_token": row.ms_per_token(),
                "ms_per_token_ratio": row.ms_per_token() / full,
                "perplexity": null,
            })
        })
        .collect();
    json!({
        "model": head.model, "dtype": "f32", "device": "flex", "context": head.context, "new": head.new,
        "prompts": head.prompts, "rows": rows,
    })
}

/// A cache as the command line names it.
pub(crate) fn name(cache: &Value) -> &str {
    if cache["plan"] == "residuals" {
        return "residuals";
    }
    cache["kind"].as_str().unwrap_or_default()
}

/// The fields of a cache beside its kind.
fn options(cache: &Value) -> Value {
    let mut options = cache.clone();
    if let Some(fields) = options.as_object_mut() {
        fields.remove("kind");
    }
    options
}

pub(crate) fn table(head: &Head<'_>, rows: &[Measurement]) -> String {
    let full = rows[0].ms_per_token();
    let mut out = String::new();
    let Head {
        model,
        context,
        new,
        prompts,
    } = head;
    let _ = writeln!(
        out,
        "{model}: {context} tokens of context, {new} new, {prompts} prompt(s), greedy, f32 on the CPU\n"
    );
    let _ = writeln!(
        out,
        "{:<18} {:>6} {:>6} {:>11} {:>5} | {:>11} {:>10} {:>11} {:>11} {:>9} | {:>9} {:>7}",
        "backend",
        "match%",
        "first",
        "max|dlogit|",
        "bits",
        "rows B",
        "floor B",
        "scratch",
        "peak",
        "B/old tok",
        "ms/token",
        "x full"
    );
    for row in rows {
        let budget = row
            .budget
            .map_or_else(String::new, |budget| format!(" {budget}"));
        let name = name(&row.cache).to_owned() + &budget;
        let first = row
            .first_divergence
            .map_or_else(|| "-".into(), |step| step.to_string());
        let _ = writeln!(
            out,
            "{name:<18} {:>6.1} {first:>6} {:>11.3e} {:>5} | {:>11} {:>10} {:>11} {:>11} {:>9} | {:>9.2} {:>7.2}",
            row.token_match() * 100.0,
            row.forced.max_abs_dlogit,
            if row.bits_equal { "equal" } else { "no" },
            row.memory.keys_values,
            row.memory.residuals + row.memory.tokens,
            row.memory.scratch_peak,
            row.total_peak,
            row.per_old_token,
            row.ms_per_token(),
            row.ms_per_token() / full,
        );
    }
    let _ = writeln!(
        out,
        "\nBytes at the end of the run. rows: exact keys and values; floor: token ids or residuals of older\n\
         tokens; scratch: the most a step held on top; peak: the most held at any time, growth slack included."
    );
    out
}

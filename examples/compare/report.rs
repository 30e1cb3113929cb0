//! A comparison as a table for people and as JSON for machines (`docs/trace.md` has the format).

use std::fmt::Write;

use kv_direct::exact::SimdLevel;
use serde_json::{Value, json};

use crate::measure::Measurement;

/// What was run.
pub(crate) struct Head<'a> {
    pub(crate) model: &'a str,
    pub(crate) new: usize,
    pub(crate) prompts: usize,
    /// Tokens scored behind each prompt.
    pub(crate) score: usize,
}

pub(crate) fn json(head: &Head<'_>, tables: &[Vec<Measurement>]) -> Value {
    let rows: Vec<Value> = tables
        .iter()
        .flat_map(|rows| rows.iter().map(move |row| (&rows[0], row)))
        .map(|(full, row)| {
            let full = full.ms_per_token();
            json!({
                "backend": row.cache["kind"],
                "options": options(&row.cache),
                "budget_rows": row.budget,
                "context": row.context,
                "token_match": row.token_match(),
                "token_match_spread": row.token_match_spread(),
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
                "prefill_ms": row.prefill_ms(),
                "prefill_tokens_per_s": row.prefill_rate(),
                "ms_per_token": row.ms_per_token(),
                "ms_per_token_ratio": row.ms_per_token() / full,
                "perplexity": row.perplexity(),
                "plan": row.plan.as_ref().map(|(plan, cost)| json!({
                    "keeps": plan.to_string(),
                    "hot_rows": plan.hot(),
                    "chunk": plan.chunk(),
                    "bytes_per_old_token": cost.per_token,
                    "bytes_fixed": cost.fixed,
                    "bytes_scratch": cost.scratch,
                    "flops_per_step": cost.flops,
                    "bytes_moved_per_step": cost.moved,
                })),
            })
        })
        .collect();
    json!({
        "model": head.model, "dtype": "f32", "device": "flex",
        "threads": threads(), "simd": SimdLevel::current().to_string(), "context": tables[0][0].context,
        "new": head.new, "prompts": head.prompts, "score": head.score, "rows": rows,
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
        new,
        prompts,
        score,
    } = head;
    let _ = writeln!(
        out,
        "{model}: {} tokens of context, {new} new, {prompts} prompt(s), {score} scored, greedy, f32 on the CPU, {} threads, {}\n",
        rows[0].context,
        threads(),
        SimdLevel::current(),
    );
    let _ = writeln!(
        out,
        "{:<18} {:>6} {:>5} {:>6} {:>11} {:>9} {:>9} {:>6} {:>7} {:>5} | {:>10} {:>9} {:>10} {:>10} {:>8} | {:>9} {:>8} {:>6}",
        "backend",
        "match%",
        "+-",
        "first",
        "max|dlogit|",
        "mean KL",
        "max KL",
        "top1%",
        "ppl",
        "bits",
        "KV B",
        "old B",
        "scratch",
        "peak",
        "B/old",
        "prefill/s",
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
        let spread = row
            .token_match_spread()
            .map_or_else(|| "-".into(), |spread| format!("{:.1}", spread * 100.0));
        let perplexity = row
            .perplexity()
            .map_or_else(|| "-".into(), |perplexity| format!("{perplexity:.2}"));
        let _ = writeln!(
            out,
            "{name:<18} {:>6.1} {spread:>5} {first:>6} {:>11.3e} {:>9.2e} {:>9.2e} {:>6.1} {perplexity:>7} {:>5} | {:>10} {:>9} {:>10} {:>10} {:>8} | {:>9.0} {:>8.2} {:>6.2}",
            row.token_match() * 100.0,
            row.forced.max_abs_dlogit,
            row.forced.mean_kl(),
            row.forced.max_kl,
            row.forced.top1() * 100.0,
            if row.bits_equal { "equal" } else { "no" },
            row.memory.keys_values,
            row.memory.residuals + row.memory.tokens,
            row.memory.scratch_peak,
            row.total_peak,
            row.per_old_token,
            row.prefill_rate(),
            row.ms_per_token(),
            row.ms_per_token() / full,
        );
    }
    out.push('\n');
    for row in rows {
        if let (Some((plan, cost)), Some(budget)) = (&row.plan, row.budget) {
            let _ = writeln!(out, "{} {budget}: {plan}\n  {cost}", name(&row.cache));
        }
    }
    out.push('\n');
    out
}

/// Threads of the kernels.
fn threads() -> usize {
    rayon::current_num_threads()
}

/// What the columns of a table mean.
pub(crate) const LEGEND: &str = "\
match: freely decoded tokens equal to those of full, mean and standard deviation over prompts; first: the
first step that differs. dlogit, KL (nats), top1: logits where the tokens of full are fed. ppl: perplexity
of the text's own next tokens. Bytes at the end of the run: KV: keys and values; old: token ids or residuals of
old tokens; scratch: the most that a step held in addition; peak: the most held at any time, with growth slack;
B/old: what one more token adds. prefill/s: tokens a second of the prompt, with the logits of its last token.
";

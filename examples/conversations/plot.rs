//! Bytes held over the turns, as in Figure 3 of the KV-Direct paper.

use std::path::Path;

use anyhow::Result;
use plotters::prelude::SeriesLabelPosition;

use crate::{MIB, Round, chart::Chart};

/// Draws what all chats hold after every round into an SVG file.
pub(crate) fn draw(path: &Path, title: &str, rounds: &[Round], byte_budget: usize) -> Result<()> {
    let line = |value: &dyn Fn(&Round) -> usize| -> Vec<(f64, f64)> {
        let points = rounds.iter().enumerate();
        points
            .map(|(turn, round)| ((turn + 1) as f64, value(round) as f64 / MIB))
            .collect()
    };
    let lines = vec![
        ("all chats in FullKv", line(&|round| round.full)),
        (
            "keys and values, without slack",
            line(&|round| round.keys_values),
        ),
        ("budget", line(&|_| byte_budget)),
        (
            "most within the round, scratch included",
            line(&|round| round.peak),
        ),
        (
            "parked chats, all bytes, between turns",
            line(&|round| round.held),
        ),
    ];
    let chart = Chart {
        title,
        axes: ["turns of every chat", "MiB"],
        x: 1.0..rounds.len().max(2) as f64,
        point_size: 2,
        legend: SeriesLabelPosition::UpperLeft,
    };
    chart.draw(path, lines)
}

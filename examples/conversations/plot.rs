//! Bytes held over the turns, as in Figure 3 of the KV-Direct paper.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::{MIB, Round};

/// Draws what all chats hold after every round into an SVG file.
pub(crate) fn draw(path: &Path, title: &str, rounds: &[Round], budget: usize) -> Result<()> {
    panel(path, title, rounds, budget)
        .map_err(|error| anyhow!("drawing {}: {error}", path.display()))
}

fn panel(
    path: &Path,
    title: &str,
    rounds: &[Round],
    budget: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let line = |value: &dyn Fn(&Round) -> usize| -> Vec<(f64, f64)> {
        let points = rounds.iter().enumerate();
        points
            .map(|(turn, round)| ((turn + 1) as f64, value(round) as f64 / MIB))
            .collect()
    };
    let lines = [
        ("all chats in FullKv", line(&|round| round.full)),
        (
            "their rows, without growth slack",
            line(&|round| round.rows),
        ),
        ("budget", line(&|_| budget)),
        (
            "most within the round, scratch included",
            line(&|round| round.peak),
        ),
        (
            "parked chats, all bytes, between turns",
            line(&|round| round.resident),
        ),
    ];
    let points = lines.iter().flat_map(|(_, points)| points);
    let highest = points.map(|point| point.1).fold(1e-6, f64::max);

    let root = SVGBackend::new(path, (720, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(1.0..rounds.len().max(2) as f64, 0.0..highest * 1.05)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("turns of every chat")
        .y_desc("MiB")
        .draw()?;
    for (index, (name, points)) in lines.into_iter().enumerate() {
        let colour = Palette99::pick(index).to_rgba();
        let line = LineSeries::new(points, colour.stroke_width(2)).point_size(2);
        chart.draw_series(line)?.label(name).legend(move |(x, y)| {
            PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2))
        });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(root.present()?)
}

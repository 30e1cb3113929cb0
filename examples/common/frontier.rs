//! Bytes against time of a step: as a table, and drawn.

use std::{fmt::Write, path::Path};

use anyhow::{Result, anyhow};
use kv_direct::planner::{Cost, Planner};
use kv_direct::residual::Plan;
use plotters::prelude::*;

const MIB: f64 = (1 << 20) as f64;

/// The plan of a budget.
pub(crate) struct Point {
    pub(crate) budget: usize,
    pub(crate) plan: Plan,
    pub(crate) cost: Cost,
    /// Seconds of a step.
    pub(crate) predicted: f64,
    /// The same, measured.
    pub(crate) measured: Option<f64>,
}

/// So many budgets, from the smallest that works to one for everything.
pub(crate) fn budgets(planner: &Planner<'_>, points: usize) -> Vec<usize> {
    let smallest = planner.smallest();
    let everything = planner.everything();
    let step = everything.saturating_sub(smallest) as f64 / points.saturating_sub(1).max(1) as f64;
    let between = (0..points).map(|i| smallest + (step * i as f64).ceil() as usize);
    between.collect()
}

/// One line a point; `everything` is what a step of `FullKv` takes.
pub(crate) fn table(points: &[Point], everything: Option<f64>) -> String {
    let mut out = String::from(
        "budget MiB | between | scratch | hot | calls of | predicted s | measured s | ratio | plan\n",
    );
    for point in points {
        let mib = |bytes: usize| bytes as f64 / MIB;
        let time = |time: Option<f64>| time.map_or_else(|| "-".into(), |time| format!("{time:.4}"));
        let ratio = point.measured.map_or_else(
            || "-".into(),
            |measured| format!("{:.2}", measured / point.predicted),
        );
        let _ = writeln!(
            out,
            "{:10.2} | {:7.2} | {:7.2} | {:4} | {:8} | {:11.4} | {:>10} | {ratio:>5} | {}",
            mib(point.budget),
            mib(point.cost.between()),
            mib(point.cost.scratch),
            point.plan.hot(),
            point.plan.chunk(),
            point.predicted,
            time(point.measured),
            point.plan,
        );
    }
    if let Some(time) = everything {
        let _ = writeln!(out, "FullKv: {time:.4} s a step");
    }
    out
}

/// Draws predicted and measured time over the budget into an SVG file.
pub(crate) fn draw(path: &Path, title: &str, points: &[Point]) -> Result<()> {
    panel(path, title, points).map_err(|error| anyhow!("drawing {}: {error}", path.display()))
}

fn panel(path: &Path, title: &str, points: &[Point]) -> Result<(), Box<dyn std::error::Error>> {
    let line = |value: &dyn Fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = points.iter();
        points
            .filter_map(|point| Some((point.budget as f64 / MIB, value(point)?)))
            .collect()
    };
    let lines = [
        ("predicted", line(&|point| Some(point.predicted))),
        ("measured", line(&|point| point.measured)),
    ];
    let all = || lines.iter().flat_map(|(_, points)| points);
    let widest = all().map(|point| point.0).fold(1e-6, f64::max);
    let highest = all().map(|point| point.1).fold(1e-6, f64::max);

    let root = SVGBackend::new(path, (720, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..widest * 1.02, 0.0..highest * 1.05)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("budget, MiB, scratch included")
        .y_desc("seconds a step")
        .draw()?;
    for (index, (name, points)) in lines.into_iter().enumerate() {
        let colour = Palette99::pick(index).to_rgba();
        let line = LineSeries::new(points, colour.stroke_width(2)).point_size(3);
        chart.draw_series(line)?.label(name).legend(move |(x, y)| {
            PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2))
        });
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(root.present()?)
}

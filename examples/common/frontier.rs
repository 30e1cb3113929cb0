//! Bytes against time of a step: as a table, and drawn.

use std::{fmt::Write, path::Path};

use anyhow::Result;
use kv_direct::planner::{Cost, Planner};
use kv_direct::residual::Plan;
use plotters::prelude::SeriesLabelPosition;

use crate::chart::Chart;

const MIB: f64 = (1 << 20) as f64;

/// The plan for a byte budget.
pub(crate) struct Point {
    pub(crate) budget: usize,
    pub(crate) plan: Plan,
    pub(crate) cost: Cost,
    /// Seconds of a step.
    pub(crate) predicted: f64,
    /// The same, measured.
    pub(crate) measured: Option<f64>,
}

/// `points` byte budgets, from the smallest that works to one for everything.
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
        "budget MiB | between | scratch | hot | chunk | predicted s | measured s | ratio | plan\n",
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
            "{:10.2} | {:7.2} | {:7.2} | {:4} | {:5} | {:11.4} | {:>10} | {ratio:>5} | {}",
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
    let mib = |point: &Point| point.budget as f64 / MIB;
    let line = |value: &dyn Fn(&Point) -> Option<f64>| -> Vec<(f64, f64)> {
        let points = points.iter();
        points
            .filter_map(|point| Some((mib(point), value(point)?)))
            .collect()
    };
    let lines = vec![
        ("predicted", line(&|point| Some(point.predicted))),
        ("measured", line(&|point| point.measured)),
    ];
    let widest = points.iter().map(mib).fold(1e-6, f64::max);
    let chart = Chart {
        title,
        axes: ["budget, MiB, scratch included", "seconds a step"],
        x: 0.0..widest * 1.02,
        point_size: 3,
        legend: SeriesLabelPosition::UpperRight,
    };
    chart.draw(path, lines)
}

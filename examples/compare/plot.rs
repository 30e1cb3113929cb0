//! Token match and divergence over the budget, a row of panels for each length of context.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::{
    measure::Measurement,
    report::{self, Head},
};

/// A backend's points by budget.
type Lines<'a> = BTreeMap<&'a str, Vec<(f64, f64)>>;

/// Draws the tables of a comparison into an SVG file.
pub(crate) fn draw(path: &Path, head: &Head<'_>, tables: &[Vec<Measurement>]) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| anyhow!("drawing {}: {error}", path.display());
    let size = (1000, 380 * tables.len() as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    for (panels, rows) in root.split_evenly((tables.len(), 1)).iter().zip(tables) {
        let (left, right) = panels.split_horizontally(500);
        let context = rows[0].context;
        let title = format!("{}: {context} tokens, token match %", head.model);
        let matches = lines(rows, |row| row.token_match() * 100.0);
        panel(&left, &title, &matches).map_err(|error| failed(&error))?;
        let divergence = lines(rows, |row| row.forced.mean_kl());
        panel(&right, "mean KL from full, nats", &divergence).map_err(|error| failed(&error))?;
    }
    root.present().map_err(|error| failed(&error))
}

fn lines(rows: &[Measurement], value: impl Fn(&Measurement) -> f64) -> Lines<'_> {
    let mut lines = Lines::new();
    for row in rows {
        if let Some(budget) = row.budget {
            let line = lines.entry(report::name(&row.cache)).or_default();
            line.push((budget as f64, value(row)));
        }
    }
    lines
}

fn panel<'a, DB>(
    area: &DrawingArea<DB, plotters::coord::Shift>,
    title: &str,
    lines: &Lines<'_>,
) -> Result<(), DrawingAreaErrorKind<DB::ErrorType>>
where
    DB: DrawingBackend + 'a,
{
    let points = || lines.values().flatten();
    let widest = points().map(|point| point.0).fold(1.0, f64::max);
    let highest = points().map(|point| point.1).fold(1e-6, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..widest * 1.05, 0.0..highest * 1.05)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_desc("budget, entries")
        .draw()?;
    for (index, (name, points)) in lines.iter().enumerate() {
        let colour = Palette99::pick(index).to_rgba();
        let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2)).point_size(3);
        chart.draw_series(line)?.label(*name).legend(move |(x, y)| {
            PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2))
        });
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()
}

//! A line chart as an SVG file.

use std::{ops::Range, path::Path};

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// A line: its name and its points.
pub(crate) type Line = (&'static str, Vec<(f64, f64)>);

/// What a chart shows beside its lines.
pub(crate) struct Chart<'a> {
    pub(crate) title: &'a str,
    /// What the axes show.
    pub(crate) axes: [&'a str; 2],
    pub(crate) x: Range<f64>,
    pub(crate) point_size: u32,
    pub(crate) legend: SeriesLabelPosition,
}

impl Chart<'_> {
    /// Draws the lines into an SVG file.
    pub(crate) fn draw(self, path: &Path, lines: Vec<Line>) -> Result<()> {
        self.try_draw(path, lines)
            .map_err(|error| anyhow!("drawing {}: {error}", path.display()))
    }

    fn try_draw(self, path: &Path, lines: Vec<Line>) -> Result<(), Box<dyn std::error::Error>> {
        let points = lines.iter().flat_map(|(_, points)| points);
        let highest = points.map(|point| point.1).fold(1e-6, f64::max);
        let root = SVGBackend::new(path, (720, 420)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(self.title, ("sans-serif", 16))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(52)
            .build_cartesian_2d(self.x, 0.0..highest * 1.05)?;
        let [x, y] = self.axes;
        chart
            .configure_mesh()
            .disable_mesh()
            .x_desc(x)
            .y_desc(y)
            .draw()?;
        for (index, (name, points)) in lines.into_iter().enumerate() {
            let colour = Palette99::pick(index).to_rgba();
            let line = LineSeries::new(points, colour.stroke_width(2)).point_size(self.point_size);
            chart.draw_series(line)?.label(name).legend(move |(x, y)| {
                PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2))
            });
        }
        chart
            .configure_series_labels()
            .position(self.legend)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()?;
        Ok(root.present()?)
    }
}

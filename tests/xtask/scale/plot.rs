//! The figures against the number of VMs, both in powers of ten: what grows with the number is a line of slope one.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::figures::{Figures, Measured, Step};

/// The steps that are drawn, each in its color.
const DRAWN: [(Step, RGBColor); 6] = [
    (Step::Create, BLUE),
    (Step::Update, RED),
    (Step::Templates, RGBColor(0, 140, 0)),
    (Step::Restart, RGBColor(200, 120, 0)),
    (Step::Failover, MAGENTA),
    (Step::StuckRestart, BLACK),
];

/// Draws the picture.
pub fn draw(figures: &[Figures], file: &Path) -> Result<()> {
    let area = SVGBackend::new(file, (900, 400)).into_drawing_area();
    area.fill(&WHITE)?;
    let (left, right) = area.split_horizontally(450);
    chart(&left, "CPU seconds of the manager", figures, |measured| measured.cpu_s)?;
    chart(&right, "Seconds until it is at rest", figures, |measured| measured.seconds)?;
    area.present()?;
    Ok(())
}

/// A step's figures by the number of VMs.
struct Line {
    step: Step,
    color: RGBColor,
    points: Vec<(f64, f64)>,
}

fn chart(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    figures: &[Figures],
    figure: fn(&Measured) -> f64,
) -> Result<()> {
    let lines: Vec<Line> = DRAWN
        .into_iter()
        .map(|(step, color)| {
            let of = |figures: &Figures| Some((figures.n as f64, figure(figures.of(step)?).max(0.01)));
            Line { step, color, points: figures.iter().filter_map(of).collect() }
        })
        .collect();
    let all = || lines.iter().flat_map(|line| &line.points);
    let least = |pick: fn(&(f64, f64)) -> f64| all().map(pick).fold(f64::INFINITY, f64::min);
    let most = |pick: fn(&(f64, f64)) -> f64| all().map(pick).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(
            (least(|point| point.0) * 0.9..most(|point| point.0) * 1.1).log_scale(),
            // Above the lines there is room for their names.
            (least(|point| point.1) * 0.8..most(|point| point.1) * 30.0).log_scale(),
        )
        .map_err(|error| anyhow!("{error}"))?;
    let plain = |value: &f64| format!("{value}");
    chart
        .configure_mesh()
        .x_desc("VMs")
        .x_label_formatter(&plain)
        .y_label_formatter(&plain)
        .light_line_style(WHITE)
        .draw()?;
    for Line { step, color, points } in lines {
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)).point_size(3))?
            .label(step.name())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
    }
    chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).background_style(WHITE).draw()?;
    Ok(())
}

//! Time and memory against the number of VMs, as a picture.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::Figures;

/// Draws the picture.
pub fn draw(figures: &[Figures], file: &Path) -> Result<()> {
    let area = SVGBackend::new(file, (900, 360)).into_drawing_area();
    area.fill(&WHITE)?;
    let (left, right) = area.split_horizontally(450);
    let points = |value: &dyn Fn(&Figures) -> f64| -> Vec<(f64, f64)> {
        let mut points: Vec<_> = figures.iter().map(|figures| (figures.n as f64, value(figures))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let times = [
        ("manager", points(&|figures| figures.pods_s), BLUE),
        ("raw limit", points(&|figures| figures.raw_pods_s), BLACK),
    ];
    chart(&left, "Seconds until all Pods exist", &times)?;
    let memory = [
        ("manager, at most", points(&|figures| figures.peak), BLUE),
        ("budget", points(&|figures| 20.0 + 0.025 * figures.n as f64), BLACK),
    ];
    chart(&right, "Memory in MB", &memory)?;
    area.present()?;
    Ok(())
}

type Lines<'a> = [(&'a str, Vec<(f64, f64)>, RGBColor)];

fn chart(area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>, title: &str, lines: &Lines<'_>) -> Result<()> {
    let most =
        |pick: fn(&(f64, f64)) -> f64| lines.iter().flat_map(|(_, points, _)| points).map(pick).fold(0.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..most(|point| point.0) * 1.02, 0.0..most(|point| point.1) * 1.05)
        .map_err(|error| anyhow!("{error}"))?;
    let whole = |value: &f64| format!("{value:.0}");
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("virtual VMs").x_label_formatter(&whole).y_label_formatter(&whole).light_line_style(WHITE).draw()?;
    for (name, points, color) in lines {
        let color = *color;
        chart
            .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)).point_size(3))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
    }
    chart.configure_series_labels().position(SeriesLabelPosition::UpperLeft).background_style(WHITE).draw()?;
    Ok(())
}

//! How a figure grows with the number of VMs.

/// The exponent `b` of `figure = a * n^b` by least squares over the logarithms; `None` unless there are two different numbers. A figure that is not
/// positive has no logarithm and is left out.
pub fn exponent(points: &[(f64, f64)]) -> Option<f64> {
    let logs: Vec<(f64, f64)> = points
        .iter()
        .filter(|(n, figure)| *n > 0.0 && *figure > 0.0)
        .map(|(n, figure)| (n.ln(), figure.ln()))
        .collect();
    let count = logs.len() as f64;
    let mean = |pick: fn(&(f64, f64)) -> f64| logs.iter().map(pick).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = logs.iter().map(|point| (point.0 - x).powi(2)).sum();
    let common: f64 = logs.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    (logs.len() > 1 && spread > 0.0).then(|| common / spread)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(figure: fn(f64) -> f64) -> f64 {
        exponent(&[100.0, 300.0, 1000.0].map(|n| (n, figure(n)))).unwrap()
    }

    #[test]
    fn what_grows_with_the_number_has_one_and_what_grows_with_its_square_two() {
        for (name, exponent, expected) in
            [("constant", of(|_| 7.0), 0.0), ("linear", of(|n| 3.0 * n), 1.0), ("square", of(|n| 0.01 * n * n), 2.0)]
        {
            assert!((exponent - expected).abs() < 1e-9, "{name}: {exponent}");
        }
        assert!(of(|n| n * n.ln()) > 1.1);
    }

    #[test]
    fn without_two_numbers_there_is_no_exponent() {
        assert_eq!(exponent(&[]), None);
        assert_eq!(exponent(&[(100.0, 1.0)]), None);
        assert_eq!(exponent(&[(100.0, 1.0), (100.0, 2.0)]), None);
        assert_eq!(exponent(&[(100.0, 0.0), (300.0, 5.0)]), None, "none at 100");
    }
}

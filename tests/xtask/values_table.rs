//! The table of a chart's values for its page, made from the comments in `values.yaml`.

use anyhow::{Context, Result};
use serde_json::Value;

/// The page, with the table of these values between its two marks.
pub fn into_page(page: &str, values: &str) -> Result<String> {
    const MARKS: [&str; 2] = ["<!-- values -->\n", "<!-- end of values -->\n"];
    let (before, rest) = page.split_once(MARKS[0]).context("the chart's README.md has no mark for the values")?;
    let (_, after) = rest.split_once(MARKS[1]).context("the chart's README.md has no mark for the values' end")?;
    Ok(format!("{before}{}{}{}{after}", MARKS[0], table(values)?, MARKS[1]))
}

/// The table of all values that `# --` describes, with their defaults.
fn table(text: &str) -> Result<String> {
    let values: Value = serde_yaml::from_str(text).context("reading values.yaml")?;
    let mut table = "| value | default | meaning |\n|---|---|---|\n".to_owned();
    let mut parents: Vec<(usize, &str)> = vec![];
    let mut about = None;
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        if let Some(text) = line.trim().strip_prefix("# -- ") {
            about = Some(text);
        } else if let Some((key, _)) = line.split_once(':').filter(|_| !line.trim().starts_with(['#', '-'])) {
            parents.retain(|(of_parent, _)| *of_parent < indent);
            parents.push((indent, key.trim()));
            if let Some(about) = about.take() {
                let path: Vec<&str> = parents.iter().map(|(_, key)| *key).collect();
                let default = path.iter().fold(&values, |value, key| &value[key]);
                table += &format!("| `{}` | `{default}` | {} |\n", path.join("."), about.replace('|', "\\|"));
            }
        }
    }
    Ok(table)
}

//! Findings in SARIF, the format of code scanning.

use serde_json::{Value, json};

use super::{Finding, Rule};

/// Findings as a SARIF log (<https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html>).
pub fn sarif(findings: &[Finding]) -> Value {
    let rules: Vec<Value> = Rule::ALL
        .iter()
        .map(|rule| json!({ "id": rule.name(), "shortDescription": { "text": rule.about() } }))
        .collect();
    let results: Vec<Value> = findings
        .iter()
        .map(|finding| {
            json!({
                "ruleId": finding.rule, "level": finding.severity, "message": { "text": finding.message },
                "locations": [{ "physicalLocation": {
                    "artifactLocation": { "uri": finding.file },
                    "region": { "startLine": finding.line.unwrap_or(1), "startColumn": finding.column.unwrap_or(1) },
                } }],
            })
        })
        .collect();
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0",
        "runs": [{ "tool": { "driver": { "name": "kubectl-vm", "rules": rules } }, "results": results }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_names_a_rule_that_is_described() {
        for &rule in Rule::ALL {
            let sarif = sarif(&[Finding::new("a", rule, "b".into())]);
            let run = &sarif["runs"][0];
            let result = &run["results"][0];
            let rules = run["tool"]["driver"]["rules"].as_array().unwrap();
            let described: Vec<&Value> = rules.iter().filter(|it| it["id"] == result["ruleId"]).collect();
            assert_eq!(described, [&json!({ "id": rule.name(), "shortDescription": { "text": rule.about() } })]);
            // The levels of SARIF, section 3.27.10.
            assert!(["error", "warning"].contains(&result["level"].as_str().unwrap()), "{result}");
        }
    }
}

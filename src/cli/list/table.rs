//! A table of the API server, and how it is printed. Pure.

use serde_json::Value;

/// Spaces between columns, as kubectl has them.
const GAP: usize = 3;

/// A table: the columns of the first page, the rows of all.
pub(super) struct Table {
    columns: Vec<Column>,
    pub rows: Vec<Row>,
}

struct Column {
    title: String,
    /// Only for the wide table.
    is_extra: bool,
}

pub(super) struct Row {
    namespace: String,
    cells: Vec<String>,
    /// The version of the object, from which a watch goes on.
    pub version: Option<String>,
}

impl Table {
    /// Reads the answers of the API server: pages of a list, or one for each object.
    ///
    /// # Errors
    /// If an answer is no table.
    pub fn from_pages(pages: &[Value]) -> Result<Self, String> {
        let mut table = Self { columns: Vec::new(), rows: Vec::new() };
        for page in pages {
            if page["kind"] != "Table" {
                return Err(format!(
                    "the API server answered with the kind {} where a Table was asked for",
                    page["kind"]
                ));
            }
            // A watch only sends the columns once.
            if let (true, Some(columns)) = (table.columns.is_empty(), page["columnDefinitions"].as_array()) {
                table.columns = columns.iter().map(Column::new).collect();
            }
            table.rows.extend(page["rows"].as_array().into_iter().flatten().map(Row::new));
        }
        Ok(table)
    }
}

impl Column {
    fn new(column: &Value) -> Self {
        let title = column["name"].as_str().unwrap_or_default().to_uppercase();
        Self { title, is_extra: column["priority"].as_i64().unwrap_or_default() > 0 }
    }
}

impl Row {
    fn new(row: &Value) -> Self {
        let metadata = &row["object"]["metadata"];
        let text = |field: &str| metadata[field].as_str().map(str::to_owned);
        let cells = row["cells"].as_array().into_iter().flatten().map(cell).collect();
        Self { namespace: text("namespace").unwrap_or_default(), cells, version: text("resourceVersion") }
    }
}

/// A cell in one line. Nobody can move the cursor of a reader with it.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect(),
        value => value.to_string(),
    }
}

/// Prints tables of the same columns below each other, with the widths of the first.
pub(super) struct Printer {
    has_namespaces: bool,
    /// The index of each column that is printed, and its title.
    shown: Vec<(usize, String)>,
    /// The columns STATE, OVERRIDE and UNTIL of a table that is not wide: a state that outranks the wanted one for some time is in the first.
    overriding: Option<[usize; 3]>,
    widths: Vec<usize>,
}

impl Printer {
    /// For tables like this one; `is_wide` with the extra columns, `has_namespaces` with one for the namespace.
    pub fn new(table: &Table, is_wide: bool, has_namespaces: bool) -> Self {
        let columns = table.columns.iter().enumerate().filter(|(_, column)| is_wide || !column.is_extra);
        let shown = columns.map(|(index, column)| (index, column.title.clone())).collect();
        let index = |title: &str| table.columns.iter().position(|column| column.title == title);
        let overriding = || Some([index("STATE")?, index("OVERRIDE")?, index("UNTIL")?]);
        let overriding = if is_wide { None } else { overriding() };
        let mut printer = Self { has_namespaces, shown, overriding, widths: Vec::new() };
        let rows = table.rows.iter().map(|row| printer.cells(row));
        let all: Vec<Vec<String>> = [printer.head()].into_iter().chain(rows).collect();
        let width =
            |column: usize| all.iter().filter_map(|cells| cells.get(column)).map(|cell| cell.chars().count()).max();
        printer.widths = (0..printer.head().len()).map(|column| width(column).unwrap_or_default()).collect();
        printer
    }

    fn head(&self) -> Vec<String> {
        let namespace = self.has_namespaces.then(|| "NAMESPACE".to_owned());
        namespace.into_iter().chain(self.shown.iter().map(|(_, title)| title.clone())).collect()
    }

    fn cells(&self, row: &Row) -> Vec<String> {
        let namespace = self.has_namespaces.then(|| row.namespace.clone());
        let at = |index: usize| row.cells.get(index).map(String::as_str).unwrap_or_default();
        let cells = self.shown.iter().map(|(index, _)| match self.overriding {
            Some([state, other, until]) if *index == state && !at(other).is_empty() => {
                format!("{} until {}", at(other), at(until))
            }
            _ => at(*index).to_owned(),
        });
        namespace.into_iter().chain(cells).collect()
    }

    /// The lines of a table.
    pub fn print(&mut self, table: &Table, has_head: bool) -> String {
        let head = has_head.then(|| self.head());
        let lines = head.into_iter().chain(table.rows.iter().map(|row| self.cells(row)));
        lines
            .map(|cells| {
                let padded = cells.iter().zip(&self.widths).map(|(cell, width)| format!("{cell:<0$}", width + GAP));
                format!("{}\n", padded.collect::<String>().trim_end())
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn page(rows: &[(&str, Value)]) -> Value {
        let rows: Vec<Value> = rows
            .iter()
            .map(|(name, ready)| {
                let metadata = json!({ "name": name, "namespace": "orchard", "resourceVersion": "7" });
                json!({ "cells": [name, ready, "why"], "object": { "metadata": metadata } })
            })
            .collect();
        let columns = json!([
            { "name": "Name", "type": "string", "priority": 0 }, { "name": "Ready", "type": "boolean", "priority": 0 },
            { "name": "Reason", "type": "string", "priority": 1 },
        ]);
        json!({ "kind": "Table", "columnDefinitions": columns, "rows": rows })
    }

    #[test]
    fn a_table_has_the_columns_of_the_server_and_all_pages() {
        let pages =
            [page(&[("apple", json!(true))]), page(&[("a-long-name", Value::Null), ("x\u{1b}[2J\n", json!(false))])];
        let table = Table::from_pages(&pages).unwrap();
        let print =
            |is_wide, has_namespaces, has_head| Printer::new(&table, is_wide, has_namespaces).print(&table, has_head);
        assert_eq!(
            print(false, false, true),
            "NAME          READY\napple         true\na-long-name\nx [2J         false\n"
        );
        assert_eq!(
            print(true, true, false),
            "orchard     apple         true    why\norchard     a-long-name           why\norchard     x [2J         false   why\n"
        );
        assert_eq!(table.rows[0].version.as_deref(), Some("7"));
    }

    #[test]
    fn a_state_for_some_time_is_in_the_column_of_the_state() {
        let columns = ["Name", "State", "Phase", "Override", "Until"].map(|name| {
            let priority = i32::from(["Override", "Until"].contains(&name));
            json!({ "name": name, "type": "string", "priority": priority })
        });
        let rows = json!([
            { "cells": ["apple", "Running", "Stopped", "Stopped", "2026-11-26T12:00:00Z"], "object": {} },
            { "cells": ["pear", "Running", "Running", null, null], "object": {} },
        ]);
        let table =
            Table::from_pages(&[json!({ "kind": "Table", "columnDefinitions": columns, "rows": rows })]).unwrap();
        let print = |is_wide| Printer::new(&table, is_wide, false).print(&table, false);
        let narrow = "apple   Stopped until 2026-11-26T12:00:00Z   Stopped\npear    Running                              Running\n";
        assert_eq!(print(false), narrow);
        let wide = "apple   Running   Stopped   Stopped    2026-11-26T12:00:00Z\npear    Running   Running\n";
        assert_eq!(print(true), wide);
    }

    #[test]
    fn an_answer_that_is_no_table_is_an_error() {
        let error = Table::from_pages(&[json!({ "kind": "VirtualMachineList" })]).err().unwrap();
        assert!(error.contains("VirtualMachineList"), "{error}");
    }
}

//! `kubectl vm list`: the VMs as the API server's table shows them, so that the columns are those of `kubectl get`.
//!
//! ```text
//!  list (Accept: Table) ─▶ rows, page by page ─▶ aligned lines
//!  watch (Accept: Table) ─▶ a line for each change
//! ```

use clap::{Args, ValueEnum};
use futures::{AsyncBufReadExt, TryStreamExt};
use http::{Request, header::ACCEPT};
use kube::{
    Client, Resource,
    api::{ListParams, WatchParams},
};
use serde::Deserialize;
use serde_json::Value;

use super::{
    cluster::ClusterOptions,
    output::{Exit, Failure, Output, chain, note},
    vms::name,
};
use crate::{api::StoredVm, process::ErrorChain};

/// How many VMs the API server sends at once.
const PAGE: u32 = 500;
/// What makes the API server answer with a table
/// (<https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables>).
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

#[derive(Args)]
pub(super) struct Options {
    /// Only these VMs.
    #[arg(value_name = "VM", conflicts_with_all = ["selector", "all_namespaces"])]
    vms: Vec<String>,
    /// The VMs with these labels.
    #[arg(long, short = 'l', value_name = "LABELS")]
    selector: Option<String>,
    /// The VMs of all namespaces.
    #[arg(long, short = 'A')]
    all_namespaces: bool,
    /// `wide`: more columns; `json` and `yaml`: the objects; `name`: only names.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<Format>,
    /// Leave out the line with the names of the columns.
    #[arg(long)]
    no_headers: bool,
    /// Print a line for each change, until interrupted.
    #[arg(long, short)]
    watch: bool,
    #[command(flatten)]
    cluster: ClusterOptions,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Wide,
    Json,
    Yaml,
    Name,
}

/// A part of a table.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Table {
    #[serde(default)]
    metadata: kube::core::ListMeta,
    #[serde(default)]
    column_definitions: Vec<Column>,
    #[serde(default)]
    rows: Vec<Row>,
}

#[derive(Clone, Deserialize)]
struct Column {
    name: String,
    #[serde(default)]
    priority: i32,
}

#[derive(Deserialize)]
struct Row {
    cells: Vec<Value>,
    object: Value,
}

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    type_: String,
    object: Value,
}

/// The table's lines: which columns are shown, and how wide they are.
struct Lines {
    columns: Vec<Column>,
    wide: bool,
    with_namespace: bool,
    widths: Vec<usize>,
}

impl Lines {
    fn cells(&self, row: &Row) -> Vec<String> {
        let text =
            |name: &str| row.object.pointer(&format!("/metadata/{name}")).and_then(Value::as_str).unwrap_or_default();
        let shown = self.columns.iter().zip(&row.cells).filter(|(column, _)| self.wide || column.priority == 0);
        let namespace = self.with_namespace.then(|| text("namespace").to_owned());
        namespace.into_iter().chain(shown.map(|(_, cell)| cell_text(cell))).collect()
    }

    fn header(&self) -> Vec<String> {
        let shown = self.columns.iter().filter(|column| self.wide || column.priority == 0);
        let namespace = self.with_namespace.then(|| "NAMESPACE".to_owned());
        namespace.into_iter().chain(shown.map(|column| column.name.to_uppercase())).collect()
    }

    fn widen(&mut self, cells: &[String]) {
        self.widths.resize(cells.len().max(self.widths.len()), 0);
        for (width, cell) in self.widths.iter_mut().zip(cells) {
            *width = (*width).max(cell.chars().count());
        }
    }

    fn line(&self, cells: &[String]) -> String {
        let padded = cells.iter().zip(&self.widths).map(|(cell, width)| format!("{cell:width$}"));
        padded.collect::<Vec<_>>().join("   ").trim_end().to_owned()
    }
}

/// Control characters would change the terminal; the API server shows texts of anybody.
fn cell_text(cell: &Value) -> String {
    let text = match cell {
        Value::Null => "<none>".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let cluster = options.cluster.connect().await.map_err(|error| Failure::new(ErrorChain(&error).to_string()))?;
    let names = options.vms.iter().map(|text| name(text)).collect::<Result<Vec<_>, _>>()?;
    let namespace = (!options.all_namespaces).then_some(cluster.namespace.as_str());
    let path = StoredVm::url_path(&(), namespace);
    let query = Query { client: cluster.client, path, names, options };
    if matches!(options.output, Some(Format::Json | Format::Yaml)) {
        return query.print_objects(output).await;
    }
    let mut lines = Lines {
        columns: Vec::new(),
        wide: options.output == Some(Format::Wide),
        with_namespace: options.all_namespaces,
        widths: Vec::new(),
    };
    let (rows, version) = query.rows(&mut lines).await?;
    let missing = query.missing(&rows);
    let shows = |row: &&Row| query.means(&row.object);
    if options.output == Some(Format::Name) {
        for row in rows.iter().filter(shows) {
            let name = row.object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
            writeln!(output, "virtualmachine.vmoperator.jdrupes.org/{name}")?;
        }
    } else {
        let cells: Vec<_> = rows.iter().filter(shows).map(|row| lines.cells(row)).collect();
        let header = Some(lines.header()).filter(|_| !options.no_headers && (!cells.is_empty() || options.watch));
        header.iter().chain(&cells).for_each(|cells| lines.widen(cells));
        for cells in header.iter().chain(&cells) {
            writeln!(output, "{}", lines.line(cells))?;
        }
        if cells.is_empty() && missing.is_empty() && !options.watch {
            let place = namespace.map(|namespace| format!(" in the namespace {namespace}")).unwrap_or_default();
            note(&format!("no VMs found{place}"));
        }
    }
    if options.watch {
        query.watch(lines, version, output).await?;
    }
    for name in &missing {
        note(&format!("vm/{name} does not exist in the namespace {}", cluster.namespace));
    }
    Ok(Exit::negative_if(!missing.is_empty()))
}

struct Query<'a> {
    client: Client,
    path: String,
    names: Vec<&'a str>,
    options: &'a Options,
}

impl Query<'_> {
    /// Whether the command asks for that object.
    fn means(&self, object: &Value) -> bool {
        let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        self.names.is_empty() || self.names.contains(&name)
    }

    /// The names that no row has.
    fn missing(&self, rows: &[Row]) -> Vec<String> {
        let has = |name: &&&str| {
            rows.iter().any(|row| row.object.pointer("/metadata/name").is_some_and(|found| found == **name))
        };
        self.names.iter().filter(|name| !has(name)).map(|name| (*name).to_owned()).collect()
    }

    fn list_parameters(&self) -> ListParams {
        let mut parameters = ListParams::default().limit(PAGE);
        parameters.label_selector.clone_from(&self.options.selector);
        if let [name] = self.names[..] {
            parameters.field_selector = Some(format!("metadata.name={name}"));
        }
        parameters
    }

    /// All pages of the list, and the version from which a watch goes on.
    async fn pages<T>(
        &self,
        accept: Option<&'static str>,
        mut page: impl FnMut(T) -> (Option<String>, Option<String>),
    ) -> Result<Option<String>, Failure>
    where
        T: serde::de::DeserializeOwned,
    {
        let mut parameters = self.list_parameters();
        loop {
            let request = kube::core::Request::new(&self.path)
                .list(&parameters)
                .map_err(|error| Failure::new(error.to_string()))?;
            let request = accepting(request, accept);
            let answer =
                self.client.request(request).await.map_err(|error| Failure::unknown(chain("list VMs", &error)))?;
            let (next, version) = page(answer);
            match next.filter(|next| !next.is_empty()) {
                Some(next) => parameters = parameters.continue_token(&next),
                None => return Ok(version),
            }
        }
    }

    async fn rows(&self, lines: &mut Lines) -> Result<(Vec<Row>, Option<String>), Failure> {
        let mut rows = Vec::new();
        let version = self
            .pages(Some(TABLE), |table: Table| {
                if lines.columns.is_empty() {
                    lines.columns = table.column_definitions;
                }
                rows.extend(table.rows);
                (table.metadata.continue_, table.metadata.resource_version)
            })
            .await?;
        Ok((rows, version))
    }

    async fn print_objects(&self, output: &mut Output<'_>) -> Result<Exit, Failure> {
        let mut items: Vec<Value> = Vec::new();
        self.pages(None, |mut list: Value| {
            let text =
                |name: &str| list.pointer(&format!("/metadata/{name}")).and_then(Value::as_str).map(str::to_owned);
            let next = (text("continue"), text("resourceVersion"));
            if let Some(Value::Array(found)) = list.get_mut("items").map(Value::take) {
                items.extend(found.into_iter().filter(|vm| self.means(vm)));
            }
            next
        })
        .await?;
        let missing: Vec<_> =
            self.names.iter().filter(|name| !items.iter().any(|vm| vm["metadata"]["name"] == ***name)).collect();
        for vm in &mut items {
            // The items of a list lack them.
            vm["apiVersion"] = StoredVm::api_version(&()).into();
            vm["kind"] = StoredVm::kind(&()).into();
        }
        let all = match (&self.names[..], items.len()) {
            ([_], 1) => items.remove(0),
            _ => serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": items }),
        };
        let text = match self.options.output {
            Some(Format::Json) => {
                serde_json::to_string_pretty(&all).map(|text| text + "\n").map_err(|error| error.to_string())
            }
            _ => serde_yaml::to_string(&all).map_err(|error| error.to_string()),
        };
        write!(output, "{}", text.map_err(Failure::new)?)?;
        for name in &missing {
            note(&format!("vm/{name} does not exist"));
        }
        Ok(Exit::negative_if(!missing.is_empty()))
    }

    /// Prints a line for each change. The API server ends a watch after some minutes; it is begun again.
    async fn watch(
        &self,
        mut lines: Lines,
        mut version: Option<String>,
        output: &mut Output<'_>,
    ) -> Result<(), Failure> {
        output.flush()?;
        let selectors = self.list_parameters();
        let parameters = WatchParams {
            label_selector: selectors.label_selector,
            field_selector: selectors.field_selector,
            ..WatchParams::default()
        };
        loop {
            let request = kube::core::Request::new(&self.path)
                .watch(&parameters, version.as_deref().unwrap_or_default())
                .map_err(|error| Failure::new(error.to_string()))?;
            let stream = self.client.request_stream(accepting(request, Some(TABLE))).await;
            let mut stream = stream.map_err(|error| Failure::unknown(chain("watch VMs", &error)))?.lines();
            while let Some(line) =
                stream.try_next().await.map_err(|error| Failure::unknown(format!("watch VMs: {error}")))?
            {
                let event: Event =
                    serde_json::from_str(&line).map_err(|error| Failure::unknown(format!("watch VMs: {error}")))?;
                if event.type_ == "ERROR" {
                    let message = event.object["message"].as_str().unwrap_or_default();
                    return Err(Failure::unknown(format!("watch VMs: {message}")));
                }
                let Ok(table) = serde_json::from_value::<Table>(event.object) else { continue };
                for row in table.rows {
                    if let Some(newer) = row.object.pointer("/metadata/resourceVersion").and_then(Value::as_str) {
                        version = Some(newer.to_owned());
                    }
                    if event.type_ != "BOOKMARK" && self.means(&row.object) {
                        let cells = lines.cells(&row);
                        lines.widen(&cells);
                        writeln!(output, "{}", lines.line(&cells))?;
                        output.flush()?;
                    }
                }
            }
        }
    }
}

fn accepting(mut request: Request<Vec<u8>>, accept: Option<&'static str>) -> Request<Vec<u8>> {
    if let Some(accept) = accept {
        request.headers_mut().insert(ACCEPT, http::HeaderValue::from_static(accept));
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> (Lines, Vec<Row>) {
        let table: Table = serde_json::from_value(serde_json::json!({
            "columnDefinitions": [{ "name": "Name" }, { "name": "State", "priority": 0 }, { "name": "Set", "priority": 1 }],
            "rows": [
                { "cells": ["apple", "Running", "lab"], "object": { "metadata": { "name": "apple", "namespace": "orchard" } } },
                { "cells": ["long-name", null, "a\u{1b}[2Jb"], "object": { "metadata": { "name": "long-name", "namespace": "o" } } },
            ],
        }))
        .unwrap();
        (Lines { columns: table.column_definitions, wide: false, with_namespace: false, widths: vec![] }, table.rows)
    }

    fn text(lines: &mut Lines, rows: &[Row]) -> String {
        let all: Vec<_> = [lines.header()].into_iter().chain(rows.iter().map(|row| lines.cells(row))).collect();
        all.iter().for_each(|cells| lines.widen(cells));
        all.iter().map(|cells| lines.line(cells) + "\n").collect()
    }

    #[test]
    fn columns_are_aligned_and_those_of_lower_priority_are_for_wide() {
        let (mut lines, rows) = table();
        assert_eq!(text(&mut lines, &rows), "NAME        STATE\napple       Running\nlong-name   <none>\n");
        let (lines, rows) = table();
        let mut wide = Lines { wide: true, with_namespace: true, ..lines };
        let wide = text(&mut wide, &rows);
        assert!(
            wide.starts_with("NAMESPACE   NAME        STATE     SET\norchard     apple       Running   lab\n"),
            "{wide}"
        );
        assert!(!wide.contains('\u{1b}'), "{wide}");
    }
}

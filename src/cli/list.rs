//! `kubectl vm list` and `kubectl vm pool list`: the API server makes the table, with the columns of the CustomResourceDefinition, so they are those of
//! `kubectl get vms` (<https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables>).

mod table;

use clap::Args;
use futures::StreamExt;
use http::{HeaderValue, header::ACCEPT};
use kube::{
    Client,
    api::{ApiResource, DynamicObject, ListParams, Request, WatchEvent, WatchParams},
    core::Resource,
};
use serde_json::{Value, json};

use self::table::{Printer, Table};
use super::{
    cluster::Cluster,
    format::{ListFormat, print_objects},
    output::{Exit, Failure, Output, note},
    vms::{self, CHUNK, Selection, name_of, refused_about, title},
};
use crate::process::ErrorChain;

/// The media type of a table.
const AS_TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    how: How,
}

/// How a list is printed.
#[derive(Args)]
pub(super) struct How {
    /// How to print them: more columns, or the objects.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<ListFormat>,
    /// Without the head of the table.
    #[arg(long)]
    no_headers: bool,
    /// Go on, with a line for each change.
    #[arg(long, short)]
    watch: bool,
}

/// What is listed.
pub(super) struct Listed {
    pub resource: ApiResource,
    /// What the objects are called in messages.
    pub what: &'static str,
    /// How one of them is called.
    pub title: fn(&str) -> String,
    /// The name in an argument.
    pub name_of: fn(&str) -> &str,
}

/// Which of them.
pub(super) struct Chosen<'a> {
    /// None: all.
    pub names: &'a [String],
    pub selector: Option<&'a str>,
    pub all_namespaces: bool,
}

/// Where objects are asked for.
struct ListSource<'a> {
    listed: &'a Listed,
    client: &'a Client,
    /// `None`: in all namespaces.
    namespace: Option<&'a str>,
    selector: Option<&'a str>,
    is_table: bool,
}

impl ListSource<'_> {
    fn request(&self) -> Request {
        Request::new(DynamicObject::url_path(&self.listed.resource, self.namespace))
    }

    fn accept(&self, mut request: http::Request<Vec<u8>>) -> http::Request<Vec<u8>> {
        if self.is_table {
            request.headers_mut().insert(ACCEPT, HeaderValue::from_static(AS_TABLE));
        }
        request
    }

    async fn send(&self, request: Result<http::Request<Vec<u8>>, kube::core::request::Error>) -> kube::Result<Value> {
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request(self.accept(request)).await
    }

    /// What the API server said about the objects.
    async fn refused(&self, what: &str, verb: &str, error: &kube::Error) -> String {
        refused_about(self.client, &self.listed.resource, what, &[verb], self.namespace, error).await
    }

    /// One object, as a table of one row or as an object.
    async fn get(&self, name: &str) -> kube::Result<Value> {
        self.send(self.request().get(name, &Default::default())).await
    }

    /// All objects, chunk by chunk.
    async fn list(&self) -> Result<Vec<Value>, Failure> {
        let mut parameters = ListParams { limit: Some(CHUNK), ..ListParams::default() };
        parameters.label_selector = self.selector.map(str::to_owned);
        let mut pages = Vec::new();
        loop {
            let page = match self.send(self.request().list(&parameters)).await {
                Ok(page) => page,
                Err(error) => {
                    let line = self.refused(self.listed.what, "list", &error).await;
                    return Err(Failure::unknown(line));
                }
            };
            parameters.continue_token =
                page["metadata"]["continue"].as_str().filter(|it| !it.is_empty()).map(str::to_owned);
            pages.push(page);
            if parameters.continue_token.is_none() {
                return Ok(pages);
            }
        }
    }
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let listed = Listed { resource: vms::resource(), what: "VMs", title, name_of };
    let Selection { names, selector, all_namespaces, .. } = &options.selection;
    let wanted = Chosen { names, selector: selector.as_deref(), all_namespaces: *all_namespaces };
    print(&listed, &wanted, &options.selection.connect().await?, &options.how, output).await
}

/// Prints objects as a table, or as data.
pub(super) async fn print(
    listed: &Listed,
    wanted: &Chosen<'_>,
    cluster: &Cluster,
    options: &How,
    output: &mut Output<'_>,
) -> Result<Exit, Failure> {
    let Chosen { names, selector, all_namespaces } = wanted;
    let of_objects = match &options.output {
        Some(ListFormat::Objects(format)) => Some(format),
        Some(ListFormat::Wide) | None => None,
    };
    let is_table = of_objects.is_none();
    if options.watch && (!names.is_empty() || !is_table) {
        return Err(Failure::usage("--watch is for tables of a namespace, or of all, or of those with labels"));
    }
    let Cluster { client, namespace } = cluster;
    let namespace = (!all_namespaces).then_some(namespace.as_str());
    let source = ListSource { listed, client, namespace, selector: *selector, is_table };
    let mut missing = 0;
    let pages = if names.is_empty() {
        source.list().await?
    } else {
        let mut pages = Vec::new();
        for name in names.iter().map(|argument| (listed.name_of)(argument)) {
            match source.get(name).await {
                Ok(page) => pages.push(page),
                Err(error) => {
                    note(&source.refused(&(listed.title)(name), "get", &error).await);
                    missing += 1;
                }
            }
        }
        pages
    };
    let found = if let Some(format) = of_objects {
        let items = objects(&listed.resource, pages, names.is_empty());
        print_objects(&items, names.len() == 1, format, output)?;
        items.len()
    } else {
        let table = Table::from_pages(&pages).map_err(Failure::unknown)?;
        let mut printer = Printer::new(&table, options.output == Some(ListFormat::Wide), *all_namespaces);
        if !table.rows.is_empty() || options.watch {
            write!(output, "{}", printer.print(&table, !options.no_headers))?;
        }
        if options.watch {
            output.flush()?;
            let version = pages.last().and_then(|page| page["metadata"]["resourceVersion"].as_str());
            return watch(&source, version.unwrap_or("0"), &mut printer, output).await;
        }
        table.rows.len()
    };
    if found == 0 && missing == 0 {
        note(&vms::nothing(listed.what, namespace, *selector));
    }
    Ok(vms::exit(found, missing))
}

/// The objects of lists, or of answers about one each. Items of a list do not say their kind.
fn objects(resource: &ApiResource, pages: Vec<Value>, are_lists: bool) -> Vec<Value> {
    if !are_lists {
        return pages;
    }
    let items = pages.into_iter().flat_map(|mut page| match page["items"].take() {
        Value::Array(items) => items,
        _ => Vec::new(),
    });
    items
        .map(|mut item| {
            item["apiVersion"] = json!(resource.api_version);
            item["kind"] = json!(resource.kind);
            item
        })
        .collect()
}

/// Prints a line for each change, until the reader has seen enough.
async fn watch(
    source: &ListSource<'_>,
    version: &str,
    printer: &mut Printer,
    output: &mut Output<'_>,
) -> Result<Exit, Failure> {
    let mut version = version.to_owned();
    let mut parameters = WatchParams { label_selector: source.selector.map(str::to_owned), ..WatchParams::default() };
    parameters.bookmarks = false;
    loop {
        let request = source.request().watch(&parameters, &version).map_err(|error| Failure::new(error.to_string()))?;
        let events = source.client.request_events::<Value>(source.accept(request)).await;
        let mut events = match events {
            Ok(events) => std::pin::pin!(events),
            Err(error) => {
                let line = source.refused(source.listed.what, "watch", &error).await;
                return Err(Failure::unknown(line));
            }
        };
        // The API server ends a watch after some minutes; the next one goes on where it ended.
        while let Some(event) = events.next().await {
            match event {
                Ok(WatchEvent::Added(page) | WatchEvent::Modified(page) | WatchEvent::Deleted(page)) => {
                    let table = Table::from_pages(&[page]).map_err(Failure::unknown)?;
                    if let Some(seen) = table.rows.last().and_then(|row| row.version.clone()) {
                        version = seen;
                    }
                    write!(output, "{}", printer.print(&table, false))?;
                    output.flush()?;
                }
                Ok(WatchEvent::Bookmark(bookmark)) => version = bookmark.metadata.resource_version,
                Ok(WatchEvent::Error(status)) => {
                    return Err(Failure::unknown(format!(
                        "{}: the watch ended: {}",
                        source.listed.what, status.message
                    )));
                }
                Err(error) => {
                    let what = source.listed.what;
                    return Err(Failure::unknown(format!("{what}: the watch ended: {}", ErrorChain(&error))));
                }
            }
        }
    }
}

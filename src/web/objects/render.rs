//! Renders the objects of a VM in a process with limited memory: templates that somebody wrote can take any amount of it.
//!
//! ```text
//!  web interface ── job (JSON) ──▶ vm-web render-objects ── objects, or why there are none (JSON) ──▶ web interface
//! ```
//!
//! The values of Secrets do not leave that process.

use std::{
    io::{self, Read, Write},
    sync::LazyLock,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::{io::AsyncWriteExt, sync::Semaphore, time::timeout};

use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    mask,
    object::{HASH_ANNOTATION, Lifetime, Rendered, Update, VERSION_ANNOTATION},
    process::limited,
    render::{
        TemplateSet, first_start,
        templates::{Ancestor, Layers},
    },
    yaml,
};

/// The subcommand of this program that renders.
const COMMAND: &str = "render-objects";
/// The CPU time that it may take, in seconds, and the time.
const CPU: u64 = 5;
const TIME: Duration = Duration::from_secs(15);
/// How many such processes run at once.
static PLACES: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(2));

/// What to render.
#[derive(Serialize, Deserialize)]
pub(super) struct Job {
    /// The VM as it is in the cluster.
    pub vm: VirtualMachine,
    /// The manager's configuration.
    pub config: ReconcilerConfig,
    /// The templates in force.
    pub layers: Layers,
}

/// A file of which a template consists, and the blocks that it sets.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Origin {
    /// The file in the folder of the templates; `builtin/NAME` for a built-in one.
    pub file: String,
    /// The line, from 1, that names the object's kind, if this file does.
    pub line: Option<usize>,
    /// Its blocks and their lines. Of a built-in template none are named: it has all.
    pub blocks: Vec<(String, usize)>,
}

/// An object as the page shows it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Shown {
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// How long it exists: `vm`, `running` or `keep`.
    pub lifetime: String,
    /// When the manager changes it: `live`, `at-start` or `once`.
    pub update: String,
    /// The template and those that it extends, the template itself first.
    pub origins: Vec<Origin>,
    /// The files of the patches that changed it.
    pub patches: Vec<String>,
    /// The object, without values of Secrets.
    pub yaml: String,
}

/// The objects, or the error of a template.
pub(super) type Outcome = Result<Vec<Shown>, String>;

/// Renders in another process.
///
/// # Errors
/// If the process can't be started, or takes too much memory or time.
pub(super) async fn render(job: &Job) -> io::Result<Outcome> {
    let _place = PLACES.acquire().await.map_err(io::Error::other)?;
    let line = serde_json::to_vec(job)?;
    let (mut child, mut input, output) = limited::start(COMMAND)?;
    child.stdout = Some(output);
    let feed = async move { input.write_all(&line).await };
    let work = async { tokio::join!(feed, child.wait_with_output()) };
    let (_, output) = timeout(TIME, work).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
    let output = output?;
    if !output.status.success() {
        return Err(io::Error::other(format!("it takes too much memory or time ({})", output.status)));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The other process: reads a job from standard input, and writes the outcome.
///
/// # Errors
/// If standard input or output fails.
pub fn serve() -> io::Result<()> {
    limited::limit(Some(CPU))?;
    let mut text = Vec::new();
    io::stdin().lock().read_to_end(&mut text)?;
    let outcome = objects(serde_json::from_slice(&text)?);
    serde_json::to_writer(io::stdout().lock(), &outcome)?;
    io::stdout().flush()
}

fn objects(job: Job) -> Outcome {
    let Job { vm, config, layers } = job;
    let set = TemplateSet::compile(layers).map_err(|error| error.to_string())?;
    let rendered = first_start(&vm, &config, &set).map_err(|error| error.to_string())?;
    Ok(rendered.iter().map(|object| shown(&set, object)).collect())
}

fn shown(set: &TemplateSet, object: &Rendered) -> Shown {
    let value = shown_value(Value::clone(&object.value));
    let place = set.place_of(&object.name, &object.key.kind);
    let lineage = set.lineage(&object.name).into_iter().map(|Ancestor { file, blocks }| {
        let line = place.as_ref().filter(|(named, _)| *named == file).map(|(_, line)| *line);
        let blocks = if file.starts_with("builtin/") { Vec::new() } else { blocks };
        Origin { line, blocks: blocks.into_iter().map(|block| (block.name, block.line)).collect(), file }
    });
    let lifetime = match object.lifetime {
        Lifetime::Vm => "vm",
        Lifetime::Running => "running",
        Lifetime::Keep => "keep",
    };
    let update = match object.update {
        Update::Live => "live",
        Update::AtStart => "at-start",
        Update::Once => "once",
    };
    Shown {
        kind: object.key.kind.clone(),
        name: object.key.name.clone(),
        lifetime: lifetime.to_owned(),
        update: update.to_owned(),
        origins: lineage.collect(),
        patches: object.patches.clone(),
        yaml: yaml::unfolded(&value).unwrap_or_default(),
    }
}

/// The object without what nobody may see, and without what the manager writes for itself.
fn shown_value(mut object: Value) -> Value {
    if let Some(annotations) = object.pointer_mut("/metadata/annotations").and_then(Value::as_object_mut) {
        annotations.remove(HASH_ANNOTATION);
        annotations.remove(VERSION_ANNOTATION);
    }
    mask::object(object)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::vm;

    fn job(base: &[(&str, &str)]) -> Job {
        let base = base.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let layers = TemplateSet::layered(&base, None).unwrap().layers().clone();
        Job { vm: vm(|_| {}), config: ReconcilerConfig::default(), layers }
    }

    #[test]
    fn an_object_says_of_which_files_it_is_made() {
        let template = "{% extends \"builtin/pod.yaml.j2\" %}{% block labels %}{{ super() }}{% endblock %}";
        let objects = objects(job(&[("pod.yaml.j2", template)])).unwrap();
        let pod = objects.iter().find(|object| object.kind == "Pod").unwrap();
        let files: Vec<_> = pod.origins.iter().map(|origin| (origin.file.as_str(), origin.blocks.as_slice())).collect();
        assert_eq!(files[0], ("pod.yaml.j2", &[("labels".to_owned(), 1)][..]));
        assert!(pod.origins[0].line.is_none() && pod.origins[1].line.is_some());
        assert_eq!(files[1], ("builtin/pod.yaml.j2", &[][..]));
        assert_eq!((pod.lifetime.as_str(), pod.update.as_str()), ("running", "at-start"));
        assert!(pod.yaml.contains("containers:") && !pod.yaml.contains(HASH_ANNOTATION));
    }

    #[test]
    fn no_value_of_a_secret_is_shown() {
        let secret = "apiVersion: v1\nkind: Secret\nmetadata: { name: extra }\nstringData: { password: sesame }\ndata: { key: c2VzYW1l }\n";
        let objects = objects(job(&[("extra.yaml.j2", secret)])).unwrap();
        let extra = objects.iter().find(|object| object.name == "extra").unwrap();
        assert!(
            extra.yaml.contains("(masked) 6 characters") && extra.yaml.contains("(masked) 8 characters"),
            "{}",
            extra.yaml
        );
        for object in objects.iter().filter(|object| object.kind == "Secret") {
            assert!(!object.yaml.contains("sesame") && !object.yaml.contains("c2VzYW1l"), "{}", object.yaml);
        }
    }

    #[test]
    fn the_error_of_a_template_is_said() {
        let error = objects(job(&[("extra.yaml.j2", "kind: {{ nothing.at.all }}\n")])).unwrap_err();
        assert!(error.contains("extra.yaml.j2"), "{error}");
        let map = shown_value(json!({ "kind": "ConfigMap", "data": { "a": "b", "user-data": "of the guest" } }));
        assert_eq!(map["data"], json!({ "a": "b", "user-data": "(masked)" }));
    }
}

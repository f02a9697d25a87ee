//! Renders VMs with the templates that somebody wrote, in a separate process: a template that makes a text of any size out of a number of
//! the VM ends that process and not the manager.
//!
//! ```text
//!  manager ── order (JSON, one a line) ──▶ vm-operator render-templates ── answer (JSON, one a line) ──▶ manager
//! ```
//!
//! The process is started for the first VM that needs it and renders one VM after the other. Templates without files of their own are
//! rendered by the manager itself. The check of a [new set](super::sandbox) protects from a set that harms with the VMs of that moment; this
//! protects from the VMs that come later.

use std::{
    collections::HashSet,
    io::{self, BufRead, BufReader, Write},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt},
    process::{Child, ChildStdin, ChildStdout},
    sync::Mutex,
    time::timeout,
};

use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    object::Rendered,
    observed::Observed,
    process::limited,
    render::{RandomInput, TemplateError, TemplateSet, render, templates::Layers},
};

/// The subcommand of this program that renders.
pub const COMMAND: &str = "render-templates";
/// The time that a VM may take. The templates of the cookbook need a thousandth of it.
const TIME: Duration = Duration::from_secs(20);
/// How many sets a process compiles before it is replaced, because it keeps all of them.
const SETS: usize = 100;

/// What a VM is rendered from, besides its templates.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// The VM.
    pub vm: &'a VirtualMachine,
    /// Its objects.
    pub observed: &'a Observed,
    /// The manager's configuration.
    pub config: &'a ReconcilerConfig,
}

/// Renders VMs.
#[derive(Default)]
pub struct Renderer(Mutex<Option<Worker>>);

/// The other process, which waits for an order.
struct Worker {
    // It ends when this is dropped.
    _process: Child,
    input: ChildStdin,
    output: tokio::io::Lines<tokio::io::BufReader<ChildStdout>>,
    /// The versions of the sets that it has compiled.
    sets: HashSet<String>,
}

#[derive(Serialize)]
enum Order<'a> {
    Compile {
        version: &'a str,
        layers: &'a Layers,
    },
    Render {
        version: &'a str,
        vm: &'a VirtualMachine,
        observed: &'a Observed,
        config: &'a ReconcilerConfig,
        random: &'a RandomInput,
    },
}

/// An [`Order`] as it is received.
#[derive(Deserialize)]
enum Received {
    Compile {
        version: String,
        layers: Layers,
    },
    Render {
        version: String,
        vm: Box<VirtualMachine>,
        observed: Observed,
        config: Box<ReconcilerConfig>,
        random: RandomInput,
    },
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Rendered(Vec<Rendered>),
    Failed(TemplateError),
}

impl Renderer {
    /// Renders the objects of a VM.
    ///
    /// # Errors
    /// The inner one: as [`render`], and if the rendering takes too much memory or time. The outer one: the process can't be started.
    pub async fn render(
        &self,
        input: Input<'_>,
        random: &RandomInput,
        set: &TemplateSet,
    ) -> io::Result<Result<Vec<Rendered>, TemplateError>> {
        let Input { vm, observed, config } = input;
        if *set.layers() == Layers::default() || vm.spec.invalid.is_some() || limited::is_unlimited() {
            return Ok(render(vm, observed, config, random, set));
        }
        let mut worker = self.0.lock().await;
        // Somebody else may have ended the process, so a VM gets a second, fresh one.
        for is_fresh in [false, true] {
            // It is put back only when it has answered.
            let known = worker.take().filter(|worker| !is_fresh && worker.sets.len() < SETS);
            let mut used = match known {
                Some(known) => known,
                None => Worker::start()?,
            };
            match timeout(TIME, used.render(input, random, set)).await {
                Ok(Ok(answer)) => {
                    *worker = Some(used);
                    return Ok(match answer {
                        Answer::Rendered(objects) => Ok(objects),
                        Answer::Failed(error) => Err(error),
                    });
                }
                Ok(Err(_)) => {}
                Err(_) => break,
            }
        }
        let message = format!(
            "it takes too much memory or time: {} MiB and {} s are the most for a VM; is there a text whose size is a number of the VM?",
            limited::MEMORY >> 20,
            TIME.as_secs()
        );
        Ok(Err(TemplateError::refused("(render)", message)))
    }
}

impl Worker {
    fn start() -> io::Result<Self> {
        let (process, input, output) = limited::start(COMMAND)?;
        let output = tokio::io::BufReader::new(output).lines();
        Ok(Self { _process: process, input, output, sets: HashSet::new() })
    }

    async fn render(&mut self, input: Input<'_>, random: &RandomInput, set: &TemplateSet) -> io::Result<Answer> {
        let (Input { vm, observed, config }, version) = (input, set.version());
        if self.sets.insert(version.to_owned()) {
            self.send(&Order::Compile { version, layers: set.layers() }).await?;
        }
        self.send(&Order::Render { version, vm, observed, config, random }).await?;
        let answer = self.output.next_line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(serde_json::from_str(&answer)?)
    }

    async fn send(&mut self, order: &Order<'_>) -> io::Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.input.write_all(&line).await
    }
}

/// The other process: renders until its input ends.
///
/// # Errors
/// If standard input or output fails.
pub fn serve() -> io::Result<()> {
    let (input, output) = (BufReader::new(io::stdin().lock()), io::stdout().lock());
    limited::limit(None)?;
    work(input, output)
}

fn work(input: impl BufRead, mut output: impl Write) -> io::Result<()> {
    let mut sets = std::collections::HashMap::new();
    for line in input.lines() {
        match serde_json::from_str(&line?)? {
            Received::Compile { version, layers } => drop(sets.insert(version, TemplateSet::compile(layers))),
            Received::Render { version, vm, observed, config, random } => {
                let answer = match sets.get(&version) {
                    Some(Ok(set)) => render(&vm, &observed, &config, &random, set),
                    Some(Err(error)) => Err(error.clone()),
                    None => Err(TemplateError::refused("(set)", "it was not compiled")),
                };
                let answer = answer.map_or_else(Answer::Failed, Answer::Rendered);
                serde_json::to_writer(&mut output, &answer)?;
                output.write_all(b"\n")?;
                output.flush()?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        render::Files,
        test_support::{nothing, vm},
    };

    #[test]
    fn the_other_process_renders_the_same_as_the_manager() {
        let text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndata: {size: {{ values.size }}}\n";
        let files: Files = [("x.yaml.j2".to_owned(), text.to_owned())].into();
        let set = TemplateSet::layered(&files, None).unwrap();
        let (observed, config) = (nothing(), ReconcilerConfig::default());
        let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
        let (version, mut orders, mut expected) = (set.version(), Vec::new(), Vec::new());
        let mut order = |order: &Order<'_>| {
            serde_json::to_writer(&mut orders, order).unwrap();
            orders.push(b'\n');
        };
        order(&Order::Compile { version, layers: set.layers() });
        for size in ["\"small\"", "null"] {
            let vm = vm(|vm| vm["spec"]["templateValues"] = format!("{{\"size\":{size}}}").parse().unwrap());
            order(&Order::Render { version, vm: &vm, observed: &observed, config: &config, random: &random });
            expected.push(render(&vm, &observed, &config, &random, &set).map_err(|error| error.to_string()));
        }
        let mut output = Vec::new();
        work(orders.as_slice(), &mut output).unwrap();
        let answers: Vec<Result<Vec<Rendered>, String>> = String::from_utf8(output)
            .unwrap()
            .lines()
            .map(|line| match serde_json::from_str(line).unwrap() {
                Answer::Rendered(objects) => Ok(objects),
                Answer::Failed(error) => Err(error.to_string()),
            })
            .collect();
        assert_eq!(answers, expected);
        assert!(answers[0].is_ok() && answers[1].as_ref().is_err_and(|error| error.contains("values.size")));
    }
}

//! render: a machine, what is observed about it, the configuration and a template set become objects.
//!
//! ```text
//!  VirtualMachine ─┐
//!  Observed        ┼─▶ context ─▶ minijinja ─▶ YAML text ─▶ documents ─▶ patches ─▶ objects (owner, labels, hash; refusals)
//!  Config, values  │   context.rs  templates.rs              read.rs      patches.rs  output.rs
//!  Facts ──────────┘               functions.rs, write.rs
//! ```
//!
//! No clock, no network, no randomness: what is random comes in as [`Facts`]. Nothing here knows which kinds of objects
//! the templates make.

pub mod builtin;
pub mod check;
pub mod context;
mod error;
pub mod functions;
pub mod outline;
pub mod output;
pub mod patches;
mod read;
pub mod schema;
pub mod templates;
pub mod values;
mod write;

use std::sync::Arc;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};

use crate::{api::VirtualMachine, config::ReconcilerConfig, object::Rendered, observed::Observed};

pub use context::Facts;
pub use error::TemplateError;
pub use templates::{Files, Library, Sources, TemplateSet};

use context::Context;
use output::Wrong;

/// What a template rendered, on its way to become an object.
struct Document<'a> {
    name: &'a str,
    place: &'a str,
    value: serde_json::Value,
    patches: Vec<String>,
}

/// How many objects a machine may have: a loop that goes wrong must not fill the cluster.
pub const MAXIMUM_OBJECTS: usize = 64;

/// Renders all objects of a machine, in the order of their templates' names.
///
/// # Errors
/// The first template that fails, with its name, line and column; nothing of the set is returned then, because half of a
/// set must not be applied.
pub fn render(
    vm: &VirtualMachine,
    observed: &Observed,
    config: &ReconcilerConfig,
    facts: &Facts,
    templates: &TemplateSet,
) -> Result<Vec<Rendered>, TemplateError> {
    let context = context_of(vm, observed, config, facts, templates)?;
    objects(vm, config, templates, &context.value())
}

fn context_of(
    vm: &VirtualMachine,
    observed: &Observed,
    config: &ReconcilerConfig,
    facts: &Facts,
    templates: &TemplateSet,
) -> Result<Context, TemplateError> {
    let values = templates.values().resolve(&config.template_values, vm.spec.template_values.as_ref())?;
    context::build(vm, observed, config, facts, values).map_err(TemplateError::context)
}

fn objects(
    vm: &VirtualMachine,
    config: &ReconcilerConfig,
    templates: &TemplateSet,
    context: &minijinja::Value,
) -> Result<Vec<Rendered>, TemplateError> {
    let mut documents: Vec<Document<'_>> = Vec::new();
    for name in templates.names() {
        let place = templates.place(name);
        let rendered =
            read::documents(&templates.render(name, context)?).map_err(|wrong| templates.wrong(name, wrong))?;
        documents.extend(rendered.into_iter().map(|value| Document { name, place, value, patches: Vec::new() }));
    }
    for patch in templates.patches(context)? {
        patch.apply(documents.iter_mut().map(|document| (&mut document.value, &mut document.patches)))?;
    }
    let scope = output::Scope::of(vm, &config.allowed_kinds);
    let mut objects: Vec<Rendered> = Vec::with_capacity(documents.len());
    for Document { name, place, value, patches } in documents {
        let object = output::object(place, value, &scope).map_err(|mut wrong| {
            if !patches.is_empty() {
                wrong.message += &format!(" (after {})", patches.join(", "));
            }
            templates.wrong(name, wrong)
        })?;
        let refused = |message| Wrong { message, near: format!("kind: {}", object.key.kind), last: false };
        if let Some(other) = objects.iter().find(|other| other.key == object.key) {
            let message = format!("{} is also made by {}", object.key, other.template);
            return Err(templates.wrong(name, refused(message)));
        }
        if objects.len() == MAXIMUM_OBJECTS {
            let message = format!("a machine may have {MAXIMUM_OBJECTS} objects, not more");
            return Err(templates.wrong(name, refused(message)));
        }
        objects.push(Rendered { name: name.to_owned(), patches, ..object });
    }
    Ok(objects)
}

/// Renders a machine as if it were made for the first time, without a cluster. One that has no UID yet and no time at which it
/// was made gets some, because templates may rely on what each machine in a cluster has.
///
/// # Errors
/// As [`render`].
pub fn first_start(
    vm: &VirtualMachine,
    config: &ReconcilerConfig,
    templates: &TemplateSet,
) -> Result<Vec<Rendered>, TemplateError> {
    let facts = Facts { display_password: "random".into() };
    let mut vm = vm.clone();
    let is_made_up = vm.metadata.uid.is_none();
    vm.metadata.uid.get_or_insert_with(|| "00000000-0000-4000-8000-000000000000".into());
    vm.metadata.creation_timestamp.get_or_insert(Time(Timestamp::UNIX_EPOCH));
    let mut objects = render(&vm, &Observed::nothing(Timestamp::UNIX_EPOCH), config, &facts, templates)?;
    for object in objects.iter_mut().filter(|_| is_made_up) {
        if let Some(metadata) = Arc::make_mut(&mut object.value)["metadata"].as_object_mut() {
            metadata.remove("ownerReferences");
        }
    }
    Ok(objects)
}

/// Renders a machine's templates one by one and tells each file before it does, so that one that does not end is known.
///
/// # Errors
/// Only those of `before`.
pub fn trace<E>(
    vm: &VirtualMachine,
    observed: &Observed,
    config: &ReconcilerConfig,
    facts: &Facts,
    templates: &TemplateSet,
    mut before: impl FnMut(&str) -> Result<(), E>,
) -> Result<(), E> {
    let Ok(context) = context_of(vm, observed, config, facts, templates) else { return Ok(()) };
    let context = context.value();
    for name in templates.names().chain(templates.patch_names()) {
        before(templates.place(name))?;
        let _ = templates.render(name, &context);
    }
    Ok(())
}

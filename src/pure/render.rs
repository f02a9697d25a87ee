//! render: a VM, its observed objects, the configuration and a template set become the objects that the VM should have.
//!
//! ```text
//!  VirtualMachine ─┐
//!  Observed        ┼─▶ context ─▶ minijinja ─▶ YAML text ─▶ documents ─▶ patches ─▶ objects (owner, labels, hash; refusals)
//!  Config, values  │   context.rs  templates.rs              read.rs      patches.rs  output.rs
//!  random values ──┘   runner.rs   functions.rs, write.rs
//! ```
//!
//! Rendering uses no clock, no network and no randomness: random values are an argument ([`RandomInput`]). Nothing here knows which kinds of
//! objects the templates make.
//!
//! [`steering`] removes from the VM what only templates may say.
//!
//! The files import each other in one direction: `context` uses `runner`, `cloud_init`, `legacy` and `output`; `templates` uses `functions`,
//! `outline`, `unclosed`, `patches`, `values`, `write` and `builtin`; `error` is below all. `guest`, `mounts`, `references` and
//! `hidden` look at a set from above; they and `output` use `pod`.
//! `command_line` makes QEMU's arguments, in the runner; `qemu` checks its templates and hands them over.
//! `check` is above all: it calls [`render`] and uses `valid`.

pub mod builtin;
pub mod check;
pub mod cloud_init;
pub mod command_line;
pub mod context;
pub(crate) mod drives;
mod error;
pub mod functions;
mod guest;
pub mod hidden;
pub mod kept;
mod legacy;
mod library;
pub(crate) mod mounts;
pub(crate) mod networks;
pub mod outline;
pub mod output;
pub mod patches;
pub(crate) mod pod;
pub mod qemu;
mod reach;
mod read;
pub(crate) mod references;
pub mod runner;
pub mod schema;
mod steering;
pub mod templates;
mod unclosed;
pub mod valid;
pub mod values;
mod write;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};

use crate::{
    allowed::{self, Reach},
    api::VirtualMachine,
    claims,
    config::ReconcilerConfig,
    object::{BELONGS_TO_ANNOTATION, Rendered, Update},
    observed::Observed,
};

pub use context::{RandomInput, RelayIdentity, needs_relay_identity};
pub use error::TemplateError;
pub use library::{Library, Sources};
pub use templates::{Files, TemplateSet};

use context::Context;
use error::OutputError;

/// A document that a template rendered, before it becomes an object.
struct Document<'a> {
    /// The template's name in its set.
    template: &'a str,
    value: serde_json::Value,
    /// The files of the patches that changed it.
    patches: Vec<String>,
}

/// How many objects a VM may have. A wrong loop in a template must not fill the cluster.
pub const MAXIMUM_OBJECTS: usize = 64;

/// Renders all objects of a VM, in the order of their templates' names.
///
/// # Errors
/// The first template that fails, with its name, line and column. No object is returned then, because half of a set must not be
/// applied.
pub fn render(
    vm: &VirtualMachine,
    observed: &Observed,
    config: &ReconcilerConfig,
    random: &RandomInput,
    templates: &TemplateSet,
) -> Result<Vec<Rendered>, TemplateError> {
    if let Some(invalid) = &vm.spec.invalid {
        return Err(TemplateError::refused("(spec)", &invalid.message));
    }
    let not_allowed = allowed::refusals(vm, Reach::default(), config);
    if let (Some(first), Some(message)) = (not_allowed.first(), allowed::message(&not_allowed)) {
        return Err(TemplateError::not_allowed(&first.field, message));
    }
    // One VM must not end the manager. Nothing that a panic may have left half done is used afterwards.
    let rendered = catch_unwind(AssertUnwindSafe(|| render_valid(vm, observed, config, random, templates)));
    let rendered = rendered
        .unwrap_or_else(|_| Err(TemplateError::refused("(render)", "the rendering panicked; the log has the place")));
    let reach = reach::of(observed);
    let waits = reach != Reach::default() && !allowed::refusals(vm, reach, config).is_empty();
    rendered.map(|objects| if waits { at_next_start(objects) } else { objects })
}

/// What a Pod reads changes at the VM's next start only: the Pod that exists may not have what the spec wants.
fn at_next_start(mut objects: Vec<Rendered>) -> Vec<Rendered> {
    let is_read = |object: &&mut Rendered| ["ConfigMap", "Secret"].contains(&object.key.kind.as_str());
    for object in objects.iter_mut().filter(is_read).filter(|object| object.update == Update::Live) {
        object.update = Update::AtStart;
    }
    objects
}

fn render_valid(
    vm: &VirtualMachine,
    observed: &Observed,
    config: &ReconcilerConfig,
    random: &RandomInput,
    templates: &TemplateSet,
) -> Result<Vec<Rendered>, TemplateError> {
    let stored = vm;
    let vm = &steering::without(vm);
    let context = context_of(vm, observed, config, random, templates)?;
    let claims: Vec<String> = context.claims().map(str::to_owned).collect();
    let qemu = context.qemu_file();
    if let Some((runner, file)) = qemu {
        qemu::check(runner, file, templates)?;
    }
    let value = context.value();
    let mut documents = documents(templates, &value)?;
    for patch in templates.patches(&value)? {
        patch.apply(documents.iter_mut().map(|document| (&mut document.value, &mut document.patches)))?;
    }
    let runner = pod::runner_name(documents.iter().map(|document| &document.value), vm);
    let scope = output::Scope::of(vm, runner, &config.allowed_kinds);
    let mut objects: Vec<Rendered> = Vec::with_capacity(documents.len());
    for mut document in documents {
        let template = document.template;
        claims::note_origin(stored, observed, &mut document.value);
        let object = object(document, templates, &scope)?;
        check_addition(&objects, &object).map_err(|error| templates.output_error(template, error))?;
        objects.push(object);
    }
    guest::check(&objects, templates)?;
    if qemu.is_some() {
        qemu::check_is_handed_over(&objects)?;
    }
    mounts::check(stored, observed, claims.iter().map(String::as_str), &objects)?;
    Ok(objects)
}

fn context_of(
    vm: &VirtualMachine,
    observed: &Observed,
    config: &ReconcilerConfig,
    random: &RandomInput,
    templates: &TemplateSet,
) -> Result<Context, TemplateError> {
    let values = templates.values().resolve(&config.template_values, vm.spec.template_values.as_ref())?;
    context::build(vm, observed, config, random, values, templates.qemu()).map_err(TemplateError::context)
}

fn documents<'a>(templates: &'a TemplateSet, context: &minijinja::Value) -> Result<Vec<Document<'a>>, TemplateError> {
    let mut documents = Vec::new();
    for template in templates.names() {
        let text = templates.render(template, context)?;
        let values = read::documents(&text).map_err(|error| templates.output_error(template, error))?;
        documents.extend(values.into_iter().map(|value| Document { template, value, patches: Vec::new() }));
    }
    Ok(documents)
}

fn object(
    document: Document<'_>,
    templates: &TemplateSet,
    scope: &output::Scope<'_>,
) -> Result<Rendered, TemplateError> {
    let Document { template, value, patches } = document;
    match output::object(templates.file_of(template), value, scope) {
        Ok(object) => Ok(Rendered { name: template.to_owned(), patches, ..object }),
        Err(mut error) => {
            if !patches.is_empty() {
                error.message += &format!(" (after {})", patches.join(", "));
            }
            Err(templates.output_error(template, error))
        }
    }
}

/// Whether a VM may have the object beside the others.
fn check_addition(objects: &[Rendered], object: &Rendered) -> Result<(), OutputError> {
    let refused = |message| Err(OutputError::at(format!("kind: {}", object.key.kind), message));
    if let Some(other) = objects.iter().find(|other| other.key == object.key) {
        return refused(format!("{} is also made by {}", object.key, other.template));
    }
    if objects.len() == MAXIMUM_OBJECTS {
        return refused(format!("a VM may have {MAXIMUM_OBJECTS} objects, not more"));
    }
    Ok(())
}

/// Renders a VM as for its first start, without a cluster. If the VM has no UID or creation time, it gets one for the rendering, because
/// every VM in a cluster has them and templates may use them.
///
/// # Errors
/// As [`render`].
pub fn first_start(
    vm: &VirtualMachine,
    config: &ReconcilerConfig,
    templates: &TemplateSet,
) -> Result<Vec<Rendered>, TemplateError> {
    let random = RandomInput { display_password: "random".into(), ..RandomInput::default() };
    let has_uid = vm.metadata.uid.is_some();
    let vm = created(vm);
    let mut objects = render(&vm, &Observed::nothing(Timestamp::UNIX_EPOCH), config, &random, templates)?;
    for object in objects.iter_mut().filter(|_| !has_uid) {
        if let Some(metadata) = Arc::make_mut(&mut object.value)["metadata"].as_object_mut() {
            metadata.remove("ownerReferences");
            if let Some(annotations) = metadata.get_mut("annotations").and_then(serde_json::Value::as_object_mut) {
                annotations.remove(BELONGS_TO_ANNOTATION);
            }
        }
    }
    Ok(objects)
}

/// The VM with what every VM in a cluster has.
fn created(vm: &VirtualMachine) -> VirtualMachine {
    let mut vm = vm.clone();
    vm.metadata.uid.get_or_insert_with(|| "00000000-0000-4000-8000-000000000000".into());
    vm.metadata.creation_timestamp.get_or_insert(Time(Timestamp::UNIX_EPOCH));
    vm
}

/// A list with a merge key that a patch of the form `mergePatch` replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    /// The file of the patch.
    pub file: String,
    /// The line of its `mergePatch` or of its target, if it is known.
    pub line: Option<usize>,
    /// The list.
    pub list: patches::ReplacedList,
}

/// The lists with merge keys that patches of a set replace at the first start of a VM, as far as it can be rendered.
pub fn replacements(vm: &VirtualMachine, config: &ReconcilerConfig, templates: &TemplateSet) -> Vec<Replacement> {
    let random = RandomInput { display_password: "random".into(), ..RandomInput::default() };
    let vm = created(vm);
    let vm = steering::without(&vm);
    let observed = Observed::nothing(Timestamp::UNIX_EPOCH);
    let mut found = Vec::new();
    let Ok(context) = context_of(&vm, &observed, config, &random, templates) else { return found };
    let context = context.value();
    let (Ok(mut documents), Ok(patches)) = (documents(templates, &context), templates.patches(&context)) else {
        return found;
    };
    for patch in patches {
        let (file, line) = patch.place();
        let lists = documents.iter().flat_map(|document| patch.replaced_lists(&document.value));
        found.extend(lists.map(|list| Replacement { file: file.to_owned(), line, list }));
        if patch.apply(documents.iter_mut().map(|document| (&mut document.value, &mut document.patches))).is_err() {
            break;
        }
    }
    found
}

/// Renders a VM's templates one by one and calls `before` with the file of each, so that the caller knows which template does not end.
///
/// # Errors
/// Only those of `before`.
pub fn trace<E>(
    vm: &VirtualMachine,
    observed: &Observed,
    config: &ReconcilerConfig,
    random: &RandomInput,
    templates: &TemplateSet,
    mut before: impl FnMut(&str) -> Result<(), E>,
) -> Result<(), E> {
    let Ok(context) = context_of(vm, observed, config, random, templates) else { return Ok(()) };
    let context = context.value();
    for name in templates.names().chain(templates.patch_names()) {
        before(templates.file_of(name))?;
        let _ = templates.render(name, &context);
    }
    Ok(())
}

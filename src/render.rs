//! render: a machine, what is observed about it, the configuration and a template set become objects.
//!
//! ```text
//!  VirtualMachine ─┐
//!  Observed        ┼─▶ context ─▶ minijinja ─▶ YAML text ─▶ objects (owner, labels, hash; refusals)
//!  Config          │   context.rs  templates.rs              output.rs
//!  Facts ──────────┘
//! ```
//!
//! No clock, no network, no randomness: what is random comes in as [`Facts`]. Nothing here knows which kinds of objects
//! the templates make.

pub mod context;
pub mod output;
pub mod templates;

use crate::{api::VirtualMachine, config::ReconcilerConfig, observed::Observed};

pub use context::Facts;
pub use output::{Lifetime, ObjectKey, Rendered, Update};
pub use templates::{TemplateError, TemplateSet};

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
    let context = context::build(vm, observed, config, facts).map_err(TemplateError::context)?;
    let scope = output::Scope::of(vm);
    let mut objects: Vec<Rendered> = Vec::new();
    for name in templates.names() {
        for object in output::objects(name, &templates.render(name, &context)?, &scope)? {
            if let Some(other) = objects.iter().find(|other| other.key == object.key) {
                return Err(TemplateError::refused(name, format!("{} is also made by {}", object.key, other.template)));
            }
            objects.push(object);
        }
    }
    Ok(objects)
}

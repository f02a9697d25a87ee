//! Makes the pages from their templates in `src/web/templates`, and serves the files that they need.
//!
//! Templates are HTML: whatever a VM, an event or a person brings in is escaped. Pages have no script and no style of their own, because the
//! browser is told to accept neither.

use std::sync::Arc;

use axum::{
    extract::Path,
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
};
use fluent_bundle::FluentValue;
use minijinja::{
    AutoEscape, Environment, Error, UndefinedBehavior, Value, context,
    value::{Kwargs, Serde},
};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::language::{Language, Texts};

/// What a browser may do with a page: nothing but load files of this site, and send forms to it.
pub(super) const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; \
                      form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// All templates, by their names.
pub(super) const TEMPLATES: [(&str, &str); 18] = [
    ("base.html", include_str!("templates/base.html")),
    ("parts.html", include_str!("templates/parts.html")),
    ("sign-in.html", include_str!("templates/sign-in.html")),
    ("signed-out.html", include_str!("templates/signed-out.html")),
    ("create.html", include_str!("templates/create.html")),
    ("objects.html", include_str!("templates/objects.html")),
    ("templates.html", include_str!("templates/templates.html")),
    ("list.html", include_str!("templates/list.html")),
    ("row.html", include_str!("templates/row.html")),
    ("home.html", include_str!("templates/home.html")),
    ("card.html", include_str!("templates/card.html")),
    ("detail.html", include_str!("templates/detail.html")),
    ("console.html", include_str!("templates/console.html")),
    ("pools.html", include_str!("templates/pools.html")),
    ("pool-card.html", include_str!("templates/pool-card.html")),
    ("waiting.html", include_str!("templates/waiting.html")),
    ("palette.html", include_str!("templates/palette.html")),
    ("message.html", include_str!("templates/message.html")),
];

/// A file that pages load.
struct Asset {
    name: &'static str,
    kind: &'static str,
    content: &'static [u8],
}

const ASSETS: [Asset; 9] = [
    Asset { name: "style.css", kind: "text/css; charset=utf-8", content: include_bytes!("assets/style.css") },
    Asset { name: "app.js", kind: "text/javascript; charset=utf-8", content: include_bytes!("assets/app.js") },
    Asset { name: "palette.js", kind: "text/javascript; charset=utf-8", content: include_bytes!("assets/palette.js") },
    Asset { name: "looks.js", kind: "text/javascript; charset=utf-8", content: include_bytes!("assets/looks.js") },
    Asset { name: "create.js", kind: "text/javascript; charset=utf-8", content: include_bytes!("assets/create.js") },
    Asset {
        name: "console.js",
        kind: "text/javascript; charset=utf-8",
        content: include_bytes!("assets/console.min.js"),
    },
    Asset {
        name: "serial.js",
        kind: "text/javascript; charset=utf-8",
        content: include_bytes!("assets/serial.min.js"),
    },
    Asset { name: "xterm.css", kind: "text/css; charset=utf-8", content: include_bytes!("assets/xterm.min.css") },
    Asset { name: "icon.svg", kind: "image/svg+xml", content: include_bytes!("assets/icon.svg") },
];

/// The path of a file: its name has a digest of its content, so that a browser can keep it for ever.
fn asset_path(asset: &Asset) -> String {
    let digest = Sha256::digest(asset.content);
    let start = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect::<String>();
    let (stem, extension) = asset.name.rsplit_once('.').unwrap_or((asset.name, ""));
    format!("{stem}.{start}.{extension}")
}

/// `GET /assets/FILE`
pub(super) async fn asset(Path(file): Path<String>) -> Response {
    match ASSETS.iter().find(|asset| asset_path(asset) == file) {
        Some(asset) => {
            let headers =
                [(header::CONTENT_TYPE, asset.kind), (header::CACHE_CONTROL, "public, max-age=31536000, immutable")];
            (headers, asset.content).into_response()
        }
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

/// A value for a template.
pub(super) fn value(value: impl Serialize) -> Value {
    Value::from(Serde(value))
}

/// What every page has.
#[derive(Clone, Serialize)]
pub(super) struct Frame<'a> {
    /// The language.
    pub language: &'static str,
    /// The name of the cluster.
    pub cluster: Option<&'a str>,
    /// The name of the person, as she is called. `None`: nobody is signed in.
    pub user: Option<&'a str>,
    /// Whether she has the administrator's view.
    pub administrator: bool,
    /// Whether she has the users' view.
    pub home: bool,
}

/// Makes pages: one environment for each language, in which the function `t` has the texts of that language.
pub(super) struct Pages(Vec<Environment<'static>>);

impl Pages {
    /// Compiles the templates.
    ///
    /// # Errors
    /// If one is wrong.
    pub fn new() -> Result<Self, Error> {
        let texts = Arc::new(Texts::new());
        let environment = |language: Language| {
            let mut environment = Environment::new();
            environment.set_undefined_behavior(UndefinedBehavior::SemiStrict);
            // By default the extension decides; a page that is not escaped must not exist.
            environment.set_auto_escape_callback(|_| AutoEscape::Html);
            for (name, source) in TEMPLATES {
                environment.add_template(name, source)?;
            }
            let texts = texts.clone();
            environment
                .add_function("t", move |name: &str, arguments: Kwargs| text(&texts, language, name, &arguments));
            environment.add_filter("bytes", bytes);
            environment.add_function("asset", |name: &str| {
                let asset = ASSETS.iter().find(|asset| asset.name == name).map(asset_path);
                format!("/assets/{}", asset.as_deref().unwrap_or(name))
            });
            Ok(environment)
        };
        Language::ALL.into_iter().map(environment).collect::<Result<_, Error>>().map(Self)
    }

    /// A part of a page, or a whole one.
    ///
    /// # Errors
    /// If the template needs what the context does not have.
    pub fn part(&self, language: Language, template: &str, context: Value) -> Result<String, Error> {
        let environment = self.0.get(language as usize).ok_or(minijinja::ErrorKind::TemplateNotFound)?;
        environment.get_template(template)?.render(context)
    }

    /// A part of a page, or nothing and a line in the log.
    pub fn part_or_nothing(&self, language: Language, template: &str, context: Value) -> String {
        self.part(language, template, context).unwrap_or_else(|error| {
            tracing::error!(template, error = format!("{error:#}"), "a part of a page can't be made");
            String::new()
        })
    }

    /// The text of that name, which has no arguments.
    pub fn word(&self, language: Language, name: &str) -> String {
        let environment = self.0.get(language as usize);
        environment.and_then(|it| it.render_str("{{ t(name) }}", context! { name }).ok()).unwrap_or_default()
    }

    /// A whole page as an answer.
    pub fn page(&self, language: Language, status: StatusCode, template: &str, context: Value) -> Response {
        let headers: [(HeaderName, &str); 2] =
            [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CACHE_CONTROL, "no-store")];
        match self.part(language, template, context) {
            Ok(page) => (status, headers, page).into_response(),
            Err(error) => {
                tracing::error!(template, error = format!("{error:#}"), "a page can't be made");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }
}

/// A number of bytes for people, such as `1.5 GiB`.
fn bytes(count: u64) -> String {
    let step = (1..=5).rev().find(|step| count >> (10 * step) > 0).unwrap_or(0_usize);
    #[allow(clippy::cast_precision_loss, reason = "a text for people")]
    let number = count as f64 / (1_u64 << (10 * step)) as f64;
    let text = format!("{number:.1}");
    format!("{} {}", text.strip_suffix(".0").unwrap_or(&text), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][step])
}

/// The text of that name.
fn text(texts: &Texts, language: Language, name: &str, arguments: &Kwargs) -> Result<String, Error> {
    let mut values = Vec::new();
    for key in arguments.args() {
        let value: Value = arguments.get(key)?;
        let value = match i64::try_from(value.clone()) {
            Ok(number) => FluentValue::from(number),
            Err(_) => FluentValue::from(value.to_string()),
        };
        values.push((key, value));
    }
    Ok(texts.text(language, name, values))
}

#[cfg(test)]
mod tests {
    use minijinja::context;
    use serde_json::json;

    use super::*;

    fn frame(language: Language) -> Frame<'static> {
        Frame { language: language.tag(), cluster: Some("<b>c"), user: Some("<i>ann"), administrator: true, home: true }
    }

    #[test]
    fn whatever_a_vm_brings_in_is_escaped_on_every_page() {
        let evil = "</td><script>alert(1)</script>\"'><img src=x onerror=y>";
        let vm = json!({
            "id": evil, "namespace": evil, "name": evil, "phase": evil, "tone": evil, "waits": evil, "pending": 1, "cpus": 1, "ram": evil, "most_cpus": 2, "most_ram": evil,
            "node": evil, "addresses": [evil], "is_console_used": true, "console_user": evil, "console_waits": "used", "pool": evil, "assignee": evil, "is_own": true, "kept_until": evil,
            "actions": ["start", "stop", "restart", "reset"], "can_open_console": true, "can_get_file": true,
        });
        let pages = Pages::new().unwrap();
        for language in Language::ALL {
            for (name, _) in TEMPLATES {
                let event = json!({ "time": evil, "reason": evil, "message": evil, "count": 2, "is_warning": true });
                let square = json!({ "id": evil, "name": evil, "tone": "free", "user": evil, "last_used": evil, "kept_until": evil, "is_connected": false });
                let pool =
                    json!({ "namespace": evil, "name": evil, "retention": evil, "problem": evil, "members": [square] });
                let why = json!({ "about": evil, "sentences": [{ "text": "git", "name": evil, "count": 1, "field": evil, "time": evil }] });
                let context = context! {
                    frame => value(frame(language)), vm => value(&vm), since => evil, sum_since => evil, sums => value([json!({ "name": "ram", "value": 1_u64 << 31, "points": evil })]), view => "list", script => "console.js", can_take => true, problem => "wrong", kind => "refused", detail => evil, failures => value(json!([{ "name": evil, "kind": "failed" }, { "name": evil, "kind": "refused", "why": &why }])), why => value(&why),
                    back => evil, namespace => evil, name => evil, events => value([event]), pending => value([json!({ "path": evil, "current": evil, "wanted": evil })]), rows => Vec::<String>::new(), cards => Vec::<String>::new(), pools => value([pool]),
                    providers => value([json!({ "path": evil, "name": evil })]), has_users => true, url => evil, provider => evil,
                    form => value(json!({ "namespace": evil, "name": evil, "image": evil, "cpus": evil, "ram": evil, "disk": evil, "network": evil, "bridge": evil, "user": evil, "keys": evil, "pools": evil })),
                    problems => value(json!({ "name": { "says": evil }, "image": "invalid", "keys": "missing" })), others => [evil], verdict => "failed", yaml => evil, command => evil,
                    namespaces => [evil], is_any_namespace => true, images => [evil],
                    id => evil, set => evil, version => evil, objects => value([json!({ "kind": evil, "name": evil, "lifetime": "vm", "update": "live", "origins": [{ "file": evil, "line": 1, "blocks": [[evil, 2]] }], "patches": [evil], "yaml": evil })]),
                    templates => value(json!({ "set": evil, "version": evil })),
                    sets => value([json!({ "name": evil, "tone": "bad", "health": "bad", "versions": [{ "version": evil, "vms": 1 }], "waiting": 1, "complaints": [{ "reason": evil, "message": evil, "vms": [evil], "more": 1 }] })]),
                    vms => value([&vm]), deeds => value(["console", "stop"].map(|what| json!({ "vm": &vm, "what": what, "label": evil }))), pages => value([[evil, evil]]),
                    explanation => value(json!({ "line": evil, "cause": { "whatToDo": evil } })),
                };
                let page = pages.part(language, name, context).unwrap_or_else(|error| panic!("{name}: {error:#}"));
                let page = page.replace("<img data-picture=", "");
                assert!(
                    !page.contains("<script>") && !page.contains("<img") && !page.contains("<b>c"),
                    "{name}: {page}"
                );
                assert!(!page.contains("\"'>"), "{name}: {page}");
            }
        }
    }

    /// The browser is told to run and to apply nothing that is in a page itself, so such a thing would have no effect.
    #[test]
    fn templates_have_no_script_and_no_style_of_their_own() {
        for (name, template) in TEMPLATES {
            let template = template.replace("<script src=", "");
            for word in ["<script", "<style", " style=", " onclick=", " onload=", "javascript:", "hx-on", "|safe"] {
                let is_part =
                    word == "|safe" && template.matches(word).count() == template.matches("{{ row|safe }}").count();
                assert!(!template.contains(word) || is_part, "{name} has {word}");
            }
        }
    }

    #[test]
    fn the_name_of_a_file_changes_with_its_content() {
        let asset = |content| asset_path(&Asset { name: "style.css", kind: "", content });
        assert_ne!(asset(b"a"), asset(b"b"));
        assert!(asset(b"a").starts_with("style.") && asset(b"a").ends_with(".css"));
    }
}

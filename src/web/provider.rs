//! Providers of OpenID Connect as the configuration has them, and which person somebody is of whom a provider speaks.
//!
//! ```text
//!  claims ─▶ profile ─ authorizedRoles ─▶ userMappings, roleMappings ─▶ person
//! ```
//!
//! | key of a provider | what it does |
//! |---|---|
//! | `name` | part of the path to sign in with it |
//! | `displayName` | its name on the page; without it, `name` |
//! | `configurationEndpoint` | the URL of its discovery document; without it, that below `issuer` |
//! | `issuer` | who must have issued its tokens; without it, the one to whom the discovery document belongs |
//! | `authorizationEndpoint`, `tokenEndpoint`, `userinfoEndpoint`, `jwksUri` | take precedence over those of the discovery document |
//! | `clientId`, `secret` | this program's name at the provider, and its password there |
//! | `scopes` | what is asked for beside `openid`; without it, `profile` and `email` |
//! | `rolesClaim` | the claim with the roles; dots lead into objects; without it, `roles` |
//! | `authorizedRoles` | who is let in: whoever has one of these roles; `""`: whoever has none |
//! | `userMappings`, `roleMappings` | `from`, a regular expression for the whole name, and `to` with `$1` and so on for its groups; the first that matches |

use std::{collections::BTreeSet, fmt};

use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::people::Person;

/// The longest name of a user, in bytes: what the relay takes.
pub(super) const LONGEST_NAME: usize = 256;
/// How long the names and roles of a profile may be together, in bytes: they are in a cookie, and that has 4 KiB at most.
const LONGEST_PROFILE: usize = 2300;
/// How much of a full name is kept, in characters.
const LONGEST_FULL_NAME: usize = 100;

/// A text that is not printed.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// A provider.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Provider {
    /// Its name in paths and sessions.
    pub name: String,
    /// Its name on pages.
    pub display_name: String,
    /// The URL of its discovery document. `None`: all that is needed is configured.
    pub discovery: Option<String>,
    /// Who must have issued its tokens. `None`: as the discovery document says, if it lies where the issuer's would.
    pub issuer: Option<String>,
    /// Where people sign in, if that is configured.
    pub authorization_endpoint: Option<String>,
    /// Where a code is exchanged for tokens, if that is configured.
    pub token_endpoint: Option<String>,
    /// Where more claims are, if that is configured.
    pub userinfo_endpoint: Option<String>,
    /// Where its keys are, if that is configured.
    pub jwks_uri: Option<String>,
    /// This program's name there.
    pub client_id: String,
    /// This program's password there.
    pub secret: Option<Secret>,
    /// What is asked for beside `openid`.
    pub scopes: Vec<String>,
    /// The claim with the roles.
    pub roles_claim: String,
    authorized_roles: BTreeSet<String>,
    user_mappings: Vec<Mapping>,
    role_mappings: Vec<Mapping>,
}

/// The keys of a provider as they are written.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Keys {
    name: String,
    display_name: Option<String>,
    configuration_endpoint: Option<String>,
    issuer: Option<String>,
    authorization_endpoint: Option<String>,
    token_endpoint: Option<String>,
    userinfo_endpoint: Option<String>,
    jwks_uri: Option<String>,
    client_id: String,
    secret: Option<Secret>,
    scopes: Option<Vec<String>>,
    roles_claim: Option<String>,
    authorized_roles: Option<Vec<String>>,
    user_mappings: Option<Vec<MappingKeys>>,
    role_mappings: Option<Vec<MappingKeys>>,
    popup: Option<Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
struct MappingKeys {
    from: String,
    to: String,
}

impl Provider {
    /// From the keys of the configuration. What has no effect is added to `warnings`.
    ///
    /// # Errors
    /// If it can't be used: the text says which key, and why.
    pub fn of(keys: Keys, warnings: &mut Vec<String>) -> Result<Self, String> {
        let Keys { name, client_id, secret, popup, others, .. } = keys;
        let is_name = !name.is_empty() && name.len() <= LONGEST_NAME && !name.chars().any(char::is_control);
        if !is_name {
            return Err(format!("{name:?}: a name has 1 to {LONGEST_NAME} bytes, and no control characters"));
        }
        let failed = |key: &str, why: &str| format!("{name}: {key}: {why}");
        let without_effect =
            popup.map(|_| "popup".to_owned()).into_iter().chain(others.into_iter().map(|(key, _)| key));
        warnings.extend(without_effect.map(|key| format!("{name}: {key} has no effect")));
        let url = |key: &str, url: Option<String>| match url {
            None => Ok(None),
            Some(url) => check_url(&url).map(|()| Some(url.clone())).map_err(|why| failed(key, why)),
        };
        let issuer = url("issuer", keys.issuer)?;
        let configuration_endpoint = url("configurationEndpoint", keys.configuration_endpoint)?;
        let authorization_endpoint = url("authorizationEndpoint", keys.authorization_endpoint)?;
        let token_endpoint = url("tokenEndpoint", keys.token_endpoint)?;
        let userinfo_endpoint = url("userinfoEndpoint", keys.userinfo_endpoint)?;
        let jwks_uri = url("jwksUri", keys.jwks_uri)?;
        let is_complete = authorization_endpoint.is_some() && token_endpoint.is_some() && jwks_uri.is_some();
        let discovery = match (configuration_endpoint, &issuer) {
            (Some(url), _) => Some(url),
            (None, Some(_)) if is_complete => None,
            (None, Some(issuer)) => Some(format!("{}{WELL_KNOWN}", issuer.trim_end_matches('/'))),
            (None, None) => {
                return Err(failed(
                    "issuer",
                    "without it or configurationEndpoint nobody can tell whose tokens are right",
                ));
            }
        };
        let mappings = |key: &str, mappings: Option<Vec<MappingKeys>>| {
            let mappings = mappings.unwrap_or_default().into_iter().map(|keys| Mapping::of(&keys));
            mappings.collect::<Result<Vec<_>, _>>().map_err(|why| failed(key, &why))
        };
        let (user_mappings, role_mappings) =
            (mappings("userMappings", keys.user_mappings)?, mappings("roleMappings", keys.role_mappings)?);
        let plain = [&discovery, &authorization_endpoint, &token_endpoint, &userinfo_endpoint, &jwks_uri];
        if plain.into_iter().flatten().any(|url| url.starts_with("http://") && !is_loopback(url)) {
            warnings.push(format!("{name}: over http:// whoever is on the way can sign in as anybody: use https://"));
        }
        let authorized_roles: BTreeSet<String> = keys.authorized_roles.unwrap_or_default().into_iter().collect();
        if authorized_roles.is_empty() {
            warnings.push(format!("{name}: nobody is let in without authorizedRoles"));
        }
        Ok(Self {
            display_name: keys.display_name.filter(|name| !name.is_empty()).unwrap_or_else(|| name.clone()),
            discovery,
            issuer,
            authorization_endpoint,
            token_endpoint,
            userinfo_endpoint,
            jwks_uri,
            client_id,
            secret: secret.filter(|Secret(text)| !text.is_empty()),
            scopes: keys.scopes.unwrap_or_else(|| vec!["profile".into(), "email".into()]),
            roles_claim: keys.roles_claim.unwrap_or_else(|| "roles".into()),
            authorized_roles,
            user_mappings,
            role_mappings,
            name,
        })
    }

    /// The issuer to whom a discovery document at that URL belongs (OpenID Connect Discovery 1.0, 4.3).
    pub fn issuer_of(discovery: &str) -> Option<&str> {
        discovery.strip_suffix(WELL_KNOWN)
    }

    /// The path at which signing in with it begins.
    pub fn path(&self) -> String {
        let encode = |byte: u8| match byte {
            b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        };
        format!("/sign-in/oidc/{}", self.name.bytes().map(encode).collect::<String>())
    }

    /// The person, with the roles that the mappings make of those that the provider says. Whether she is let in depends on the latter.
    ///
    /// # Errors
    /// If she is not let in.
    pub fn admit(&self, profile: &Profile) -> Result<Person, NotLetIn> {
        let is_authorized = match profile.roles.is_empty() {
            true => self.authorized_roles.contains(""),
            false => profile.roles.iter().any(|role| !role.is_empty() && self.authorized_roles.contains(role)),
        };
        if !is_authorized {
            return Err(NotLetIn::NotAuthorized);
        }
        let user = mapped(&self.user_mappings, &profile.user);
        if !is_user(&user) {
            return Err(NotLetIn::BadName);
        }
        let roles = profile.roles.iter().map(|role| mapped(&self.role_mappings, role)).collect();
        Ok(Person { user, roles })
    }
}

/// Where the discovery document of an issuer is.
const WELL_KNOWN: &str = "/.well-known/openid-configuration";

/// Whether this is the URL of a server.
pub(super) fn check_url(text: &str) -> Result<(), &'static str> {
    let has_host = |rest: &str| rest.split(['/', '?', '#']).next().is_some_and(|host| !host.is_empty());
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_clean = !text.chars().any(|character| character.is_whitespace() || character.is_control());
    match rest.is_some_and(has_host) && is_clean {
        true => Ok(()),
        false => Err("this is no URL with https://"),
    }
}

fn is_loopback(url: &str) -> bool {
    let authority = url.strip_prefix("http://").and_then(|rest| rest.split(['/', '?', '#']).next()).unwrap_or_default();
    ["localhost", "127.0.0.1", "[::1]"]
        .iter()
        .any(|host| authority.strip_prefix(host).is_some_and(|port| port.is_empty() || port.starts_with(':')))
}

fn is_user(name: &str) -> bool {
    !name.is_empty() && name.len() <= LONGEST_NAME && !name.chars().any(char::is_control)
}

/// What a provider says of somebody.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Profile {
    /// The claim `preferred_username`.
    #[serde(rename = "u")]
    pub user: String,
    /// The claim `name`.
    #[serde(rename = "n")]
    pub full_name: Option<String>,
    /// The claim with the roles.
    #[serde(rename = "r")]
    pub roles: BTreeSet<String>,
}

impl Profile {
    /// Reads the claims.
    ///
    /// # Errors
    /// If they don't say who it is, or are too long for a session.
    pub fn of(claims: &Map<String, Value>, roles_claim: &str) -> Result<Self, NotLetIn> {
        let text = |name: &str| claims.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
        let user = text("preferred_username").ok_or(NotLetIn::NoName)?.to_owned();
        if !is_user(&user) {
            return Err(NotLetIn::BadName);
        }
        let full_name = text("name").filter(|name| !name.chars().any(char::is_control));
        let full_name = full_name.map(|name| name.chars().take(LONGEST_FULL_NAME).collect());
        let roles = match roles(claims, roles_claim) {
            Some(Value::Array(roles)) => roles.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            Some(Value::String(role)) => [role.clone()].into(),
            _ => BTreeSet::new(),
        };
        let profile = Self { user, full_name, roles };
        let length = serde_json::to_string(&profile).map_or(usize::MAX, |text| text.len());
        if length > LONGEST_PROFILE { Err(NotLetIn::TooLong) } else { Ok(profile) }
    }

    /// Whether these claims have all that a profile is made of.
    pub fn is_complete(claims: &Map<String, Value>, roles_claim: &str) -> bool {
        claims.contains_key("preferred_username") && roles(claims, roles_claim).is_some()
    }
}

/// The claim of that name, or the value to which the parts of the name lead.
fn roles<'a>(claims: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    claims.get(name).or_else(|| {
        let mut parts = name.split('.');
        let first = claims.get(parts.next()?)?;
        parts.try_fold(first, |value, part| value.get(part))
    })
}

/// Why somebody is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotLetIn {
    /// The user is not configured any more.
    #[error("there is no such user")]
    NoUser,
    /// The provider is not configured any more.
    #[error("the provider is not in the configuration")]
    NoProvider,
    /// The provider does not say who it is.
    #[error("the provider says no preferred_username")]
    NoName,
    /// The name can't be one of a user.
    #[error("the name is empty, has more than {LONGEST_NAME} bytes or has control characters")]
    BadName,
    /// Names and roles don't fit into a cookie.
    #[error("the roles have more than {LONGEST_PROFILE} bytes: let the provider send fewer")]
    TooLong,
    /// No role lets her in.
    #[error("none of the roles is in authorizedRoles")]
    NotAuthorized,
    /// A user with a password has this name.
    #[error("a user of the configuration has this name")]
    IsLocalUser,
}

/// What becomes of a name.
#[derive(Clone, Debug)]
struct Mapping {
    from: Regex,
    to: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq)]
enum Part {
    Text(String),
    Group(usize),
}

impl PartialEq for Mapping {
    fn eq(&self, other: &Self) -> bool {
        self.from.as_str() == other.from.as_str() && self.to == other.to
    }
}

impl Mapping {
    fn of(MappingKeys { from, to }: &MappingKeys) -> Result<Self, String> {
        let regex = Regex::new(&format!(r"\A(?:{from})\z")).map_err(|error| error.to_string())?;
        let groups = regex.captures_len();
        let (mut parts, mut text, mut rest) = (Vec::new(), String::new(), to.chars().peekable());
        while let Some(character) = rest.next() {
            match character {
                // As in Java: after a backslash each character stands for itself.
                '\\' => text.extend(rest.next()),
                '$' => {
                    let digit = rest.next().and_then(|digit| digit.to_digit(10));
                    let mut group = digit.ok_or_else(|| format!("{to}: a number must follow $"))? as usize;
                    if group >= groups {
                        return Err(format!("{to}: {from} has no group {group}"));
                    }
                    // Further digits belong to the number as long as there is such a group.
                    while let Some(more) =
                        rest.peek().and_then(|digit| digit.to_digit(10)).map(|it| group * 10 + it as usize)
                        && more < groups
                    {
                        group = more;
                        rest.next();
                    }
                    parts.extend([Part::Text(std::mem::take(&mut text)), Part::Group(group)]);
                }
                character => text.push(character),
            }
        }
        parts.push(Part::Text(text));
        Ok(Self { from: regex, to: parts })
    }

    fn replace(&self, groups: &Captures<'_>) -> String {
        let part = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Group(number) => groups.get(*number).map(|group| group.as_str().to_owned()).unwrap_or_default(),
        };
        self.to.iter().map(part).collect()
    }
}

/// What the first mapping that matches makes of a name; without one, the name.
fn mapped(mappings: &[Mapping], name: &str) -> String {
    let replaced = mappings.iter().find_map(|mapping| Some(mapping.replace(&mapping.from.captures(name)?)));
    replaced.unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn provider(keys: Value) -> Result<(Provider, Vec<String>), String> {
        let mut all =
            json!({ "name": "lab", "clientId": "web", "issuer": "https://id.example", "authorizedRoles": ["staff"] });
        all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let mut warnings = Vec::new();
        let keys = serde_json::from_value(all).map_err(|error: serde_json::Error| error.to_string())?;
        Provider::of(keys, &mut warnings).map(|provider| (provider, warnings))
    }

    fn profile(user: &str, roles: &[&str]) -> Profile {
        Profile { user: user.into(), full_name: None, roles: roles.iter().map(|role| (*role).to_owned()).collect() }
    }

    fn claims(claims: Value) -> Map<String, Value> {
        claims.as_object().unwrap().clone()
    }

    #[test]
    fn where_its_discovery_document_is() {
        let found = |keys: Value| provider(keys).map(|(provider, _)| provider.discovery);
        let well_known = "https://id.example/.well-known/openid-configuration";
        assert_eq!(found(json!({})).unwrap().as_deref(), Some(well_known));
        assert_eq!(found(json!({ "issuer": "https://id.example/" })).unwrap().as_deref(), Some(well_known));
        let elsewhere = "https://other.example/configuration";
        assert_eq!(found(json!({ "configurationEndpoint": elsewhere })).unwrap().as_deref(), Some(elsewhere));
        let endpoints = json!({
            "authorizationEndpoint": "https://id.example/a", "tokenEndpoint": "https://id.example/t", "jwksUri": "https://id.example/k",
        });
        assert_eq!(found(endpoints).unwrap(), None);
        // The keys are still needed.
        let endpoints =
            json!({ "authorizationEndpoint": "https://id.example/a", "tokenEndpoint": "https://id.example/t" });
        assert_eq!(found(endpoints).unwrap().as_deref(), Some(well_known));
        assert_eq!(Provider::issuer_of(well_known), Some("https://id.example"));
        assert_eq!(Provider::issuer_of(elsewhere), None);
    }

    #[test]
    fn what_can_not_be_used_is_said_with_its_key() {
        for (keys, message) in [
            (json!({ "issuer": null }), "lab: issuer: without it or configurationEndpoint"),
            (json!({ "issuer": "id.example" }), "lab: issuer: this is no URL with https://"),
            (json!({ "tokenEndpoint": "https://" }), "lab: tokenEndpoint: this is no URL"),
            (json!({ "name": "" }), "\"\": a name has"),
            (json!({ "clientId": null }), "invalid type"),
            (json!({ "userMappings": [{ "from": "(", "to": "" }] }), "lab: userMappings: regex parse error"),
            (json!({ "roleMappings": [{ "from": "(a)", "to": "$2" }] }), "lab: roleMappings: $2: (a) has no group 2"),
            (json!({ "roleMappings": [{ "from": "a", "to": "$" }] }), "lab: roleMappings: $: a number must follow $"),
        ] {
            let error = provider(keys).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn what_has_no_effect_or_is_dangerous_is_named() {
        let warnings = |keys: Value| provider(keys).unwrap().1;
        assert!(warnings(json!({})).is_empty());
        assert_eq!(
            warnings(json!({ "popup": true, "colour": "red" })),
            ["lab: popup has no effect", "lab: colour has no effect"]
        );
        assert!(warnings(json!({ "authorizedRoles": [] }))[0].contains("nobody is let in"));
        assert!(warnings(json!({ "issuer": "http://id.example" }))[0].contains("use https://"));
        for host in ["localhost:8080", "127.0.0.1", "[::1]:80"] {
            assert!(warnings(json!({ "issuer": format!("http://{host}/a") })).is_empty(), "{host}");
        }
        assert_eq!(warnings(json!({ "issuer": "http://localhost.example" })).len(), 1);
        let secret = provider(json!({ "secret": "hush" })).unwrap().0;
        assert!(!format!("{secret:?}").contains("hush"));
    }

    #[test]
    fn the_path_has_its_name() {
        assert_eq!(provider(json!({})).unwrap().0.path(), "/sign-in/oidc/lab");
        assert_eq!(provider(json!({ "name": "A b/ü" })).unwrap().0.path(), "/sign-in/oidc/A%20b%2F%C3%BC");
    }

    #[test]
    fn who_is_let_in() {
        for (authorized, roles, is_admitted) in [
            (json!([]), &[][..], false),
            (json!([]), &["staff"], false),
            (json!(null), &["staff"], false),
            (json!(["staff"]), &["staff"], true),
            (json!(["staff"]), &["other", "staff"], true),
            (json!(["staff"]), &["other"], false),
            (json!(["staff"]), &["Staff"], false),
            (json!(["staff"]), &[], false),
            (json!([""]), &[], true),
            (json!([""]), &["other"], false),
            (json!([""]), &[""], false),
            (json!(["", "staff"]), &["staff"], true),
            // Before the mappings: what a role becomes lets nobody in.
            (json!(["mapped"]), &["other"], false),
        ] {
            let keys = json!({ "authorizedRoles": authorized, "roleMappings": [{ "from": "other", "to": "mapped" }] });
            let admitted = provider(keys).unwrap().0.admit(&profile("ann", roles));
            assert_eq!(admitted.is_ok(), is_admitted, "{authorized} {roles:?}");
            assert!(admitted.is_ok() || admitted == Err(NotLetIn::NotAuthorized));
        }
    }

    #[test]
    fn names_are_mapped_by_the_first_that_matches_the_whole() {
        let map = |mappings: Value, name: &str| {
            let mappings: Vec<MappingKeys> = serde_json::from_value(mappings).unwrap();
            let mappings: Vec<Mapping> = mappings.iter().map(|keys| Mapping::of(keys).unwrap()).collect();
            mapped(&mappings, name)
        };
        let one = |from: &str, to: &str, name: &str| map(json!([{ "from": from, "to": to }]), name);
        assert_eq!(map(json!([]), "ann"), "ann");
        assert_eq!(one("(.*)", "oidc/$1", "ann"), "oidc/ann");
        assert_eq!(one("an", "x", "ann"), "ann", "a part does not match");
        assert_eq!(one("a|ann", "x", "ann"), "x");
        assert_eq!(one("(.*)@(.*)", "$2-$1", "ann@lab"), "lab-ann");
        assert_eq!(one("(a)(x)?nn", "[$2]", "ann"), "[]");
        assert_eq!(one("(a)nn", "$12", "ann"), "a2", "there is no group 12");
        assert_eq!(one("(a)nn", "$0!", "ann"), "ann!");
        assert_eq!(one("a(.)n", r"\$1\\$1", "ann"), r"$1\n");
        assert_eq!(one("ann", "x", "ann\n"), "ann\n");
        let two = json!([{ "from": "a.*", "to": "first" }, { "from": "ann", "to": "second" }]);
        assert_eq!((map(two.clone(), "ann"), map(two, "bob")), ("first".into(), "bob".into()));
        let keys = json!({
            "authorizedRoles": ["a", "b"], "userMappings": [{ "from": "(.*)", "to": "$1@lab" }],
            "roleMappings": [{ "from": "a", "to": "admin" }, { "from": "b", "to": "admin" }],
        });
        let person = provider(keys).unwrap().0.admit(&profile("ann", &["a", "b", "c"])).unwrap();
        assert_eq!(person, Person { user: "ann@lab".into(), roles: ["admin".to_owned(), "c".to_owned()].into() });
        let emptied = json!({ "userMappings": [{ "from": ".*", "to": "" }] });
        assert_eq!(provider(emptied).unwrap().0.admit(&profile("ann", &["staff"])), Err(NotLetIn::BadName));
    }

    #[test]
    fn who_somebody_is() {
        let read = |value: Value| Profile::of(&claims(value), "roles");
        let ann = read(json!({ "preferred_username": "ann", "name": "Ann Lee", "roles": ["b", "a", 7] })).unwrap();
        assert_eq!((ann.user.as_str(), ann.full_name.as_deref()), ("ann", Some("Ann Lee")));
        assert_eq!(ann.roles, profile("", &["a", "b"]).roles);
        assert_eq!(read(json!({ "preferred_username": "ann", "roles": "a" })).unwrap().roles.len(), 1);
        assert!(read(json!({ "preferred_username": "ann", "roles": { "a": true } })).unwrap().roles.is_empty());
        for nobody in [json!({}), json!({ "preferred_username": "" }), json!({ "preferred_username": 7, "sub": "ann" })]
        {
            assert_eq!(read(nobody), Err(NotLetIn::NoName));
        }
        assert_eq!(read(json!({ "preferred_username": "a\nb" })), Err(NotLetIn::BadName));
        assert_eq!(read(json!({ "preferred_username": "a".repeat(257) })), Err(NotLetIn::BadName));
        let many: Vec<String> = (0..300).map(|number| format!("role-{number}")).collect();
        assert_eq!(read(json!({ "preferred_username": "ann", "roles": many })), Err(NotLetIn::TooLong));
        let long = read(json!({ "preferred_username": "ann", "name": "a".repeat(1000) })).unwrap();
        assert_eq!(long.full_name.unwrap().len(), LONGEST_FULL_NAME);
    }

    #[test]
    fn the_claim_with_the_roles() {
        let all = claims(json!({
            "preferred_username": "ann", "groups": ["g"], "realm_access": { "roles": ["r"] }, "a.b": ["whole"], "a": { "b": ["part"] },
        }));
        for (name, role) in [
            ("groups", Some("g")),
            ("realm_access.roles", Some("r")),
            ("a.b", Some("whole")),
            ("none", None),
            ("a.c", None),
        ] {
            let roles = Profile::of(&all, name).unwrap().roles;
            assert_eq!(roles.first().map(String::as_str), role, "{name}");
            assert_eq!(Profile::is_complete(&all, name), role.is_some());
        }
        assert!(!Profile::is_complete(&claims(json!({ "roles": [] })), "roles"));
    }
}

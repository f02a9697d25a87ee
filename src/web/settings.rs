//! What the configuration file says about the web interface: the sections of the interface of the VM-Operator in Java, whose files are
//! used as they are.
//!
//! | section of `/Manager` | key | what it does |
//! |---|---|---|
//! | itself | `clusterName` | the name at the head of each page |
//! | `/GuiSocketServer` | `port`, `hostname` | where the program listens, unless its command line says so |
//! | | `maxConnections` | how many connections may be open |
//! | | `trustedProxies` | the addresses of proxies that say from whom a request comes |
//! | W`/LoginConlet` | `users` | who signs in with a password |
//! | | `oidcProviders` | with what others sign in ([`super::provider`]) |
//! | W`/OidcClient` | `redirectUri` | where such a provider sends people, if it is not what their browser asks for |
//! | W`/ComponentCollector/VmAccess` | `preferredIpVersion`, `deleteConnectionFile` | connection files; the keys may also be in `displayResource` |
//! | `/Controller/Reconciler/DisplaySecretReconciler` | `passwordValidity` | for how many seconds a new password lets a viewer in |
//! | W`/RoleConfigurator` | `rolesByUser`, `replace` | the roles of a user; those of `*` are added to everybody's |
//! | W`/RoleConletFilter` | `conletTypesByRole` | the views of a role |
//!
//! Former names are read, too: `/VmViewer` and `/Controller/DisplaySecretMonitor`. W is `/GuiHttpServer/ConsoleWeblet/WebConsole`. All other keys of these sections have no effect; the program warns about each.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    str::FromStr,
    time::Duration,
};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    passwords::Hash,
    provider::{self, LONGEST_NAME, NotLetIn, Provider},
    session::SignIn,
};
use crate::{
    actions::display::{IpVersion, Validity},
    people::Person,
    process::network::Network,
};

const SERVER: &str = "/Manager/GuiSocketServer";
const HTTP: &str = "/Manager/GuiHttpServer";
const LOGIN: &str = "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/LoginConlet";
const OIDC: &str = "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/OidcClient";
const ACCESS: [&str; 2] = [
    "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/ComponentCollector/VmAccess",
    "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/ComponentCollector/VmViewer",
];
const PASSWORDS: [&str; 2] =
    ["/Manager/Controller/Reconciler/DisplaySecretReconciler", "/Manager/Controller/DisplaySecretMonitor"];
const ROLES: &str = "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/RoleConfigurator";
const VIEWS: &str = "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/RoleConletFilter";

/// The port without a configuration.
pub(super) const PORT: u16 = 8080;
/// How many connections may be open without a configuration.
const CONNECTIONS: usize = 1024;

/// The types of the administrator's view: the present one and former names.
const ADMINISTRATORS_TYPES: [&str; 2] =
    ["org.jdrupes.vmoperator.vmmgmt.VmMgmt", "org.jdrupes.vmoperator.vmconlet.VmConlet"];
/// The types of the users' view.
const USERS_TYPES: [&str; 2] = ["org.jdrupes.vmoperator.vmaccess.VmAccess", "org.jdrupes.vmoperator.vmviewer.VmViewer"];

/// What is configured.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    /// The name at the head of each page.
    pub cluster_name: Option<String>,
    port: Option<u16>,
    hostname: Option<IpAddr>,
    max_connections: Option<usize>,
    /// The addresses of proxies that say from whom a request comes ([`super::client`]).
    pub trusted_proxies: Vec<Network>,
    users: BTreeMap<String, LocalUser>,
    providers: Vec<Provider>,
    /// The URL to which providers send people.
    pub redirect_uri: Option<String>,
    /// Which of a Pod's addresses a viewer gets.
    pub ip_version: Option<IpVersion>,
    delete_connection_file: Option<bool>,
    password_validity: Option<Validity>,
    roles_by_user: BTreeMap<String, BTreeSet<String>>,
    /// Whether the configured roles of a user are all that she has.
    replaces_roles: bool,
    /// `None`: the file says nothing. Then everybody has the users' view, and nobody the administrator's.
    types_by_role: Option<BTreeMap<String, Vec<String>>>,
    /// What has no effect, for the log: a line each.
    pub warnings: Vec<String>,
}

/// A user who signs in with a password.
#[derive(Clone, Debug)]
pub(super) struct LocalUser {
    /// The name that pages show.
    pub full_name: Option<String>,
    /// `None`: nobody signs in as this user.
    pub hash: Option<Hash>,
}

/// Which pages a person sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Views {
    /// All VMs, with all rights.
    pub administrator: bool,
    /// The VMs on which the person has a right.
    pub user: bool,
}

/// A configuration that can't be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum SettingsError {
    /// It is not YAML.
    #[error(transparent)]
    Yaml(#[from] crate::yaml::Error),
    /// A value can't be used.
    #[error("{path}: {message}")]
    Value {
        /// The section and the key.
        path: String,
        /// Why.
        message: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct User {
    name: Option<String>,
    full_name: Option<String>,
    #[allow(dead_code, reason = "the key is known; no page shows it")]
    email: Option<String>,
    password: Option<String>,
    /// All other keys.
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl Settings {
    /// Reads the configuration's text.
    ///
    /// # Errors
    /// If it is not YAML, or a key that has an effect has a value that can't be used.
    pub fn parse(text: &str) -> Result<Self, SettingsError> {
        let mut settings = Self::default();
        let file: Option<Map<String, Value>> = crate::yaml::unique_from_str(text)?;
        settings.section("", file.unwrap_or_default())?;
        Ok(settings)
    }

    /// Takes a section: keys that begin with `/` are sections in it.
    fn section(&mut self, path: &str, section: Map<String, Value>) -> Result<(), SettingsError> {
        for (key, value) in section {
            match value {
                Value::Object(below) if key.starts_with('/') => self.section(&format!("{path}{key}"), below)?,
                Value::Null if key.starts_with('/') => {}
                value => self
                    .key(path, &key, value)
                    .map_err(|message| SettingsError::Value { path: format!("{path}: {key}"), message })?,
            }
        }
        Ok(())
    }

    fn key(&mut self, path: &str, key: &str, value: Value) -> Result<(), String> {
        match (path, key) {
            ("/Manager", "clusterName") => self.cluster_name = typed(value)?,
            (SERVER, "port") => self.port = number::<u16>(value)?,
            (SERVER, "hostname") => {
                let name: Option<String> = typed(value)?;
                self.hostname = match name.as_deref() {
                    None => None,
                    Some("localhost") => Some(IpAddr::from([127, 0, 0, 1])),
                    Some(name) => {
                        Some(name.parse().map_err(|_| format!("{name:?} is no IP address of this computer"))?)
                    }
                };
            }
            (SERVER, "maxConnections") => {
                self.max_connections = number::<usize>(value)?.filter(|most| *most > 0);
            }
            (SERVER, "trustedProxies") => {
                let ranges: Option<Vec<String>> = typed(value)?;
                let range = |text: &String| text.parse().map_err(|error| format!("{text:?}: {error}"));
                self.trusted_proxies = ranges.iter().flatten().map(range).collect::<Result<_, String>>()?;
            }
            (LOGIN, "users") => self.take_users(value)?,
            (LOGIN, "oidcProviders") => self.take_providers(value)?,
            (OIDC, "redirectUri") => {
                let uri: Option<String> = typed(value)?;
                uri.iter().try_for_each(|uri| provider::check_url(uri))?;
                self.redirect_uri = uri;
            }
            (_, "displayResource") if ACCESS.contains(&path) => {
                let keys: Option<Map<String, Value>> = typed(value)?;
                for (key, value) in keys.unwrap_or_default() {
                    self.key(path, &key, value).map_err(|error| format!("{key}: {error}"))?;
                }
            }
            (_, "preferredIpVersion") if ACCESS.contains(&path) => {
                let version: Option<String> = typed(value)?;
                self.ip_version = match version.as_deref() {
                    None => None,
                    Some(name) if name.eq_ignore_ascii_case("ipv4") => Some(IpVersion::V4),
                    Some(name) if name.eq_ignore_ascii_case("ipv6") => Some(IpVersion::V6),
                    Some(name) => return Err(format!("{name:?} is neither ipv4 nor ipv6")),
                };
            }
            (_, "deleteConnectionFile") if ACCESS.contains(&path) => self.delete_connection_file = typed(value)?,
            (_, "passwordValidity") if PASSWORDS.contains(&path) => {
                let seconds: Option<u64> = number(value)?;
                let validity = seconds.map(|seconds| Validity::try_from(Duration::from_secs(seconds)));
                if let Some(Err(error)) = validity {
                    self.warnings.push(format!("{path}: passwordValidity: {error}; that is what it is"));
                }
                self.password_validity = validity.and_then(Result::ok);
            }
            (ROLES, "rolesByUser") => self.roles_by_user = typed::<Option<_>>(value)?.unwrap_or_default(),
            (ROLES, "replace") => self.replaces_roles = typed::<Option<bool>>(value)?.unwrap_or_default(),
            (VIEWS, "conletTypesByRole") => self.types_by_role = typed(value)?,
            _ if path == SERVER || path == HTTP || path.starts_with(&format!("{HTTP}/")) => {
                self.warnings.push(format!("{path}: {key} has no effect"));
            }
            // The manager's own keys.
            _ => {}
        }
        Ok(())
    }

    /// The users: a list, or an object by name; `{}` is an empty list, too.
    fn take_users(&mut self, value: Value) -> Result<(), String> {
        let users: Vec<User> = match value {
            Value::Null => Vec::new(),
            Value::Object(by_name) => {
                let named = by_name.into_iter().map(|(name, user)| {
                    typed::<User>(user)
                        .map(|user| User { name: Some(name.clone()), ..user })
                        .map_err(|error| format!("{name}: {error}"))
                });
                named.collect::<Result<_, _>>()?
            }
            value => typed(value)?,
        };
        for User { name, full_name, password, email: _, others } in users {
            let name = name.ok_or("a user has no name")?;
            if name.is_empty() || name.len() > LONGEST_NAME || name.chars().any(char::is_control) {
                return Err(format!("{name:?}: a name has 1 to {LONGEST_NAME} bytes, and no control characters"));
            }
            let unknown = others.keys().map(|key| format!("{LOGIN}: users: {name}: {key} has no effect"));
            self.warnings.extend(unknown);
            let hash = password.as_deref().and_then(Hash::parse);
            if hash.is_none() {
                self.warnings.push(format!(
                    "{LOGIN}: users: {name} can't sign in: the password must be a hash of bcrypt ($2b$...) or Argon2 ($argon2id$...)"
                ));
            }
            self.users.insert(name, LocalUser { full_name, hash });
        }
        Ok(())
    }

    /// The providers: a list; `{}` is an empty one, too.
    fn take_providers(&mut self, value: Value) -> Result<(), String> {
        let providers: Vec<provider::Keys> = match value {
            Value::Null => Vec::new(),
            Value::Object(none) if none.is_empty() => Vec::new(),
            value => typed(value)?,
        };
        for keys in providers {
            let mut warnings = Vec::new();
            let provider = Provider::of(keys, &mut warnings)?;
            if self.provider(&provider.name).is_some() {
                return Err(format!("{}: two providers have this name", provider.name));
            }
            self.warnings.extend(warnings.into_iter().map(|warning| format!("{LOGIN}: oidcProviders: {warning}")));
            self.providers.push(provider);
        }
        Ok(())
    }

    /// Where the program listens, unless its command line says so.
    pub fn address(&self) -> SocketAddr {
        (self.hostname.unwrap_or_else(|| IpAddr::from([0; 16])), self.port.unwrap_or(PORT)).into()
    }

    /// How many connections may be open.
    pub fn most_connections(&self) -> usize {
        self.max_connections.unwrap_or(CONNECTIONS)
    }

    /// For how long a new password lets a viewer in.
    pub fn password_validity(&self) -> Validity {
        self.password_validity.unwrap_or_default()
    }

    /// Whether a viewer deletes its connection file.
    pub fn deletes_connection_file(&self) -> bool {
        self.delete_connection_file.unwrap_or(true)
    }

    /// The user of that name.
    pub fn user(&self, name: &str) -> Option<&LocalUser> {
        self.users.get(name)
    }

    /// The hash with which a password is compared if there is no such user, so that the answer takes as long.
    pub fn decoy(&self) -> Option<&Hash> {
        self.users.values().find_map(|user| user.hash.as_ref())
    }

    /// Whether anybody can sign in with a password.
    pub fn has_users(&self) -> bool {
        !self.users.is_empty()
    }

    /// The providers, in the order of the page.
    pub fn providers(&self) -> &[Provider] {
        &self.providers
    }

    /// The provider of that name.
    pub fn provider(&self, name: &str) -> Option<&Provider> {
        self.providers.iter().find(|provider| provider.name == name)
    }

    /// The person who has signed in so, with the roles that she has now.
    ///
    /// # Errors
    /// If she is not let in any more.
    pub fn person(&self, by: &SignIn) -> Result<Person, NotLetIn> {
        let person = match by {
            SignIn::Password(user) => {
                self.users.get(user).ok_or(NotLetIn::NoUser)?;
                Person { user: user.clone(), roles: BTreeSet::new() }
            }
            SignIn::Provider(name, profile) => {
                let person = self.provider(name).ok_or(NotLetIn::NoProvider)?.admit(profile)?;
                // Otherwise whoever gets such a name at the provider would have the rights of that user.
                if self.users.contains_key(&person.user) {
                    return Err(NotLetIn::IsLocalUser);
                }
                person
            }
        };
        Ok(self.with_roles(person))
    }

    /// The name that pages show of a person.
    pub fn full_name<'a>(&'a self, by: &'a SignIn) -> Option<&'a str> {
        match by {
            SignIn::Password(user) => self.users.get(user)?.full_name.as_deref(),
            SignIn::Provider(_, profile) => profile.full_name.as_deref(),
        }
    }

    /// The roles that are configured, added to those that the person has, or in their place.
    fn with_roles(&self, mut person: Person) -> Person {
        let own = self.roles_by_user.get(&person.user);
        if self.replaces_roles && own.is_some() {
            person.roles.clear();
        }
        let everybodys = self.roles_by_user.get("*");
        person.roles.extend(own.into_iter().chain(everybodys).flatten().cloned());
        person
    }

    /// Which pages the person sees. In the list of a role the first entry that matches a type decides: its name or `*` allow it, `-NAME` and
    /// `!NAME` do not. What one of the roles has as `--NAME` is not allowed by any.
    pub fn views(&self, person: &Person) -> Views {
        let Some(types_by_role) = &self.types_by_role else { return Views { administrator: false, user: true } };
        let lists: Vec<&Vec<String>> = person.roles.iter().filter_map(|role| types_by_role.get(role)).collect();
        // A type has several names, and each of them stands for all.
        let is_allowed = |names: &[&str]| {
            let names_it =
                |entry: &str, sign: &[char]| entry.strip_prefix(sign).is_some_and(|name| names.contains(&name));
            let is_never = |entry: &String| entry.strip_prefix("--").is_some_and(|name| names.contains(&name));
            let decides =
                |entry: &&String| *entry == "*" || names.contains(&entry.as_str()) || names_it(entry, &['-', '!']);
            let allows =
                |list: &&Vec<String>| list.iter().find(decides).is_some_and(|entry| !entry.starts_with(['-', '!']));
            !lists.iter().any(|list| list.iter().any(is_never)) && lists.iter().any(allows)
        };
        Views { administrator: is_allowed(&ADMINISTRATORS_TYPES), user: is_allowed(&USERS_TYPES) }
    }
}

/// Reads a number. The interface in Java also takes one that is written as a text.
fn number<T: serde::de::DeserializeOwned + FromStr>(value: Value) -> Result<Option<T>, String> {
    match value.as_str().and_then(|text| text.trim().parse::<T>().ok()) {
        Some(number) => Ok(Some(number)),
        None => typed(value),
    }
}

/// Reads the value of a key.
fn typed<T: serde::de::DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sample configuration of the VM-Operator in Java.
    const SAMPLE: &str = include_str!("../../tests/predecessor/config.yaml");

    fn read(text: &str) -> Settings {
        Settings::parse(text).unwrap()
    }

    /// Settings of that section of the web console.
    fn console(section: &str, keys: &str) -> Settings {
        read(&format!(
            "'/Manager': {{'/GuiHttpServer': {{'/ConsoleWeblet': {{'/WebConsole': {{'{section}': {keys}}}}}}}}}"
        ))
    }

    fn roles(settings: &Settings, user: &str) -> Vec<String> {
        settings.with_roles(Person { user: user.into(), roles: ["own".to_owned()].into() }).roles.into_iter().collect()
    }

    fn views(types: &str, has: &[&str]) -> (bool, bool) {
        let settings = console("/RoleConletFilter", &format!("{{conletTypesByRole: {types}}}"));
        let roles = has.iter().map(|role| (*role).to_owned()).collect();
        let Views { administrator, user } = settings.views(&Person { user: "ann".into(), roles });
        (administrator, user)
    }

    #[test]
    fn an_existing_file_lets_its_users_in() {
        let settings = read(SAMPLE);
        assert_eq!(settings.cluster_name.as_deref(), Some("test"));
        assert_eq!(settings.address().to_string(), "[::]:8888");
        let admin = settings.person(&SignIn::Password("admin".into())).unwrap();
        assert_eq!(admin.roles, ["admin".to_owned(), "other".to_owned()].into());
        assert_eq!(settings.views(&admin), Views { administrator: true, user: true });
        assert_eq!(settings.user("admin").unwrap().full_name.as_deref(), Some("Administrator"));
        assert!(settings.user("admin").unwrap().hash.is_some());
        // Everybody else has the role `other`, with which one may only sign in.
        let other = settings.with_roles(Person { user: "ann".into(), roles: BTreeSet::new() });
        assert_eq!(settings.views(&other), Views::default());
        assert_eq!(settings.person(&SignIn::Password("ann".into())), Err(NotLetIn::NoUser));
        let console = "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole";
        assert_eq!(
            settings.warnings,
            [format!("{console}/ComponentCollector/VmAccess: syncPreviewsFor has no effect")]
        );
        assert_eq!(settings.ip_version, Some(IpVersion::V4));
        assert_eq!(settings.password_validity(), Validity::try_from(Duration::from_secs(60)).unwrap());
    }

    #[test]
    fn where_it_listens() {
        assert_eq!(read("").address().to_string(), "[::]:8080");
        let server = |keys: &str| read(&format!("'/Manager': {{'/GuiSocketServer': {keys}}}"));
        assert_eq!(server("{port: 80}").address().to_string(), "[::]:80");
        assert_eq!(server("{hostname: 127.0.0.1}").address().to_string(), "127.0.0.1:8080");
        assert_eq!(server("{hostname: localhost}").address().to_string(), "127.0.0.1:8080");
        assert_eq!(server("{port: '8081'}").address().to_string(), "[::]:8081");
        assert_eq!(server("{maxConnections: ' 100 '}").most_connections(), 100);
        assert!(Settings::parse("'/Manager': {'/GuiSocketServer': {port: '80800'}}").is_err());
        assert_eq!((server("{maxConnections: 7}").most_connections(), read("").most_connections()), (7, CONNECTIONS));
        let wrong = Settings::parse("'/Manager': {'/GuiSocketServer': {port: many}}").unwrap_err().to_string();
        assert!(wrong.starts_with("/Manager/GuiSocketServer: port: invalid type"), "{wrong}");
        assert!(Settings::parse("'/Manager': {'/GuiSocketServer': {hostname: no such name}}").is_err());
        let proxies = server("{trustedProxies: [10.0.0.0/8, 'fd00::1']}").trusted_proxies;
        assert_eq!(proxies.iter().map(Network::to_string).collect::<Vec<_>>(), ["10.0.0.0/8", "fd00::1/128"]);
        assert!(read("").trusted_proxies.is_empty() && server("{trustedProxies: }").trusted_proxies.is_empty());
        let wrong = Settings::parse("'/Manager': {'/GuiSocketServer': {trustedProxies: [ingress]}}").unwrap_err();
        assert!(wrong.to_string().contains("trustedProxies: \"ingress\": expected an address or a range"), "{wrong}");
        // Sections may also be named by their whole path.
        assert_eq!(read("'/Manager/GuiSocketServer': {port: 81}").address().port(), 81);
    }

    #[test]
    fn users_are_a_list_or_named_by_their_keys() {
        let hash = "$2b$05$NiBd74ZGdplLC63ePZf1f.UtjMKkbQ23cQoO2OKOFalDBHWAOy21.";
        for users in [
            format!("[{{name: ann, fullName: Ann A, email: a@example.com, password: '{hash}'}}]"),
            format!("{{ann: {{fullName: Ann A, password: '{hash}'}}}}"),
        ] {
            let settings = console("/LoginConlet", &format!("{{users: {users}}}"));
            let ann = settings.user("ann").unwrap();
            assert_eq!((ann.full_name.as_deref(), ann.hash.is_some()), (Some("Ann A"), true));
            assert!(settings.decoy().is_some() && settings.warnings.is_empty());
        }
        for users in [
            format!("[{{name: ann, password: '{hash}', roles: [a]}}]"),
            format!("{{ann: {{password: '{hash}', roles: [a]}}}}"),
        ] {
            let settings = console("/LoginConlet", &format!("{{users: {users}}}"));
            assert_eq!(settings.warnings, [format!("{LOGIN}: users: ann: roles has no effect")]);
        }
        assert!(console("/LoginConlet", "{users: {}}").users.is_empty());
        let plain = console("/LoginConlet", "{users: [{name: ann, password: secret}]}");
        assert!(plain.user("ann").unwrap().hash.is_none() && plain.decoy().is_none());
        assert!(
            plain.warnings[0].contains("ann can't sign in") && !plain.warnings[0].contains("secret"),
            "{:?}",
            plain.warnings
        );
        let file = "'/Manager': {'/GuiHttpServer': {'/ConsoleWeblet': {'/WebConsole': {'/LoginConlet': {users: [{name: ''}]}}}}}";
        assert!(Settings::parse(file).is_err());
    }

    #[test]
    fn connection_files() {
        let of = |section: &str, keys: &str| console("/ComponentCollector", &format!("{{'/{section}': {keys}}}"));
        assert_eq!((read("").ip_version, read("").deletes_connection_file()), (None, true));
        for section in ["VmAccess", "VmViewer"] {
            for keys in [
                "preferredIpVersion: IPv6, deleteConnectionFile: false",
                "displayResource: {preferredIpVersion: ipv6, deleteConnectionFile: false}",
            ] {
                let settings = of(section, &format!("{{{keys}}}"));
                assert_eq!(
                    (settings.ip_version, settings.deletes_connection_file()),
                    (Some(IpVersion::V6), false),
                    "{keys}"
                );
                assert!(settings.warnings.is_empty());
            }
        }
        assert_eq!(of("VmAccess", "{displayResource: {colour: red}}").warnings.len(), 1);
        let wrong =
            "'/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/ComponentCollector/VmAccess': {preferredIpVersion: 6}";
        assert!(Settings::parse(wrong).is_err());
        let validity = |section: &str, seconds: &str| {
            let settings = read(&format!("'/Manager/Controller{section}': {{passwordValidity: {seconds}}}"));
            (settings.password_validity(), settings.warnings.len())
        };
        let seconds = |seconds| Validity::try_from(Duration::from_secs(seconds)).unwrap();
        assert_eq!(read("").password_validity(), seconds(10));
        for section in ["/Reconciler/DisplaySecretReconciler", "/DisplaySecretMonitor"] {
            assert_eq!(validity(section, "60"), (seconds(60), 0));
            assert_eq!(validity(section, "5"), (seconds(10), 1));
        }
    }

    #[test]
    fn people_of_providers() {
        let lab = "{name: lab, issuer: 'https://id.example', clientId: web, authorizedRoles: [staff], popup: true}";
        let section = |keys: &str| {
            let hash = "$2b$05$NiBd74ZGdplLC63ePZf1f.UtjMKkbQ23cQoO2OKOFalDBHWAOy21.";
            format!(
                "'/Manager': {{'/GuiHttpServer': {{'/ConsoleWeblet': {{'/WebConsole': {{
                   '/LoginConlet': {{users: [{{name: bob, password: '{hash}'}}], oidcProviders: {keys}}},
                   '/OidcClient': {{redirectUri: 'https://vms.example/oauth/callback'}},
                   '/RoleConfigurator': {{rolesByUser: {{ann: [admins], '*': [all]}}}}}}}}}}}}"
            )
        };
        let settings = read(&section(&format!("[{lab}]")));
        assert_eq!(settings.warnings, [format!("{LOGIN}: oidcProviders: lab: popup has no effect")]);
        assert_eq!(settings.redirect_uri.as_deref(), Some("https://vms.example/oauth/callback"));
        let by = |provider: &str, user: &str, roles: &[&str]| {
            let roles = roles.iter().map(|role| (*role).to_owned()).collect();
            let profile = provider::Profile { user: user.into(), full_name: Some("Full".into()), roles };
            SignIn::Provider(provider.into(), profile)
        };
        let ann = settings.person(&by("lab", "ann", &["staff"])).unwrap();
        assert_eq!(ann.roles, ["admins", "all", "staff"].map(str::to_owned).into(), "those that are configured, too");
        assert_eq!(settings.full_name(&by("lab", "ann", &[])), Some("Full"));
        assert_eq!(settings.person(&by("lab", "ann", &[])), Err(NotLetIn::NotAuthorized));
        assert_eq!(settings.person(&by("other", "ann", &["staff"])), Err(NotLetIn::NoProvider));
        assert_eq!(settings.person(&by("lab", "bob", &["staff"])), Err(NotLetIn::IsLocalUser));
        assert!(read(&section("{}")).providers().is_empty());
        let twice = Settings::parse(&section(&format!("[{lab}, {lab}]"))).unwrap_err().to_string();
        assert!(twice.contains("two providers have this name"), "{twice}");
        let wrong = Settings::parse(&section("[{name: lab}]")).unwrap_err().to_string();
        assert!(wrong.contains("LoginConlet: oidcProviders: missing field `clientId`"), "{wrong}");
    }

    #[test]
    fn the_roles_of_users() {
        let by_user = "rolesByUser: {ann: [staff], '*': [all]}";
        let added = console("/RoleConfigurator", &format!("{{{by_user}}}"));
        assert_eq!(
            (roles(&added, "ann"), roles(&added, "bob")),
            (vec!["all".into(), "own".into(), "staff".into()], vec!["all".into(), "own".into()])
        );
        let replaced = console("/RoleConfigurator", &format!("{{{by_user}, replace: true}}"));
        assert_eq!(
            (roles(&replaced, "ann"), roles(&replaced, "bob")),
            (vec!["all".into(), "staff".into()], vec!["all".into(), "own".into()])
        );
    }

    #[test]
    fn the_views_of_roles() {
        let (management, access) = (ADMINISTRATORS_TYPES[0], USERS_TYPES[0]);
        assert_eq!(views("{a: ['*']}", &["a"]), (true, true));
        assert_eq!(views("{a: ['*']}", &["b"]), (false, false));
        assert_eq!(views("{a: ['*']}", &[]), (false, false));
        assert_eq!(views(&format!("{{a: [{management}], b: [{access}]}}"), &["a"]), (true, false));
        assert_eq!(views(&format!("{{a: [{management}], b: [{access}]}}"), &["b"]), (false, true));
        assert_eq!(views(&format!("{{a: [{management}], b: [{access}]}}"), &["a", "b"]), (true, true));
        // Former names.
        assert_eq!(views(&format!("{{a: [{}, {}]}}", ADMINISTRATORS_TYPES[1], USERS_TYPES[1]), &["a"]), (true, true));
        // The first entry that matches decides; another role may still allow it, unless it is for ever forbidden.
        for sign in ["-", "!"] {
            assert_eq!(views(&format!("{{a: ['{sign}{management}', '*']}}"), &["a"]), (false, true));
            assert_eq!(views(&format!("{{a: ['*', '{sign}{management}']}}"), &["a"]), (true, true));
            assert_eq!(views(&format!("{{a: ['{sign}{management}'], b: ['*']}}"), &["a", "b"]), (true, true));
        }
        assert_eq!(views(&format!("{{a: ['*', '--{management}'], b: ['*']}}"), &["a", "b"]), (false, true));
        // A former name forbids as the present one.
        assert_eq!(views(&format!("{{a: ['-{}', '*']}}", ADMINISTRATORS_TYPES[1]), &["a"]), (false, true));
        // A file without the key.
        let settings = read("");
        assert_eq!(settings.views(&Person::default()), Views { administrator: false, user: true });
    }

    #[test]
    fn what_has_no_effect_is_named_with_its_path() {
        let settings = console("/LoginConlet", "{colours: [], users: []}");
        assert_eq!(settings.warnings, [format!("{LOGIN}: colours has no effect")]);
        assert!(read("'/Manager': {'/Controller': {namespace: a}}").warnings.is_empty(), "that is the manager's");
    }
}

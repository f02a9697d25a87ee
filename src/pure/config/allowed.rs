//! What VMs may get beside a VM: lists of an administrator, which are empty by default.
//!
//! [`crate::allowed`] decides by them about a VM. In all lists `*` stands for any text.

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use url::{Position, Url};
use wildmatch::WildMatch;

/// The ports of displays in the network of a node that need no permission: those that viewers count from.
const DISPLAY_PORTS: (u16, u16) = (5800, 5999);

/// The lists, which are keys of the section `/Reconciler`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Allowed {
    /// Networks of the nodes.
    pub networks: AllowedNetworks,
    /// Images beside the installation's own. An image in [`Self::legacy_runner_images`] is allowed too.
    pub runner_images: Images,
    /// The images that contain a legacy runner, the one of the VM-Operator in Java.
    pub legacy_runner_images: Images,
    /// Nodes that a VM may name in `spec.nodeName`, past the scheduler.
    pub node_names: Patterns,
    /// Other namespaces to whose Pods the affinity of a VM may refer.
    pub affinity_namespaces: Patterns,
    /// Resources beside CPUs, memory and the devices of VMs.
    pub extended_resources: Patterns,
    /// What claims of VMs may have.
    pub claims: AllowedClaims,
    /// What a VM may say of its Service.
    pub services: AllowedServices,
    /// The keys of a VM's own labels that its Pod gets. The others are not copied.
    pub pod_labels: Patterns,
}

/// Networks of the nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AllowedNetworks {
    /// Bridges of the nodes.
    pub bridges: Patterns,
    /// URLs of CDs for VMs in the network of the node, which they reach with its addresses.
    pub cd_urls: Urls,
    /// Ports of displays in the network of the node, beside 5800 to 5999.
    pub display_ports: Ports,
}

/// What claims of VMs may have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AllowedClaims {
    /// What a disk may be a copy of: `Kind/NAME` or `Kind.group/NAME`, in another namespace `NAMESPACE:Kind.group/NAME`.
    pub data_sources: Patterns,
    /// Volumes that a claim may name. `*` also lets claims select a volume, and take any that has no storage class.
    pub volume_names: Patterns,
    /// Keys of annotations.
    pub annotations: Patterns,
    /// Keys of labels.
    pub labels: Patterns,
}

/// What a VM may say of its Service.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AllowedServices {
    /// Keys of annotations.
    pub annotations: Patterns,
    /// Keys of labels.
    pub labels: Patterns,
}

/// Texts; `*` stands for any text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<String>", into = "Vec<String>")]
pub struct Patterns(Vec<WildMatch>);

impl From<Vec<String>> for Patterns {
    fn from(texts: Vec<String>) -> Self {
        Self(texts.iter().map(|text| WildMatch::new(text)).collect())
    }
}

impl From<Patterns> for Vec<String> {
    fn from(Patterns(patterns): Patterns) -> Self {
        patterns.iter().map(WildMatch::to_string).collect()
    }
}

impl Patterns {
    /// Whether the list contains the text.
    pub fn contain(&self, text: &str) -> bool {
        self.0.iter().any(|pattern| pattern.matches(text))
    }

    /// Whether the list contains every text.
    pub fn contain_everything(&self) -> bool {
        self.0.iter().any(|pattern| *pattern == "*")
    }
}

/// The entry that stands for all images, or all URLs.
const ANY: &str = "*";

/// URLs, each with scheme, host and path. In the path `*` stands for any text, and a host that begins with `*.` for those below the rest. `*` alone
/// is any URL.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct Urls(Vec<UrlPattern>);

/// An entry of [`Urls`].
#[derive(Clone, Debug, PartialEq)]
enum UrlPattern {
    Any,
    Of {
        text: String,
        scheme: String,
        host: String,
        /// Only hosts below `host`.
        is_below: bool,
        port: Option<u16>,
        /// Of path and query.
        path: WildMatch,
    },
}

impl UrlPattern {
    /// `None`: the text does not name scheme, host and path. A wildcard over the whole text would also match another host.
    fn parse(text: &str) -> Option<Self> {
        if text == ANY {
            return Some(Self::Any);
        }
        let (scheme, rest) = text.split_once("://")?;
        let (host, path) = rest.split_once('/')?;
        let (is_below, host) = host.strip_prefix("*.").map_or((false, host), |rest| (true, rest));
        let url = plain_url(&format!("{scheme}://{host}/")).filter(|_| !host.contains(['*', '?']))?;
        Some(Self::Of {
            text: text.to_owned(),
            scheme: url.scheme().to_owned(),
            host: url.host_str()?.to_owned(),
            is_below,
            port: url.port_or_known_default(),
            path: WildMatch::new(&format!("/{path}")),
        })
    }

    fn matches(&self, url: &Url) -> bool {
        let Self::Of { text: _, scheme, host, is_below, port, path } = self else { return true };
        let is_host = url.host_str().is_some_and(|found| {
            if *is_below {
                found.strip_suffix(host.as_str()).is_some_and(|rest| rest.ends_with('.'))
            } else {
                found == host
            }
        });
        is_host
            && url.scheme() == scheme
            && url.port_or_known_default() == *port
            && path.matches(&url[Position::BeforePath..])
    }
}

/// A URL that all programs read alike: one without a user, a fragment, spaces and backslashes.
fn plain_url(text: &str) -> Option<Url> {
    let is_odd = |c: char| c.is_whitespace() || c.is_control() || ['\\', '#'].contains(&c);
    let url = Url::parse(text).ok().filter(|_| !text.contains(is_odd))?;
    (url.username().is_empty() && url.password().is_none()).then_some(url)
}

impl TryFrom<Vec<String>> for Urls {
    type Error = String;

    fn try_from(entries: Vec<String>) -> Result<Self, String> {
        let parsed = |entry: &String| {
            UrlPattern::parse(entry).ok_or_else(|| {
                format!(
                    "{entry:?} does not name scheme, host and path, such as https://cdimage.example.org/*: a wildcard may be in the path, or be the \
                     first name of the host (https://*.example.org/*)"
                )
            })
        };
        entries.iter().map(parsed).collect::<Result<_, _>>().map(Self)
    }
}

impl From<Urls> for Vec<String> {
    fn from(Urls(patterns): Urls) -> Self {
        let text = |pattern| match pattern {
            UrlPattern::Any => ANY.to_owned(),
            UrlPattern::Of { text, .. } => text,
        };
        patterns.into_iter().map(text).collect()
    }
}

impl Urls {
    /// Whether the list contains the URL.
    pub fn contain(&self, text: &str) -> bool {
        let url = plain_url(text);
        self.0.iter().any(|pattern| *pattern == UrlPattern::Any || url.as_ref().is_some_and(|url| pattern.matches(url)))
    }
}

/// Container images, each as its registry and path, without tag and digest; `*` stands for any text, but not in the registry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct Images(Patterns);

impl TryFrom<Vec<String>> for Images {
    type Error = String;

    fn try_from(repositories: Vec<String>) -> Result<Self, String> {
        let names_registry = |entry: &String| {
            entry.split_once('/').is_some_and(|(registry, path)| {
                !registry.is_empty() && !registry.contains(['*', '?']) && !path.is_empty()
            })
        };
        // The manager hands the lists of the examples, which allow everything, to its own processes. A file may not have that.
        match repositories.iter().find(|entry| *entry != ANY && !names_registry(entry)) {
            Some(entry) => Err(format!(
                "{entry:?} does not name registry and path, such as registry.example.org/team/vm-runner: an image of that name could be in any \
                 registry"
            )),
            None => Ok(Self(repositories.into())),
        }
    }
}

impl From<Images> for Vec<String> {
    fn from(Images(patterns): Images) -> Self {
        patterns.into()
    }
}

impl Images {
    /// The images of a file, which must name a registry.
    ///
    /// # Errors
    /// If they are all images.
    pub fn of_file(self) -> Result<Self, &'static str> {
        if self.0.contain_everything() {
            return Err("\"*\" does not name registry and path, such as registry.example.org/team/vm-runner");
        }
        Ok(self)
    }

    /// The entries that another list has, too.
    #[must_use]
    pub fn limited_to(&self, other: &Self) -> Self {
        let Patterns(all) = &self.0;
        Self(Patterns(all.iter().filter(|entry| other.0.0.contains(entry)).cloned().collect()))
    }

    /// Whether the list contains the image with that reference (`REPOSITORY[:TAG][@DIGEST]`).
    pub fn contain(&self, reference: &str) -> bool {
        self.0.contain(repository(reference))
    }
}

/// Whether an image has the name of a runner of the VM-Operator in Java, in any registry. Anybody can give an image that name, so it allows
/// nothing.
pub fn is_named_like_legacy(reference: &str) -> bool {
    let last_part = repository(reference).rsplit('/').next().unwrap_or_default();
    last_part.starts_with("org.jdrupes.vmoperator.runner.qemu-")
}

/// The image of a reference without tag and digest.
pub fn repository(reference: &str) -> &str {
    let name = reference.split_once('@').map_or(reference, |(name, _)| name);
    // A colon before the last slash is that of the registry's port.
    match name.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => name,
    }
}

/// Ports and ranges of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(into = "Vec<String>")]
pub struct Ports(Vec<(u16, u16)>);

impl Ports {
    /// Whether a display may have the port in the network of a node.
    pub fn contain(&self, port: u16) -> bool {
        self.0.iter().chain([&DISPLAY_PORTS]).any(|(first, last)| (*first..=*last).contains(&port))
    }
}

impl From<Ports> for Vec<String> {
    fn from(Ports(ranges): Ports) -> Self {
        ranges.iter().map(|(first, last)| format!("{first}-{last}")).collect()
    }
}

impl<'de> Deserialize<'de> for Ports {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a port, or a range such as \"7000-7010\"")]
        enum Entry {
            Port(u16),
            Range(String),
        }
        let range = |entry: &Entry| match entry {
            Entry::Port(port) => Some((*port, *port)),
            Entry::Range(text) => {
                let (first, last) = text.split_once('-').unwrap_or((text, text));
                Some((first.parse().ok()?, last.parse().ok()?))
            }
        };
        let entries = Vec::<Entry>::deserialize(deserializer)?;
        let ranges = entries.iter().map(range).collect::<Option<Vec<_>>>();
        ranges.map(Self).ok_or_else(|| D::Error::custom("each entry is a port, or a range such as \"7000-7010\""))
    }
}

impl Allowed {
    /// Nothing is refused: for VMs of whoever may do all this anyway, such as the owner of a computer without a cluster. No image counts as a
    /// legacy runner.
    pub fn everything() -> Self {
        let any = || Patterns::from(vec!["*".to_owned()]);
        Self {
            networks: AllowedNetworks {
                bridges: any(),
                cd_urls: Urls(vec![UrlPattern::Any]),
                display_ports: Ports(vec![(0, u16::MAX)]),
            },
            runner_images: Images(any()),
            legacy_runner_images: Images::default(),
            node_names: any(),
            affinity_namespaces: any(),
            extended_resources: any(),
            claims: AllowedClaims { data_sources: any(), volume_names: any(), annotations: any(), labels: any() },
            services: AllowedServices { annotations: any(), labels: any() },
            pod_labels: any(),
        }
    }
}

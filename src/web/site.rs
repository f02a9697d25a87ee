//! The URLs of this site that other servers send people to.

/// Where a provider of OpenID Connect sends a person who has signed in.
pub(super) const CALLBACK: &str = "/oauth/callback";

/// URLs of this site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Site {
    /// Where a provider sends a person who has signed in.
    pub signed_in: String,
    /// Where it sends one who has signed out.
    pub signed_out: String,
}

impl Site {
    /// As it is configured; else of the origin that the command line names; else as the browser asks for it (`Host`). A browser keeps a session only over
    /// HTTPS or on its own computer, so HTTPS is assumed everywhere else. `None`: the browser does not say.
    pub fn of(configured: Option<&str>, origin: Option<&str>, host: Option<&str>, is_https: bool) -> Option<Self> {
        if let Some(redirect) = configured {
            let base = redirect.strip_suffix(CALLBACK).unwrap_or_else(|| origin_of(redirect));
            return Some(Self { signed_in: redirect.to_owned(), signed_out: format!("{base}/sign-in") });
        }
        let of_host = || {
            let host = host.filter(|host| !host.is_empty() && !host.contains(|it: char| !is_of_authority(it)))?;
            let is_here = ["localhost", "127.0.0.1", "[::1]"]
                .iter()
                .any(|name| host.strip_prefix(name).is_some_and(|port| port.is_empty() || port.starts_with(':')));
            Some(format!("{}://{host}", if is_here && !is_https { "http" } else { "https" }))
        };
        let origin = origin.map(str::to_owned).or_else(of_host)?;
        Some(Self { signed_in: format!("{origin}{CALLBACK}"), signed_out: format!("{origin}/sign-in") })
    }
}

const fn is_of_authority(character: char) -> bool {
    matches!(character, 'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '-' | '_' | ':' | '[' | ']')
}

/// The scheme, host and port of a URL.
fn origin_of(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |at| start + at);
    &url[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_configured_comes_before_what_the_browser_says() {
        let site = |configured, origin, host, is_https| {
            Site::of(configured, origin, host, is_https).map(|site| (site.signed_in, site.signed_out))
        };
        let of = |base: &str| Some((format!("{base}/oauth/callback"), format!("{base}/sign-in")));
        let (origin, host) = (Some("https://vms.example"), Some("inside:8080"));
        let configured = "https://outside.example/vms/oauth/callback";
        assert_eq!(site(Some(configured), origin, host, false), of("https://outside.example/vms"));
        let other = site(Some("https://outside.example:1/other?a"), origin, host, false).unwrap();
        assert_eq!(other, ("https://outside.example:1/other?a".into(), "https://outside.example:1/sign-in".into()));
        assert_eq!(site(None, origin, host, false), of("https://vms.example"));
        assert_eq!(site(None, None, host, false), of("https://inside:8080"));
        for (host, is_https, base) in [
            ("localhost:8080", false, "http://localhost:8080"),
            ("localhost:8080", true, "https://localhost:8080"),
            ("127.0.0.1", false, "http://127.0.0.1"),
            ("[::1]:80", false, "http://[::1]:80"),
            ("localhost.example", false, "https://localhost.example"),
        ] {
            assert_eq!(site(None, None, Some(host), is_https), of(base), "{host}");
        }
        for host in [None, Some(""), Some("a/b"), Some("a@b"), Some("a b"), Some("a\"b")] {
            assert_eq!(site(None, None, host, false), None, "{host:?}");
        }
    }
}

//! From which address a request comes, and whether over HTTPS: what the connection says, or what proxies say that are trusted.
//!
//! | the connection is from | the client is |
//! |---|---|
//! | an address that is not trusted | that address, whatever the headers say |
//! | a trusted proxy | the rightmost address in `X-Forwarded-For` (or in `Forwarded`, RFC 7239) that is not trusted |
//! | a trusted proxy, and all that it names are trusted | the leftmost one |
//! | a trusted proxy, and both headers are there and say different things | the proxy: a client may have sent one of them |
//!
//! Each proxy adds on the right the address from which it was asked. So what a client has sent by itself is further to the left than what a proxy has seen,
//! and is never reached.

use std::net::{IpAddr, SocketAddr};

use axum::http::{HeaderMap, HeaderName, header};

use crate::process::network::Network;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Who sends a request, as far as the network says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Client {
    /// Her address.
    pub address: IpAddr,
    /// Whether she asks a trusted proxy over HTTPS.
    pub is_https: bool,
}

/// Whether a program at that address is trusted.
pub(super) fn is_proxy(proxies: &[Network], address: IpAddr) -> bool {
    proxies.iter().any(|proxy| proxy.contains(address))
}

impl Client {
    /// The client of a request on a connection from `peer`.
    pub fn of(peer: IpAddr, headers: &HeaderMap, proxies: &[Network]) -> Self {
        let peer = peer.to_canonical();
        if !is_proxy(proxies, peer) {
            return Self { address: peer, is_https: false };
        }
        let chain = |name: &HeaderName, addresses: fn(&str) -> Vec<Option<IpAddr>>| {
            let values: Vec<_> = headers.get_all(name).iter().collect();
            // What is no text names nobody.
            let addresses = |value: &&axum::http::HeaderValue| value.to_str().map_or_else(|_| vec![None], addresses);
            (!values.is_empty()).then(|| nearest(peer, values.iter().flat_map(addresses).collect(), proxies))
        };
        let of_list = |text: &str| text.split(',').map(address).collect();
        let address = match (chain(&FORWARDED_FOR, of_list), chain(&header::FORWARDED, of_forwarded)) {
            (Some(one), Some(other)) if one == other => one,
            (Some(one), None) | (None, Some(one)) => one,
            (Some(_), Some(_)) | (None, None) => peer,
        };
        Self { address, is_https: is_https(headers) }
    }
}

/// The rightmost address that is not trusted; else the last one that is known.
fn nearest(peer: IpAddr, chain: Vec<Option<IpAddr>>, proxies: &[Network]) -> IpAddr {
    let mut last = peer;
    for address in chain.into_iter().rev() {
        match address {
            Some(address) if is_proxy(proxies, address) => last = address,
            Some(address) => return address,
            None => return last,
        }
    }
    last
}

/// An address, maybe with a port, and that of IPv6 maybe in brackets.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address = bare.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()));
    address.map(|address: IpAddr| address.to_canonical())
}

/// The parameters of that name in the header `Forwarded`, of each proxy: `for=192.0.2.1;proto=https, for="[2001:db8::1]:80"`.
fn parameters<'a>(text: &'a str, name: &str) -> Vec<Option<&'a str>> {
    let mut is_quoted = false;
    let elements = text.split(move |letter| {
        is_quoted ^= letter == '"';
        letter == ',' && !is_quoted
    });
    let value = |element: &'a str| {
        let pairs = element.split(';').filter_map(|pair| pair.split_once('='));
        let mut values =
            pairs.filter(|(known, _)| known.trim().eq_ignore_ascii_case(name)).map(|(_, value)| value.trim());
        values.next().map(|value| value.trim_matches('"'))
    };
    elements.map(value).collect()
}

fn of_forwarded(text: &str) -> Vec<Option<IpAddr>> {
    parameters(text, "for").into_iter().map(|value| value.and_then(address)).collect()
}

/// Whether the first of the proxies was asked over HTTPS. What a client says there by itself changes nothing but what its own browser is told.
fn is_https(headers: &HeaderMap) -> bool {
    let first = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let of_list = first(&FORWARDED_PROTO).and_then(|text| text.split(',').next());
    let of_forwarded = || parameters(first(&header::FORWARDED)?, "proto").into_iter().next()?;
    of_list.or_else(of_forwarded).is_some_and(|protocol| protocol.trim().eq_ignore_ascii_case("https"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROXY: &str = "10.0.0.1";

    fn of(peer: &str, lines: &[(&str, &str)]) -> String {
        let proxies = ["10.0.0.0/8", "fd00::/8"].map(|range| range.parse().unwrap());
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        let Client { address, is_https } = Client::of(peer.parse().unwrap(), &headers, &proxies);
        format!("{address}{}", if is_https { " https" } else { "" })
    }

    #[test]
    fn a_client_that_is_no_proxy_is_where_it_is() {
        for lines in [
            &[][..],
            &[("x-forwarded-for", "192.0.2.1"), ("x-forwarded-proto", "https")],
            &[("forwarded", "for=192.0.2.1;proto=https")],
        ] {
            assert_eq!(of("203.0.113.9", lines), "203.0.113.9");
            assert_eq!(of("::ffff:203.0.113.9", lines), "203.0.113.9");
            assert_eq!(of("2001:db8::9", lines), "2001:db8::9");
        }
    }

    #[test]
    fn of_what_a_proxy_says_the_rightmost_address_counts_that_is_not_trusted() {
        for (sent, client) in [
            ("203.0.113.9", "203.0.113.9"),
            // What the client has sent itself is further to the left.
            ("192.0.2.1, 203.0.113.9", "203.0.113.9"),
            ("10.0.0.7, 203.0.113.9", "203.0.113.9"),
            ("192.0.2.1,203.0.113.9,10.9.9.9 , 10.0.0.2", "203.0.113.9"),
            ("10.0.0.7, 10.0.0.2", "10.0.0.7"),
            ("unknown, 10.0.0.2", "10.0.0.2"),
            ("203.0.113.9, unknown", PROXY),
            ("", PROXY),
            (", ,", PROXY),
            ("203.0.113.9:4711", "203.0.113.9"),
            ("[2001:db8::9]:4711", "2001:db8::9"),
            ("[2001:db8::9]", "2001:db8::9"),
            ("2001:db8::9", "2001:db8::9"),
            ("2001:db8::9, fd00::1", "2001:db8::9"),
            ("::ffff:203.0.113.9", "203.0.113.9"),
            ("::ffff:10.0.0.2", "10.0.0.2"),
        ] {
            assert_eq!(of(PROXY, &[("x-forwarded-for", sent)]), client, "{sent:?}");
        }
        // Several lines are one list.
        let lines =
            [("x-forwarded-for", "192.0.2.1"), ("x-forwarded-for", "203.0.113.9"), ("x-forwarded-for", "10.0.0.2")];
        assert_eq!(of(PROXY, &lines), "203.0.113.9");
        assert_eq!(of("fd00::1", &lines), "203.0.113.9");
        assert_eq!(of("::ffff:10.0.0.1", &lines), "203.0.113.9");
        assert_eq!(of(PROXY, &[]), PROXY);
    }

    #[test]
    fn the_header_of_the_standard() {
        for (sent, client) in [
            ("for=203.0.113.9", "203.0.113.9"),
            ("for=192.0.2.1, for=203.0.113.9;by=10.0.0.2", "203.0.113.9"),
            ("For=\"[2001:db8::9]:4711\";Proto=https", "2001:db8::9 https"),
            ("proto=http;for=\"203.0.113.9:80\"", "203.0.113.9"),
            ("for=203.0.113.9;host=\"a,b;for=192.0.2.1\", for=10.0.0.2", "203.0.113.9"),
            ("for=_hidden, for=10.0.0.2", "10.0.0.2"),
            ("by=10.0.0.2", PROXY),
        ] {
            assert_eq!(of(PROXY, &[("forwarded", sent)]), client, "{sent:?}");
        }
        // A client may have sent the header that its proxy does not know.
        let both = |sent| of(PROXY, &[("x-forwarded-for", "203.0.113.9"), ("forwarded", sent)]);
        assert_eq!(both("for=192.0.2.1"), PROXY);
        assert_eq!(both("for=203.0.113.9"), "203.0.113.9");
    }

    #[test]
    fn a_proxy_says_whether_it_was_asked_over_https() {
        for (sent, is_https) in [("https", true), ("HTTPS", true), ("http", false), ("https,http", true), ("", false)] {
            assert_eq!(of(PROXY, &[("x-forwarded-proto", sent)]).ends_with("https"), is_https, "{sent}");
        }
    }
}

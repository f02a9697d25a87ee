//! Addresses of the network: ranges of them, and what counts as one address where something is limited for each.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

/// What counts as one address. Of IPv6 that is a /64: whoever has one of its addresses can have all of them.
pub fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

/// The network around an address, which mostly is somebody's as a whole: of IPv6 a /48 (RFC 6177), of IPv4 a /24.
pub fn around(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 80 << 80)),
        IpAddr::V4(address) => IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() >> 8 << 8)),
    }
}

/// A range of addresses in the notation of CIDR (RFC 4632), such as `10.0.0.0/8` or `fd00::/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// The bits of the address; those of IPv4 are the first ones.
    bits: u128,
    /// How many of them count.
    prefix: u32,
    is_v4: bool,
}

/// Why a text is no range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotNetwork {
    /// It is neither an address nor one with the length of its prefix.
    #[error("expected an address or a range such as 10.0.0.0/8 or fd00::/8")]
    Text,
    /// The address has ones after its prefix: it is not clear which range is meant.
    #[error("the address has bits after its prefix that are not zero")]
    Host,
}

/// The bits of an address, and how many it has. An address of IPv4 that is written as one of IPv6 is one of IPv4.
fn bits(address: IpAddr) -> (u128, u32) {
    match address.to_canonical() {
        IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, 32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    }
}

/// The bits that count.
const fn mask(prefix: u32) -> u128 {
    match prefix {
        0 => 0,
        prefix => u128::MAX << (128 - prefix),
    }
}

impl Network {
    /// Whether the address is in the range.
    pub fn contains(&self, address: IpAddr) -> bool {
        let (bits, length) = bits(address);
        (length == 32) == self.is_v4 && bits & mask(self.prefix) == self.bits
    }
}

impl FromStr for Network {
    type Err = NotNetwork;

    fn from_str(text: &str) -> Result<Self, NotNetwork> {
        let (address, prefix) = text.trim().split_once('/').map_or((text.trim(), None), |(at, len)| (at, Some(len)));
        let (bits, length) = bits(address.parse().map_err(|_| NotNetwork::Text)?);
        let prefix = match prefix {
            None => length,
            // Not a sign, nor anything else that a number may begin with elsewhere.
            Some(prefix) if prefix.bytes().all(|digit| digit.is_ascii_digit()) => {
                prefix.parse().ok().filter(|prefix| *prefix <= length).ok_or(NotNetwork::Text)?
            }
            Some(_) => return Err(NotNetwork::Text),
        };
        if bits & !mask(prefix) != 0 {
            return Err(NotNetwork::Host);
        }
        Ok(Self { bits, prefix, is_v4: length == 32 })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = Ipv6Addr::from_bits(self.bits);
        let v4 = || std::net::Ipv4Addr::from_bits(u32::try_from(self.bits >> 96).unwrap_or_default());
        if self.is_v4 { write!(f, "{}/{}", v4(), self.prefix) } else { write!(f, "{address}/{}", self.prefix) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_ipv6_counts_with_its_neighbours() {
        let counted = |text: &str| counted(text.parse().unwrap()).to_string();
        assert_eq!(counted("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(counted("2001:db8:1:2::1"), counted("2001:db8:1:2:ffff::1"));
        assert_ne!(counted("2001:db8:1:2::1"), counted("2001:db8:1:3::1"));
        assert_eq!([counted("192.0.2.1"), counted("::ffff:192.0.2.1")], ["192.0.2.1", "192.0.2.1"]);
    }

    #[test]
    fn a_range_has_its_addresses_and_no_others() {
        for (range, inside, outside) in [
            ("10.0.0.0/8", "10.255.1.2", "11.0.0.0"),
            ("10.0.0.0/8", "::ffff:10.1.2.3", "::a00:1"),
            ("192.0.2.7", "192.0.2.7", "192.0.2.8"),
            ("192.0.2.6/31", "192.0.2.7", "192.0.2.8"),
            ("0.0.0.0/0", "203.0.113.1", "2001:db8::1"),
            ("::/0", "2001:db8::1", "203.0.113.1"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("2001:db8::1", "2001:db8::1", "2001:db8::2"),
            ("2001:db8:0:1::/64", "2001:db8:0:1:ffff::", "2001:db8:0:2::"),
            ("::ffff:192.0.2.7", "192.0.2.7", "192.0.2.8"),
        ] {
            let network: Network = range.parse().unwrap();
            assert!(network.contains(inside.parse().unwrap()), "{inside} in {range}");
            assert!(!network.contains(outside.parse().unwrap()), "{outside} in {range}");
            assert_eq!(network.to_string().parse(), Ok(network), "{range}");
        }
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in
            ["", "10", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/+8", "10.0.0.0/-1", "::/129", "a/8", "10.0.0.0/8/8"]
        {
            assert_eq!(text.parse::<Network>(), Err(NotNetwork::Text), "{text}");
        }
        assert_eq!("10.1.0.0/8".parse::<Network>(), Err(NotNetwork::Host));
        assert_eq!("::1/0".parse::<Network>(), Err(NotNetwork::Host));
    }
}

//! The address on which a program answers, as an option of its command line.

use std::{
    net::{Ipv6Addr, SocketAddr},
    str::FromStr,
};

/// Where to listen: `[::]:8081`, `127.0.0.1:8081`, `:8081` for all addresses, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(pub Option<SocketAddr>);

impl FromStr for Listen {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "off" {
            return Ok(Self(None));
        }
        let text = text
            .strip_prefix(':')
            .map_or_else(|| text.to_owned(), |port| format!("[{}]:{port}", Ipv6Addr::UNSPECIFIED));
        let address = text.parse().map_err(|_| "expected an address such as [::]:8081 or 127.0.0.1:8081, or off")?;
        Ok(Self(Some(address)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_leave_out_its_host() {
        let all = "[::]:8081".parse().ok();
        assert!(all.is_some());
        assert_eq!(":8081".parse(), Ok(Listen(all)));
        assert_eq!("127.0.0.1:1".parse(), Ok(Listen("127.0.0.1:1".parse().ok())));
        assert_eq!("off".parse(), Ok(Listen(None)));
        assert!("8081".parse::<Listen>().is_err() && ":none".parse::<Listen>().is_err());
    }
}

//! What the text of a CD means: `spec.vm.disks[].cdrom.image`, and the `file` of a CD drive in the runner's configuration.

/// A CD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cd<'a> {
    /// None: the drive is empty.
    None,
    /// A file of a server.
    Url {
        /// The whole text.
        url: &'a str,
        /// What is before `://`, as it is written.
        protocol: &'a str,
    },
    /// A file in the runner's container, by its absolute path.
    Path(&'a str),
    /// A file in the image repository, by its path there.
    Repository(&'a str),
}

impl<'a> Cd<'a> {
    /// What a text means. Each text means something; whether there is such a CD, and whether a VM may have it, is not looked at.
    pub fn parse(text: &'a str) -> Self {
        match text.split_once("://") {
            _ if text.is_empty() => Self::None,
            Some((protocol, _)) => Self::Url { url: text, protocol },
            None if text.starts_with('/') => Self::Path(text),
            None => Self::Repository(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_means_one_of_four() {
        for (text, meaning) in [
            ("", Cd::None),
            ("https://a/b.iso", Cd::Url { url: "https://a/b.iso", protocol: "https" }),
            ("fat:///etc", Cd::Url { url: "fat:///etc", protocol: "fat" }),
            ("/srv/a://b", Cd::Url { url: "/srv/a://b", protocol: "/srv/a" }),
            ("/srv/a.iso", Cd::Path("/srv/a.iso")),
            ("isos/a.iso", Cd::Repository("isos/a.iso")),
            ("fat:/etc", Cd::Repository("fat:/etc")),
        ] {
            assert_eq!(Cd::parse(text), meaning, "{text}");
        }
    }
}

//! What `base/NAME` stands for: the template of that name in the layers below.
//!
//! In a named set that is the template of VMs that choose no set. In the base it is the built-in one. So a file that extends
//! `base/pod.yaml.j2` can be used in both places, and in a named set it keeps what the base overrides.

use std::{borrow::Cow, collections::BTreeSet};

/// What stands before the name in a template.
const BASE: &str = "base/";
/// What stands before the names of the built-in templates.
pub const BUILTIN: &str = "builtin/";
/// What stands before the name under which a named set keeps a template of the layers below. It differs from `base/`, because a file of
/// the base that extends `base/NAME` means another template than the one that it is.
pub const OF_BASE: &str = "base:";

/// Finds templates of the layers below.
#[derive(Clone, Debug, Default)]
pub struct Below {
    /// The names of the built-in templates.
    pub builtin: BTreeSet<String>,
    /// The names of the files of the named set, if it is one.
    pub named: Option<BTreeSet<String>>,
}

impl Below {
    /// The template that is meant by a name in the template `parent`. Without a parent: in a template of the topmost layer.
    pub fn resolve<'a>(&self, name: &'a str, parent: Option<&str>) -> Cow<'a, str> {
        let Some(of_base) = name.strip_prefix(BASE) else { return Cow::Borrowed(name) };
        let is_of_set = self.named.as_ref().is_some_and(|named| parent.is_none_or(|parent| named.contains(parent)));
        if is_of_set {
            Cow::Owned(format!("{OF_BASE}{of_base}"))
        } else if self.builtin.contains(of_base) {
            Cow::Owned(format!("{BUILTIN}{of_base}"))
        } else {
            Cow::Borrowed(name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_is_the_layer_below_that_of_the_file() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let builtin = names(&["pod.yaml.j2"]);
        let base = Below { builtin: builtin.clone(), named: None };
        let set = Below { builtin, named: Some(names(&["pod.yaml.j2"])) };
        let pod = "base/pod.yaml.j2";
        assert_eq!(base.resolve(pod, Some("pod.yaml.j2")), "builtin/pod.yaml.j2");
        assert_eq!(base.resolve(pod, None), "builtin/pod.yaml.j2");
        assert_eq!(set.resolve(pod, Some("pod.yaml.j2")), "base:pod.yaml.j2");
        assert_eq!(set.resolve(pod, None), "base:pod.yaml.j2");
        // Files of the base, of which the set replaces one.
        assert_eq!(set.resolve(pod, Some("base:pod.yaml.j2")), "builtin/pod.yaml.j2");
        assert_eq!(set.resolve(pod, Some("other.yaml.j2")), "builtin/pod.yaml.j2");
        // A folder of that name.
        assert_eq!(base.resolve("base/mine.j2", None), "base/mine.j2");
        assert_eq!(base.resolve("lib/a.j2", None), "lib/a.j2");
    }
}

//! Where a value or a key stands in a YAML text.
//!
//! The parser gives positions only with its errors. So this reads the text again up to the wanted place, and there ends with an error.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// A step on the way from the root of a document to a value in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Step {
    Key(String),
    Index(usize),
}

/// Line and column of the value at the path, from 1. If it is a block of YAML, that is where its first line begins.
pub(in crate::cli) fn of_value(text: &str, path: &[Step]) -> Option<(usize, usize)> {
    find(text, Seek { path, is_key: false })
}

/// Line and column of the key at the end of the path, from 1.
pub(in crate::cli) fn of_key(text: &str, path: &[Step]) -> Option<(usize, usize)> {
    find(text, Seek { path, is_key: true })
}

fn find(text: &str, seek: Seek<'_>) -> Option<(usize, usize)> {
    let place = seek.deserialize(crate::yaml::documents(text).ok()?).err()?.location()?;
    Some((place.line(), place.column()))
}

/// Reads a value and ends with an error at the path below it.
#[derive(Clone, Copy)]
struct Seek<'a> {
    path: &'a [Step],
    /// Whether the key is wanted that the path ends with, and not its value.
    is_key: bool,
}

impl Seek<'_> {
    /// The end of the reading, if this is the place.
    fn ends<E: Error>(self) -> Result<(), E> {
        if self.path.is_empty() { Err(E::custom("found")) } else { Ok(()) }
    }
}

impl<'de> DeserializeSeed<'de> for Seek<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seek<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }
    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.ends()
    }
    fn visit_none<E: Error>(self) -> Result<(), E> {
        self.ends()
    }
    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.ends()
    }
    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        self.ends()
    }
    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.ends()
    }
    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        self.ends()
    }
    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        self.ends()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<(), A::Error> {
        self.ends()?;
        let mut at = 0;
        loop {
            let next = match self.path.split_first() {
                Some((Step::Index(wanted), path)) if *wanted == at => {
                    access.next_element_seed(Seek { path, ..self })?.map(drop)
                }
                _ => access.next_element::<IgnoredAny>()?.map(drop),
            };
            if next.is_none() {
                return Ok(());
            }
            at += 1;
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<(), A::Error> {
        self.ends()?;
        let Some((Step::Key(wanted), path)) = self.path.split_first() else {
            while access.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            return Ok(());
        };
        let ends_here = self.is_key && path.is_empty();
        while let Some(is_wanted) = access.next_key_seed(Key { wanted, ends_here })? {
            if is_wanted {
                access.next_value_seed(Seek { path, ..self })?;
            } else {
                access.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

/// Reads a key and returns whether it is the wanted one.
struct Key<'a> {
    wanted: &'a str,
    /// The reading ends with the wanted key.
    ends_here: bool,
}

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<bool, E> {
        let is_wanted = key == self.wanted;
        if is_wanted && self.ends_here { Err(E::custom("found")) } else { Ok(is_wanted) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_keys_are_found() {
        let text = "a: 1\nspec:\n  vm:\n    disks:\n      - {cdrom: {image: x}}\n      - cdrom:\n          imag: y\n    1: z\n";
        let path = |path: &str| -> Vec<Step> {
            let step = |part: &str| {
                part.strip_prefix('#').map_or_else(|| Step::Key(part.into()), |at| Step::Index(at.parse().unwrap()))
            };
            path.split('.').filter(|part| !part.is_empty()).map(step).collect()
        };
        for (wanted, value, key) in [
            ("", Some((1, 1)), Some((1, 1))),
            ("a", Some((1, 4)), Some((1, 1))),
            ("spec.vm", Some((4, 5)), Some((3, 3))),
            ("spec.vm.disks", Some((5, 7)), Some((4, 5))),
            ("spec.vm.disks.#0.cdrom.image", Some((5, 25)), Some((5, 18))),
            ("spec.vm.disks.#1.cdrom.imag", Some((7, 17)), Some((7, 11))),
            ("spec.vm.1", Some((8, 8)), Some((8, 5))),
            ("spec.vm.cpus", None, None),
            ("spec.vm.disks.#2", None, None),
        ] {
            let path = path(wanted);
            assert_eq!((of_value(text, &path), of_key(text, &path)), (value, key), "{wanted}");
        }
    }
}

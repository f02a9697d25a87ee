//! Sizes as users write them: `4Gi` as in Kubernetes, `4 GiB` as in manifests of the Java VM-Operator, or a number of bytes.

use std::{borrow::Cow, fmt};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A size in bytes, kept as it was written.
///
/// The text is kept and sent back to the API server, because a GitOps tool would see a normalised value as a change. Calculations use
/// [`Quantity::bytes`].
#[derive(Clone, Debug)]
pub struct Quantity {
    text: String,
    bytes: u64,
    number: bool,
}

/// The text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a size: write a number with an optional unit, such as 4Gi, 4 GiB, 512M or 1.5G")]
pub struct InvalidQuantity(pub String);

/// The suffixes and their factors (<https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/>).
/// `B` after a unit is optional, as is white space before it.
const UNITS: [(&str, u64); 12] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("Pi", 1 << 50),
    ("Ei", 1 << 60),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("P", 1_000_000_000_000_000),
    ("E", 1_000_000_000_000_000_000),
];

/// The texts that the CRD's schema accepts: those that [`Quantity::parse`] does, with no more digits than every unit allows below 16 EiB.
pub const PATTERN: &str = r"^([0-9]{1,18}(\.[0-9]{1,18})? ?|[0-9]{1,15}(\.[0-9]{1,18})? ?(ki?|Ki)|[0-9]{1,12}(\.[0-9]{1,18})? ?Mi?|[0-9]{1,9}(\.[0-9]{1,18})? ?Gi?|[0-9]{1,6}(\.[0-9]{1,18})? ?Ti?|[0-9]{1,4}(\.[0-9]{1,18})? ?Pi?|(1[0-5]|[0-9])(\.[0-9]{1,18})? ?Ei?)B?$";
/// One MiB.
const MEBI: u64 = 1 << 20;
/// The largest number of bytes that the schema accepts as a number.
const LARGEST: u64 = 1 << 60;

impl Quantity {
    /// Parses a size.
    ///
    /// # Errors
    /// If the text is not a number with an optional unit, or is beyond 2^64 bytes.
    pub fn parse(text: &str) -> Result<Self, InvalidQuantity> {
        let error = || InvalidQuantity(text.to_owned());
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.strip_prefix(' ').unwrap_or(unit);
        let unit = unit.strip_suffix('B').unwrap_or(unit);
        let factor = match unit {
            "" => 1,
            "ki" => 1 << 10,
            unit => UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(error)?.1,
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        if whole.is_empty()
            || fraction.is_empty()
            || !fraction.bytes().all(|c| c.is_ascii_digit())
            || fraction.len() > 18
        {
            return Err(error());
        }
        let parse = |digits: &str| digits.parse::<u128>().map_err(|_| error());
        let scale = 10u128.pow(u32::try_from(fraction.len()).map_err(|_| error())?);
        let scaled = parse(whole)?
            .checked_mul(scale)
            .and_then(|whole| whole.checked_add(fraction.parse::<u128>().ok()?))
            .and_then(|value| value.checked_mul(u128::from(factor)))
            .ok_or_else(error)?;
        let bytes = u64::try_from(scaled / scale).map_err(|_| error())?;
        Ok(Self { text: text.to_owned(), bytes, number: false })
    }

    /// The bytes of a quantity in a Kubernetes object; `None` if the value is not a quantity.
    pub fn bytes_of(size: &serde_json::Value) -> Option<u64> {
        Self::deserialize(size).ok().map(|size| size.bytes)
    }

    /// A size in bytes, written as a plain number.
    pub fn from_bytes(bytes: u64) -> Self {
        Self { text: bytes.to_string(), bytes, number: true }
    }

    /// The size as people read it: `512Mi`, `1G`. What no unit fits is rounded to MiB: QEMU, for example, rounds memory to pages.
    pub fn with_unit(bytes: u64) -> Self {
        let exact = |bytes| largest_unit(&UNITS[1..6], bytes).or_else(|| largest_unit(&UNITS[7..], bytes));
        let rounded = (bytes.saturating_add(MEBI / 2) / MEBI).saturating_mul(MEBI);
        let (bytes, (unit, factor)) = match (exact(bytes), exact(rounded)) {
            (Some(unit), _) => (bytes, unit),
            (None, Some(unit)) => (rounded, unit),
            (None, None) => (bytes, ("", 1)),
        };
        Self { text: format!("{}{unit}", bytes / factor), bytes, number: false }
    }

    /// The size in the form that runners of the Java VM-Operator read: `4 GiB`, or a number of bytes where no unit fits.
    pub fn spaced(&self) -> Self {
        let text = largest_unit(&UNITS[..6], self.bytes)
            .map_or_else(|| self.bytes.to_string(), |(name, factor)| format!("{} {name}B", self.bytes / factor));
        Self { text, bytes: self.bytes, number: false }
    }

    /// The size in bytes, rounded down.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The largest of the units, which are in the order of their factors, of which a size is a multiple.
fn largest_unit(units: &[(&'static str, u64)], bytes: u64) -> Option<(&'static str, u64)> {
    units.iter().rev().copied().find(|(_, factor)| bytes > 0 && bytes.is_multiple_of(*factor))
}

/// Two sizes are equal if they are the same number of bytes, however they are written.
impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Quantity {}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.number { serializer.serialize_u64(self.bytes) } else { serializer.serialize_str(&self.text) }
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Quantity;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as 4Gi or a number of bytes")
            }
            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Quantity, E> {
                Ok(Quantity::from_bytes(bytes))
            }
            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Quantity, E> {
                u64::try_from(bytes)
                    .map(Quantity::from_bytes)
                    .map_err(|_| E::custom(InvalidQuantity(bytes.to_string())))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Quantity, E> {
                Quantity::parse(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl JsonSchema for Quantity {
    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "x-kubernetes-int-or-string": true, "pattern": PATTERN, "minimum": 0, "maximum": LARGEST })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(text: &str) -> Option<u64> {
        Quantity::parse(text).ok().map(|quantity| quantity.bytes())
    }

    #[test]
    fn sizes_are_parsed() {
        for (text, expected) in [
            ("0", 0),
            ("1000", 1000),
            ("4Gi", 4 << 30),
            ("4 GiB", 4 << 30),
            ("4GiB", 4 << 30),
            ("1G", 1_000_000_000),
            ("1.5G", 1_500_000_000),
            ("1.5 KiB", 1536),
            ("2k", 2000),
            ("2 kB", 2000),
            ("3B", 3),
            ("15Ei", 15 << 60),
        ] {
            assert_eq!(bytes(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn sizes_for_runners_of_the_java_vm_operator() {
        for (text, spaced) in
            [("4Gi", "4 GiB"), ("1536Mi", "1536 MiB"), ("1G", "1000000000"), ("1025", "1025"), ("0", "0")]
        {
            assert_eq!(Quantity::parse(text).unwrap().spaced().to_string(), spaced);
        }
    }

    #[test]
    fn sizes_for_people() {
        for (bytes, text) in [
            (0, "0"),
            (512 << 20, "512Mi"),
            (4 << 30, "4Gi"),
            (1536 << 20, "1536Mi"),
            (1_000_000_000, "1G"),
            (8 << 30, "8Gi"),
            // QEMU makes this of 1G and of 1.5G.
            (976_568 << 10, "954Mi"),
            (1_500_004_352, "1431Mi"),
            ((8 << 30) - 4096, "8Gi"),
            (1025, "1025"),
        ] {
            assert_eq!(Quantity::with_unit(bytes).to_string(), text);
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "4Gx", "Gi", "-1", "4  Gi", "4 gi", ".5G", "5.G", "1e3", "16Ei", "4Gi\n", "1.2.3", "0x10", "٣"]
        {
            assert_eq!(bytes(text), None, "{text}");
        }
    }

    #[test]
    fn the_schema_accepts_what_can_be_parsed() {
        let pattern = regex::Regex::new(PATTERN).unwrap();
        for text in [
            "0",
            "1000",
            "4Gi",
            "4 GiB",
            "4GiB",
            "1.5G",
            "2 kB",
            "1Ki",
            "1ki",
            "3B",
            "15.99Ei",
            "9999Pi",
            "999999999999999999",
        ] {
            assert!(pattern.is_match(text) && bytes(text).is_some(), "{text}");
        }
        let longest = "9".repeat(18);
        for unit in ["", "k", "ki", "Ki", "M", "Mi", "G", "Gi", "T", "Ti", "P", "Pi", "E", "Ei"] {
            for whole in (1..=18).map(|digits| "9".repeat(digits)).chain(["15".to_owned()]) {
                let text = format!("{whole}.{longest}{unit}B");
                assert!(!pattern.is_match(&text) || bytes(&text).is_some(), "{text}");
            }
        }
        for text in
            ["", "4Gx", "Gi", "-1", "4  Gi", "4 gi", ".5G", "5.G", "1e3", "16Ei", "4Gi\n", "99999999999999999999"]
        {
            assert!(!pattern.is_match(text), "{text}");
        }
    }

    proptest! {
        #[test]
        fn text_survives_a_round_trip(number in 0u64..1 << 20, unit in "(|[kMGT]i?|Ki)B?") {
            let text = format!("{number}{unit}");
            let json = serde_json::to_value(Quantity::parse(&text).unwrap()).unwrap();
            prop_assert_eq!(&json, &serde_json::Value::String(text));
            prop_assert_eq!(serde_json::from_value::<Quantity>(json.clone()).unwrap(), serde_json::from_value::<Quantity>(json).unwrap());
        }
    }
}

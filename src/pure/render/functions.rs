//! Filters and functions that templates have besides those of Jinja.
//!
//! The result of each depends on its arguments alone: no clock, no randomness, no file. [`TABLE`] is their documentation.

use std::{fmt::Write as _, io::Write as _};

use flate2::{Compression, write::GzEncoder};
use k8s_openapi::{
    ByteString,
    jiff::{Timestamp, fmt::strtime},
};
use minijinja::{
    Environment, Error, ErrorKind, State, Value,
    value::{Kwargs, Rest, Serde, ValueKind, ValueOrKwargs},
};
use sha2::{Digest as _, Sha256};

use super::output::digest;
use crate::{config::allowed::repository, user_data::Kind};

/// The documentation of a filter or function.
pub struct Function {
    /// How a template calls it.
    pub usage: &'static str,
    /// What it does.
    pub about: &'static str,
    /// An expression.
    pub example: &'static str,
    /// The result of the example as JSON.
    pub gives: &'static str,
}

const fn row(usage: &'static str, about: &'static str, example: &'static str, gives: &'static str) -> Function {
    Function { usage, about, example, gives }
}

/// All filters and functions. The documentation is made from it, and a test evaluates the examples.
pub const TABLE: &[Function] = &[
    row(
        "text | quantity",
        "the number that a Kubernetes quantity stands for: bytes, CPUs",
        r#""1.5Gi" | quantity + ("512Mi" | quantity)"#,
        "2147483648",
    ),
    row(
        "number | as_quantity(unit=none)",
        "the number as a quantity: in the unit, rounded up, or in the largest binary one that leaves nothing over",
        r#"("4Gi" | quantity * 1.1) | as_quantity("Mi")"#,
        r#""4506Mi""#,
    ),
    row(
        "text | digest",
        "a hash: 32 hexadecimal digits, the same for the same text",
        r#""apple" | digest"#,
        r#""3a7bd3e2360a3d29eea436fcfb7e44c7""#,
    ),
    row(
        "text | mac",
        "a MAC address (locally administered), the same for the same text",
        r#""default/apple/1" | mac"#,
        r#""02:06:fb:62:5c:c4""#,
    ),
    row("text | b64encode", "base64, as in a Secret's `data`", r#""secret" | b64encode"#, r#""c2VjcmV0""#),
    row("text | b64decode", "the text back; an error if it is not UTF-8", r#""c2VjcmV0" | b64decode"#, r#""secret""#),
    row(
        "text | gzip",
        "the text compressed, as base64: cloud-init takes it for user data",
        r##"("#!/bin/sh" | gzip)[:6]"##,
        r#""H4sIAA""#,
    ),
    row(
        "map | merge(map, ...)",
        "the maps over each other, also in their depth; `none` takes a key out, a list is replaced",
        r#"{"a": 1, "b": {"c": 2}} | merge({"b": {"d": 3}}, {"a": none})"#,
        r#"{"b": {"c": 2, "d": 3}}"#,
    ),
    row("list | flatten", "the lists in a list, one after the other", "[[1, 2], [], [3]] | flatten", "[1, 2, 3]"),
    row("list | without(list)", "the items that are not in the other list", "[1, 2, 3] | without([2])", "[1, 3]"),
    row(
        "text | opt",
        "the text as a part of an option of QEMU, in which a comma is doubled",
        r#""guest=" ~ ("a,b" | opt)"#,
        r#""guest=a,,b""#,
    ),
    row("value | to_yaml", "the value as the text of a YAML file", r#"{"a": [1]} | to_yaml"#, r#""a:\n- 1\n""#),
    row("text | from_yaml", "what a YAML text says", r#""a: [1]" | from_yaml"#, r#"{"a": [1]}"#),
    row(
        "text | date(format)",
        "a time such as `vm.metadata.creationTimestamp`, written after strftime, in UTC",
        r#""2026-11-20T10:30:00Z" | date("%d %b %Y")"#,
        r#""20 Nov 2026""#,
    ),
    row(
        "multipart(parts)",
        "user data in several parts, a MIME message; each part has `content` and may have `type` and `filename`",
        r##"multipart([{"content": "#!/bin/sh\necho"}]) is startingwith("Content-Type: multipart/mixed")"##,
        "true",
    ),
    row(
        "text | image_repository",
        "the image of a reference, with its registry and without tag and digest: what a list of images has",
        r#""registry.example.org:5000/team/disk:1.2" | image_repository"#,
        r#""registry.example.org:5000/team/disk""#,
    ),
    row("fail(message)", "ends the rendering with that error", r#""small" or fail("a size is needed")"#, r#""small""#),
];

/// Adds all filters and functions.
pub fn add(environment: &mut Environment<'_>) {
    environment.add_filter("quantity", quantity);
    environment.add_filter("image_repository", |reference: &str| repository(reference).to_owned());
    environment.add_filter("as_quantity", as_quantity);
    environment.add_filter("digest", |text: Value| written(&text).map(|text| digest(&text)));
    environment.add_filter("mac", mac);
    environment.add_filter("b64encode", |text: Value| base64(written(&text)?.into_bytes()));
    environment.add_filter("b64decode", b64decode);
    environment.add_filter("gzip", gzip);
    environment.add_filter("merge", merge);
    environment.add_filter("flatten", flatten);
    environment.add_filter("without", without);
    environment.add_filter("opt", |text: String| text.replace(',', ",,"));
    environment.add_filter("to_yaml", to_yaml);
    environment.add_filter("from_yaml", from_yaml);
    environment.add_filter("date", date);
    environment.add_function("multipart", multipart);
    for (name, check) in BOUNDED {
        let unbounded = format!("{name} without a bound");
        environment.add_filter(*name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            check(&args)?;
            state.apply_filter(&unbounded, &args)
        });
    }
    environment.add_filter("indent without a bound", minijinja::filters::indent);
    environment.add_filter("format without a bound", minijinja::filters::format);
    environment.add_filter("tojson without a bound", minijinja::filters::tojson);
    environment.add_filter("batch without a bound", minijinja::filters::batch);
    environment.add_filter("slice without a bound", minijinja::filters::slice);
    environment.add_function("fail", |message: String| -> Result<Value, Error> { Err(invalid(message)) });
}

/// The most bytes or items that a filter may make out of a number, as much as a template may render.
const LARGEST: usize = 2 << 20;

/// The filters of Jinja whose result is as large as a number says, each with the check of its arguments. The number may come from a VM, and
/// a failed allocation ends the process. The names of the filters without a check are none that a template can write.
const BOUNDED: &[(&str, Check)] = &[
    ("indent", |args| bound(number_in(args), text(args).lines().count() + 1)),
    ("format", |args| bound(longest_number(text(args)), text(args).matches('%').count())),
    // A document nests, so its lines are indented several times.
    ("tojson", |args| bound(number_in(args), LARGEST / 100)),
    ("batch", |args| bound(number_in(args), 1)),
    ("slice", |args| bound(number_in(args), 1)),
];

/// Refuses arguments.
type Check = fn(&[Value]) -> Result<(), Error>;

fn bound(number: usize, times: usize) -> Result<(), Error> {
    match number.checked_mul(times) {
        Some(size) if size <= LARGEST => Ok(()),
        _ => Err(invalid(format!("{number} is too large here: the result may have {LARGEST} bytes or items"))),
    }
}

fn text(args: &[Value]) -> &str {
    args.first().and_then(Value::as_str).unwrap_or_default()
}

/// The largest number among the arguments after the first, also among those with a name.
fn number_in(args: &[Value]) -> usize {
    let named = |value: &Value| -> Vec<Value> {
        let names = value.try_iter().into_iter().flatten().filter(|_| value.kind() == ValueKind::Map);
        names.filter_map(|name| value.get_item(&name).ok()).collect()
    };
    let all = args.iter().skip(1).flat_map(|value| named(value).into_iter().chain([value.clone()]));
    let numbers = all.filter(|value| value.kind() == ValueKind::Number);
    numbers.map(|value| usize::try_from(value).unwrap_or(usize::MAX)).max().unwrap_or(0)
}

/// The largest number in a format, such as a width.
fn longest_number(format: &str) -> usize {
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).max().unwrap_or(0)
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// The suffixes of quantities and their factors as fractions
/// (<https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/>), the binary ones from the largest.
const UNITS: [(&str, f64); 16] = [
    ("Ei", (1u64 << 60) as f64),
    ("Pi", (1u64 << 50) as f64),
    ("Ti", (1u64 << 40) as f64),
    ("Gi", (1u64 << 30) as f64),
    ("Mi", (1u64 << 20) as f64),
    ("Ki", (1u64 << 10) as f64),
    ("E", 1e18),
    ("P", 1e15),
    ("T", 1e12),
    ("G", 1e9),
    ("M", 1e6),
    ("k", 1e3),
    ("", 1.0),
    ("m", 1e-3),
    ("u", 1e-6),
    ("n", 1e-9),
];

/// A float holds every whole number below this one.
const EXACT: f64 = (1u64 << 53) as f64;

#[allow(clippy::cast_possible_truncation, reason = "a whole number below 2^53")]
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < EXACT { Value::from(value as i64) } else { Value::from(value) }
}

fn quantity(value: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::Number {
        return Ok(value.clone());
    }
    let wrong =
        || invalid(format!("{value} is not a quantity: write a number with an optional unit, such as 4Gi or 250m"));
    let text = value.as_str().ok_or_else(wrong)?.trim();
    // `4 GiB` is `4Gi`, as in the spec of a VM.
    let digits = text.find(|c: char| !matches!(c, '0'..='9' | '.' | '-' | '+')).unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits);
    let unit = unit.trim_start();
    let unit = unit.strip_suffix('B').unwrap_or(unit);
    let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
    // The decimal point is removed first, because division of whole numbers is exact more often.
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let scaled: f64 = format!("{whole}{fraction}").parse().map_err(|_| wrong())?;
    let places = 10f64.powi(i32::try_from(fraction.len()).map_err(|_| wrong())?);
    Ok(number(if *factor >= 1.0 { scaled * factor / places } else { scaled / (places / factor).round() }))
}

fn as_quantity(value: f64, unit: Option<&str>) -> Result<String, Error> {
    if !value.is_finite() {
        return Err(invalid("not a number that a quantity can have"));
    }
    let (unit, factor) = match unit {
        Some(unit) => UNITS.iter().find(|(name, _)| *name == unit).copied().ok_or_else(|| {
            let names: Vec<&str> = UNITS.iter().map(|(name, _)| *name).filter(|name| !name.is_empty()).collect();
            invalid(format!("{unit:?} is not a unit: there are {}", names.join(", ")))
        })?,
        None if value.fract() != 0.0 => ("m", 1e-3),
        None => {
            UNITS[..6].iter().find(|(_, factor)| value != 0.0 && value % factor == 0.0).copied().unwrap_or(("", 1.0))
        }
    };
    // A rounding error of a float must not lead to the next whole number.
    let count = if factor < 1.0 { value * (1.0 / factor).round() } else { value / factor };
    let near = count.round();
    let count = if (count - near).abs() < 1e-12 * near.abs().max(1.0) { near } else { count.ceil() };
    Ok(format!("{count:.0}{unit}"))
}

/// The first octet, 02, means unicast and locally administered (IEEE 802).
fn mac(text: Value) -> Result<String, Error> {
    let hash = Sha256::digest(written(&text)?);
    let octets = hash.iter().take(5);
    Ok(octets.fold("02".to_owned(), |mut mac, octet| {
        let _ = write!(mac, ":{octet:02x}");
        mac
    }))
}

/// A text, number or boolean as text. `none` is refused, because its text would be the same for all VMs.
fn written(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String | ValueKind::Number | ValueKind::Bool => Ok(value.to_string()),
        kind => Err(invalid(format!("a text is needed here, and this is {kind}"))),
    }
}

/// Base64 as in Kubernetes' Secrets (RFC 4648, with padding).
fn base64(bytes: Vec<u8>) -> Result<String, Error> {
    match serde_json::to_value(ByteString(bytes)) {
        Ok(serde_json::Value::String(text)) => Ok(text),
        _ => Err(invalid("base64")),
    }
}

fn b64decode(text: Value) -> Result<String, Error> {
    let text = written(&text)?;
    let ByteString(bytes) =
        serde_json::from_value(text.into()).map_err(|error| invalid(format!("not base64: {error}")))?;
    String::from_utf8(bytes).map_err(|_| invalid("what is in the base64 is not text"))
}

/// The header has no time and no file name, so that the same text gives the same bytes.
fn gzip(text: Value) -> Result<String, Error> {
    let text = written(&text)?;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let bytes = encoder.write_all(text.as_bytes()).and_then(|()| encoder.finish());
    base64(bytes.map_err(|error| invalid(error.to_string()))?)
}

fn merge(map: Value, over: Rest<Value>) -> Result<Value, Error> {
    let json = |value: &Value| serde_json::to_value(value).map_err(|error| invalid(error.to_string()));
    let mut merged = json(&map)?;
    for over in over.iter() {
        if let Some(wrong) = [&map, over].into_iter().find(|value| value.kind() != ValueKind::Map) {
            return Err(invalid(format!("maps are merged, and this is {}", wrong.kind())));
        }
        json_patch::merge(&mut merged, &json(over)?);
    }
    Ok(Value::from(Serde(merged)))
}

fn flatten(list: Value) -> Result<Vec<Value>, Error> {
    let mut all = Vec::new();
    for item in list.try_iter()? {
        match item.kind() {
            ValueKind::Seq | ValueKind::Iterable => all.extend(item.try_iter()?),
            _ => all.push(item),
        }
    }
    Ok(all)
}

fn without(list: Value, other: Value) -> Result<Vec<Value>, Error> {
    let other: Vec<Value> = other.try_iter()?.collect();
    Ok(list.try_iter()?.filter(|item| !other.contains(item)).collect())
}

fn to_yaml(value: &Value) -> Result<String, Error> {
    serde_saphyr::to_string(value).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

fn from_yaml(text: Value) -> Result<Value, Error> {
    let value: serde_json::Value =
        crate::yaml::from_str(&written(&text)?).map_err(|error| invalid(format!("not YAML: {error}")))?;
    Ok(Value::from(Serde(value)))
}

fn date(text: Value, format: String) -> Result<String, Error> {
    let text = written(&text)?;
    let time: Timestamp = text.parse().map_err(|error| invalid(format!("{text:?} is not a time: {error}")))?;
    strtime::format(&format, time).map_err(|error| invalid(format!("{format:?} is not a format of strftime: {error}")))
}

/// A MIME message (RFC 2046) for cloud-init. The boundary is a hash of the content.
fn multipart(parts: Value, options: Kwargs) -> Result<String, Error> {
    options.assert_all_used()?;
    let bodies: Vec<String> = parts.try_iter()?.map(|part| part_body(&part)).collect::<Result<_, _>>()?;
    let boundary = format!("part-{}", digest(&bodies.concat()));
    let mut message = format!("Content-Type: multipart/mixed; boundary=\"{boundary}\"\nMIME-Version: 1.0\n\n");
    for body in bodies {
        let _ = write!(message, "--{boundary}\n{body}\n");
    }
    let _ = writeln!(message, "--{boundary}--");
    Ok(message)
}

/// A part with its headers. The content is in base64, which allows any text.
fn part_body(part: &Value) -> Result<String, Error> {
    if let Some(unknown) =
        part.try_iter()?.find(|key| !["content", "type", "filename"].map(Some).contains(&key.as_str()))
    {
        return Err(invalid(format!("a part has no {unknown}: there are content, type, filename")));
    }
    let field = |name: &str| part.get_attr(name).map(|value| value.as_str().map(str::to_owned));
    let content = field("content")?.ok_or_else(|| invalid("each part has a text `content`"))?;
    let kind = field("type")?.unwrap_or_else(|| media_type(&content).to_owned());
    let name = field("filename")?.map(|name| format!("; filename=\"{name}\"")).unwrap_or_default();
    if [&kind, &name].iter().any(|text| text.contains(['\n', '\r'])) {
        return Err(invalid("`type` and `filename` are one line each"));
    }
    let mut body = format!(
        "Content-Type: {kind}; charset=\"utf-8\"\nMIME-Version: 1.0\nContent-Transfer-Encoding: base64\n\
         Content-Disposition: attachment{name}\n\n"
    );
    for line in base64(content.into_bytes())?.as_bytes().chunks(76) {
        body.extend(line.iter().map(|byte| char::from(*byte)));
        body.push('\n');
    }
    Ok(body)
}

/// The type of user data, by their beginning (<https://cloudinit.readthedocs.io/en/latest/explanation/format.html>).
fn media_type(content: &str) -> &'static str {
    Kind::media_type(content).unwrap_or("text/cloud-config")
}

#[cfg(test)]
mod tests {
    use minijinja::context;
    use serde_json::json;

    use super::*;

    fn environment() -> Environment<'static> {
        let mut environment = Environment::new();
        add(&mut environment);
        environment
    }

    fn evaluate(expression: &str) -> Result<serde_json::Value, String> {
        let environment = environment();
        let value = environment.compile_expression(expression).and_then(|expression| expression.eval(context! {}));
        value.map(|value| serde_json::to_value(value).unwrap()).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn each_example_has_the_documented_result() {
        for Function { usage, example, gives, .. } in TABLE {
            let expected: serde_json::Value = serde_json::from_str(gives).unwrap();
            assert_eq!(evaluate(example).unwrap(), expected, "{usage}: {example}");
        }
    }

    #[test]
    fn quantities_are_exact() {
        for (text, number) in [
            ("0.1Gi", "107374182.4"),
            ("1.1", "1.1"),
            ("250m", "0.25"),
            ("1500m", "1.5"),
            ("4 GiB", "4294967296"),
            ("100k", "100000"),
            ("-1Ki", "-1024"),
            ("7", "7"),
        ] {
            assert_eq!(evaluate(&format!("{text:?} | quantity")).unwrap().to_string(), number, "{text}");
        }
        for (expression, text) in [
            ("0.25 | as_quantity", "250m"),
            ("1 | as_quantity('m')", "1000m"),
            ("0.1 | as_quantity('m')", "100m"),
            ("1073741825 | as_quantity('Gi')", "2Gi"),
            ("0 | as_quantity", "0"),
            ("1000 | as_quantity", "1000"),
            ("'1.1' | quantity | as_quantity('m')", "1100m"),
            ("3072 | as_quantity", "3Ki"),
        ] {
            assert_eq!(evaluate(expression).unwrap(), text, "{expression}");
        }
    }

    #[test]
    fn errors_name_the_cause() {
        for (expression, message) in [
            ("'4Gx' | quantity", "4Gx is not a quantity"),
            ("'.' | quantity", "is not a quantity"),
            ("1 | as_quantity('Gb')", "\"Gb\" is not a unit: there are Ei, Pi"),
            ("'?' | b64decode", "not base64"),
            ("'/w==' | b64decode", "is not text"),
            ("'yesterday' | date('%F')", "\"yesterday\" is not a time"),
            ("'2026-11-20T10:30:00Z' | date('%!')", "is not a format of strftime"),
            ("multipart([{}])", "each part has a text `content`"),
            ("multipart([{'content': 'a', 'type': 'a\nb'}])", "one line each"),
            ("multipart([{'content': 'a', 'typ': 'b'}])", "a part has no typ"),
            ("none | mac", "a text is needed here, and this is none"),
            ("none | b64encode", "this is none"),
            ("{} | digest", "this is map"),
            ("{'a': 1} | merge([1])", "maps are merged, and this is sequence"),
            ("fail('values.size is needed')", "values.size is needed"),
        ] {
            let error = evaluate(expression).unwrap_err();
            assert!(error.contains(message), "{expression}: {error}");
        }
    }

    #[test]
    fn a_number_does_not_make_a_text_that_is_too_large() {
        for (expression, result) in [
            ("'a\nb' | indent(2)", json!("a\n  b")),
            ("'a\nb' | indent(width=1, first=true)", json!(" a\n b")),
            ("'%05d|%s' | format(7, 'x')", json!("00007|x")),
            ("[1, 2, 3] | batch(2)", json!([[1, 2], [3]])),
            ("[1, 2] | slice(2)", json!([[1], [2]])),
            ("[1] | tojson(indent=2)", json!("[\n  1\n]")),
            ("[1] | tojson(true)", json!("[\n  1\n]")),
        ] {
            assert_eq!(evaluate(expression), Ok(result), "{expression}");
        }
        for expression in [
            "'a\nb' | indent(1000000000000)",
            "'a\nb' | indent(1e12)",
            "'a\nb' | indent(width=1000000000000)",
            "('\n' * 100000) | indent(1000)",
            "'%1000000000000d' | format(7)",
            "'%.1000000000000f' | format(7)",
            "('%100000d' * 100) | format(7)",
            "[1] | batch(1000000000000, 'x')",
            "[1] | slice(1000000000000)",
            "[1] | tojson(1000000000000)",
            "[1] | tojson(indent=1000000000000)",
        ] {
            let error = evaluate(expression).unwrap_err();
            assert!(error.contains("is too large here"), "{expression}: {error}");
        }
    }

    #[test]
    fn parts_make_a_mime_message() {
        let parts = "multipart([{'content': '#!/bin/sh\n', 'filename': 'a.sh'}, {'content': '#cloud-config\n{}'}])";
        let text = evaluate(parts).unwrap();
        insta::assert_snapshot!(text.as_str().unwrap());
    }
}

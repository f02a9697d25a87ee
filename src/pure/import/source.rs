//! What another program says of a VM, as a tree of which each part knows its line and whether anybody used it.
//!
//! A reader of a format marks what it uses. What is left without a mark in the end has no equivalent, so nothing is dropped silently.

use std::{borrow::Cow, cell::RefCell, collections::BTreeSet};

use granit_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Value};

use crate::exchange::Grade;

/// The deepest nesting that is read. Real files have less than 20 levels.
const DEPTH: usize = 64;
/// The most parts that a file may have. The largest of libvirt's own tests has 3,000.
pub(super) const PARTS: usize = 200_000;
/// The most comparisons of attributes: each is compared with the others of its element. A file with so many parts as are read, of which each has
/// ten attributes, needs less.
const COMPARISONS: usize = 50_000_000;

/// The source can't be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SourceError {
    /// Line and column, from 1.
    pub at: (usize, usize),
    /// What is wrong, and what to do.
    pub message: String,
}

impl SourceError {
    /// An error in a line.
    pub fn new(line: usize, message: impl Into<String>) -> Self {
        Self { at: (line, 1), message: message.into() }
    }

    /// That there is too much from a place on.
    pub(super) fn too_much(at: (usize, usize)) -> Self {
        Self { at, message: format!("this is more than {PARTS} parts: divide the file") }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
enum Mark {
    #[default]
    Nobody,
    /// Its parts are looked at one by one.
    Entered,
    /// What became of it.
    Graded(Grade, String),
    /// Something around it was graded as a whole.
    Covered(Grade),
}

/// A part of the source: an element or attribute of XML, a key of YAML, a line or a property of a Proxmox configuration.
#[derive(Clone, Debug)]
pub struct Item {
    /// What its parent calls it. Attributes begin with `@`.
    pub key: String,
    /// What messages call it.
    pub label: String,
    /// Its line, from 1.
    pub line: usize,
    text: Option<String>,
    /// Its text is quoted, so it is no number and no boolean.
    is_quoted: bool,
    is_list: bool,
    items: Vec<Item>,
    mark: RefCell<Mark>,
}

impl Item {
    /// A part without parts of its own.
    pub fn new(key: impl Into<String>, label: impl Into<String>, line: usize, text: Option<String>) -> Self {
        Self {
            key: key.into(),
            label: label.into(),
            line,
            text,
            is_quoted: false,
            is_list: false,
            items: Vec::new(),
            mark: RefCell::default(),
        }
    }

    /// Adds a part.
    pub fn push(&mut self, item: Self) {
        self.items.push(item);
    }

    /// All its parts.
    pub fn items(&self) -> &[Self] {
        &self.items
    }

    /// Its parts, without itself.
    pub fn into_items(self) -> Vec<Self> {
        self.items
    }

    /// A copy of it that nobody has used, with these parts in place of its own.
    pub fn with_items(&self, items: Vec<Self>) -> Self {
        Self {
            key: self.key.clone(),
            label: self.label.clone(),
            line: self.line,
            text: self.text.clone(),
            is_quoted: self.is_quoted,
            is_list: self.is_list,
            items,
            mark: RefCell::default(),
        }
    }

    /// How many parts there are, with itself.
    pub fn count(&self) -> usize {
        1 + self.items.iter().map(Self::count).sum::<usize>()
    }

    /// The first part of a path such as `cpu/topology/@cores`.
    pub fn get(&self, path: &str) -> Option<&Self> {
        path.split('/').try_fold(self, |item, key| item.items.iter().find(|item| item.key == key))
    }

    /// All parts of that name.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a Self> {
        self.items.iter().filter(move |item| item.key == key)
    }

    /// Its text, or an empty one.
    pub fn text(&self) -> &str {
        self.text.as_deref().unwrap_or_default()
    }

    /// Its text as a number.
    pub fn number(&self) -> Option<u64> {
        self.text().parse().ok()
    }

    /// Whether its text is a word for yes.
    pub fn is_yes(&self) -> bool {
        ["yes", "on", "true", "1"].contains(&self.text())
    }

    /// The guest finds the same. Returns the text.
    pub fn same(&self, became: impl Into<String>) -> &str {
        self.grade(Grade::Same, became);
        self.text()
    }

    /// Something is different.
    pub fn changed(&self, how: impl Into<String>) -> &str {
        self.grade(Grade::Changed, how);
        self.text()
    }

    /// It is left out, because of this.
    pub fn left_out(&self, why: impl Into<String>) {
        self.grade(Grade::LeftOut, why);
    }

    /// Its parts are looked at one by one.
    pub fn enter(&self) -> &Self {
        self.mark.replace_with(|mark| if *mark == Mark::Nobody { Mark::Entered } else { mark.clone() });
        self
    }

    fn grade(&self, grade: Grade, what: impl Into<String>) {
        *self.mark.borrow_mut() = Mark::Graded(grade, what.into());
    }

    /// It and all its parts that nobody graded.
    pub fn whole(&self, grade: Grade, what: impl Into<String>) {
        self.grade(grade, what);
        self.cover(grade);
    }

    fn cover(&self, grade: Grade) {
        for item in &self.items {
            item.mark.replace_with(|mark| match mark {
                Mark::Nobody | Mark::Entered => Mark::Covered(grade),
                mark => mark.clone(),
            });
            item.cover(grade);
        }
    }

    /// It as JSON, for what is copied as it is. Nothing is marked.
    pub fn json(&self) -> Value {
        if self.is_list {
            return self.items.iter().map(Self::json).collect();
        }
        let Some(text) = &self.text else {
            return self.items.iter().map(|item| (item.key.clone(), item.json())).collect::<Map<_, _>>().into();
        };
        match text.as_str() {
            _ if self.is_quoted => text.clone().into(),
            "" | "~" | "null" | "Null" | "NULL" => Value::Null,
            "true" | "True" | "TRUE" => true.into(),
            "false" | "False" | "FALSE" => false.into(),
            number => serde_json::from_str::<serde_json::Number>(number).map_or_else(|_| number.into(), Value::Number),
        }
    }

    fn is_touched(&self) -> bool {
        *self.mark.borrow() != Mark::Nobody || self.items.iter().any(Self::is_touched)
    }

    /// Calls `found` with each part that was graded, and with the outermost parts that nobody used. What is below a part that was changed or
    /// left out as a whole has the same fate.
    pub fn visit(&self, found: &mut impl FnMut(&Self, Grade, &str)) {
        match &*self.mark.borrow() {
            Mark::Graded(grade, what) => found(self, *grade, what),
            Mark::Nobody if !self.is_touched() => return found(self, Grade::LeftOut, ""),
            Mark::Nobody if !self.text().is_empty() => found(self, Grade::LeftOut, ""),
            Mark::Covered(Grade::Same) => found(self, Grade::Same, "as a part of the whole"),
            Mark::Nobody | Mark::Entered | Mark::Covered(_) => {}
        }
        self.items.iter().for_each(|item| item.visit(found));
    }
}

/// The root element of an XML text.
///
/// # Errors
/// If it is no XML, has a document type (which may define entities), is too large or too deep.
pub fn xml(text: &str) -> Result<Item, SourceError> {
    let text = undeclared(text);
    element(document(&text)?.root_element(), "", &Lines::new(&text), 0)
}

/// The root element of an XML text, or if it is called so, its parts, each as if it were a root.
///
/// # Errors
/// As those of [`xml`], and if there is text between the parts.
pub fn xml_parts(text: &str, around: &str) -> Result<Vec<Item>, SourceError> {
    let text = undeclared(text);
    let (document, lines) = (document(&text)?, Lines::new(&text));
    let root = document.root_element();
    if root.tag_name().name() != around {
        return Ok(vec![element(root, "", &lines, 0)?]);
    }
    let words =
        |node: roxmltree::Node<'_, '_>| node.is_text() && node.text().is_some_and(|text| !text.trim().is_empty());
    if let Some(node) = root.children().find(|node| words(*node)) {
        let text = node.text().unwrap_or_default();
        let before = text.len() - text.trim_start().len();
        let what = format!("this is no part of XML: {:?}", text.trim().lines().next().unwrap_or_default());
        return Err(SourceError::new(lines.of(node.range().start + before), what));
    }
    root.children().filter(roxmltree::Node::is_element).map(|part| element(part, "", &lines, 0)).collect()
}

/// The text with blanks in place of its XML declarations: of several texts one after the other, each may have one. Lines stay the same.
pub(super) fn undeclared(text: &str) -> Cow<'_, str> {
    const BEGIN: &str = "<?xml";
    let (mut blank, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(BEGIN) {
        let (before, declaration) = rest.split_at(at);
        // There are other instructions, such as <?xml-stylesheet?>.
        if !declaration[BEGIN.len()..].starts_with(|letter: char| letter.is_ascii_whitespace()) {
            let (instruction, after) = rest.split_at(at + BEGIN.len());
            blank += instruction;
            rest = after;
            continue;
        }
        let Some(end) = declaration.find("?>") else { break };
        let (declaration, after) = declaration.split_at(end + 2);
        blank += before;
        blank.extend(declaration.chars().map(|letter| if letter == '\n' { '\n' } else { ' ' }));
        rest = after;
    }
    if blank.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(blank + rest) }
}

fn document(text: &str) -> Result<roxmltree::Document<'_>, SourceError> {
    few_attributes(text)?;
    let options = roxmltree::ParsingOptions { nodes_limit: PARTS as u32, ..Default::default() };
    roxmltree::Document::parse_with_options(text, options).map_err(|error| {
        let place = error.pos();
        let at = (place.row as usize, place.col as usize);
        let message = match error {
            roxmltree::Error::DtdDetected => "a document type (DTD) is not read: remove it".to_owned(),
            roxmltree::Error::NoRootNode => "there is nothing in this file".to_owned(),
            roxmltree::Error::UnknownToken(_) => "this is no XML: an element is expected here".to_owned(),
            roxmltree::Error::NodesLimitReached => return SourceError::too_much(at),
            error => {
                let text = error.to_string();
                text.strip_suffix(&format!(" at {place}")).map_or(text.clone(), str::to_owned)
            }
        };
        SourceError { at, message }
    })
}

/// An error if elements have so many attributes that comparing their names takes long.
fn few_attributes(text: &str) -> Result<(), SourceError> {
    let (mut from, mut comparisons) = (0, 0_usize);
    while let Some(at) = text[from..].find('<') {
        let begin = from + at + 1;
        let tag = &text[begin..];
        let other = [("!--", "-->"), ("![CDATA[", "]]>"), ("?", "?>")].iter().find(|(open, _)| tag.starts_with(open));
        if let Some((_, close)) = other {
            let Some(end) = tag.find(close) else { break };
            from = begin + end + close.len();
            continue;
        }
        // Each attribute has a value in quotes.
        let (mut attributes, mut quote) = (0_usize, None);
        let end = tag.bytes().position(|byte| {
            match (quote, byte) {
                (Some(open), byte) if open == byte => (quote, attributes) = (None, attributes + 1),
                (None, b'\'' | b'"') => quote = Some(byte),
                _ => {}
            }
            quote.is_none() && byte == b'>'
        });
        comparisons = comparisons.saturating_add(attributes.saturating_mul(attributes));
        if comparisons > COMPARISONS {
            return Err(SourceError::new(
                Lines::new(text).of(begin),
                "the elements up to here have too many attributes",
            ));
        }
        let Some(end) = end else { break };
        from = begin + end + 1;
    }
    Ok(())
}

/// Where lines begin: looking a line up in the text takes time in its length.
struct Lines(Vec<usize>);

impl Lines {
    fn new(text: &str) -> Self {
        Self(std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect())
    }

    fn of(&self, offset: usize) -> usize {
        self.0.partition_point(|begin| *begin <= offset)
    }
}

fn element(node: roxmltree::Node<'_, '_>, around: &str, lines: &Lines, depth: usize) -> Result<Item, SourceError> {
    let line = lines.of(node.range().start);
    if depth > DEPTH {
        return Err(SourceError::new(line, format!("the elements are nested more than {DEPTH} levels deep")));
    }
    let key = node.tag_name().name();
    // The path begins below the root and below the list of devices.
    let path = match (depth, key) {
        (0, _) | (1, "devices") => String::new(),
        _ if around.is_empty() => key.to_owned(),
        _ => format!("{around}/{key}"),
    };
    let name = if path.is_empty() { key } else { &path };
    let text: String = node.children().filter(roxmltree::Node::is_text).filter_map(|it| it.text()).collect();
    let text = text.trim();
    let text = (!text.is_empty()).then(|| text.to_owned());
    let mut item = Item::new(key, format!("<{name}>"), line, text);
    for attribute in node.attributes() {
        let at = lines.of(attribute.range().start);
        let label = format!("<{name} {}>", attribute.name());
        item.push(Item::new(format!("@{}", attribute.name()), label, at, Some(attribute.value().to_owned())));
    }
    for child in node.children().filter(roxmltree::Node::is_element) {
        item.push(element(child, &path, lines, depth + 1)?);
    }
    Ok(item)
}

/// The documents of a YAML text. Aliases are not read.
///
/// # Errors
/// If it is no YAML, has aliases or a key twice, is too large or too deep.
pub fn yaml(text: &str) -> Result<Vec<Item>, SourceError> {
    /// A collection whose end has not come, and in a mapping the key whose value comes next.
    struct Open {
        item: Item,
        is_map: bool,
        key: Option<(String, usize)>,
        /// All keys of a mapping.
        keys: BTreeSet<String>,
    }

    impl Open {
        /// What the next part is called, if it is a value.
        fn name(&mut self, line: usize) -> Option<(String, String, usize)> {
            if self.is_map {
                let (key, line) = self.key.take()?;
                let around = &self.item.label;
                let label = if around.is_empty() { key.clone() } else { format!("{around}.{key}") };
                return Some((key, label, line));
            }
            let key = self.item.items.len().to_string();
            let label = format!("{}[{key}]", self.item.label);
            Some((key, label, line))
        }
    }

    let (mut open, mut documents, mut parts): (Vec<Open>, Vec<Item>, usize) = (Vec::new(), Vec::new(), 0);
    for next in Parser::new_from_str(text) {
        let (event, span) = next.map_err(|error| SourceError {
            at: (error.marker().line(), error.marker().col() + 1),
            message: error.info().to_string(),
        })?;
        let (line, column) = (span.start.line(), span.start.col() + 1);
        let wrong = |message: String| SourceError { at: (line, column), message };
        parts += 1;
        if parts > PARTS {
            return Err(SourceError::too_much((line, column)));
        }
        if open.len() > DEPTH {
            return Err(wrong(format!("this is more than {DEPTH} levels deep")));
        }
        let ended = match event {
            Event::Scalar(value, style, ..) => {
                let is_key = open.last().is_some_and(|open| open.is_map && open.key.is_none());
                if let Some(map) = open.last_mut().filter(|_| is_key) {
                    let key = value.into_owned();
                    if !map.keys.insert(key.clone()) {
                        return Err(wrong(format!("the key {key:?} is there twice")));
                    }
                    map.key = Some((key, line));
                    continue;
                }
                let name = open.last_mut().and_then(|open| open.name(line)).unwrap_or_default();
                let mut item = Item::new(name.0, name.1, name.2.max(1), Some(value.into_owned()));
                item.is_quoted = style != ScalarStyle::Plain;
                item
            }
            Event::SequenceStart(..) | Event::MappingStart(..) => {
                let is_map = matches!(event, Event::MappingStart(..));
                let place = match open.last_mut() {
                    Some(open) => open.name(line).ok_or_else(|| wrong("a key must be a text".into()))?,
                    None => (String::new(), String::new(), line),
                };
                let mut item = Item::new(place.0, place.1, place.2, None);
                item.is_list = !is_map;
                open.push(Open { item, is_map, key: None, keys: BTreeSet::new() });
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(open) => open.item,
                None => continue,
            },
            Event::Alias(_) => return Err(wrong("aliases (*NAME) are not read: write the value out".into())),
            _ => continue,
        };
        match open.last_mut() {
            Some(open) => open.item.push(ended),
            // Nothing between two marks is no document.
            None if ended.text.is_some() && ended.json() == Value::Null => {}
            None => documents.push(ended),
        }
    }
    Ok(documents)
}

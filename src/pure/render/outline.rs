//! The outline of a template, read from its tokens: the template that it extends, its blocks, and the templates and names that it uses.

use minijinja::machinery::{Span, Token};

use crate::jinja;

/// A name in a template and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mention {
    /// The name.
    pub name: String,
    /// The line, from 1.
    pub line: usize,
    /// The column in that line, from 1.
    pub column: usize,
}

impl Mention {
    /// A name at the begin of a span.
    pub fn new(name: &str, span: Span) -> Self {
        Self { name: name.to_owned(), line: span.start_line.into(), column: usize::from(span.start_col) + 1 }
    }
}

/// The outline of a template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// The template that it extends, if the name is a literal.
    pub extends: Option<Mention>,
    /// Its blocks. True: the block is not inside another one.
    pub blocks: Vec<(Mention, bool)>,
    /// The names of the blocks that have `super()` in them.
    pub supers: Vec<String>,
    /// The templates that it includes and imports, if their names are literals.
    pub uses: Vec<Mention>,
    /// The imported templates with the imported names.
    pub imports: Vec<Import>,
    /// The names that others can import from it: its macros, its variables, and the names of its own imports.
    pub exports: Vec<String>,
    /// The names in its expressions with their attributes, such as `vm.metadata.name`.
    pub paths: Vec<Mention>,
    /// Text outside of blocks. In a template that extends another, it is never rendered.
    pub text: Option<Mention>,
}

/// `{% import "FILE" as MODULE %}` or `{% from "FILE" import NAMES %}`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Import {
    /// The template.
    pub file: String,
    /// The local name of the whole template.
    pub module: Option<String>,
    /// The imported names, each with its local name.
    pub names: Vec<(Mention, String)>,
}

impl Import {
    /// Reads the tokens after the name of the file.
    fn of<'a>(file: &str, rest: impl Iterator<Item = &'a (Token<'a>, Span)>) -> Self {
        let mut import = Self { file: file.to_owned(), ..Self::default() };
        let (mut is_from, mut is_alias) = (false, false);
        for (token, span) in rest {
            match token {
                Token::BlockEnd => break,
                Token::Ident("import") => is_from = true,
                Token::Ident("as") => is_alias = true,
                Token::Ident(name) if !is_alias => import.names.push((Mention::new(name, *span), (*name).to_owned())),
                Token::Ident(name) if !is_from => import.module = Some((*name).to_owned()),
                Token::Ident(name) => {
                    if let Some((_, local)) = import.names.last_mut() {
                        *local = (*name).to_owned();
                    }
                }
                Token::Comma => is_alias = false,
                _ => {}
            }
        }
        import
    }
}

impl Outline {
    /// The outline of a template that compiles. What follows a token that can't be read is left out.
    pub fn of(source: &str) -> Self {
        let tokens: Vec<(Token<'_>, Span)> = jinja::tokens(source).map_while(Result::ok).collect();
        let mut reader = Reader { tokens: &tokens, index: 0, open: Vec::new(), outline: Self::default() };
        while let Some((token, span)) = tokens.get(reader.index) {
            reader.read(token, *span);
            reader.index += 1;
        }
        reader.outline
    }
}

/// Reads a template's tokens one after the other.
struct Reader<'a> {
    tokens: &'a [(Token<'a>, Span)],
    /// The token that is read.
    index: usize,
    /// The blocks that it is in, the innermost one last.
    open: Vec<&'a str>,
    outline: Outline,
}

impl<'a> Reader<'a> {
    fn read(&mut self, token: &Token<'_>, span: Span) {
        match token {
            Token::TemplateData(text) if self.open.is_empty() && self.outline.text.is_none() => {
                self.outline.text = first_line(text, span);
            }
            Token::BlockStart => self.statement(),
            Token::Ident("super") => self.outline.supers.extend(self.open.last().map(|block| (*block).to_owned())),
            Token::Ident(name) => self.path(name, span),
            _ => {}
        }
    }

    fn token(&self, ahead: usize) -> Option<&'a (Token<'a>, Span)> {
        self.tokens.get(self.index + ahead)
    }

    /// Reads a statement up to its name. The expressions in the rest of it are read as all others.
    fn statement(&mut self) {
        let Some((Token::Ident(keyword), _)) = self.token(1) else { return };
        self.index += match (*keyword, self.token(2)) {
            ("block", Some((Token::Ident(name), span))) => {
                self.outline.blocks.push((Mention::new(name, *span), self.open.is_empty()));
                self.open.push(name);
                2
            }
            ("endblock", _) => {
                self.open.pop();
                // The block's name may follow, which is no expression.
                self.tokens[self.index..].iter().take_while(|(token, _)| !matches!(token, Token::BlockEnd)).count()
            }
            ("extends", Some((Token::Str(name), span))) => {
                self.outline.extends = Some(Mention::new(name, *span));
                2
            }
            ("include", Some((Token::Str(name), span))) => {
                self.outline.uses.push(Mention::new(name, *span));
                2
            }
            ("import" | "from", Some((Token::Str(name), span))) => {
                self.outline.uses.push(Mention::new(name, *span));
                self.import(name);
                2
            }
            ("macro", Some((Token::Ident(name), _))) => {
                self.outline.exports.push((*name).to_owned());
                2
            }
            ("set", _) => {
                self.assigned();
                1
            }
            _ => 0,
        };
    }

    fn import(&mut self, file: &str) {
        let import = Import::of(file, self.tokens[self.index + 3..].iter());
        self.outline.exports.extend(import.module.iter().chain(import.names.iter().map(|(_, name)| name)).cloned());
        self.outline.imports.push(import);
    }

    /// The variables that a `set` assigns.
    fn assigned(&mut self) {
        for (token, _) in &self.tokens[self.index + 2..] {
            match token {
                Token::Assign | Token::BlockEnd => break,
                Token::Ident(name) => self.outline.exports.push((*name).to_owned()),
                _ => {}
            }
        }
    }

    fn path(&mut self, name: &str, span: Span) {
        let mut path = name.to_owned();
        while let (Some((Token::Dot, _)), Some((Token::Ident(name), _))) = (self.token(1), self.token(2)) {
            path.push('.');
            path.push_str(name);
            self.index += 2;
        }
        self.outline.paths.push(Mention::new(&path, span));
    }
}

/// The first line of a text that is not blank.
fn first_line(text: &str, span: Span) -> Option<Mention> {
    let blank = text.len() - text.trim_start().len();
    let line = text[blank..].lines().next()?;
    let mut mention = Mention::new(line.trim_end(), span);
    let lines_above = text[..blank].matches('\n').count();
    if lines_above > 0 {
        mention.line += lines_above;
        mention.column = 1;
    }
    Some(mention)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outline_has_the_blocks_uses_and_paths_of_a_template() {
        let outline = Outline::of(
            "{% extends \"builtin/pod.yaml.j2\" %}\n\nlost\n{% block containers %}\n{{ super() }}\n  {% block mine %}{% endblock mine %}\n\
             {% include \"lib/x.j2\" %}{{ vm.metadata.name ~ 'a' }}\n{% endblock %}\n{% block labels %}{% endblock %}\n",
        );
        let show = |mention: &Mention| format!("{}:{}:{}", mention.name, mention.line, mention.column);
        assert_eq!(outline.extends.as_ref().map(show).as_deref(), Some("builtin/pod.yaml.j2:1:12"));
        let blocks: Vec<_> = outline.blocks.iter().map(|(name, top)| (show(name), *top)).collect();
        assert_eq!(
            blocks,
            [("containers:4:10".into(), true), ("mine:6:12".into(), false), ("labels:9:10".into(), true)]
        );
        assert_eq!(outline.supers, ["containers"]);
        assert_eq!(outline.uses.iter().map(show).collect::<Vec<_>>(), ["lib/x.j2:7:12"]);
        assert!(outline.paths.iter().any(|path| show(path) == "vm.metadata.name:7:28"), "{:?}", outline.paths);
        assert_eq!(outline.text.as_ref().map(show).as_deref(), Some("lost:3:1"));
    }

    #[test]
    fn an_outline_has_imports_and_exports() {
        let outline = Outline::of(
            "{% import \"a.j2\" as a %}{% from \"b.j2\" import one, two as three %}{% include \"c.j2\" %}\n\
             {% macro side(name) %}{{ name }}{% endmacro %}{% set x, y = [1, 2] %}{% set z %}text{% endset %}",
        );
        let imports: Vec<_> = outline
            .imports
            .iter()
            .map(|import| {
                let names: Vec<_> = import.names.iter().map(|(name, _)| name.name.as_str()).collect();
                (import.file.as_str(), import.module.as_deref(), names)
            })
            .collect();
        assert_eq!(imports, [("a.j2", Some("a"), vec![]), ("b.j2", None, vec!["one", "two"])]);
        assert_eq!(outline.exports, ["a", "one", "three", "side", "x", "y", "z"]);
    }
}

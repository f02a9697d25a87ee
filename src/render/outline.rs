//! What a template says of itself, read from its tokens: which it extends, which blocks it has, which others it uses.

use minijinja::{
    machinery::{Span, Token, tokenize},
    syntax::SyntaxConfig,
};

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
    fn new(name: &str, span: Span) -> Self {
        Self { name: name.to_owned(), line: span.start_line.into(), column: usize::from(span.start_col) + 1 }
    }
}

/// What a template says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// The template that it extends, if its name is written out.
    pub extends: Option<Mention>,
    /// Its blocks; true: not inside another block.
    pub blocks: Vec<(Mention, bool)>,
    /// The templates that it includes and imports, as far as their names are written out.
    pub uses: Vec<Mention>,
    /// Those that it imports, and what from them.
    pub imports: Vec<Import>,
    /// What others can import from it: its macros and variables, and what it imports itself under the names that it gives.
    pub exports: Vec<String>,
    /// The names that stand in its expressions, with their attributes, such as `vm.metadata.name`.
    pub paths: Vec<Mention>,
    /// Text outside of blocks. Where a template extends another, nobody ever sees it.
    pub text: Option<Mention>,
}

/// `{% import "FILE" as MODULE %}` or `{% from "FILE" import NAMES %}`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Import {
    /// The template.
    pub file: String,
    /// What all of it is called here.
    pub module: Option<String>,
    /// What is taken from it, and what that is called here.
    pub names: Vec<(Mention, String)>,
}

impl Import {
    /// Reads on behind the name of the file.
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
    /// Of a template that compiles; what comes after a token that can't be read is left out.
    pub fn of(source: &str) -> Self {
        let tokens: Vec<(Token<'_>, Span)> =
            tokenize(source, false, SyntaxConfig::default()).map_while(Result::ok).collect();
        let mut outline = Self::default();
        let mut depth = 0usize;
        let mut index = 0;
        while let Some((token, span)) = tokens.get(index) {
            let next = |ahead: usize| tokens.get(index + ahead);
            match (token, next(1), next(2)) {
                (Token::TemplateData(text), ..) if depth == 0 && outline.text.is_none() => {
                    let blank = text.len() - text.trim_start().len();
                    if let Some(line) = text[blank..].lines().next() {
                        let before = text[..blank].matches('\n').count();
                        let line = Mention::new(line.trim_end(), *span).below(before);
                        outline.text = Some(line);
                    }
                }
                (Token::BlockStart, Some((Token::Ident("block"), _)), Some((Token::Ident(name), at))) => {
                    outline.blocks.push((Mention::new(name, *at), depth == 0));
                    depth += 1;
                    index += 2;
                }
                (Token::BlockStart, Some((Token::Ident("endblock"), _)), _) => {
                    depth = depth.saturating_sub(1);
                    // A name may stand after it.
                    while tokens.get(index).is_some_and(|(token, _)| !matches!(token, Token::BlockEnd)) {
                        index += 1;
                    }
                }
                (Token::BlockStart, Some((Token::Ident("extends"), _)), Some((Token::Str(name), at))) => {
                    outline.extends = Some(Mention::new(name, *at));
                    index += 2;
                }
                (
                    Token::BlockStart,
                    Some((Token::Ident("include" | "import" | "from"), _)),
                    Some((Token::Str(name), at)),
                ) => {
                    outline.uses.push(Mention::new(name, *at));
                    if !matches!(next(1), Some((Token::Ident("include"), _))) {
                        let import = Import::of(name, tokens[index + 3..].iter());
                        outline
                            .exports
                            .extend(import.module.iter().chain(import.names.iter().map(|(_, it)| it)).cloned());
                        outline.imports.push(import);
                    }
                    index += 2;
                }
                (Token::BlockStart, Some((Token::Ident("macro"), _)), Some((Token::Ident(name), _))) => {
                    outline.exports.push((*name).to_owned());
                    index += 2;
                }
                (Token::BlockStart, Some((Token::Ident("set"), _)), _) => {
                    let names = tokens[index + 2..].iter().map_while(|(token, _)| match token {
                        Token::Assign | Token::BlockEnd => None,
                        token => Some(token),
                    });
                    outline.exports.extend(names.filter_map(|token| match token {
                        Token::Ident(name) => Some((*name).to_owned()),
                        _ => None,
                    }));
                    index += 1;
                }
                (Token::Ident(name), ..) => {
                    let mut path = (*name).to_owned();
                    let start = *span;
                    while let (Some((Token::Dot, _)), Some((Token::Ident(name), _))) =
                        (tokens.get(index + 1), tokens.get(index + 2))
                    {
                        path.push('.');
                        path.push_str(name);
                        index += 2;
                    }
                    outline.paths.push(Mention::new(&path, start));
                }
                _ => {}
            }
            index += 1;
        }
        outline
    }
}

impl Mention {
    fn below(mut self, lines: usize) -> Self {
        if lines > 0 {
            self.line += lines;
            self.column = 1;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_template_says() {
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
        assert_eq!(outline.uses.iter().map(show).collect::<Vec<_>>(), ["lib/x.j2:7:12"]);
        assert!(outline.paths.iter().any(|path| show(path) == "vm.metadata.name:7:28"), "{:?}", outline.paths);
        assert_eq!(outline.text.as_ref().map(show).as_deref(), Some("lost:3:1"));
    }

    #[test]
    fn what_it_takes_from_others_and_gives_to_them() {
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

//! What the text of a template may be before minijinja reads it.
//!
//! minijinja calls itself for each operator of an expression and for each `elif`, with no bound of its own, and a program whose stack is
//! full ends at once. So every template goes through [`check`], and is compiled [`on_large_stack`], which holds what [`check`] lets pass.

use std::{io, thread};

use minijinja::{
    Error,
    machinery::{Span, Token, tokenize},
    syntax::SyntaxConfig,
};

/// How many operators, filters and brackets may be inside each other in an expression. What a comma separates counts by itself.
const DEEPEST: usize = 256;
/// How many `elif` the statements `if` may have that are open at one place.
const MOST_ELIFS: usize = 128;
/// The most bytes of a line: minijinja counts columns up to 65535.
const LONGEST_LINE: usize = 65_000;
/// The stack on which templates are compiled, in bytes.
const STACK: usize = 16 << 20;

/// A place where a template goes beyond a bound.
#[derive(Debug, PartialEq, Eq)]
pub struct Beyond {
    /// The line, from 1.
    pub line: usize,
    /// The column in that line, from 1.
    pub column: usize,
    /// What is wrong, and what to do.
    pub message: String,
}

/// The tokens of a template. None, if minijinja can't read it to its end.
pub fn tokens(source: &str) -> impl Iterator<Item = Result<(Token<'_>, Span), Error>> {
    let readable = if short_lines(source).is_ok() { source } else { "" };
    tokenize(readable, false, SyntaxConfig::default())
}

/// Whether minijinja may read a template.
///
/// # Errors
/// The first place that it may not.
pub fn check(source: &str) -> Result<(), Beyond> {
    short_lines(source)?;
    let mut expression = Expression::default();
    let mut elifs = Elifs::default();
    let mut is_keyword = false;
    // minijinja reads nothing behind a token that is wrong.
    for (token, span) in tokenize(source, false, SyntaxConfig::default()).map_while(Result::ok) {
        let beyond =
            |message: String| Beyond { line: span.start_line.into(), column: usize::from(span.start_col) + 1, message };
        if matches!(token, Token::VariableStart | Token::BlockStart) {
            expression = Expression::default();
        } else if expression.depth_with(&token) > DEEPEST {
            return Err(beyond(format!(
                "this expression has more than {DEEPEST} operators, filters and brackets inside each other; give its \
                 parts names before it, with {{% set part = ... %}}"
            )));
        }
        if let (true, Token::Ident(keyword)) = (is_keyword, &token)
            && elifs.with(keyword) > MOST_ELIFS
        {
            return Err(beyond(format!(
                "this {{% if %}} has more than {MOST_ELIFS} {{% elif %}}; look the value up in a map, with \
                 {{% set map = {{\"key\": \"value\"}} %}} and map[key], or write several {{% if %}}"
            )));
        }
        is_keyword = matches!(token, Token::BlockStart);
    }
    Ok(())
}

fn short_lines(source: &str) -> Result<(), Beyond> {
    match source.split('\n').zip(1..).find(|(line, _)| line.len() > LONGEST_LINE) {
        Some((text, line)) => Err(Beyond {
            line,
            column: 1,
            message: format!("this line has {} bytes; a line of a template has at most {LONGEST_LINE}", text.len()),
        }),
        None => Ok(()),
    }
}

/// How deep an expression nests, at most, as far as it was read.
#[derive(Default)]
struct Expression {
    /// The open brackets: for each, the depth of the deepest part that a comma has ended, and of the part behind that.
    brackets: Vec<(usize, usize)>,
    /// The same outside of brackets.
    outside: (usize, usize),
    /// The sum of the depths of all parts that are not ended.
    depth: usize,
}

impl Expression {
    fn depth_with(&mut self, token: &Token<'_>) -> usize {
        let (deepest, current) = self.brackets.last_mut().unwrap_or(&mut self.outside);
        match token {
            Token::Comma => {
                *deepest = (*deepest).max(*current);
                self.depth -= *current;
                *current = 0;
            }
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => {
                *current += 1;
                self.depth += 1;
                self.brackets.push((0, 0));
            }
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                if let Some((deepest, current)) = self.brackets.pop() {
                    let within = deepest.max(current);
                    self.depth += within - current;
                    self.brackets.last_mut().unwrap_or(&mut self.outside).1 += within;
                }
            }
            token if deepens(token) => {
                *current += 1;
                self.depth += 1;
            }
            _ => {}
        }
        self.depth
    }
}

/// Whether what is before or behind a token is inside the expression of that token.
fn deepens(token: &Token<'_>) -> bool {
    match token {
        Token::Ident(name) => matches!(*name, "if" | "else" | "not" | "is" | "in" | "and" | "or"),
        Token::Plus
        | Token::Minus
        | Token::Mul
        | Token::Div
        | Token::FloorDiv
        | Token::Pow
        | Token::Mod
        | Token::Dot
        | Token::Tilde
        | Token::Pipe
        | Token::Eq
        | Token::Ne
        | Token::Gt
        | Token::Gte
        | Token::Lt
        | Token::Lte => true,
        _ => false,
    }
}

/// The statements `if` that are open: how many `elif` each has.
#[derive(Default)]
struct Elifs {
    open: Vec<usize>,
    all: usize,
}

impl Elifs {
    fn with(&mut self, keyword: &str) -> usize {
        match (keyword, self.open.last_mut()) {
            ("if", _) => self.open.push(0),
            ("elif", Some(elifs)) => {
                *elifs += 1;
                self.all += 1;
            }
            ("endif", Some(_)) => self.all -= self.open.pop().unwrap_or_default(),
            _ => {}
        }
        self.all
    }
}

/// Compiles templates on a stack that is large enough for all that [`check`] lets pass.
///
/// # Errors
/// If it panics, or there is no memory for the stack.
pub fn on_large_stack<T: Send>(compile: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("templates".into()).stack_size(STACK).spawn_scoped(scope, compile)?;
        thread.join().map_err(|_| io::Error::other("it panicked; the log has the place"))
    })
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    /// Texts that nest as deep as is allowed, with `more` beyond that.
    fn deep(more: usize) -> Vec<String> {
        let chain = |begin: &str, part: &str, each: usize| {
            let times = DEEPEST / each + more;
            format!("{{{{ {begin}{} }}}}", part.repeat(times))
        };
        let mut all: Vec<String> = [
            ("x", "|lower", 1),
            ("x", " ~ x", 1),
            ("x", " + x", 1),
            ("x", " // x", 1),
            ("x", " ** x", 1),
            ("x", " and x", 1),
            ("x", " or x", 1),
            ("x", " < x", 1),
            ("x", " in x", 1),
            ("x", " is odd", 1),
            ("x", ".x", 1),
            ("x", "[0]", 1),
            ("x", "()", 1),
            ("x", "|f(x, x.y)", 3),
            ("x", " if x else x", 2),
        ]
        .iter()
        .map(|(begin, part, each)| chain(begin, part, *each))
        .collect();
        let before = |part: &str| format!("{{{{ {}x }}}}", part.repeat(DEEPEST + more));
        all.extend([before("not "), before("- ")]);
        let elifs = "{% elif x %}a".repeat(MOST_ELIFS + more);
        all.push(format!("{{% if x %}}a{elifs}{{% endif %}}"));
        let (half, rest) = (MOST_ELIFS / 2, MOST_ELIFS - MOST_ELIFS / 2 + more);
        let elifs = |count| "{% elif x %}".repeat(count);
        let within = format!("{{% if x %}}{}{{% endif %}}", elifs(rest));
        all.push(format!("{{% if x %}}{}{within}{{% endif %}}", elifs(half)));
        all
    }

    fn compiles(text: &str) -> bool {
        Environment::new().template_from_str(text).is_ok()
    }

    #[test]
    fn what_is_allowed_is_compiled_on_half_of_the_stack() {
        let compile = || {
            for text in deep(0) {
                assert_eq!(check(&text), Ok(()), "{text}");
                assert!(compiles(&text), "{text}");
                // Inside as many statements and brackets as minijinja allows.
                let (begin, end) = ("{% for i in x %}{% if x %}".repeat(70), "{% endif %}{% endfor %}".repeat(70));
                assert!(compiles(&format!("{begin}{text}{end}")), "{text}");
            }
            for (open, close) in [("(", ")"), ("[", "]"), ("{1:", "}"), ("x[", "]"), ("f(", ")"), ("x|f(", ")")] {
                // minijinja bounds these itself.
                let text = format!("{{{{ {}x{} }}}}", open.repeat(250), close.repeat(250));
                assert!(!compiles(&text), "{text}");
                let text = format!("{{{{ {}x{} }}}}", open.repeat(70), close.repeat(70));
                assert!(compiles(&text), "{text}");
            }
        };
        thread::Builder::new().stack_size(STACK / 2).spawn(compile).unwrap().join().unwrap();
    }

    #[test]
    fn what_nests_deeper_is_refused_at_its_place() {
        for text in deep(1) {
            let beyond = check(&text).unwrap_err();
            assert!(beyond.line == 1 && beyond.column > 100, "{text}: {beyond:?}");
        }
        assert_eq!(check(&format!("a\n{{{{ x{} }}}}", "|f".repeat(300))).unwrap_err().line, 2);
        // Brackets that are closed again count as well.
        let mut text = "x".to_owned();
        for _ in 0..10 {
            text = format!("({text}{})", "|f".repeat(50));
        }
        assert!(check(&format!("{{{{ {text} }}}}")).is_err());
        assert!(check(&deep(10_000).concat()).is_err());
    }

    #[test]
    fn long_lists_and_many_statements_are_no_depth() {
        let row = "{name: x.y ~ \"a\", list: [1, f(2)|g]}, ";
        assert_eq!(check(&format!("{{% set table = [{}] %}}", row.repeat(1500))), Ok(()));
        assert_eq!(check(&"{{ a.b.c|d }}{% if x %}{% elif y %}{% endif %}\n".repeat(2000)), Ok(()));
        // Text and comments are no tokens.
        assert_eq!(check(&format!("{}{{# {} #}}", "a.b|c ".repeat(2000), "a.b|c ".repeat(2000))), Ok(()));
    }

    #[test]
    fn a_line_whose_columns_minijinja_can_not_count_is_refused() {
        let text = format!("a\n{}{{{{ ! }}}}\n", "x".repeat(LONGEST_LINE));
        let beyond = check(&text).unwrap_err();
        assert_eq!((beyond.line, beyond.column), (2, 1));
        assert_eq!(tokens(&text).count(), 0);
        assert_eq!(check(&"x".repeat(LONGEST_LINE)), Ok(()));
    }

    #[test]
    fn a_panic_is_an_error() {
        assert_eq!(on_large_stack(|| 1).unwrap(), 1);
        assert!(on_large_stack(|| assert!(compiles("{{"), "as expected")).is_err());
    }
}

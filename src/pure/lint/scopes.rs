//! Which names of a template are its own: loop variables, assignments, arguments, macros and imports, read from its syntax tree.
//!
//! A block is rendered where the extended template has it. So a template that overrides the block can also use the names that are in scope
//! there, such as the variable of a loop around the block.

use std::collections::BTreeMap;

use minijinja::{
    machinery::{
        Span,
        ast::{Call, CallArg, Expr, Macro, Stmt},
        parse,
    },
    syntax::SyntaxConfig,
};

use super::Mention;

/// A name that a template sets itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Local {
    pub name: String,
    /// The list of the context whose items it is, such as `disks`.
    pub item_of: Option<String>,
}

/// A name in an expression with its attributes, such as `vm.metadata.name`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub mention: Mention,
    /// What the template itself has under the first part of the name.
    pub local: Option<Local>,
    /// The blocks around it, the innermost last.
    pub blocks: Vec<String>,
}

/// The names of a template.
#[derive(Debug, Default)]
pub(super) struct Scopes {
    pub uses: Vec<Use>,
    /// The names that are in scope where each block stands.
    pub blocks: BTreeMap<String, Vec<Local>>,
}

impl Scopes {
    /// The names of a template that compiles.
    pub fn of(source: &str) -> Self {
        let mut walker = Walker { scopes: vec![Vec::new()], blocks: Vec::new(), found: Self::default() };
        if let Ok(template) = parse(source, "", SyntaxConfig::default()) {
            walker.template(&template);
        }
        walker.found
    }
}

/// Filters that keep items of a list as they are.
const ITEMS_STAY: [&str; 8] = ["list", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique"];

struct Walker {
    /// The names in scope, the innermost scope last.
    scopes: Vec<Vec<Local>>,
    blocks: Vec<String>,
    found: Scopes,
}

impl Walker {
    fn template(&mut self, template: &Stmt<'_>) {
        let Stmt::Template(template) = template else { return };
        // A template that extends another is read to its end before any of its blocks is rendered.
        if template.children.iter().any(|statement| matches!(statement, Stmt::Extends(_))) {
            template.children.iter().for_each(|statement| self.declare(statement));
        }
        self.all(&template.children);
    }

    /// Adds the names that a statement at the top sets.
    fn declare(&mut self, statement: &Stmt<'_>) {
        match statement {
            Stmt::Set(set) => self.assign(&set.target, None),
            Stmt::SetBlock(set) => self.assign(&set.target, None),
            Stmt::Import(import) => self.assign(&import.name, None),
            Stmt::FromImport(import) => {
                import.names.iter().for_each(|(name, alias)| self.assign(alias.as_ref().unwrap_or(name), None));
            }
            Stmt::Macro(declared) => self.add(declared.name, None),
            _ => {}
        }
    }

    fn all(&mut self, statements: &[Stmt<'_>]) {
        statements.iter().for_each(|statement| self.statement(statement));
    }

    /// Reads statements in a scope of their own.
    fn inside(&mut self, read: impl FnOnce(&mut Self)) {
        self.scopes.push(Vec::new());
        read(self);
        self.scopes.pop();
    }

    fn statement(&mut self, statement: &Stmt<'_>) {
        match statement {
            Stmt::EmitExpr(emit) => self.expression(&emit.expr),
            Stmt::ForLoop(each) => {
                self.expression(&each.iter);
                self.inside(|walker| {
                    walker.add("loop", None);
                    walker.assign(&each.target, items_of(&each.iter).as_deref());
                    each.filter_expr.iter().for_each(|filter| walker.expression(filter));
                    walker.all(&each.body);
                });
                self.inside(|walker| walker.all(&each.else_body));
            }
            // An `if` has no scope: what it sets stays set.
            Stmt::IfCond(condition) => {
                self.expression(&condition.expr);
                self.all(&condition.true_body);
                self.all(&condition.false_body);
            }
            Stmt::WithBlock(with) => self.inside(|walker| {
                for (target, value) in &with.assignments {
                    walker.expression(value);
                    walker.assign(target, None);
                }
                walker.all(&with.body);
            }),
            Stmt::Set(set) => {
                self.expression(&set.expr);
                self.assign(&set.target, None);
            }
            Stmt::SetBlock(set) => {
                set.filter.iter().for_each(|filter| self.expression(filter));
                self.inside(|walker| walker.all(&set.body));
                self.assign(&set.target, None);
            }
            Stmt::AutoEscape(escape) => self.inside(|walker| walker.all(&escape.body)),
            Stmt::FilterBlock(filter) => {
                self.expression(&filter.filter);
                self.inside(|walker| walker.all(&filter.body));
            }
            Stmt::Block(block) => {
                let in_scope = self.scopes.iter().flatten().cloned();
                self.found.blocks.entry(block.name.to_owned()).or_default().extend(in_scope);
                self.blocks.push(block.name.to_owned());
                self.inside(|walker| walker.all(&block.body));
                self.blocks.pop();
            }
            Stmt::Import(_) | Stmt::FromImport(_) => self.declare(statement),
            Stmt::Include(include) => self.expression(&include.name),
            Stmt::Macro(declared) => {
                self.declare(statement);
                self.macro_body(declared);
            }
            Stmt::CallBlock(block) => {
                self.call(&block.call);
                self.macro_body(&block.macro_decl);
            }
            Stmt::Do(action) => self.call(&action.call),
            _ => {}
        }
    }

    fn macro_body(&mut self, declared: &Macro<'_>) {
        self.inside(|walker| {
            walker.add("caller", None);
            declared.args.iter().for_each(|argument| walker.assign(argument, None));
            declared.defaults.iter().for_each(|default| walker.expression(default));
            walker.all(&declared.body);
        });
    }

    fn call(&mut self, call: &Call<'_>) {
        self.expression(&call.expr);
        self.arguments(&call.args);
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) {
        for argument in arguments {
            match argument {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => {
                    self.expression(value);
                }
            }
        }
    }

    fn expression(&mut self, expression: &Expr<'_>) {
        match expression {
            Expr::Var(name) => self.use_of(name.id.to_owned(), name.span()),
            Expr::GetAttr(attribute) => match path(expression) {
                Some((name, span)) => self.use_of(name, span),
                None => self.expression(&attribute.expr),
            },
            Expr::GetItem(item) => self.each([&item.expr, &item.subscript_expr]),
            Expr::Slice(slice) => {
                self.expression(&slice.expr);
                self.each([&slice.start, &slice.stop, &slice.step].into_iter().flatten());
            }
            Expr::UnaryOp(operation) => self.expression(&operation.expr),
            Expr::BinOp(operation) => self.each([&operation.left, &operation.right]),
            Expr::Compare(comparison) => {
                self.expression(&comparison.expr);
                self.each(comparison.ops.iter().map(|operation| &operation.expr));
            }
            Expr::IfExpr(condition) => {
                self.each([&condition.test_expr, &condition.true_expr]);
                self.each(&condition.false_expr);
            }
            Expr::Filter(filter) => {
                self.each(&filter.expr);
                self.arguments(&filter.args);
            }
            Expr::Test(test) => {
                self.expression(&test.expr);
                self.arguments(&test.args);
            }
            Expr::Call(call) => self.call(call),
            Expr::List(list) => self.each(&list.items),
            Expr::Tuple(tuple) => self.each(&tuple.items),
            Expr::Map(map) => self.each(map.keys.iter().chain(&map.values)),
            Expr::Const(_) => {}
        }
    }

    fn each<'a, 'e: 'a>(&mut self, expressions: impl IntoIterator<Item = &'a Expr<'e>>) {
        expressions.into_iter().for_each(|expression| self.expression(expression));
    }

    fn use_of(&mut self, name: String, span: Span) {
        let root = name.split('.').next().unwrap_or_default();
        let local = self.scopes.iter().rev().flat_map(|scope| scope.iter().rev()).find(|local| local.name == root);
        let (local, blocks) = (local.cloned(), self.blocks.clone());
        self.found.uses.push(Use { mention: Mention::new(&name, span), local, blocks });
    }

    fn assign(&mut self, target: &Expr<'_>, item_of: Option<&str>) {
        match target {
            Expr::Var(name) => self.add(name.id, item_of),
            Expr::List(list) => list.items.iter().for_each(|item| self.assign(item, None)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.assign(item, None)),
            // An attribute of a namespace, which must exist.
            other => self.expression(other),
        }
    }

    fn add(&mut self, name: &str, item_of: Option<&str>) {
        let local = Local { name: name.to_owned(), item_of: item_of.map(str::to_owned) };
        self.scopes.iter_mut().rev().take(1).for_each(|scope| scope.push(local.clone()));
    }
}

/// A name with its attributes, and where it stands.
fn path(expression: &Expr<'_>) -> Option<(String, Span)> {
    match expression {
        Expr::Var(name) => Some((name.id.to_owned(), name.span())),
        Expr::GetAttr(attribute) => {
            let (path, span) = path(&attribute.expr)?;
            Some((format!("{path}.{}", attribute.name), span))
        }
        _ => None,
    }
}

/// The name of the list that a loop goes through.
fn items_of(expression: &Expr<'_>) -> Option<String> {
    match expression {
        Expr::Filter(filter) if ITEMS_STAY.contains(&filter.name) => items_of(filter.expr.as_ref()?),
        _ => path(expression).map(|(path, _)| path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown(source: &str) -> Vec<String> {
        let uses = Scopes::of(source).uses.into_iter().filter(|it| it.local.is_none());
        uses.map(|it| it.mention.name).collect()
    }

    #[test]
    fn names_that_a_template_sets_are_its_own() {
        for (source, expected) in [
            ("{% set x = a %}{{ x }}{{ x.y }}{{ b.c[d] }}", &["a", "b.c", "d"] as &[&str]),
            ("{% for x in xs if x %}{{ x }}{{ loop.index }}{% else %}{{ x }}{% endfor %}{{ x }}", &["xs", "x", "x"]),
            ("{% if a %}{% set x = 1 %}{% endif %}{{ x }}", &["a"]),
            ("{% with x = a, y = x %}{{ x ~ y }}{% endwith %}{{ y }}", &["a", "y"]),
            ("{% macro m(x, y=a) %}{{ x ~ y ~ caller() }}{% endmacro %}{{ m(b, c=d) }}", &["a", "b", "d"]),
            ("{% import 'a' as x %}{% from 'b' import y, z as w %}{{ x.m() }}{{ y }}{{ w }}{{ z }}", &["z"]),
            ("{% block a %}{% set x = 1 %}{% endblock %}{% block b %}{{ x }}{% endblock %}", &["x"]),
            (
                "{% extends 'a' %}{% block b %}{{ x }}{{ m() }}{% endblock %}{% set x = 1 %}{% macro m() %}{% endmacro %}",
                &[],
            ),
            (
                "{{ {'k': a}.k ~ [b][0] ~ (c if d else e) ~ -f ~ (g | default(h)) ~ (i is sameas(j)) ~ l[m:n] }}",
                &["a", "b", "d", "c", "e", "f", "g", "h", "i", "j", "l", "m", "n"],
            ),
            (
                "{% set x, y = a %}{{ x ~ y }}{% set z %}{{ b }}{% endset %}{{ z }}{% filter upper %}{{ c }}{% endfilter %}",
                &["a", "b", "c"],
            ),
        ] {
            assert_eq!(unknown(source), expected, "{source}");
        }
    }

    #[test]
    fn a_block_has_the_names_around_it() {
        let scopes = Scopes::of(
            "{% set p = 1 %}{% for d in disks | sort %}{% block a %}{% endblock %}{% endfor %}{% block b %}{% endblock %}",
        );
        let names = |block: &str| -> Vec<(&str, Option<&str>)> {
            scopes.blocks[block].iter().map(|local| (local.name.as_str(), local.item_of.as_deref())).collect()
        };
        assert_eq!(names("a"), [("p", None), ("loop", None), ("d", Some("disks"))]);
        assert_eq!(names("b"), [("p", None)]);
    }

    #[test]
    fn a_use_has_its_place_and_the_blocks_around_it() {
        let scopes = Scopes::of("{% block a %}\n  {% block b %}{{ vm.metadata.name }}{% endblock %}{% endblock %}");
        let [found] = &scopes.uses[..] else { panic!("{scopes:?}") };
        assert_eq!(
            (found.mention.line, found.mention.column, &found.blocks[..]),
            (2, 19, &["a".to_owned(), "b".to_owned()][..])
        );
    }
}

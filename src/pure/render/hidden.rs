//! What a named set drops of the base, without saying so.
//!
//! A file of a named set replaces the file of that name in the base. If it extends the built-in template instead of `base/NAME`, the VMs
//! of the set lose what the administrator changed for all VMs. The same happens to a block that both change, if the set's block has no
//! `super()`.

use super::{
    TemplateSet,
    outline::{Mention, Outline},
    patches,
};

/// A part of the base that a file of a named set replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// The file of the set in the operator's folder.
    pub file: String,
    /// Where in it: the extended template, or the block.
    pub at: Option<Mention>,
    /// What is lost, and what to do.
    pub message: String,
}

/// What a named set hides of the base. Nothing for the set of VMs that choose none.
pub fn hidden(set: &TemplateSet) -> Vec<Hidden> {
    let Some((set_name, files)) = &set.layers().named else { return Vec::new() };
    let base = &set.layers().base;
    let mut found = Vec::new();
    for (name, text) in files {
        let Some(below) = base.get(name).filter(|below| *below != text && !below.trim().is_empty()) else { continue };
        // An empty file says that there shall be none.
        if text.trim().is_empty() {
            continue;
        }
        let file = format!("sets/{set_name}/{name}");
        let of_file = |(at, message)| Hidden { file: file.clone(), at, message };
        if name.ends_with(patches::SUFFIX) || name.ends_with(patches::TEMPLATE_SUFFIX) {
            let message = format!(
                "this file replaces {name} of the base, whose patches do not apply to VMs of the set: rename it, and both apply"
            );
            found.push(of_file((None, message)));
        } else if name.ends_with(".j2") {
            found.extend(of_template(name, &Outline::of(text), &Outline::of(below)).into_iter().map(of_file));
        }
    }
    found
}

/// What a template hides of the one below it.
fn of_template(name: &str, outline: &Outline, below: &Outline) -> Vec<(Option<Mention>, String)> {
    let base_name = format!("base/{name}");
    let is_base = |used: &Mention| used.name == base_name;
    if outline.uses.iter().any(is_base) {
        return Vec::new();
    }
    if !outline.extends.as_ref().is_some_and(is_base) {
        let message = format!(
            "this file replaces {name} of the base, whose changes VMs of the set do not get: extend or include {base_name:?}"
        );
        return vec![(outline.extends.clone(), message)];
    }
    // The blocks of a template that extends nothing are not changes but places for them.
    let is_changed =
        |block: &Mention| below.extends.is_some() && below.blocks.iter().any(|(it, _)| it.name == block.name);
    let blocks = outline.blocks.iter().filter(|(block, is_top)| *is_top && !outline.supers.contains(&block.name));
    let lost = blocks.filter(|(block, _)| is_changed(block)).map(|(block, _)| {
        let message = format!(
            "this block replaces the block `{}` of {name} in the base: write {{{{ super() }}}} in it to keep both",
            block.name
        );
        (Some(block.clone()), message)
    });
    lost.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::Files;

    fn found(base: &[(&str, &str)], set: &[(&str, &str)]) -> Vec<String> {
        let files = |list: &[(&str, &str)]| -> Files {
            list.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
        };
        let set = TemplateSet::layered(&files(base), Some(("desktop", &files(set)))).unwrap();
        let show = |Hidden { file, at, message }: Hidden| {
            let at = at.map(|at| format!(":{}:{}", at.line, at.column)).unwrap_or_default();
            format!("{file}{at}: {message}")
        };
        hidden(&set).into_iter().map(show).collect()
    }

    #[test]
    fn a_file_or_block_that_drops_a_change_of_the_base_is_found() {
        let base = [
            (
                "pod.yaml.j2",
                "{% extends 'base/pod.yaml.j2' %}\n{% block scheduling %}\n  priority: 1\n{% endblock %}\n",
            ),
            ("10.patch.yaml", "target: {kind: Pod}\nmergePatch: {}\n"),
            ("lib/x.j2", "x"),
            ("values.yaml", "a: 1\n"),
        ];
        let pod = |extends: &str, block: &str| {
            format!("{{% extends '{extends}/pod.yaml.j2' %}}\n{{% block scheduling %}}{block}{{% endblock %}}\n")
        };
        let show = |files: &[(&str, &str)]| found(&base, files).join("\n");
        insta::assert_snapshot!(show(&[("pod.yaml.j2", &pod("builtin", ""))]), @r#"sets/desktop/pod.yaml.j2:1:12: this file replaces pod.yaml.j2 of the base, whose changes VMs of the set do not get: extend or include "base/pod.yaml.j2""#);
        insta::assert_snapshot!(show(&[("pod.yaml.j2", &pod("base", ""))]), @"sets/desktop/pod.yaml.j2:2:10: this block replaces the block `scheduling` of pod.yaml.j2 in the base: write {{ super() }} in it to keep both");
        insta::assert_snapshot!(show(&[("10.patch.yaml", "target: {kind: Pod}\nmergePatch: {a: b}\n")]), @"sets/desktop/10.patch.yaml: this file replaces 10.patch.yaml of the base, whose patches do not apply to VMs of the set: rename it, and both apply");
        insta::assert_snapshot!(show(&[("lib/x.j2", "y")]), @r#"sets/desktop/lib/x.j2: this file replaces lib/x.j2 of the base, whose changes VMs of the set do not get: extend or include "base/lib/x.j2""#);
        for good in [
            ("pod.yaml.j2", pod("base", "{{ super() }}").as_str()),
            ("pod.yaml.j2", "{% set pod %}{% include 'base/pod.yaml.j2' %}{% endset %}{{ pod | safe }}"),
            ("pod.yaml.j2", base[0].1),
            ("pod.yaml.j2", ""),
            ("lib/x.j2", "{% include 'base/lib/x.j2' %}"),
            ("service.yaml.j2", "{% extends 'builtin/service.yaml.j2' %}"),
            ("values.yaml", "a: 2\n"),
        ] {
            assert_eq!(show(&[good]), "", "{good:?}");
        }
    }

    #[test]
    fn the_blocks_of_a_template_that_extends_nothing_are_places_for_changes() {
        let base = [("a.yaml.j2", "{% block x %}{% endblock %}")];
        assert!(
            found(&base, &[("a.yaml.j2", "{% extends 'base/a.yaml.j2' %}{% block x %}y{% endblock %}")]).is_empty()
        );
    }
}

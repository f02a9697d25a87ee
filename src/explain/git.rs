//! The object of a GitOps tool that applies a VM, and whether it is suspended.
//!
//! | object | what it leaves on a VM |
//! |---|---|
//! | Kustomization of Flux | the labels `kustomize.toolkit.fluxcd.io/name` and `namespace` |
//! | HelmRelease of Flux | the labels `helm.toolkit.fluxcd.io/name` and `namespace` |
//! | Application of Argo CD | the annotation `argocd.argoproj.io/tracking-id`, or the label `app.kubernetes.io/instance` and its field manager |

use std::fmt;

use kube::{
    ResourceExt,
    core::{ApiResource, GroupVersionKind},
};
use serde_json::Value;

use crate::{api::VirtualMachine, object::INSTANCE_LABEL};

/// The kinds of such objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// <https://fluxcd.io/flux/components/kustomize/kustomizations/>
    Kustomization,
    /// <https://fluxcd.io/flux/components/helm/helmreleases/>
    HelmRelease,
    /// <https://argo-cd.readthedocs.io/en/stable/operator-manual/declarative-setup/#applications>
    Application,
}

/// The object that applies a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its kind.
    pub kind: Kind,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// The annotation with which Argo CD leaves an Application alone
/// (<https://argo-cd.readthedocs.io/en/stable/user-guide/skip_reconcile/>).
const SKIP: &str = "argocd.argoproj.io/skip-reconcile";
/// Where Argo CD runs, and Applications are unless it is told otherwise.
const ARGO: &str = "argocd";

impl Kind {
    /// Its resource in the API.
    pub fn resource(self) -> ApiResource {
        let (group, version, kind) = match self {
            Self::Kustomization => ("kustomize.toolkit.fluxcd.io", "v1", "Kustomization"),
            Self::HelmRelease => ("helm.toolkit.fluxcd.io", "v2", "HelmRelease"),
            Self::Application => ("argoproj.io", "v1alpha1", "Application"),
        };
        ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}/{}", self.kind, self.namespace, self.name)
    }
}

impl Source {
    /// The object that applies a VM, as the tool has written on it. The VM is as the API server has it.
    pub fn of(vm: &VirtualMachine) -> Option<Self> {
        let flux = |kind, group: &str| {
            let label = |name: &str| vm.labels().get(&format!("{group}/{name}")).cloned();
            Some(Self { kind, namespace: label("namespace")?, name: label("name")? })
        };
        let argo = |app: &str| {
            // An Application of another namespace is called NAMESPACE_NAME.
            let (namespace, name) = app.split_once('_').unwrap_or((ARGO, app));
            Self { kind: Kind::Application, namespace: namespace.into(), name: name.into() }
        };
        let tracked = || vm.annotations().get("argocd.argoproj.io/tracking-id")?.split(':').next();
        let is_argo =
            || vm.managed_fields().iter().any(|it| it.manager.as_ref().is_some_and(|name| name.starts_with("argocd-")));
        let labelled = || vm.labels().get(INSTANCE_LABEL).filter(|_| is_argo()).map(String::as_str);
        flux(Kind::Kustomization, "kustomize.toolkit.fluxcd.io")
            .or_else(|| flux(Kind::HelmRelease, "helm.toolkit.fluxcd.io"))
            .or_else(|| tracked().or_else(labelled).map(argo))
    }

    /// Why changes in Git do not reach the VM, and how to let them: the field of the object, and a command. `None`: nothing keeps them.
    pub fn suspended(&self, object: &Value) -> Option<(String, String)> {
        let Self { kind, namespace, name } = self;
        match kind {
            Kind::Kustomization | Kind::HelmRelease => {
                let resource = if *kind == Kind::Kustomization { "kustomization" } else { "helmrelease" };
                let todo = format!("flux resume {resource} {name} -n {namespace}");
                (object["spec"]["suspend"] == true).then(|| ("spec.suspend".to_owned(), todo))
            }
            Kind::Application => {
                let place = format!("kubectl -n {namespace}");
                if object["metadata"]["annotations"][SKIP] == "true" {
                    return Some((SKIP.to_owned(), format!("{place} annotate application {name} {SKIP}-")));
                }
                let is_off = object["spec"]["syncPolicy"]["automated"]["enabled"] == false;
                is_off.then(|| {
                    ("spec.syncPolicy.automated.enabled: false".to_owned(), format!("{place} edit application {name}"))
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::vm;

    fn source(metadata: &Value) -> Option<String> {
        let vm = vm(|vm| {
            for (key, value) in metadata.as_object().unwrap() {
                vm["metadata"][key] = value.clone();
            }
        });
        Source::of(&vm).map(|source| source.to_string())
    }

    #[test]
    fn a_tool_is_known_by_what_it_leaves_on_a_vm() {
        let flux = |group: &str| json!({ "labels": { format!("{group}/name"): "vms", format!("{group}/namespace"): "flux-system" } });
        let argo = |id: &str| json!({ "annotations": { "argocd.argoproj.io/tracking-id": id } });
        let labelled =
            |manager: &str| json!({ "labels": { INSTANCE_LABEL: "web" }, "managedFields": [{ "manager": manager }] });
        for (metadata, expected) in [
            (flux("kustomize.toolkit.fluxcd.io"), Some("Kustomization flux-system/vms")),
            (flux("helm.toolkit.fluxcd.io"), Some("HelmRelease flux-system/vms")),
            (argo("web:vmoperator.jdrupes.org/VirtualMachine:vms/apple"), Some("Application argocd/web")),
            (argo("team_web:vmoperator.jdrupes.org/VirtualMachine:vms/apple"), Some("Application team/web")),
            (labelled("argocd-controller"), Some("Application argocd/web")),
            (labelled("kubectl"), None),
            (json!({}), None),
        ] {
            assert_eq!(source(&metadata).as_deref(), expected, "{metadata}");
        }
    }

    #[test]
    fn what_suspends_an_object_is_named_with_the_way_back() {
        let of = |kind| Source { kind, namespace: "n".into(), name: "a".into() };
        let said = |kind, object: Value| of(kind).suspended(&object).map(|(field, todo)| format!("{field}: {todo}"));
        let skipped = json!({ "metadata": { "annotations": { SKIP: "true" } } });
        let cases = [
            (
                Kind::Kustomization,
                json!({ "spec": { "suspend": true } }),
                Some("spec.suspend: flux resume kustomization a -n n"),
            ),
            (
                Kind::HelmRelease,
                json!({ "spec": { "suspend": true } }),
                Some("spec.suspend: flux resume helmrelease a -n n"),
            ),
            (Kind::Kustomization, json!({ "spec": { "suspend": false } }), None),
            (
                Kind::Application,
                skipped,
                Some(
                    "argocd.argoproj.io/skip-reconcile: kubectl -n n annotate application a argocd.argoproj.io/skip-reconcile-",
                ),
            ),
            (
                Kind::Application,
                json!({ "spec": { "syncPolicy": { "automated": { "enabled": false } } } }),
                Some("spec.syncPolicy.automated.enabled: false: kubectl -n n edit application a"),
            ),
            (Kind::Application, json!({ "spec": { "syncPolicy": { "automated": {} } } }), None),
            // It is synced by hand, as somebody wants it.
            (Kind::Application, json!({ "spec": {} }), None),
        ];
        for (kind, object, expected) in cases {
            assert_eq!(said(kind, object.clone()).as_deref(), expected, "{object}");
        }
    }
}

//! The object of a GitOps tool that applies a VM, and whether something keeps changes in Git from the VM.
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
pub struct GitApplier {
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

/// How much of a tool's message is shown, in characters.
const MESSAGE_LENGTH: usize = 300;

/// What keeps changes in Git from a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// What is wrong with the tool's object, as words that follow its name.
    pub what: String,
    /// How to let the changes through.
    pub what_to_do: String,
}

impl Kind {
    /// What the commands of the tool call it.
    const fn word(self) -> &'static str {
        match self {
            Self::Kustomization => "kustomization",
            Self::HelmRelease => "helmrelease",
            Self::Application => "application",
        }
    }

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

impl fmt::Display for GitApplier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}/{}", self.kind, self.namespace, self.name)
    }
}

impl GitApplier {
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

    /// Why changes in Git do not reach the VM. `None`: nothing keeps them.
    pub fn obstacle(&self, object: &Value) -> Option<Obstacle> {
        self.suspended(object).or_else(|| self.failed(object))
    }

    fn suspended(&self, object: &Value) -> Option<Obstacle> {
        let Self { kind, namespace, name } = self;
        let (field, what_to_do) = match kind {
            Kind::Kustomization | Kind::HelmRelease => (object["spec"]["suspend"] == true)
                .then(|| ("spec.suspend".to_owned(), format!("flux resume {} {name} -n {namespace}", kind.word()))),
            Kind::Application => {
                let place = format!("kubectl -n {namespace}");
                if object["metadata"]["annotations"][SKIP] == "true" {
                    Some((SKIP.to_owned(), format!("{place} annotate application {name} {SKIP}-")))
                } else {
                    let is_off = object["spec"]["syncPolicy"]["automated"]["enabled"] == false;
                    is_off.then(|| {
                        let field = "spec.syncPolicy.automated.enabled: false";
                        (field.to_owned(), format!("{place} edit application {name}"))
                    })
                }
            }
        }?;
        Some(Obstacle { what: format!("is suspended ({field})"), what_to_do })
    }

    /// What the tool itself reports: the condition Ready of Flux, the errors and the last operation of Argo CD. A health check that fails is
    /// none, because the changes are applied by then, and the VM may be what fails.
    fn failed(&self, object: &Value) -> Option<Obstacle> {
        let Self { kind, namespace, name } = self;
        let status = &object["status"];
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        let word = kind.word();
        let (reason, message, what_to_do) = match kind {
            Kind::Kustomization | Kind::HelmRelease => {
                let ready = conditions.find(|it| it["type"] == "Ready" && it["status"] == "False")?;
                let reason = ready["reason"].as_str().unwrap_or_default();
                if reason == "HealthCheckFailed" {
                    return None;
                }
                let what_to_do = format!("mend that, then flux reconcile {word} {name} -n {namespace} --with-source");
                (reason, &ready["message"], what_to_do)
            }
            Kind::Application => {
                let is_error = |it: &&Value| it["type"].as_str().is_some_and(|kind| kind.ends_with("Error"));
                let operation = &status["operationState"];
                let phase = operation["phase"].as_str().unwrap_or_default();
                let what_to_do = format!("mend that: kubectl -n {namespace} describe {word} {name}");
                match conditions.find(is_error) {
                    Some(error) => (error["type"].as_str().unwrap_or_default(), &error["message"], what_to_do),
                    None if matches!(phase, "Failed" | "Error") => (phase, &operation["message"], what_to_do),
                    None => return None,
                }
            }
        };
        let message = message.as_str().unwrap_or_default().lines().next().unwrap_or_default().trim();
        let short: String = message.chars().take(MESSAGE_LENGTH).collect();
        let rest = if short.len() < message.len() { " ..." } else { "" };
        Some(Obstacle { what: format!("fails ({reason}): {short}{rest}"), what_to_do })
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
        GitApplier::of(&vm).map(|source| source.to_string())
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
    fn what_keeps_changes_from_a_vm_is_named_with_the_way_back() {
        let of = |kind| GitApplier { kind, namespace: "n".into(), name: "a".into() };
        let said =
            |kind, object: &Value| of(kind).obstacle(object).map(|it| format!("{} -> {}", it.what, it.what_to_do));
        let ready = |status: &str, reason: &str| {
            json!({ "status": { "conditions": [
                { "type": "Reconciling", "status": "True", "reason": "Progressing", "message": "m" },
                { "type": "Ready", "status": status, "reason": reason, "message": "kustomize build failed:\nno such file" },
            ] } })
        };
        let argo = |conditions: Value, phase: &str| json!({ "status": { "conditions": conditions, "operationState": { "phase": phase, "message": "one is invalid" } } });
        let cases = [
            (
                Kind::Kustomization,
                json!({ "spec": { "suspend": true } }),
                Some("is suspended (spec.suspend) -> flux resume kustomization a -n n"),
            ),
            (
                Kind::HelmRelease,
                json!({ "spec": { "suspend": true } }),
                Some("is suspended (spec.suspend) -> flux resume helmrelease a -n n"),
            ),
            (Kind::Kustomization, json!({ "spec": { "suspend": false } }), None),
            (
                Kind::Kustomization,
                ready("False", "BuildFailed"),
                Some(
                    "fails (BuildFailed): kustomize build failed: -> mend that, then flux reconcile kustomization a -n n --with-source",
                ),
            ),
            (Kind::HelmRelease, ready("True", "UpgradeSucceeded"), None),
            // The VM itself may be what is not healthy.
            (Kind::Kustomization, ready("False", "HealthCheckFailed"), None),
            (
                Kind::Application,
                json!({ "metadata": { "annotations": { SKIP: "true" } } }),
                Some(
                    "is suspended (argocd.argoproj.io/skip-reconcile) -> kubectl -n n annotate application a argocd.argoproj.io/skip-reconcile-",
                ),
            ),
            (
                Kind::Application,
                json!({ "spec": { "syncPolicy": { "automated": { "enabled": false } } } }),
                Some("is suspended (spec.syncPolicy.automated.enabled: false) -> kubectl -n n edit application a"),
            ),
            (Kind::Application, json!({ "spec": { "syncPolicy": { "automated": {} } } }), None),
            // It is synced by hand, as somebody wants it.
            (Kind::Application, json!({ "spec": {} }), None),
            (
                Kind::Application,
                argo(json!([{ "type": "ComparisonError", "message": "app path does not exist" }]), "Succeeded"),
                Some(
                    "fails (ComparisonError): app path does not exist -> mend that: kubectl -n n describe application a",
                ),
            ),
            (
                Kind::Application,
                argo(json!([{ "type": "OrphanedResourceWarning", "message": "w" }]), "Failed"),
                Some("fails (Failed): one is invalid -> mend that: kubectl -n n describe application a"),
            ),
            (Kind::Application, argo(json!(null), "Succeeded"), None),
        ];
        for (kind, object, expected) in cases {
            assert_eq!(said(kind, &object).as_deref(), expected, "{object}");
        }
        let long = json!({ "status": { "operationState": { "phase": "Error", "message": "é".repeat(1000) } } });
        assert!(of(Kind::Application).obstacle(&long).unwrap().what.ends_with("é ..."));
    }
}

//! `kubectl vm migrate-check`: what happens to a namespace of the VM-Operator in Java when this project's manager takes it over. Nothing is
//! written. The objects are planned as by [`plan`](super::plan); what no plan shows is [`exchange::takeover`](crate::exchange::takeover).

use std::{collections::BTreeSet, fmt, sync::Arc};

use clap::Args;
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, PersistentVolumeClaim, Secret},
};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams},
};
use serde::Serialize;
use serde_json::json;

use super::{
    cluster::ClusterOptions,
    diff::listing::Lists,
    format::DataFormat,
    manifest,
    output::{Exit, Failure, Output, counted, note, plain, yaml},
    plan::{
        Seen, of_vm,
        refusal::Refusals,
        see,
        sources::{Change, Side},
    },
    vms::Selection,
};
use crate::{
    actions::FoundVm,
    allowed::{self, NotAllowed, Reach},
    api::VmPool,
    client::discovery::Resources,
    config::Config,
    exchange::takeover::{self, Finding, Surroundings, findings},
    object::{COMPONENT_LABEL, CONFIG_MAP, DISPLAY_SECRET, MANAGED_BY},
    plan::effect::{Class, Effect},
    render::context::IMAGE_REPOSITORY_CLAIM,
    runner_config::paths::PASSWORD_FILE,
};

/// The names of the images of the VM-Operator's manager contain this.
const ITS_MANAGER: &str = "org.jdrupes.vmoperator.manager";

/// How keys of the configuration begin that have a meaning there and none here: the web interface, and what the manager does not need.
const WITHOUT_EFFECT: [&str; 4] = [
    "/Manager/GuiSocketServer",
    "/Manager/GuiHttpServer",
    "/Manager/Controller/DisplaySecretMonitor",
    "/Manager: clusterName",
];

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    cluster: ClusterOptions,
    /// Say of each VM what changes, and what else there is to know.
    #[arg(long, short)]
    verbose: bool,
    /// Print the details as data.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<DataFormat>,
}

/// What becomes of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Same,
    Changed,
    Attention,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Checked {
    name: String,
    result: Outcome,
    #[serde(flatten)]
    effect: Effect,
    findings: Vec<Finding>,
    notes: Vec<String>,
}

/// What becomes of a namespace.
#[derive(Serialize)]
struct Report {
    namespace: String,
    /// Of the manager and its configuration.
    findings: Vec<Finding>,
    vms: Vec<Checked>,
    #[serde(skip)]
    verbose: bool,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let report = check(options).await.map_err(Failure::undetermined)?;
    match &options.output {
        Some(format) => output.found(&report, Some(format))?,
        None => write!(output, "{}", plain(&report.to_string()))?,
    }
    let needs_attention = report.findings.iter().any(|finding| finding.needs_attention)
        || report.vms.iter().any(|vm| vm.result == Outcome::Attention);
    Ok(Exit::negative_if(needs_attention))
}

async fn check(options: &Options) -> Result<Report, Failure> {
    let selection = Selection {
        names: Vec::new(),
        selector: None,
        all: true,
        all_namespaces: false,
        cluster: options.cluster.clone(),
    };
    let found = selection.find().await?;
    let (client, namespace) = (&found.cluster.client, &found.cluster.namespace);
    let (change, mut side) = (Change::read(&[], None)?, Side::installed(client, namespace).await?);
    let needed: Vec<(String, Vec<NotAllowed>)> = found
        .vms
        .iter()
        .map(|found| (found.vm.name_any(), allowed::refusals(&found.vm, Reach::default(), &side.config)))
        .collect();
    let permissions = takeover::permissions(&side.config.allowed, &needed);
    // The rest is what happens when an administrator has allowed that.
    for (_, refusals) in &needed {
        side.config.allowed = allowed::extended(&side.config.allowed, refusals);
    }
    let (resources, lists) = (Resources::new(client.clone()), Lists::of_all());
    let around = surroundings(client, namespace).await;
    let mut vms = Vec::new();
    for FoundVm { object, vm } in found.vms {
        let violations = violations(&object)?;
        let seen = see(client, &resources, &lists, Arc::new(vm), &side, &side).await?;
        let rendered = side.render(&seen.vm, &seen.observed).unwrap_or_default();
        let findings = findings(&seen.vm, &seen.observed, &rendered, &violations, &around);
        let report = of_vm(Seen::clone(&seen), &change, &side, &side, &Refusals::default());
        let has_error = side.render(&seen.vm, &seen.observed).is_err();
        let needs_attention = has_error
            || report.effect.class == Class::Refused
            || findings.iter().any(|finding| finding.needs_attention);
        let result = match report.effect.class {
            _ if needs_attention => Outcome::Attention,
            Class::Nothing => Outcome::Same,
            _ => Outcome::Changed,
        };
        vms.push(Checked { name: report.name, result, effect: report.effect, findings, notes: report.notes });
    }
    let mut findings = of_namespace(client, namespace).await;
    findings.extend(permissions);
    Ok(Report { namespace: namespace.clone(), findings, vms, verbose: options.verbose })
}

/// The rules of our definition that a stored VM breaks, in words.
fn violations(object: &DynamicObject) -> Result<Vec<String>, Failure> {
    let metadata = json!({ "name": object.name_any(), "namespace": object.namespace() });
    let types = object.types.clone().unwrap_or_else(kube::api::TypeMeta::resource::<crate::api::VirtualMachine>);
    let value = json!({ "apiVersion": types.api_version, "kind": types.kind, "metadata": metadata, "spec": object.data["spec"] });
    let text = yaml(&value)?;
    let parsed = crate::yaml::from_str(&text).map_err(|error: crate::yaml::Error| Failure::new(error.to_string()))?;
    Ok(manifest::read(&text, &parsed).err().into_iter().flatten().map(|violation| violation.message).collect())
}

/// What of the namespace the VMs depend on. What can't be read is said once, and not judged.
async fn surroundings(client: &Client, namespace: &str) -> Surroundings {
    let unknown = |what: &str, error: &kube::Error| {
        note(&format!("# not checked: {what}: {}", crate::process::ErrorChain(error)));
    };
    let mut around = Surroundings::default();
    let displays = ListParams::default().labels(&format!("{COMPONENT_LABEL}={DISPLAY_SECRET}"));
    match Api::<Secret>::namespaced(client.clone(), namespace).list(&displays).await {
        Ok(secrets) => {
            let is_open = |secret: &Secret| {
                let password = secret.data.as_ref().and_then(|data| data.get(PASSWORD_FILE));
                password.is_none_or(|password| password.0.is_empty())
            };
            around.open_displays =
                Some(secrets.iter().filter(|secret| is_open(secret)).map(ResourceExt::name_any).collect());
        }
        Err(error) => unknown("passwords of displays", &error),
    }
    match Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace).get_opt(IMAGE_REPOSITORY_CLAIM).await {
        Ok(claim) => around.has_image_repository = Some(claim.is_some()),
        Err(error) => unknown("the claim with CD images", &error),
    }
    let pools: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), namespace, &kube::api::ApiResource::erase::<VmPool>(&()));
    match pools.list_metadata(&ListParams::default()).await {
        Ok(pools) => around.pools = Some(pools.iter().map(ResourceExt::name_any).collect::<BTreeSet<_>>()),
        Err(error) => unknown("pools", &error),
    }
    around
}

/// What there is to know of the manager and of its configuration.
async fn of_namespace(client: &Client, namespace: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut add = |needs_attention, text: String| found.push(Finding { needs_attention, text });
    match Api::<Deployment>::namespaced(client.clone(), namespace).get_opt(MANAGED_BY).await {
        Ok(Some(deployment)) => {
            let spec = deployment.spec.unwrap_or_default();
            let containers = spec.template.spec.map(|pod| pod.containers).unwrap_or_default();
            let is_its = containers.iter().filter_map(|it| it.image.as_ref()).any(|image| image.contains(ITS_MANAGER));
            if is_its && spec.replicas != Some(0) {
                let command = format!("kubectl -n {namespace} scale --replicas=0 deployment/{MANAGED_BY}");
                add(true, format!("the manager of the VM-Operator runs: stop it before ours starts: {command}"));
            }
        }
        Ok(None) => {}
        Err(error) => note(&format!("# not checked: Deployment {MANAGED_BY}: {}", crate::process::ErrorChain(&error))),
    }
    match Api::<ConfigMap>::namespaced(client.clone(), namespace).get_opt(CONFIG_MAP).await {
        Ok(map) => {
            let data = map.and_then(|map| map.data).unwrap_or_default();
            match data.get("config.yaml").map(|text| Config::parse(text)) {
                None => add(false, format!("there is no configuration (ConfigMap {CONFIG_MAP}): defaults are used")),
                Some(Ok(config)) => {
                    let is_known = |key: &String| WITHOUT_EFFECT.iter().any(|begin| key.starts_with(begin));
                    let (known, unknown): (Vec<_>, Vec<_>) = config.unknown.into_iter().partition(is_known);
                    if !known.is_empty() {
                        add(false, format!("keys of the configuration that have no effect here: {}", known.join(", ")));
                    }
                    for key in unknown {
                        add(true, format!("the configuration has a key that nothing knows: {key}"));
                    }
                }
                Some(Err(error)) => {
                    add(
                        true,
                        format!(
                            "the configuration (ConfigMap {CONFIG_MAP}) can't be read: {}",
                            crate::process::ErrorChain(&error)
                        ),
                    );
                }
            }
            if data.contains_key("logging.properties") {
                add(false, format!("logging.properties of the ConfigMap {CONFIG_MAP} is not read: use RUST_LOG"));
            }
        }
        Err(error) => note(&format!("# not checked: ConfigMap {CONFIG_MAP}: {}", crate::process::ErrorChain(&error))),
    }
    found
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Self::Same => "same",
            Self::Changed => "changed",
            Self::Attention => "attention",
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = |finding: &Finding| if finding.needs_attention { "attention" } else { "note" };
        for finding in &self.findings {
            writeln!(f, "{}: {}", mark(finding), finding.text)?;
        }
        let heading = ["VM", "RESULT", "AT ONCE", "AT THE NEXT START", "NEEDS ATTENTION"].map(str::to_owned);
        let rows: Vec<[String; 5]> = std::iter::once(heading).chain(self.vms.iter().map(row)).collect();
        for (number, row) in rows.iter().enumerate() {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default() + 3;
                line += &format!("{cell:width$}");
            }
            writeln!(f, "{}", line.trim_end())?;
            let Some(vm) = number.checked_sub(1).and_then(|number| self.vms.get(number)).filter(|_| self.verbose)
            else {
                continue;
            };
            for touched in &vm.effect.at_once {
                writeln!(f, "  at once: {} {}", touched.object, touched.what)?;
            }
            for change in &vm.effect.at_next_start {
                writeln!(f, "  at the next start: {}", change.path)?;
            }
            for finding in &vm.findings {
                writeln!(f, "  {}: {}", mark(finding), finding.text)?;
            }
            for why in vm.effect.refused.iter().chain(&vm.notes) {
                writeln!(f, "  attention: {why}")?;
            }
        }
        let count = |result: Outcome| self.vms.iter().filter(|vm| vm.result == result).count();
        let results = [Outcome::Same, Outcome::Changed, Outcome::Attention];
        let counts: Vec<String> = results.map(|result| format!("{} {}", count(result), result.word())).into();
        writeln!(f, "{}: {}", counted(self.vms.len(), "VM"), counts.join(", "))
    }
}

fn row(vm: &Checked) -> [String; 5] {
    let or_none = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    let number = |count: usize, what: &str| if count == 0 { String::new() } else { counted(count, what) };
    let attention: Vec<&str> = vm.findings.iter().filter(|it| it.needs_attention).map(|it| it.text.as_str()).collect();
    let attention: Vec<&str> = vm.effect.refused.iter().map(String::as_str).chain(attention).collect();
    let attention = match attention.as_slice() {
        [] if vm.result == Outcome::Attention => vm.notes.join("; "),
        [] => String::new(),
        [one] => (*one).to_owned(),
        several => format!("{} (and {} more: -v)", several[0], several.len() - 1),
    };
    let cells = [number(vm.effect.at_once.len(), "object"), number(vm.effect.at_next_start.len(), "change"), attention];
    let [at_once, at_next_start, attention] = cells.map(or_none);
    [vm.name.clone(), vm.result.word().into(), at_once, at_next_start, attention]
}

//! The objects of VMs, as they are in the cluster.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, TypeMeta},
    core::Status,
};
use tokio::sync::Mutex;

use super::super::{installed::unknown, output::Failure, vms::CHUNK};
use crate::{
    api::VirtualMachine,
    claims,
    client::discovery::Resources,
    object::{
        COMPONENT_LABEL, DISPLAY_SECRET, INSTANCE_LABEL, VM_ANNOTATION, builtin_kinds, named_vm, selector,
        stateful_sets,
    },
    observed::{Object, Observed},
};

/// Where the objects of VMs are read: those of each VM by themselves, or those of all VMs of a namespace at once, which takes few requests.
pub(in crate::cli) struct Lists {
    of_all: Option<Mutex<Known>>,
}

/// What was listed, by namespace and kind.
type Known = HashMap<(String, TypeMeta), Arc<Listed>>;

/// The objects of a kind in a namespace.
enum Listed {
    Found {
        by_vm: HashMap<String, Vec<DynamicObject>>,
        /// Claims without the label, by name.
        others: HashMap<String, DynamicObject>,
    },
    Refused(Box<Status>),
}

impl Lists {
    pub fn of_one() -> Self {
        Self { of_all: None }
    }

    pub fn of_all() -> Self {
        Self { of_all: Some(Mutex::default()) }
    }
}

/// A VM's objects, as far as they were listed.
pub(in crate::cli) struct Listing<'a> {
    client: &'a Client,
    vm: &'a VirtualMachine,
    resources: &'a Resources,
    lists: &'a Lists,
    kinds: HashSet<TypeMeta>,
    pub observed: Observed,
    pub current: Vec<DynamicObject>,
    /// The kinds that the person may not list.
    pub unlisted: Vec<String>,
}

impl<'a> Listing<'a> {
    pub fn new(client: &'a Client, vm: &'a VirtualMachine, resources: &'a Resources, lists: &'a Lists) -> Self {
        let observed = Observed::nothing(Timestamp::now());
        let (kinds, current, unlisted) = (HashSet::new(), Vec::new(), Vec::new());
        Self { client, vm, resources, lists, kinds, observed, current, unlisted }
    }

    /// Lists the kinds that VMs usually have, and the claims that are the VM's by their names although their labels do not say so.
    pub async fn add_usual(&mut self) -> Result<(), Failure> {
        self.add_if_possible(builtin_kinds().chain([stateful_sets()])).await?;
        self.add_claims_without_labels().await.map_err(unknown(objects(&claim_kind())))
    }

    /// Lists the VM's objects of a kind, if that has not been done.
    pub async fn add(&mut self, kind: &TypeMeta) -> kube::Result<()> {
        if self.kinds.contains(kind) {
            return Ok(());
        }
        for object in self.list(kind).await? {
            self.put(kind, object);
        }
        self.kinds.insert(kind.clone());
        Ok(())
    }

    /// Lists kinds of which there may be objects. A kind that the cluster does not have has none; one that the person may not
    /// list is noted.
    pub async fn add_if_possible(&mut self, kinds: impl IntoIterator<Item = TypeMeta>) -> Result<(), Failure> {
        for kind in kinds {
            match self.add(&kind).await {
                Err(kube::Error::Api(answer)) if answer.is_not_found() => {}
                Err(kube::Error::Api(answer)) if answer.is_forbidden() => {
                    if !self.unlisted.contains(&kind.kind) {
                        self.unlisted.push(kind.kind);
                    }
                }
                result => result.map_err(unknown(objects(&kind)))?,
            }
        }
        Ok(())
    }

    fn put(&mut self, kind: &TypeMeta, object: DynamicObject) {
        // The objects of a list have no type.
        let object = DynamicObject { types: Some(kind.clone()), ..object };
        self.observed.objects.push(Arc::new(Object::trim(kind, object.clone())));
        self.current.push(object);
    }

    async fn list(&self, kind: &TypeMeta) -> kube::Result<Vec<DynamicObject>> {
        let name = self.vm.name_any();
        if self.lists.of_all.is_none() {
            let api = self.api(kind).await?;
            let list = |selector: String| ListParams::default().labels(&selector);
            let mut found = api.list(&list(format!("{INSTANCE_LABEL}={name}"))).await?.items;
            if kind.kind == "Secret" {
                let secrets = api.list(&list(format!("{},{COMPONENT_LABEL}={DISPLAY_SECRET}", selector()))).await?;
                let is_known = |secret: &DynamicObject| secret.labels().get(INSTANCE_LABEL) == Some(&name);
                let is_named = |secret: &DynamicObject| secret.annotations().get(VM_ANNOTATION) == Some(&name);
                found.extend(secrets.into_iter().filter(|secret| is_named(secret) && !is_known(secret)));
            }
            return Ok(found);
        }
        match &*self.of_all(kind).await? {
            Listed::Found { by_vm, .. } => Ok(by_vm.get(&name).cloned().unwrap_or_default()),
            Listed::Refused(status) => Err(kube::Error::Api(status.clone())),
        }
    }

    async fn api(&self, kind: &TypeMeta) -> kube::Result<Api<DynamicObject>> {
        let resource = self.resources.of(kind).await?;
        Ok(Api::namespaced_with(self.client.clone(), &self.vm.namespace().unwrap_or_default(), &resource))
    }

    /// The objects of a kind of all VMs of the namespace. Of Secrets only the metadata is read. Claims are listed whatever their labels are.
    async fn of_all(&self, kind: &TypeMeta) -> kube::Result<Arc<Listed>> {
        let name = (self.vm.namespace().unwrap_or_default(), kind.clone());
        let Some(known) = &self.lists.of_all else { return Ok(Arc::new(Listed::empty())) };
        let mut known = known.lock().await;
        if let Some(listed) = known.get(&name) {
            return Ok(listed.clone());
        }
        let listed = match self.list_all(kind).await {
            Ok(objects) => Listed::of(objects),
            Err(kube::Error::Api(status)) if status.is_forbidden() || status.is_not_found() => Listed::Refused(status),
            Err(error) => return Err(error),
        };
        Ok(known.entry(name).or_insert(Arc::new(listed)).clone())
    }

    async fn list_all(&self, kind: &TypeMeta) -> kube::Result<Vec<DynamicObject>> {
        let api = self.api(kind).await?;
        let mut parameters = ListParams { limit: Some(CHUNK), ..ListParams::default() };
        if *kind != claim_kind() {
            parameters.label_selector = Some(selector());
        }
        let mut objects = Vec::new();
        loop {
            let next = if kind.kind == "Secret" {
                let page = api.list_metadata(&parameters).await?;
                objects.extend(page.items.into_iter().map(|object| DynamicObject {
                    types: None,
                    metadata: object.metadata,
                    data: serde_json::json!({}),
                }));
                page.metadata.continue_
            } else {
                let page = api.list(&parameters).await?;
                objects.extend(page.items);
                page.metadata.continue_
            };
            parameters.continue_token = next.filter(|token| !token.is_empty());
            if parameters.continue_token.is_none() {
                return Ok(objects);
            }
        }
    }

    /// Reads the claims that are the VM's by their names although their labels do not say so.
    async fn add_claims_without_labels(&mut self) -> kube::Result<()> {
        let kind = claim_kind();
        if !self.kinds.contains(&kind) {
            return Ok(());
        }
        let names: Vec<String> =
            claims::possible_names(self.vm).filter(|name| self.observed.claim(name).is_none()).collect();
        if self.lists.of_all.is_some() {
            if let Listed::Found { by_vm, others } = &*self.of_all(&kind).await? {
                let of_others = by_vm.values().flatten().filter(|claim| claims::is_used(self.vm, *claim));
                let named = |claim: &DynamicObject| names.contains(&claim.name_any());
                let claims: Vec<_> = names
                    .iter()
                    .filter_map(|name| others.get(name))
                    .chain(of_others.filter(|claim| named(claim)))
                    .cloned()
                    .collect();
                claims.into_iter().for_each(|claim| self.put(&kind, claim));
            }
            return Ok(());
        }
        let api = self.api(&kind).await?;
        for name in names {
            if let Some(claim) = api.get_opt(&name).await?.filter(|claim| claims::is_of(self.vm, claim)) {
                self.put(&kind, claim);
            }
        }
        Ok(())
    }
}

impl Listed {
    fn empty() -> Self {
        Self::Found { by_vm: HashMap::new(), others: HashMap::new() }
    }

    fn of(objects: Vec<DynamicObject>) -> Self {
        let (mut by_vm, mut others): (HashMap<String, Vec<_>>, HashMap<_, _>) = Default::default();
        for object in objects {
            match named_vm(object.annotations(), object.labels()).cloned() {
                Some(vm) => by_vm.entry(vm).or_default().push(object),
                None => drop(others.insert(object.name_any(), object)),
            }
        }
        Self::Found { by_vm, others }
    }
}

fn claim_kind() -> TypeMeta {
    TypeMeta { api_version: "v1".into(), kind: "PersistentVolumeClaim".into() }
}

pub(in crate::cli) fn objects(kind: &TypeMeta) -> String {
    format!("{} objects", kind.kind)
}

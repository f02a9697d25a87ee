//! What the manager's account or a person may do, asked by the manager or by a person. It asks the API server, without doing it
//! (<https://kubernetes.io/docs/reference/access-authn-authz/authorization/#checking-api-access>). An answer with the code 403 alone does not
//! say that: a quota or an admission plugin answers so too.

use std::fmt;

use k8s_openapi::api::{
    authentication::v1::SelfSubjectReview,
    authorization::v1::{
        ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SubjectAccessReview,
        SubjectAccessReviewSpec,
    },
};
use kube::{
    Api, Client,
    api::{ApiResource, PostParams},
};
use tokio::sync::OnceCell;

/// A rule that no Role of the manager's account has. Its text is for people, with the rule as YAML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingRule {
    group: String,
    plural: String,
    verbs: Vec<String>,
    /// `None`: in all namespaces.
    namespace: Option<String>,
    /// `None`: the API server did not say whose rights it has looked at.
    account: Option<String>,
    /// It is a person who lacks it, not the manager.
    is_person: bool,
}

impl fmt::Display for MissingRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, plural, verbs, namespace, account, is_person } = self;
        let verbs = verbs.join(", ");
        let resource = if group.is_empty() { plural.clone() } else { format!("{plural}.{group}") };
        let (place, role) = match namespace {
            Some(namespace) => (format!("the namespace {namespace}"), "a Role in that namespace"),
            None => ("all namespaces".to_owned(), "a ClusterRole"),
        };
        let group = if group.is_empty() { "\"\"" } else { group };
        if *is_person {
            let who = account.as_deref().unwrap_or("this user");
            return write!(
                f,
                "{who} may not {verbs} {resource} in {place}; {role} with the rule \
                 - {{apiGroups: [{group}], resources: [{plural}], verbs: [{verbs}]}} allows it"
            );
        }
        let account = account.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
        write!(
            f,
            "the manager may not {verbs} {resource} in {place}; give its account{account} {role} with the rule \
             - {{apiGroups: [{group}], resources: [{plural}], verbs: [{verbs}]}}"
        )
    }
}

/// Asks the API server what the manager may do.
pub struct Access {
    client: Client,
    /// The name of the manager's account, when it is known.
    account: OnceCell<Option<String>>,
    /// Whether the client is a person's, who asks about the manager.
    is_others: bool,
    /// Whether the client is a person's, who asks about herself.
    is_person: bool,
}

impl Access {
    /// Asks with this client, and so about its account.
    pub fn new(client: Client) -> Self {
        Self { client, account: OnceCell::new(), is_others: false, is_person: false }
    }

    /// Asks with a person's client about that person. What it finds is worded for her.
    pub fn of_person(client: Client) -> Self {
        Self { is_person: true, ..Self::new(client) }
    }

    /// Asks about the service account of that namespace and name. That needs the right to create SubjectAccessReviews.
    pub fn of_account(client: Client, namespace: &str, name: &str) -> Self {
        let account = Some(format!("{SERVICE_ACCOUNTS}:{namespace}:{name}"));
        Self { client, account: OnceCell::new_with(Some(account)), is_others: true, is_person: false }
    }

    /// The rule that the manager lacks to do this with a resource in a namespace (`None`: in all). `None`: it lacks none, or the API server
    /// does not answer.
    pub async fn missing_rule(
        &self,
        resource: &ApiResource,
        verbs: &[&str],
        namespace: Option<&str>,
    ) -> Option<MissingRule> {
        let mut lacking = Vec::new();
        for verb in verbs {
            if !self.is_allowed(resource, verb, namespace.unwrap_or_default()).await.ok()? {
                lacking.push(*verb);
            }
        }
        if lacking.is_empty() { None } else { Some(self.rule(resource, &lacking, namespace).await) }
    }

    /// The rule with which the account may do this.
    pub async fn rule(&self, resource: &ApiResource, verbs: &[&str], namespace: Option<&str>) -> MissingRule {
        MissingRule {
            group: resource.group.clone(),
            plural: resource.plural.clone(),
            verbs: verbs.iter().map(|verb| (*verb).to_owned()).collect(),
            namespace: namespace.map(str::to_owned),
            account: self.account.get_or_try_init(|| self.ask_account()).await.ok().cloned().flatten(),
            is_person: self.is_person,
        }
    }

    async fn ask_account(&self) -> kube::Result<Option<String>> {
        let api: Api<SelfSubjectReview> = Api::all(self.client.clone());
        let answer = api.create(&PostParams::default(), &SelfSubjectReview::default()).await?;
        Ok(answer.status.and_then(|status| status.user_info?.username))
    }

    /// Whether the account may do this in a namespace; with an empty one: in all. The plural may have a subresource (`pods/exec`).
    ///
    /// # Errors
    /// The error of the request.
    pub async fn is_allowed(&self, resource: &ApiResource, verb: &str, namespace: &str) -> kube::Result<bool> {
        let (plural, subresource) = match resource.plural.split_once('/') {
            Some((plural, subresource)) => (plural, Some(subresource.to_owned())),
            None => (resource.plural.as_str(), None),
        };
        let attributes = ResourceAttributes {
            group: Some(resource.group.clone()),
            version: Some(resource.version.clone()),
            resource: Some(plural.to_owned()),
            subresource,
            verb: Some(verb.to_owned()),
            namespace: Some(namespace.to_owned()),
            ..ResourceAttributes::default()
        };
        let attributes = Some(attributes);
        let status = match self.account.get().cloned().flatten().filter(|_| self.is_others) {
            Some(account) => {
                let spec = SubjectAccessReviewSpec {
                    groups: Some(groups(&account)),
                    user: Some(account),
                    resource_attributes: attributes,
                    ..SubjectAccessReviewSpec::default()
                };
                let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
                Api::all(self.client.clone()).create(&PostParams::default(), &review).await?.status
            }
            None => {
                let spec = SelfSubjectAccessReviewSpec {
                    resource_attributes: attributes,
                    ..SelfSubjectAccessReviewSpec::default()
                };
                let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
                Api::all(self.client.clone()).create(&PostParams::default(), &review).await?.status
            }
        };
        Ok(status.is_some_and(|status| status.allowed))
    }
}

/// The first part of the user name of a service account.
const SERVICE_ACCOUNTS: &str = "system:serviceaccount";

/// The groups of a service account (<https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/>).
fn groups(account: &str) -> Vec<String> {
    let namespace = account.split(':').nth(2).unwrap_or_default();
    vec!["system:authenticated".into(), "system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")]
}

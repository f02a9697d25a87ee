//! The password of a display: which Secret has it, when a new one is set, and when it is in force.

use std::{pin::pin, time::Duration};

use k8s_openapi::{
    ByteString,
    api::core::v1::{Pod, Secret, SecretProjection},
    jiff::Timestamp,
};
use kube::{
    ResourceExt,
    api::{ListParams, Patch},
    runtime::wait::await_condition,
};
use serde_json::json;
use tokio::time::timeout;

use super::{DisplayError, MINIMUM_VALIDITY, Protocol, Request, VmHandle, patch_params};
use crate::{
    api::VirtualMachine,
    object::{self, COMPONENT_LABEL, DISPLAY_SECRET},
    runner_config::{
        self,
        paths::{EXPIRY_FILE, NEVER, PASSWORD_FILE},
    },
};

/// How long the runner may take to set a new password. A kubelet that is not notified of a changed Secret projects it within a
/// minute and a half.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
/// A person is told of a wait that takes longer.
const SILENT_WAIT: Duration = Duration::from_secs(2);

/// The password that lets a viewer in now; `None` if the display has none. A new one is set if the present one does not do.
pub(super) async fn in_force(
    vm: &VmHandle,
    request: &Request,
    waiting: impl FnOnce(),
) -> Result<Option<String>, DisplayError> {
    let Some(secret) = find_secret(vm).await? else { return Ok(None) };
    let Some(password) = present_or_new(vm, &secret, request).await? else { return Ok(None) };
    wait_until_set(vm, &secret, &password, waiting).await?;
    if password.end().is_some_and(|end| end <= now()) {
        return Err(DisplayError::PasswordExpired);
    }
    Ok(Some(password.text))
}

/// The password in the display secret, whether or not it lets anybody in.
#[derive(Clone, PartialEq, Eq)]
pub struct Present {
    /// The Secret.
    pub secret: String,
    /// The password. `None`: the display lets everybody in.
    pub password: Option<String>,
    /// When it ends.
    pub end: End,
}

/// When a password ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It does not.
    Never,
    /// At this time.
    At(Timestamp),
    /// As the Secret says: only the runner knows what a time such as `+300` counts from.
    Unknown(String),
}

/// Reads the password. `None`: the VM has no display secret.
pub(super) async fn present(vm: &VmHandle) -> Result<Option<Present>, DisplayError> {
    let Some(name) = find_secret(vm).await? else { return Ok(None) };
    let secret = vm.api::<Secret>().get(&name).await.map_err(DisplayError::object(format!("Secret {name}")))?;
    let password = Password::of(&secret);
    let end = password.as_ref().map_or(End::Never, Password::shown_end);
    Ok(Some(Present { secret: name, password: password.map(|password| password.text), end }))
}

/// Reads the password, and writes a new one if it does not last long enough or is another user's.
async fn present_or_new(vm: &VmHandle, name: &str, request: &Request) -> Result<Option<Password>, DisplayError> {
    let secrets = vm.api::<Secret>();
    loop {
        let secret = secrets.get(name).await.map_err(DisplayError::object(format!("Secret {name}")))?;
        let Some(present) = Password::of(&secret) else { return Ok(None) };
        let resource = vm.get().await.map_err(DisplayError::Vm)?;
        let last_user = resource.status.as_ref().and_then(|status| status.display.console_user.as_deref());
        if !present.must_be_renewed(last_user, request.user.as_deref(), now()) {
            return Ok(Some(present));
        }
        let text = random_password(Protocol::of(&resource))?;
        let expiry = present.next_end(now(), request.validity.0).to_string();
        let patch = json!({
            "metadata": { "resourceVersion": secret.metadata.resource_version },
            "stringData": { PASSWORD_FILE: text, EXPIRY_FILE: expiry },
        });
        match secrets.patch(name, &patch_params(request.field_manager), &Patch::Merge(patch)).await {
            // This one, and not what is read now: that may be another call's already, for another user. Then the runner never reports the end of this one.
            Ok(_) => return Ok(Some(Password { text, expiry })),
            // Somebody else has written the Secret since we read it: that password may do.
            Err(kube::Error::Api(refusal)) if refusal.is_conflict() => {}
            Err(error) => {
                return Err(DisplayError::object(format!("Secret {name} does not take a new password"))(error));
            }
        }
    }
}

/// Waits until the runner reports the end of that password.
async fn wait_until_set(
    vm: &VmHandle,
    secret: &str,
    password: &Password,
    waiting: impl FnOnce(),
) -> Result<(), DisplayError> {
    let is_reported = |vm: &VirtualMachine| {
        vm.status
            .as_ref()
            .is_some_and(|status| status.runner.display_password_expiry.as_ref() == Some(&password.expiry))
    };
    // A VM that is gone ends the wait, too.
    let condition = |vm: Option<&VirtualMachine>| vm.is_none_or(is_reported);
    let mut wait = pin!(await_condition(vm.api(), vm.name(), condition));
    let mut outcome = timeout(SILENT_WAIT, &mut wait).await;
    if outcome.is_err() {
        waiting();
        outcome = timeout(LIMIT, wait).await;
    }
    match outcome {
        Ok(vm) => vm?.map(drop).ok_or(DisplayError::Deleted),
        Err(_) => Err(DisplayError::PasswordNotSet { secret: secret.to_owned() }),
    }
}

/// The name of the Secret with the display's password; `None` if there is none.
///
/// The Pod names it. A person who may not read Pods gets the one that the manager would take: a Secret of a person before the
/// generated one, the first by name.
async fn find_secret(vm: &VmHandle) -> Result<Option<String>, DisplayError> {
    match vm.api::<Pod>().get_opt(vm.name()).await {
        Ok(Some(pod)) => return Ok(secret_of(&pod)),
        // Templates may give the Pod another name.
        Ok(None) => {}
        Err(kube::Error::Api(refusal)) if refusal.is_forbidden() => {}
        Err(error) => return Err(DisplayError::object("Pod")(error)),
    }
    let generated = format!("{}-{DISPLAY_SECRET}", vm.name());
    let labels = format!("{},{COMPONENT_LABEL}={DISPLAY_SECRET}", object::selector());
    match vm.api::<Secret>().list_metadata(&ListParams::default().labels(&labels)).await {
        Ok(found) => {
            let of_vm = found.into_iter().filter(|secret| {
                object::named_vm(secret.annotations(), secret.labels()).is_some_and(|name| name == vm.name())
            });
            let names = of_vm.map(|secret| secret.name_any());
            Ok(names.min_by_key(|name| (*name == generated, name.clone())))
        }
        // A person may have the right to read this Secret without the right to list all Secrets.
        Err(kube::Error::Api(refusal)) if refusal.is_forbidden() => Ok(Some(generated)),
        Err(error) => Err(DisplayError::object("display secret")(error)),
    }
}

/// The Secret whose password is projected into a Pod.
fn secret_of(pod: &Pod) -> Option<String> {
    let volumes = pod.spec.as_ref()?.volumes.iter().flatten();
    let sources = volumes.filter_map(|volume| volume.projected.as_ref()).flat_map(|it| it.sources.iter().flatten());
    let mut secrets = sources.filter_map(|source| source.secret.as_ref());
    let has_password =
        |secret: &&SecretProjection| secret.items.iter().flatten().any(|item| item.path == PASSWORD_FILE);
    secrets.find(has_password).map(|secret| secret.name.clone())
}

/// A password that nobody can guess.
fn random_password(protocol: Protocol) -> Result<String, DisplayError> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits)?;
    let base64 = json!(ByteString(bits.to_vec()));
    let mut text = base64.as_str().unwrap_or_default().trim_end_matches('=').to_owned();
    if protocol == Protocol::Vnc {
        // VNC uses the first 8 characters only (RFC 6143, section 7.2.2).
        text.truncate(8);
    }
    Ok(text)
}

/// Seconds since 1970.
fn now() -> i64 {
    Timestamp::now().as_second()
}

/// The password of a display secret.
struct Password {
    text: String,
    /// Its end, as the runner reads and reports it.
    expiry: String,
}

impl Password {
    /// `None` where the display lets everybody in.
    fn of(secret: &Secret) -> Option<Self> {
        let text = |key: &str| secret.data.as_ref()?.get(key).and_then(|value| runner_config::text(&value.0));
        Some(Self { text: text(PASSWORD_FILE)?, expiry: text(EXPIRY_FILE).unwrap_or_else(|| NEVER.into()) })
    }

    /// When it ends, in seconds since 1970; `None`: never. Only the runner knows what a relative time (`+n`) counts from, so
    /// that counts as past.
    fn end(&self) -> Option<i64> {
        (self.expiry != NEVER).then(|| self.expiry.parse().ok().filter(|_| !self.expiry.starts_with('+')).unwrap_or(0))
    }

    /// When it ends, for people.
    fn shown_end(&self) -> End {
        let time = || self.expiry.parse().ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
        match self.expiry.as_str() {
            NEVER => End::Never,
            expiry if expiry.starts_with('+') => End::Unknown(expiry.to_owned()),
            expiry => time().map_or_else(|| End::Unknown(expiry.to_owned()), End::At),
        }
    }

    /// When the next password ends. The runner tells passwords apart by their end, so it is never the present one's.
    fn next_end(&self, now: i64, validity: Duration) -> i64 {
        let end = now.saturating_add_unsigned(validity.as_secs());
        if self.end() == Some(end) { end + 1 } else { end }
    }

    fn must_be_renewed(&self, last_user: Option<&str>, user: Option<&str>, now: i64) -> bool {
        let Some(end) = self.end() else { return false };
        let is_for_another_user = user.is_some_and(|user| last_user != Some(user));
        end < now.saturating_add_unsigned(MINIMUM_VALIDITY.as_secs()) || is_for_another_user
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(password: &str, expiry: Option<&str>) -> Secret {
        let entry = |key: &str, text: &str| (key.to_owned(), ByteString(text.into()));
        let password = entry("display-password", password);
        let expiry = expiry.map(|expiry| entry("password-expiry", expiry));
        Secret { data: Some(std::iter::once(password).chain(expiry).collect()), ..Secret::default() }
    }

    #[test]
    fn a_password_is_used_again_only_while_it_lasts() {
        for (expiry, user, renewed) in [
            (None, None, false),
            (Some(""), None, false),
            (Some("never\n"), Some("bob"), false),
            (Some("1010"), None, false),
            (Some("1010"), Some("alice"), false),
            (Some("1010"), Some("bob"), true),
            (Some("1009"), Some("alice"), true),
            (Some("+300"), None, true),
            (Some("now"), None, true),
        ] {
            let password = Password::of(&secret(" secret\n", expiry)).unwrap();
            assert_eq!(password.text, " secret");
            assert_eq!(password.must_be_renewed(Some("alice"), user, 1_000), renewed, "{expiry:?} {user:?}");
        }
    }

    #[test]
    fn people_are_told_when_a_password_ends() {
        for (expiry, end) in [
            (None, End::Never),
            (Some("never"), End::Never),
            (Some("1800000000"), End::At(Timestamp::from_second(1_800_000_000).unwrap())),
            (Some("+300"), End::Unknown("+300".into())),
            (Some("now"), End::Unknown("now".into())),
        ] {
            assert_eq!(Password::of(&secret("s", expiry)).unwrap().shown_end(), end, "{expiry:?}");
        }
    }

    #[test]
    fn a_secret_without_a_password_lets_everybody_in() {
        assert!(Password::of(&secret("", Some("now"))).is_none());
        assert!(Password::of(&Secret::default()).is_none());
    }

    #[test]
    fn a_new_password_has_another_end_than_the_present_one() {
        let present = Password::of(&secret("a", Some("1120"))).unwrap();
        assert_eq!(present.next_end(1_000, Duration::from_secs(120)), 1_121);
        assert_eq!(present.next_end(1_001, Duration::from_secs(120)), 1_121);
    }

    #[test]
    fn a_new_password_has_the_length_that_viewers_take() {
        assert_eq!(random_password(Protocol::Spice).unwrap().len(), 22);
        assert_eq!(random_password(Protocol::Vnc).unwrap().len(), 8);
        assert_ne!(random_password(Protocol::Spice).unwrap(), random_password(Protocol::Spice).unwrap());
    }
}

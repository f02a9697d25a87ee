//! `kubectl vm password`: the password of a VM's display, from its display secret.

use clap::Args;
use k8s_openapi::jiff::Timestamp;

use super::{
    display::{failure, validity},
    in_pod::Target,
    output::{Exit, Failure, Output, note},
};
use crate::actions::display::{self, DisplayError, End, Present, Validity};

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    target: Target,
    /// Set a new one if the present one has ended or ends within 10s, and wait until the display takes it.
    #[arg(long)]
    renew: bool,
    /// How long a new one lets viewers in; at least 10s.
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = validity, requires = "renew")]
    valid_for: Validity,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let vm = options.target.handle().await?;
    if options.renew {
        let waiting = || note(&format!("{vm}: waiting for its runner to set the password ..."));
        let password = display::password_in_force(&vm, options.valid_for, waiting).await;
        match password.map_err(|error| failure(&vm, &error))? {
            Some(password) => writeln!(output, "{password}")?,
            None => note(&format!("{vm}: its display has no password: it lets everybody in")),
        }
        return Ok(Exit::Success);
    }
    let found = display::present_password(&vm).await.map_err(|error| failure(&vm, &error))?;
    let Some(Present { secret, password, end }) = found else {
        // Secrets are found by their labels, so a name that no VM has looks the same. Who may not read VMs gets the other answer.
        if let Err(kube::Error::Api(answer)) = vm.get().await
            && answer.is_not_found()
        {
            return Err(failure(&vm, &DisplayError::Vm(kube::Error::Api(answer))));
        }
        return Err(Failure::new(format!("{vm}: it has no display secret, so its display has no password")));
    };
    let Some(password) = password else {
        note(&format!("{vm}: Secret {secret} has no password, so its display lets everybody in"));
        return Ok(Exit::Success);
    };
    if let Some(what) = says(&end, Timestamp::now(), vm.name()) {
        note(&format!("{vm}: {what}"));
    }
    writeln!(output, "{password}")?;
    Ok(Exit::Success)
}

/// What a person should know of the end of a password.
fn says(end: &End, now: Timestamp, name: &str) -> Option<String> {
    match end {
        End::Never => None,
        End::At(time) if *time > now => Some(format!("the password lets viewers in until {time}")),
        End::At(time) => Some(format!(
            "the password has ended ({time}) and lets nobody in; to set a new one: kubectl vm password {name} --renew"
        )),
        End::Unknown(text) => {
            Some(format!("the password's end is {text:?}, which counts from when the runner reads it"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_that_has_ended_is_said_to_be_useless() {
        let at = |second| End::At(Timestamp::from_second(second).unwrap());
        let now = Timestamp::from_second(1_000).unwrap();
        let said = |end| says(&end, now, "apple").unwrap_or_default();
        assert_eq!(said(End::Never), "");
        assert_eq!(said(at(1_001)), "the password lets viewers in until 1970-01-01T00:16:41Z");
        assert!(said(at(1_000)).ends_with("lets nobody in; to set a new one: kubectl vm password apple --renew"));
        assert!(said(End::Unknown("+300".into())).contains("\"+300\""));
    }
}

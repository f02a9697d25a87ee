//! `kubectl vm export`: a VM as the objects of another system, and what is changed or left out. What becomes of each field is
//! [`exchange`](crate::exchange).

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use clap_complete::engine::ArgValueCompleter;
use kube::{Api, ResourceExt};

use super::{
    cluster::ClusterOptions,
    input::read_vms,
    output::{Exit, Failure, Output, note, yaml},
    vms::{name_of, refused, title, vm_names},
};
use crate::{
    api::{StoredVm, VirtualMachine},
    exchange::{Exported, Grade, kubevirt},
    process::ErrorChain,
};

#[derive(Args)]
pub(super) struct Options {
    /// The VM in the cluster.
    #[arg(value_name = "VM", add = ArgValueCompleter::new(vm_names), required_unless_present = "filename")]
    vm: Option<String>,
    /// A file with VMs (-: standard input), in place of one of the cluster. They have no claims and no identity yet.
    #[arg(long, short, value_name = "FILE", conflicts_with = "vm")]
    filename: Option<PathBuf>,
    /// For which system.
    #[arg(long, value_name = "SYSTEM")]
    to: System,
    /// End with exit code 1 if anything is changed or left out.
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    cluster: ClusterOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum System {
    Kubevirt,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let mut is_lossy = false;
    for (number, vm) in vms(options).await?.iter().enumerate() {
        let (exported, general) = match options.to {
            System::Kubevirt => (kubevirt::export(vm), kubevirt::IN_GENERAL),
        };
        if number > 0 {
            writeln!(output, "---")?;
        }
        print(vm, &exported, &general, output)?;
        is_lossy |= exported.losses().next().is_some();
    }
    Ok(Exit::negative_if(options.strict && is_lossy))
}

/// The list as comments at the head of the objects, and on standard error.
fn print(vm: &VirtualMachine, exported: &Exported, general: &[&str], output: &mut Output<'_>) -> Result<(), Failure> {
    let title = title(&vm.name_any());
    writeln!(output, "# {title} as it is for another system. In general:")?;
    for line in general {
        writeln!(output, "#   {line}")?;
    }
    for grade in [Grade::Changed, Grade::LeftOut] {
        let of_grade: Vec<_> = exported.remarks.iter().filter(|remark| remark.grade == grade).collect();
        if !of_grade.is_empty() {
            writeln!(output, "# {}:", if grade == Grade::Changed { "Changed" } else { "Left out" })?;
        }
        for remark in of_grade {
            // A value of the VM must not end the comment.
            let text = remark.text.replace(|letter: char| letter.is_control(), " ");
            writeln!(output, "#   {}: {text}", remark.field)?;
            note(&format!("{title}: {}: {grade}: {text}", remark.field));
        }
    }
    let same = exported.remarks.iter().filter(|remark| remark.grade == Grade::Same);
    let same: Vec<&str> = same.map(|remark| remark.field.as_str()).collect();
    if !same.is_empty() {
        writeln!(output, "# The same: {}", same.join(", "))?;
    }
    for (number, object) in exported.objects.iter().enumerate() {
        if number > 0 {
            writeln!(output, "---")?;
        }
        write!(output, "{}", yaml(object)?)?;
    }
    Ok(())
}

async fn vms(options: &Options) -> Result<Vec<VirtualMachine>, Failure> {
    if let Some(file) = &options.filename {
        return read_vms(file, options.cluster.namespace.as_deref().unwrap_or(super::input::DEFAULT_NAMESPACE));
    }
    let Some(name) = options.vm.as_deref().map(name_of) else { return Ok(Vec::new()) };
    let cluster = options.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
    match Api::<StoredVm>::namespaced(cluster.client.clone(), &cluster.namespace).get(name).await {
        Ok(StoredVm(vm)) => Ok(vec![vm]),
        Err(error) => {
            let what = refused(&cluster.client, &title(name), &["get"], Some(&cluster.namespace), &error).await;
            Err(Failure::new(what))
        }
    }
}

//! The runner's configuration of a VM: the file `config.yaml`.
//!
//! It needs no cluster. Whoever has a VM's drives and its data for cloud-init can make it, so that a VM can also run from a file.

use kube::ResourceExt;

use super::networks;
use crate::{
    api::{Cdrom, CpuTopology, HardwareWish, VirtualMachine, cd::Cd, status::Identity},
    runner_config::{
        CloudInitSection, DisplaySection, Drive, LATEST_HARDWARE, RunnerConfig, SpiceSection, VmSection, VncSection,
        paths,
    },
};

/// The runner's configuration of a VM. The parts of the status that stay for the VM's life are read from `vm.status.identity`.
///
/// `drives` stands for the VM's `disks`, in their order. `cloud_init` is the result of [`super::cloud_init::section`], and `cd_folders` the
/// folders of which CDs may be, beside the image repository.
pub fn runner_config(
    vm: &VirtualMachine,
    drives: Vec<Drive>,
    cloud_init: Option<CloudInitSection>,
    cd_folders: Vec<String>,
) -> RunnerConfig {
    RunnerConfig {
        data_dir: paths::DATA_DIR.into(),
        runtime_dir: paths::RUNTIME_DIR.into(),
        template: vm.spec.runner_template.source.clone(),
        update_template: vm.spec.runner_template.update,
        qemu_templates: None,
        namespace: vm.namespace().unwrap_or_default(),
        resource_uid: vm.uid(),
        guest_shutdown_stops: vm.spec.guest_shutdown_stops,
        reset_counter: vm.spec.vm.reset_count.map(u64::from).unwrap_or_default(),
        reboot_counter: vm.spec.vm.reboot_count.map(u64::from).unwrap_or_default(),
        paused: vm.spec.vm.paused,
        cloud_init,
        cd_folders,
        vm: vm_section(vm, drives),
    }
}

fn vm_section(vm: &VirtualMachine, drives: Vec<Drive>) -> VmSection {
    let machine = &vm.spec.vm;
    let level = |level: fn(CpuTopology) -> u32| machine.cpu_topology.map(level).unwrap_or_default();
    let identity = identity(vm);
    VmSection {
        name: vm.name_any(),
        uuid: machine.machine_uuid.clone().or_else(|| identity?.uuid.clone()),
        machine_type: identity.and_then(|identity| identity.machine_type.clone()),
        hardware: match machine.hardware {
            Some(HardwareWish::Latest) => Some(LATEST_HARDWARE.into()),
            None => identity.and_then(|identity| identity.hardware.clone()),
        },
        use_tpm: machine.use_tpm,
        firmware: machine.firmware,
        boot_menu: machine.boot_menu,
        powerdown_timeout: u64::from(machine.powerdown_timeout),
        cpu_model: machine.cpu_model.clone(),
        maximum_cpus: machine.most_cpus(),
        sockets: level(|topology| topology.sockets),
        dies_per_socket: level(|topology| topology.dies_per_socket),
        cores_per_die: level(|topology| topology.cores_per_die),
        threads_per_core: level(|topology| topology.threads_per_core),
        current_cpus: machine.cpus(),
        maximum_ram: machine.maximum_ram.spaced(),
        current_ram: Some(machine.ram().spaced()),
        accelerator: machine.accelerator,
        rtc_base: machine.rtc_base.clone(),
        rtc_timezone: machine.rtc_timezone.clone(),
        rtc_clock: machine.rtc_clock.clone(),
        on_panic: machine.on_panic,
        watchdog: machine.watchdog,
        network: networks::sections(vm),
        drives,
        display: display(vm),
    }
}

fn identity(vm: &VirtualMachine) -> Option<&Identity> {
    vm.status.as_ref()?.runner.identity.as_ref()
}

/// The drive of a CD. Its `image` is a URL, a path, or the name of a file in the image repository; empty: the drive has no CD.
pub fn cd_drive(cdrom: &Cdrom, bootindex: Option<u32>) -> Drive {
    Drive::IdeCd { file: cd_file(&cdrom.image), bootindex, name: cdrom.name.clone(), slot: None }
}

pub(super) fn cd_file(image: &str) -> String {
    match Cd::parse(image) {
        Cd::None | Cd::Url { .. } | Cd::Path(_) => image.to_owned(),
        Cd::Repository(name) => format!("{}/{name}", paths::IMAGE_REPOSITORY),
    }
}

fn display(vm: &VirtualMachine) -> DisplaySection {
    let display = &vm.spec.vm.display;
    let spice = display.vnc.is_none().then(|| SpiceSection {
        port: display.spice.port,
        ticket: None,
        streaming_video: display.spice.streaming_video.clone(),
        usb_redirects: display.spice.usb_redirects,
        socket: None,
    });
    DisplaySection {
        outputs: display.outputs,
        logged_in_user: display.logged_in_user.clone(),
        spice,
        vnc: display.vnc.as_ref().map(|vnc| VncSection { port: vnc.port, socket: None }),
        clipboard: display.clipboard,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        render::cloud_init,
        runner_config::{ConfigFile, NetworkSection},
        test_support::vm,
    };

    #[test]
    fn a_vm_runs_from_a_file_with_disks_in_files_and_without_claims() {
        let vm: VirtualMachine = serde_yaml::from_str(
            "apiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\nmetadata: {name: apple}\nspec:\n  \
             cloudInit: {userData: {password: secret}}\n  vm: {maximumCpus: 2, maximumRam: 1Gi, networks: [{user: {}}]}\n",
        )
        .unwrap();
        let drives = vec![
            Drive::Raw {
                resource: "/home/alice/apple.img".into(),
                bootindex: Some(0),
                size: Some(1 << 30),
                serial: None,
                slot: None,
            },
            cd_drive(&Cdrom { image: "/home/alice/Fedora.iso".into(), name: None }, None),
        ];
        let config = runner_config(&vm, drives.clone(), cloud_init::section(&vm).unwrap(), vec![]);
        let text = serde_yaml::to_string(&ConfigFile { runner: config.clone() }).unwrap();
        assert!(text.contains("resource: /home/alice/apple.img\n"), "{text}");
        let read = RunnerConfig::parse(&text).unwrap();
        assert_eq!(read, config);
        assert_eq!((read.vm.name.as_str(), read.vm.maximum_cpus, read.vm.drives), ("apple", 2, drives));
        let cloud_init = read.cloud_init.unwrap();
        assert_eq!(
            (&cloud_init.user_data["password"], &cloud_init.meta_data["local-hostname"]),
            (&json!("secret"), &json!("apple"))
        );
    }

    #[test]
    fn a_guest_has_at_most_the_maximum() {
        let vm = vm(|vm| {
            let machine = vm["spec"]["vm"].as_object_mut().unwrap();
            machine.extend([("currentCpus".into(), json!(4)), ("currentRam".into(), json!("8Gi"))]);
        });
        let config = runner_config(&vm, Vec::new(), None, vec![]).vm;
        assert_eq!((config.current_cpus, config.maximum_cpus), (2, 2));
        assert_eq!(config.current_ram, Some(config.maximum_ram));
        assert_eq!((vm.spec.vm.cpus(), vm.spec.vm.ram().bytes()), (2, 1_000_000_000));
    }

    #[test]
    fn a_kept_address_is_not_given_to_a_second_network() {
        let (x, y) = ("52:54:00:00:00:0a", "52:54:00:00:00:02");
        let vm = vm(|vm| {
            vm["spec"]["vm"]["networks"] =
                json!([{ "user": {} }, { "tap": { "mac": x.to_uppercase() } }, { "user": {} }]);
            vm["status"] = json!({ "identity": { "uuid": "u", "macs": [x, y, y], "machineType": "q35" } });
        });
        let macs: Vec<Option<String>> = networks::sections(&vm).iter().map(|it| it.mac().map(str::to_owned)).collect();
        // The second one had the first address, so it was the first network.
        assert_eq!(macs, [Some(y.to_owned()), Some(x.to_uppercase()), None]);
    }

    #[test]
    fn a_vm_keeps_its_type_and_its_macs_for_its_life() {
        let with_status = |status: Value| {
            vm(|vm| {
                vm["spec"]["vm"]["networks"] =
                    json!([{ "user": {} }, { "tap": {} }, { "tap": { "mac": "02:00:00:00:00:07" } }, { "pod": {} }]);
                vm["status"] = status;
            })
        };
        let macs = ["02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03", "02:00:00:00:00:04"];
        let configured = |vm: &VirtualMachine| {
            let vm = runner_config(vm, Vec::new(), None, vec![]).vm;
            let macs: Vec<Option<&str>> = vm.network.iter().map(NetworkSection::mac).collect();
            json!([vm.uuid, vm.machine_type, macs])
        };
        let identity = json!({ "uuid": "u", "machineType": "pc-q35-7.2", "macs": macs });
        assert_eq!(
            configured(&with_status(json!({ "identity": identity }))),
            json!(["u", "pc-q35-7.2", [macs[0], macs[1], "02:00:00:00:00:07", macs[3]]])
        );
        // Before the first start the runner chooses.
        assert_eq!(configured(&with_status(json!({}))), json!([null, null, [null, null, "02:00:00:00:00:07", null]]));
    }

    #[test]
    fn a_cds_name_is_one_of_the_image_repository() {
        for (image, file) in [
            ("", ""),
            ("Fedora.iso", "/var/local/vmop-image-repository/Fedora.iso"),
            ("/tmp/a.iso", "/tmp/a.iso"),
            ("https://example.org/a.iso", "https://example.org/a.iso"),
        ] {
            assert_eq!(cd_file(image), file);
        }
    }
}

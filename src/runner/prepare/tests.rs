use super::*;

// Every test but the last one is about a start.
async fn machine_type(configured: Option<&str>, data: &Path, qemu: &str) -> Result<String, Error> {
    super::machine_type(configured, data, qemu, Purpose::Start).await
}
fn uuid(configured: Option<&str>, data: &Path) -> Result<String, Error> {
    super::uuid(configured, data, Purpose::Start)
}
fn vm() -> VmSection {
    RunnerConfig::parse("/Runner: { namespace: n, vm: { name: v } }").unwrap().vm
}
fn hardware(data: &Path) -> Result<Hardware, Error> {
    super::hardware(&vm(), data, Purpose::Start)
}
fn firmware(kind: api::Firmware, data: &Path, ovmf: &Path) -> Result<Option<Firmware>, Error> {
    super::firmware(kind, data, ovmf, Purpose::Start)
}
fn disks(drives: &[Drive]) -> Result<Vec<bool>, Error> {
    super::disks(drives, Purpose::Start)
}
fn template(config: &RunnerConfig, image: &Path) -> Result<Template, Error> {
    super::template(config, None, image, Purpose::Start)
}

#[test]
fn machine_types_are_compared_by_their_numbers() {
    let help = "Supported machines are:\nq35   PC (alias of pc-q35-10.0)\npc-q35-9.2  PC\npc-q35-10.0  PC\npc-q35-4.0.1 PC\nmicrovm\n";
    assert_eq!(newest_q35(help).as_deref(), Some("pc-q35-10.0"));
    assert_eq!(newest_q35("microvm"), None);
}

#[tokio::test]
async fn a_vm_keeps_its_machine_type_when_qemu_has_a_newer_one() {
    let data = tempfile::tempdir().unwrap();
    let get = async |configured, qemu| machine_type(configured, data.path(), qemu).await.unwrap();
    let newest = get(None, "qemu-system-x86_64").await;
    assert!(newest.starts_with("pc-q35-"), "{newest}");
    assert_eq!(get(None, "no-such-qemu").await, newest, "the type of the first start is kept");
    fs::write(data.path().join("machine-type"), "pc-q35-2.4\n").unwrap();
    assert_eq!(get(None, "qemu-system-x86_64").await, "pc-q35-2.4");
    assert_eq!(get(Some("pc-q35-7.2"), "qemu-system-x86_64").await, "pc-q35-7.2", "the configuration has precedence");
}

#[tokio::test]
async fn a_vm_that_the_vm_operator_created_keeps_its_hardware() {
    let data = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| fs::write(data.path().join(name), text).unwrap();
    let machine_type = async || machine_type(None, data.path(), "no-such-qemu").await.unwrap();
    put(LEGACY_TEMPLATE, "# not pc-q35-6.2\n    - [ \"-machine\", \"pc-q35-7.0,usb=off,vmport=off\\\n");
    put(TPM_STATE, "state");
    assert_eq!(hardware(data.path()).unwrap(), Hardware::Legacy);
    assert_eq!(machine_type().await, "pc-q35-7.0");
    assert_eq!(hardware(data.path()).unwrap(), Hardware::Legacy, "at the second start, too");
    assert_eq!(tpm_directory(data.path()), data.path());
    // The other runner starts the VM again, with a newer template.
    put(LEGACY_TEMPLATE, "[ \"-machine\", \"pc-q35-9.0\" ]");
    assert_eq!(machine_type().await, "pc-q35-7.0");
}

#[test]
fn a_vm_keeps_the_arrangement_of_its_first_start() {
    let data = tempfile::tempdir().unwrap();
    fs::write(data.path().join(MACHINE_TYPE), "pc-q35-9.0").unwrap();
    assert_eq!(hardware(data.path()).unwrap(), Hardware::Standard, "its runner knew no root ports");
    // What the runner keeps is lost, and the VM's status has it.
    let lost = tempfile::tempdir().unwrap();
    let of_status_tried = |machine_type: &str, name: Option<&str>| {
        let vm = VmSection { machine_type: Some(machine_type.into()), hardware: name.map(str::to_owned), ..vm() };
        super::hardware(&vm, lost.path(), Purpose::Start)
    };
    let of_status = |machine_type: &str, name: Option<&str>| of_status_tried(machine_type, name).unwrap();
    assert_eq!(of_status("pc-q35-9.0", None), Hardware::Standard);
    assert_eq!(of_status("pc-q35-9.0", Some("root-ports")), Hardware::RootPorts);
    // Other hardware than a later release gave it would be worse than no start.
    let error = of_status_tried("pc-q35-9.0", Some("from-the-future")).unwrap_err().to_string();
    assert!(error.contains("hardware generation") && error.contains("from-the-future"), "{error}");
    assert_eq!(of_status("pc-q35-9.0", Some("legacy")), Hardware::Legacy);
    assert_eq!(of_status("pc-q35-9.0", Some("multi-queue")), Hardware::MultiQueue);
}

#[test]
fn a_vm_that_asks_for_the_newest_arrangement_has_it_from_then_on() {
    let get = |data: &Path, name: Option<&str>, purpose| {
        super::hardware(&VmSection { hardware: name.map(str::to_owned), ..vm() }, data, purpose).unwrap()
    };
    for before in ["root-ports", "standard", "legacy", ""] {
        let data = tempfile::tempdir().unwrap();
        fs::write(data.path().join(MACHINE_TYPE), "pc-q35-9.0").unwrap();
        if !before.is_empty() {
            fs::write(data.path().join(HARDWARE), before).unwrap();
        }
        // To look changes nothing.
        assert_eq!(get(data.path(), Some(LATEST_HARDWARE), Purpose::Look), Hardware::MultiQueue);
        assert_ne!(get(data.path(), Some("root-ports"), Purpose::Look), Hardware::MultiQueue, "{before}");
        assert_eq!(get(data.path(), Some(LATEST_HARDWARE), Purpose::Start), Hardware::MultiQueue);
        assert_eq!(get(data.path(), None, Purpose::Start), Hardware::MultiQueue, "it stays: {before}");
    }
}

#[test]
fn the_id_of_the_generation_stays() {
    let data = tempfile::tempdir().unwrap();
    let id = generation_id(data.path(), Purpose::Start).unwrap();
    assert!(is_uuid(&id), "{id}");
    assert_eq!(generation_id(data.path(), Purpose::Start).unwrap(), id);
    // QEMU would not start with what a broken write has left.
    fs::write(data.path().join(GENERATION), "x,guid=auto").unwrap();
    assert!(is_uuid(&generation_id(data.path(), Purpose::Start).unwrap()));
}

#[test]
fn a_new_vm_keeps_its_hardware_even_if_the_vm_operator_runs_it_later() {
    let data = tempfile::tempdir().unwrap();
    assert_eq!(hardware(data.path()).unwrap(), Hardware::NEWEST);
    assert_eq!(tpm_directory(data.path()), data.path().join("tpm"));
    fs::create_dir(data.path().join("tpm")).unwrap();
    for file in [MACHINE_TYPE, LEGACY_TEMPLATE, TPM_STATE, "tpm/tpm2-00.permall"] {
        fs::write(data.path().join(file), "pc-q35-9.0").unwrap();
    }
    assert_eq!(hardware(data.path()).unwrap(), Hardware::NEWEST);
    assert_eq!(tpm_directory(data.path()), data.path().join("tpm"));
}

#[test]
fn disks_have_names_from_the_first_start_on_or_never() {
    let names = |vm: &VmSection, data: &Path, purpose| super::names_disks(vm, data, purpose).unwrap();
    let data = tempfile::tempdir().unwrap();
    assert!(names(&vm(), data.path(), Purpose::Look));
    assert!(!data.path().join(SERIALS).exists());
    assert!(names(&vm(), data.path(), Purpose::Start));
    fs::write(data.path().join(HARDWARE), "root-ports").unwrap();
    fs::write(data.path().join(MACHINE_TYPE), "pc-q35-9.0").unwrap();
    assert!(names(&vm(), data.path(), Purpose::Start), "also at the next starts");
    for file in [HARDWARE, MACHINE_TYPE, LEGACY_TEMPLATE] {
        let before = tempfile::tempdir().unwrap();
        fs::write(before.path().join(file), "x").unwrap();
        assert!(!names(&vm(), before.path(), Purpose::Start), "{file}");
    }
    let lost = tempfile::tempdir().unwrap();
    assert!(!names(&VmSection { hardware: Some("root-ports".into()), ..vm() }, lost.path(), Purpose::Start));
    assert!(!names(&VmSection { machine_type: Some("pc-q35-9.0".into()), ..vm() }, lost.path(), Purpose::Start));
}

#[test]
fn variables_on_a_larger_volume_are_cut_to_their_size() {
    let (data, ovmf) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let volume = |length: u64| {
        let mut volume = vec![0xff; usize::try_from(length).unwrap()];
        volume[VOLUME_LENGTH].copy_from_slice(&length.to_le_bytes());
        volume[VOLUME_SIGNATURE.0].copy_from_slice(VOLUME_SIGNATURE.1);
        volume
    };
    let large = volume(540_672);
    fs::write(ovmf.path().join("OVMF_CODE_4M.fd"), "code").unwrap();
    fs::write(ovmf.path().join("OVMF_VARS_4M.fd"), &large).unwrap();
    let own = data.path().join("fw-vars.fd");
    let mut written = large.clone();
    written[1000] = b'x';
    for filler in [0, 0xff] {
        let mut volume = written.clone();
        volume.resize(4 << 20, filler);
        fs::write(&own, &volume).unwrap();
        super::firmware(api::Firmware::Uefi, data.path(), ovmf.path(), Purpose::Look).unwrap_err();
        assert_eq!(fs::metadata(&own).unwrap().len(), 4 << 20, "a look changes nothing");
        firmware(api::Firmware::Uefi, data.path(), ovmf.path()).unwrap();
        assert_eq!(fs::read(&own).unwrap(), written);
    }
    // Something else behind them, variables of another size, no variables at all: nothing is cut.
    let mut more = written.clone();
    more.resize(4 << 20, 0);
    more[2 << 20] = 1;
    let mut small = volume(131_072);
    small.resize(4 << 20, 0);
    for other in [more, small, vec![0; 4 << 20], vec![1; 10], Vec::new()] {
        fs::write(&own, &other).unwrap();
        let error = firmware(api::Firmware::Uefi, data.path(), ovmf.path()).unwrap_err().to_string();
        assert!(error.contains("another size"), "{error}");
        assert_eq!(fs::read(&own).unwrap(), other);
    }
    fs::write(&own, b"QFI\xfb and more").unwrap();
    let error = firmware(api::Firmware::Uefi, data.path(), ovmf.path()).unwrap_err().to_string();
    assert!(error.contains("qemu-img convert -f qcow2"), "{error}");
}

#[test]
fn a_uuid_is_generated_once() {
    let data = tempfile::tempdir().unwrap();
    let first = uuid(None, data.path()).unwrap();
    assert_eq!(first.len(), 36);
    assert_eq!(uuid(None, data.path()).unwrap(), first);
    let given = "B0E3A5A4-0000-4000-8000-3e1f6e1d0001";
    assert_eq!(uuid(Some(given), data.path()).unwrap(), given);
}

#[tokio::test]
async fn an_identity_that_would_be_more_than_one_option_is_refused() {
    let data = tempfile::tempdir().unwrap();
    for text in ["", "given", "b0e3a5a4-0000-4000-8000-3e1f6e1d0001,x=y", "b0e3a5a4-0000-4000-8000-3e1f6e1d000g"] {
        assert!(matches!(uuid(Some(text), data.path()), Err(Error::Identity { what: "UUID", .. })), "{text}");
    }
    for text in ["", "pc-q35-7.2,dumpdtb=/var/local/vm-data/uuid.txt", "pc q35", "q35\n-S"] {
        let refused = machine_type(Some(text), data.path(), "no-such-qemu").await;
        assert!(matches!(refused, Err(Error::Identity { what: "machine type", .. })), "{text}");
    }
}

#[test]
fn a_vm_keeps_its_firmware_variables_and_a_firmware_that_fits_them() {
    let (data, ovmf) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let put = |name: &str, content: &str| fs::write(ovmf.path().join(name), content).unwrap();
    let get = |kind| firmware(kind, data.path(), ovmf.path());
    assert_eq!(get(api::Firmware::Bios).unwrap(), None);
    let error = get(api::Firmware::Secure4m).unwrap_err().to_string();
    assert!(error.starts_with("the firmware secure-4m is not installed: looked for"), "{error}");

    put("OVMF_CODE_4M.fd", "code");
    put("OVMF_VARS_4M.fd", "large");
    let large = get(api::Firmware::Uefi).unwrap().unwrap();
    assert!(large.code.ends_with("OVMF_CODE_4M.fd"), "only the large firmware is installed");
    fs::write(&large.vars, "LARGE").unwrap();

    put("OVMF_CODE.fd", "code");
    put("OVMF_VARS.fd", "small!");
    assert_eq!(get(api::Firmware::Uefi).unwrap(), Some(large.clone()), "the firmware must fit the variables");
    assert_eq!(fs::read_to_string(&large.vars).unwrap(), "LARGE");

    // A firmware with Secure Boot needs keys.
    put("OVMF_CODE_4M.secboot.fd", "code");
    put("OVMF_VARS_4M.ms.fd", "keys!");
    fs::write(&large.vars, "LARGE").unwrap();
    let refused = get(api::Firmware::Secure).unwrap_err().to_string();
    assert!(refused.contains("has no keys, so the firmware secure would check nothing"), "{refused}");
    fs::remove_file(&large.vars).unwrap();
    assert!(get(api::Firmware::Secure).unwrap().unwrap().secure);
    assert_eq!(fs::read_to_string(data.path().join(VARIABLES_KIND)).unwrap(), "secure");
    fs::write(&large.vars, "guest").unwrap();
    assert!(get(api::Firmware::Secure).unwrap().unwrap().secure, "the guest may have changed the keys");
    // As an earlier runner has left it.
    fs::remove_file(data.path().join(VARIABLES_KIND)).unwrap();
    assert!(get(api::Firmware::Secure).is_err());
    let keys = [b"x".as_slice(), KEK].concat();
    fs::write(&large.vars, &keys).unwrap();
    put("OVMF_VARS_4M.ms.fd", "123456789");
    assert!(get(api::Firmware::Secure).unwrap().unwrap().secure);
    fs::write(&large.vars, "neither of both").unwrap();
    assert!(get(api::Firmware::Uefi).unwrap_err().to_string().contains("has 15 bytes"));
}

#[test]
fn the_firmware_is_found_where_distributions_put_it() {
    let (debian, fedora, arch) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let directories = [debian.path(), fedora.path(), arch.path()];
    let put = |dir: &Path, names: [&str; 2]| names.iter().for_each(|name| fs::write(dir.join(name), "x").unwrap());
    let found = |kind| firmware_directory(kind, &directories);
    assert_eq!(found(api::Firmware::Uefi), debian.path(), "where it is missing, an error names the first directory");
    put(arch.path(), ["OVMF_CODE.4m.fd", "OVMF_VARS.4m.fd"]);
    put(fedora.path(), ["OVMF_CODE.secboot.fd", "OVMF_VARS.secboot.fd"]);
    assert_eq!(found(api::Firmware::Uefi), arch.path());
    assert_eq!(found(api::Firmware::Secure), fedora.path());
    put(debian.path(), ["OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"]);
    assert_eq!(found(api::Firmware::Uefi), debian.path());
}

#[test]
fn disk_files_are_created_and_enlarged_but_never_made_smaller() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img").display().to_string();
    let drive = |size| [Drive::Raw { resource: path.clone(), bootindex: None, size, serial: None, slot: None }];
    assert!(disks(&drive(None)).unwrap_err().to_string().contains("does not exist: check the Pod's"));
    assert_eq!(disks(&drive(Some(1 << 20))).unwrap(), [false]);
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    fs::write(&path, "what the guest wrote").unwrap();
    assert_eq!(disks(&drive(Some(2 << 20))).unwrap(), [false]);
    assert_eq!(fs::metadata(&path).unwrap().len(), 2 << 20, "the claim has grown");
    for size in [Some(1 << 20), None] {
        assert_eq!(disks(&drive(size)).unwrap(), [false]);
        assert_eq!(fs::metadata(&path).unwrap().len(), 2 << 20, "the file is not made smaller");
    }
    assert!(fs::read(&path).unwrap().starts_with(b"what the guest wrote\0"));
}

#[test]
fn a_link_or_a_directory_in_place_of_a_disks_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("secret"), "of somebody else").unwrap();
    std::os::unix::fs::symlink(dir.path().join("secret"), dir.path().join("disk.img")).unwrap();
    for name in ["disk.img", "."] {
        let path = dir.path().join(name).display().to_string();
        let refused =
            disks(&[Drive::Raw { resource: path, bootindex: None, size: Some(1 << 20), serial: None, slot: None }]);
        assert!(matches!(refused, Err(Error::NotAFile { .. })), "{name}: {refused:?}");
    }
    assert_eq!(fs::read_to_string(dir.path().join("secret")).unwrap(), "of somebody else");
}

#[test]
fn with_update_template_false_the_first_template_is_kept() {
    let (data, image) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = |update: bool, name: &str| {
        RunnerConfig::parse(&format!(
            "/Runner: {{ namespace: n, dataDir: {:?}, template: {name}, updateTemplate: {update}, vm: {{ name: v }} }}",
            data.path()
        ))
        .unwrap()
    };
    let text = |update, name| {
        template(&config(update, name), image.path()).map(|template| template.file.templates.base[name].clone())
    };
    assert!(text(true, "standard.yaml.j2").unwrap().contains("-nodefaults"));
    assert!(matches!(text(true, "own.yaml.j2"), Err(Error::NoTemplate { .. })));
    fs::write(image.path().join("own.yaml.j2"), "one").unwrap();
    assert_eq!(text(false, "own.yaml.j2").unwrap(), "one");
    fs::write(image.path().join("own.yaml.j2"), "two").unwrap();
    assert_eq!(text(false, "own.yaml.j2").unwrap(), "one");
    assert_eq!(text(true, "own.yaml.j2").unwrap(), "two");
    assert!(matches!(text(true, "../own.yaml.j2"), Err(Error::NoTemplate { .. })));
}

#[test]
fn the_template_of_the_set_comes_before_that_of_the_image_and_can_be_kept() {
    let (data, image) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = |update: bool, name: &str| {
        let text = format!(
            "/Runner: {{ namespace: n, dataDir: {:?}, template: {name}, updateTemplate: {update}, vm: {{ name: v }} }}",
            data.path()
        );
        RunnerConfig::parse(&text).unwrap()
    };
    let of_set = |text: &str| {
        let file = format!("templates: {{base: {{qemu/standard.yaml.j2: {text}}}, named: null}}\nvalues: {{a: 1}}\n");
        config::qemu_file(Path::new("qemu.yaml"), &file).unwrap()
    };
    let text = |update, name, of_set: Option<&QemuFile>, purpose| {
        let template = super::template(&config(update, name), of_set, image.path(), purpose)?;
        Ok::<_, Error>(template.file.templates.base[&template.name].clone())
    };
    let (one, two) = (of_set("one"), of_set("two"));
    fs::write(image.path().join("own.yaml.j2"), "of the image").unwrap();
    fs::write(image.path().join("standard.yaml.j2"), "of the image").unwrap();
    let (start, look) = (Purpose::Start, Purpose::Look);
    assert_eq!(text(true, "standard.yaml.j2", Some(&one), start).unwrap(), "one");
    // A VM of the VM-Operator has this name in its spec.
    assert_eq!(text(true, "Standard-VM-latest.ftl.yaml", Some(&one), start).unwrap(), "one");
    assert_eq!(text(true, "own.yaml.j2", Some(&one), start).unwrap(), "of the image", "the set has no such template");
    assert_eq!(text(true, "standard.yaml.j2", None, start).unwrap(), "of the image");
    // Who looks keeps nothing.
    assert_eq!(text(false, "standard.yaml.j2", Some(&one), look).unwrap(), "one");
    assert_eq!(text(false, "standard.yaml.j2", Some(&two), start).unwrap(), "two");
    assert_eq!(text(false, "standard.yaml.j2", Some(&one), start).unwrap(), "two", "it keeps that of its first start");
    assert_eq!(text(false, "standard.yaml.j2", None, start).unwrap(), "two");
    assert_eq!(text(true, "standard.yaml.j2", Some(&one), start).unwrap(), "one");
    // Also the built-in one that it extends, which another runner has otherwise.
    let kept = super::template(&config(false, "standard.yaml.j2"), None, image.path(), look).unwrap();
    assert_eq!(kept.file.standard.as_deref(), command_line::built_in(command_line::STANDARD));
    fs::write(data.path().join(QEMU_COPY), "[").unwrap();
    let error = text(false, "standard.yaml.j2", Some(&one), start).unwrap_err().to_string();
    assert!(error.contains(QEMU_COPY), "{error}");
}

#[tokio::test]
async fn who_only_looks_changes_nothing() {
    let (dir, ovmf) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (data, runtime) = (dir.path().join("data"), RuntimeDir::at(&dir.path().join("run")).unwrap());
    for file in ["OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"] {
        fs::write(ovmf.path().join(file), file).unwrap();
    }
    fs::write(dir.path().join("small.img"), "what the guest wrote").unwrap();
    let look = Purpose::Look;
    let drive = |name: &str| Drive::Raw {
        resource: dir.path().join(name).display().to_string(),
        bootindex: None,
        size: Some(1 << 20),
        serial: None,
        slot: None,
    };
    assert_eq!(super::disks(&[drive("small.img"), drive("new.img")], look).unwrap(), [false, false]);
    assert!(super::uuid(None, &data, look).is_ok());
    assert!(super::machine_type(None, &data, "qemu-system-x86_64", look).await.unwrap().starts_with("pc-q35-"));
    let firmware = super::firmware(api::Firmware::Uefi, &data, ovmf.path(), look).unwrap().unwrap();
    assert!(firmware.vars.ends_with("data/fw-vars.fd"));
    let disk = super::cloud_init_disk(Some(&CloudInitFiles::default()), &runtime, look).unwrap();
    assert!(disk.unwrap().ends_with("run/cloud-init.img"));
    let config = format!("/Runner: {{ namespace: n, dataDir: {data:?}, updateTemplate: false, vm: {{ name: v }} }}");
    assert!(super::template(&RunnerConfig::parse(&config).unwrap(), None, &data, look).is_ok());
    // A VM of the VM-Operator in Java, which this runner has not started yet.
    let legacy = tempfile::tempdir().unwrap();
    fs::write(legacy.path().join(LEGACY_TEMPLATE), "[ \"-machine\", \"pc-q35-7.0\" ]").unwrap();
    assert_eq!(super::hardware(&vm(), legacy.path(), look).unwrap(), Hardware::Legacy);
    assert_eq!(super::machine_type(None, legacy.path(), "no-such-qemu", look).await.unwrap(), "pc-q35-7.0");
    let names = |dir: &Path| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(names(dir.path()), ["small.img"]);
    assert_eq!(names(legacy.path()), [LEGACY_TEMPLATE]);
    assert_eq!(fs::read_to_string(dir.path().join("small.img")).unwrap(), "what the guest wrote");
}

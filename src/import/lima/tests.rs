//! What Lima's files leave open, write in several ways, or mean for another computer.

use serde_json::{Value, json};

use super::size;
use crate::{
    exchange::Grade,
    import::{
        self, Format, Imported, Wish,
        source::{Item, SourceError},
    },
};

const IMAGE: &str = "images:\n- location: https://example.org/a.img\n  arch: x86_64\n";

fn read(text: &str) -> Result<Imported, SourceError> {
    import::read(text, Format::Lima, "file", Wish::default()).map(|mut vms| vms.remove(0))
}

/// An instance with an image, which lines 1 to 3 are, and this.
fn imported(text: &str) -> Imported {
    read(&format!("{IMAGE}{text}")).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The size of the first disk.
fn storage(vm: &Imported) -> Option<&str> {
    vm.manifest.pointer("/spec/vm/disks/0/volumeClaimTemplate/spec/resources/requests/storage")?.as_str()
}

/// What fills the first disk.
fn source(vm: &Imported) -> Option<&Value> {
    vm.manifest.pointer("/spec/templateValues/import")
}

fn user_data(vm: &Imported) -> Option<&Value> {
    vm.manifest.pointer("/spec/cloudInit/userData")
}

/// A part has this grade, and these words in its reason.
#[track_caller]
fn says(vm: &Imported, what: &str, grade: Grade, words: &str) {
    let found = vm.findings.iter().any(|it| it.what == what && it.grade == grade && it.why.contains(words));
    assert!(found, "{what}: {grade}: {words}: {:#?}", vm.findings);
}

/// What is not the same, but for the user.
fn losses(vm: &Imported) -> Vec<&str> {
    let losses = vm.findings.iter().filter(|it| it.grade != Grade::Same && it.what != "the file");
    losses.map(|it| it.what.as_str()).collect()
}

#[test]
fn sizes_are_those_of_go_units() {
    const GIB: u64 = 1 << 30;
    for (text, bytes) in [
        ("4GiB", Some(4 * GIB)),
        ("4GB", Some(4 * GIB)),
        ("4G", Some(4 * GIB)),
        ("4g", Some(4 * GIB)),
        ("4gib", Some(4 * GIB)),
        ("4 GiB", Some(4 * GIB)),
        ("0.5G", Some(GIB / 2)),
        ("1TiB", Some(GIB << 10)),
        ("2p", Some(GIB << 21)),
        ("512m", Some(GIB / 2)),
        ("64KB", Some(64 << 10)),
        ("7", Some(7)),
        ("7b", Some(7)),
        ("0", Some(0)),
        ("", None),
        ("GiB", None),
        ("-4GiB", None),
        ("4Gib/s", None),
        ("4GiBs", None),
        ("4bb", None),
        ("4xb", None),
        ("4  GiB", None),
        ("1.2.3G", None),
        ("99999999P", None),
        ("four", None),
        ("4é", None),
    ] {
        assert_eq!(size(&Item::new("", "", 1, Some(text.into()))), bytes, "{text}");
    }
}

#[test]
fn null_and_nothing_are_the_default() {
    for nothing in ["null", "~", "", "''", "\"\"", "[]", "{}"] {
        let keys = [
            "arch",
            "cpus",
            "memory",
            "disk",
            "vmType",
            "os",
            "user",
            "mounts",
            "mountType",
            "ssh",
            "containerd",
            "networks",
            "env",
            "param",
            "video",
            "audio",
            "timezone",
            "vmOpts",
            "cpuType",
            "firmware",
            "tpm",
            "additionalDisks",
            "provision",
            "upgradePackages",
            "minimumLimaVersion",
            "plain",
            "base",
        ];
        let text: String = keys.iter().map(|key| format!("{key}: {nothing}\n")).collect();
        let vm = imported(&text);
        let mut plain = imported("");
        assert_eq!(losses(&vm), Vec::<&str>::new(), "{nothing:?}");
        plain.findings.clone_from(&vm.findings);
        assert_eq!(vm, plain, "{nothing:?}");
        assert_eq!(storage(&vm), Some("100Gi"));
        let found = ["maximumCpus", "maximumRam"].map(|field| vm.manifest["spec"]["vm"][field].clone());
        assert_eq!(found, [json!(4), json!("4Gi")]);
    }
    let vm = imported("cpus: 0\ndisk: 0\nmemory: 2g\n");
    assert_eq!((&vm.manifest["spec"]["vm"]["maximumCpus"], storage(&vm)), (&json!(4), Some("100Gi")));
    assert_eq!(vm.manifest["spec"]["vm"]["maximumRam"], json!("2Gi"));
}

#[test]
fn what_is_no_number_and_no_size_is_refused_with_its_line() {
    for (text, complaint) in [
        ("cpus: -1", "cpus: \"-1\" is no number of CPUs"),
        ("cpus: 1.5", "cpus: \"1.5\" is no number of CPUs"),
        ("cpus: 1_000", "cpus: \"1_000\" is no number of CPUs"),
        ("cpus: many", "cpus: \"many\" is no number of CPUs"),
        ("cpus: 99999999999999999999", "is no number of CPUs: a VM has 1 to 1024"),
        ("cpus: 2000", "is no number of CPUs: a VM has 1 to 1024"),
        ("memory: -1GiB", "memory: \"-1GiB\" is no size"),
        ("memory: much", "memory: \"much\" is no size"),
        ("memory: 0", "memory: \"0\" is no size"),
        ("memory: 9000P", "memory: \"9000P\" is no size"),
        ("disk: large", "disk: \"large\" is no size"),
        ("disk: -8GiB", "disk: \"-8GiB\" is no size"),
        ("disk: 2000P", "disk: \"2000P\" is no size"),
    ] {
        let error = read(&format!("{IMAGE}{text}\n")).unwrap_err();
        assert_eq!(error.at.0, 4, "{error}");
        assert!(error.message.contains(complaint), "{complaint}: {error}");
    }
}

#[test]
fn an_image_that_fills_no_disk_is_told() {
    for (text, part, words) in [
        ("cpus: 2\n", "the file", "there is no image: the disk is empty"),
        ("images: []\n", "images", "the disk is empty"),
        ("images:\n", "images", "the disk is empty"),
        ("images:\n- location: https://x/a.img\n  arch: aarch64\n", "images", "the disk is empty"),
        ("base: template:ubuntu\n", "base", "the disk is empty: `limactl template copy"),
        ("base:\n- template:ubuntu\nimages: null\n", "base", "the disk is empty: `limactl template copy"),
        ("images:\n- location: https://x/a.raw.xz\n", "images[0]", "unpack it (xz -d)"),
        ("images:\n- location: https://x/a.img.gz\n", "images[0]", "unpack it (gunzip)"),
        ("images:\n- location: ~/a.img.zst\n", "images[0]", "unpack it (zstd -d)"),
        ("images:\n- https://x/a.qcow2.bz2?b=c\n", "images[0]", "unpack it (bunzip2)"),
        ("images:\n- location: https://x/a.tar.gz\n", "images[0]", "it is an archive of files, and no disk"),
        ("images:\n- location: https://x/a.TGZ?b=c.img\n", "images[0]", "it is an archive of files, and no disk"),
        ("images:\n- location: ~/a.tar.xz\n", "images[0]", "it is an archive of files, and no disk"),
        ("images:\n- location: https://x/a.tar\n", "images[0]", "it is an archive of files, and no disk"),
        ("images:\n- location: https://x/a.wsl\n", "images[0]", "it is an archive of files, and no disk"),
        ("images:\n- location: https://x/a.ISO\n  arch: x86_64\n", "images[0]", "spec.vm.disks[].cdrom.image"),
        ("images:\n- location: oci://x/a\n", "images[0]", "only files and URLs of http and https"),
        ("images:\n- location: template:x\n", "images[0]", "only files and URLs of http and https"),
        ("images:\n- location: '{{.Dir}}/a.img'\n", "images[0]", "a template, which Lima fills in"),
        ("images:\n- arch: x86_64\n", "images[0]", "only files and URLs of http and https"),
    ] {
        let vm = read(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        says(&vm, part, Grade::LeftOut, words);
        assert_eq!((source(&vm), vm.steps.is_empty(), storage(&vm)), (None, true, Some("100Gi")), "{text}");
        if part.starts_with("images[") {
            says(&vm, "images", Grade::LeftOut, "the disk is empty");
        }
    }
}

#[test]
fn the_first_image_that_can_be_taken_fills_the_disk() {
    let of = |images: &str| read(&format!("images:\n{images}")).unwrap_or_else(|error| panic!("{error}: {images}"));
    for (images, expected) in [
        ("- location: https://x/a.img\n", json!({ "url": "https://x/a.img" })),
        ("- https://x/a.img\n", json!({ "url": "https://x/a.img" })),
        ("- location: https://x/a.img\n  arch: null\n", json!({ "url": "https://x/a.img" })),
        ("- location: https://x/a.img\n  arch: amd64\n", json!({ "url": "https://x/a.img" })),
        ("- location: https://x/A.RAW?b\n", json!({ "url": "https://x/A.RAW?b", "format": "raw" })),
        ("- location: https://x/a.iso\n- location: https://x/b.qcow2\n", json!({ "url": "https://x/b.qcow2" })),
    ] {
        assert_eq!(source(&of(images)), Some(&expected), "{images}");
    }
    let vm = of("- location: file:///a b.qcow2\n  arch: x86_64\n  digest: sha256:00\n- location: https://x/a.img\n");
    assert_eq!(source(&vm), None);
    assert!(vm.steps.contains(&"  qemu-img convert -O raw '/a b.qcow2' system.raw".to_owned()), "{:#?}", vm.steps);
    says(&vm, "images[0].arch", Grade::Same, "");
    says(&vm, "images[0].digest", Grade::LeftOut, "nobody compares it");
}

#[test]
fn another_architecture_is_refused() {
    for (text, ending) in [
        ("arch: aarch64\nimages:\n- location: https://x/a.img\n  arch: aarch64\n", "aarch64: VMs are x86_64"),
        ("arch: aarch64\n", "aarch64: VMs are x86_64"),
        ("arch: aarch64\nimages:\n- location: https://x/a.img\n  arch: x86_64\n", "set `arch: x86_64`"),
    ] {
        let error = read(text).unwrap_err();
        assert!(error.message.ends_with(ending), "{ending}: {error}");
        assert_eq!(error.at.0, 1, "{error}");
    }
    for arch in ["x86_64", "default", "null", "''"] {
        imported(&format!("arch: {arch}\n"));
    }
    assert_eq!(read("images: []\nos: Darwin\n").unwrap_err().at.0, 2);
}

#[test]
fn who_can_log_in_is_told() {
    let alone = imported("");
    says(&alone, "the file", Grade::Changed, "write one into spec.cloudInit.userData.users");
    assert_eq!(user_data(&alone), None);
    let sudo = "ALL=(ALL) NOPASSWD:ALL";
    for (text, user, part, grade, words) in [
        (
            "{name: ann}",
            json!({ "name": "ann", "sudo": sudo }),
            "user.name",
            Grade::Changed,
            "without a key nobody can log in",
        ),
        (
            "{name: ann, comment: Ann B, home: /a, shell: /bin/sh, uid: 501}",
            json!({ "name": "ann", "sudo": sudo, "gecos": "Ann B", "homedir": "/a", "shell": "/bin/sh", "uid": 501 }),
            "user.uid",
            Grade::Same,
            "",
        ),
        (
            "{name: ann, uid: abc}",
            json!({ "name": "ann", "sudo": sudo }),
            "user.uid",
            Grade::LeftOut,
            "this is no number",
        ),
        ("{name: ann, uid: null}", json!({ "name": "ann", "sudo": sudo }), "user.uid", Grade::Same, "default"),
        (
            "{home: '/home/{{.User}}.guest', name: ann}",
            json!({ "name": "ann", "sudo": sudo }),
            "user.home",
            Grade::LeftOut,
            "a template",
        ),
        ("{name: '{{.User}}', shell: /bin/sh}", Value::Null, "user.name", Grade::LeftOut, "a template"),
        ("{name: Ann B}", Value::Null, "user.name", Grade::LeftOut, "no user can be called so"),
        ("{shell: /bin/zsh, uid: 501}", Value::Null, "user.shell", Grade::LeftOut, "write one into spec.cloudInit"),
    ] {
        let vm = imported(&format!("user: {text}\n"));
        says(&vm, part, grade, words);
        let users = user_data(&vm).and_then(|data| data.get("users")).cloned();
        assert_eq!(users, if user.is_null() { None } else { Some(json!([user])) }, "{text}");
    }
}

#[test]
fn what_is_off_is_no_loss() {
    let vm = imported(
        "mounts: []\nmountType: 9p\nmountInotify: false\ncontainerd: {system: false, user: false}\n\
         rosetta: {enabled: false, binfmt: false}\nnestedVirtualization: false\ncaCerts: {removeDefaults: false}\nparam: {}\n\
         plain: False\nvideo: {display: none, vnc: {display: '127.0.0.1:0'}}\naudio: {device: ''}\nupgradePackages: false\n\
         firmware: {legacyBIOS: false}\nhostResolver: {enabled: false}\npropagateProxyEnv: false\n",
    );
    assert_eq!(losses(&vm), Vec::<&str>::new(), "{:#?}", vm.findings);
    assert_eq!(user_data(&vm), None);
    for (text, part, grade) in [
        ("mounts: [{location: '~'}]\n", "mounts", Grade::LeftOut),
        ("mounts: [{location: '~'}]\nmountType: 9p\n", "mountType", Grade::LeftOut),
        ("containerd: {user: true}\n", "containerd", Grade::LeftOut),
        ("rosetta: {enabled: true}\n", "rosetta", Grade::LeftOut),
        ("param: {a: false}\n", "param", Grade::LeftOut),
        ("plain: true\n", "plain", Grade::Changed),
        ("video: {display: vnc}\n", "video", Grade::Changed),
        ("audio: {device: default}\n", "audio", Grade::Changed),
    ] {
        says(&imported(text), part, grade, "");
    }
    let on = imported("upgradePackages: True\nfirmware: {legacyBIOS: TRUE}\n");
    assert_eq!(user_data(&on), Some(&json!({ "package_upgrade": true })));
    assert_eq!(on.manifest["spec"]["vm"]["firmware"], json!("bios"));
}

#[test]
fn a_tpm_is_kept() {
    let has_tpm = |vm: &Imported| vm.manifest["spec"]["vm"].get("useTpm") == Some(&json!(true));
    for (text, part) in
        [("tpm: true\n", "tpm"), ("tpm: {enabled: true}\n", "tpm.enabled"), ("tpm:\n  enabled: True\n", "tpm.enabled")]
    {
        let vm = imported(text);
        assert!(has_tpm(&vm), "{text}");
        says(&vm, part, Grade::Same, "spec.vm.useTpm");
        assert_eq!(losses(&vm), Vec::<&str>::new(), "{text}");
    }
    for text in ["tpm: false\n", "tpm: {enabled: false}\n"] {
        let vm = imported(text);
        assert!(!has_tpm(&vm), "{text}");
        says(&vm, "tpm", Grade::Same, "it is off");
    }
    for (text, part) in
        [("tpm: 1.2\n", "tpm"), ("tpm: {model: a}\n", "tpm"), ("tpm: {enabled: true, model: a}\n", "tpm.model")]
    {
        says(&imported(text), part, Grade::LeftOut, "");
    }
}

#[test]
fn the_image_of_a_guest_with_windows_is_a_cd() {
    let vm =
        read("os: Windows\nimages:\n- {location: 'https://x/ServerIso', arch: x86_64}\nosOpts: {Windows: {}, a: 1}\n")
            .unwrap();
    says(&vm, "images[0]", Grade::LeftOut, "spec.vm.disks[].cdrom.image");
    says(&vm, "osOpts", Grade::LeftOut, "by the console");
    assert_eq!(source(&vm), None);
}

#[test]
fn each_network_and_each_disk_has_its_line() {
    let vm = imported("networks:\n- lima: shared\n  macAddress: '52:55:55:12:34:56'\n- vzNAT: true\n- lima: user-v2\n");
    assert_eq!(vm.manifest["spec"]["vm"]["networks"], json!([{ "pod": {} }]));
    says(&vm, "networks[0]", Grade::LeftOut, "example/templates/second-network");
    says(&vm, "networks[1]", Grade::LeftOut, "example/templates/second-network");
    says(&vm, "networks[2]", Grade::Changed, "the Pod's network");
    let vm =
        imported("additionalDisks:\n- data\n- {name: logs, size: 20GB}\n- {name: x, size: big}\n- {format: true}\n");
    let sizes = [1, 2, 3].map(|at| {
        let path = format!("/spec/vm/disks/{at}/volumeClaimTemplate/spec/resources/requests/storage");
        vm.manifest.pointer(&path).and_then(Value::as_str)
    });
    assert_eq!(sizes, [Some("10Gi"), Some("20Gi"), Some("10Gi")]);
    says(&vm, "additionalDisks[2].size", Grade::LeftOut, "this is no size");
    says(&vm, "additionalDisks[3]", Grade::LeftOut, "it has no name");
}

#[test]
fn scripts_that_are_not_in_the_file_are_left_out() {
    let vm = imported(
        "provision:\n- script: echo $PARAM_a\n- {mode: system, script: {url: 'https://x'}}\n- {mode: user, script: b}\n\
         - file: c.sh\n- {mode: null, script: d}\n",
    );
    let found = user_data(&vm).and_then(|data| data.pointer("/runcmd")).and_then(Value::as_array).unwrap();
    assert_eq!(found.len(), 2);
    says(&vm, "provision[0].script", Grade::Changed, "without Lima's variables");
    for part in ["provision[1]", "provision[2]", "provision[3]"] {
        says(&vm, part, Grade::LeftOut, "put it into spec.cloudInit");
    }
    says(&vm, "provision[4].script", Grade::Changed, "it runs once, at the first start");
}

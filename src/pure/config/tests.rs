use super::{allowed::Images, *};

#[test]
fn the_documented_file_is_read() {
    let config = Config::parse(
        "\"/Manager\":\n  \"/Controller\":\n    namespace: vmop-dev\n    \"/Reconciler\":\n      runnerDataPvc: { storageClassName: local-path }\n      \
         diskPvc: { volumeMode: Filesystem }\n      imageRepositoryClaim: cds\n      cloudInitSecretLabel: former\n      cdFolders: [/srv/isos]\n      \
         loadBalancerService: { labels: {a: b}, annotations: {} }\n      cpuOvercommit: 3\n  \"/GuiHttpServer\": { port: 8080 }\n",
    )
    .unwrap();
    assert_eq!(config.namespace, Some(Scope::of(vec!["vmop-dev".into()])));
    assert_eq!(config.reconciler.runner_data_pvc.storage_class_name.as_deref(), Some("local-path"));
    assert_eq!(config.reconciler.disk_pvc.volume_mode, VolumeMode::Filesystem);
    assert_eq!(config.reconciler.image_repository_claim.as_deref(), Some("cds"));
    assert_eq!(config.reconciler.cd_folders, ["/srv/isos"]);
    assert_eq!((config.reconciler.cpu_overcommit, config.reconciler.ram_overcommit), (3.0, 1.25));
    assert_eq!(config.unknown, ["/Manager/GuiHttpServer: port"]);
}

#[test]
fn the_resources_and_profiles_have_defaults_of_their_own() {
    let read = |text: &str| {
        Config::parse(&format!("/Manager:\n  /Controller:\n    /Reconciler: {text}\n")).unwrap().reconciler
    };
    assert!(ReconcilerConfig::default().relay && !read("{relay: false}").relay);
    assert_eq!(read("{nodeDevices: {}, passt: {}}"), ReconcilerConfig::default());
    let kvm = "vmoperator.jdrupes.org/kvm".to_owned();
    let machine = Some("example.org/kvm".to_owned());
    assert_eq!(read("{nodeDevices: {machine: example.org/kvm}}").node_devices, NodeDevices { kvm, machine });
    let passt = read("{passt: {seccompProfile: Unconfined, appArmorProfile: passt}}").passt;
    assert_eq!((passt.seccomp_profile.as_str(), passt.app_armor_profile.as_deref()), (UNCONFINED, Some("passt")));
}

#[test]
fn vms_have_services_only_if_the_key_is_true_or_a_map() {
    for (value, expected) in [
        ("false", LoadBalancerService::Enabled(false)),
        ("null", LoadBalancerService::Enabled(false)),
        ("true", LoadBalancerService::Enabled(true)),
        ("{}", LoadBalancerService::Metadata(ServiceMetadata::default())),
    ] {
        let text = format!("/Manager:\n  /Controller:\n    /Reconciler:\n      loadBalancerService: {value}\n");
        assert_eq!(Config::parse(&text).unwrap().reconciler.load_balancer_service, expected, "{value}");
    }
    assert_eq!(Config::default().reconciler.load_balancer_service, LoadBalancerService::Enabled(false));
}

/// A file of the VM-Operator in Java, with the parts of its web interface.
#[test]
fn the_file_of_the_original_operator_is_read_with_all_its_keys() {
    let config = Config::parse(include_str!("../../../tests/predecessor/config.yaml")).unwrap();
    assert_eq!(config.namespace, Some(Scope::of(vec!["vmop".into()])));
    let reconciler = config.reconciler;
    assert_eq!(reconciler.runner_data_pvc.storage_class_name.as_deref(), Some("rook-cephfs"));
    let LoadBalancerService::Metadata(service) = reconciler.load_balancer_service else { unreachable!() };
    assert_eq!(service.labels.unwrap()["label2"].as_deref(), Some("toBeReplaced"));
    assert_eq!(service.annotations.unwrap().len(), 3);
    assert!(reconciler.logging_properties.unwrap().contains("org.jdrupes.vmoperator.runner.qemu.level=FINEST"));
    assert_eq!(reconciler.cpu_overcommit, 4.0);
    assert_eq!(
        config.unknown,
        [
            "/Manager: clusterName",
            "/Manager/Controller/DisplaySecretMonitor: passwordValidity",
            "/Manager/GuiSocketServer: port",
            "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/LoginConlet: users",
            "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/RoleConfigurator: rolesByUser",
            "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/RoleConfigurator: replace",
            "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/RoleConletFilter: conletTypesByRole",
            "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/ComponentCollector/VmAccess: displayResource",
            "/Manager/GuiHttpServer/ConsoleWeblet/WebConsole/ComponentCollector/VmAccess: syncPreviewsFor",
        ]
    );
}

#[test]
fn legacy_runners_are_known_by_the_repository_of_their_image() {
    let images = |entry: &str| Images::try_from(vec![entry.to_owned()]);
    let listed = images("ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-*").unwrap();
    for (reference, expected) in [
        ("ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:latest", true),
        ("ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:4.0.3@sha256:00", true),
        ("evil.example.org/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:latest", false),
        ("evil.example.org/ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch", false),
        ("ghcr.io.evil.example.org/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch", false),
        ("org.jdrupes.vmoperator.runner.qemu-arch", false),
        ("localhost/vm-runner:0.1.0", false),
    ] {
        assert_eq!(listed.contain(reference), expected, "{reference}");
        assert!(!Images::default().contain(reference), "{reference}");
    }
    for wrong in
        ["org.jdrupes.vmoperator.runner.qemu-*", "*/runner", "*.example.org/runner", "/runner", "example.org/", ""]
    {
        assert!(images(wrong).unwrap_err().contains("does not name registry and path"), "{wrong}");
    }
    let own = images("mirror.example.org:5000/java-runner").unwrap();
    assert!(own.contain("mirror.example.org:5000/java-runner:4"));
    assert!(!own.contain("ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:latest"));
}

#[test]
fn an_empty_file_is_the_default() {
    assert_eq!(Config::parse("").unwrap(), Config::default());
    assert_eq!(Config::parse("# nothing\n").unwrap(), Config::default());
}

#[test]
fn errors_have_line_and_column() {
    let reconciler = "/Manager:\n  /Controller:\n    /Reconciler:\n      ";
    for (text, place, message) in [
        ("/Manager:\n  a: [\n".to_owned(), (3, 1), "did not find expected node content"),
        (
            format!("{reconciler}cpuOvercommit: many\n"),
            (4, 22),
            "invalid type: string \"many\", expected a number above 0",
        ),
        (
            format!("{reconciler}ramOvercommit: 0\n"),
            (4, 22),
            "invalid value: floating point `0.0`, expected a number above 0",
        ),
        (format!("{reconciler}loadBalancerService: yes\n"), (4, 28), "expected true, false, or labels and annotations"),
        (format!("{reconciler}loadBalancerService:\n        labels: 1\n"), (5, 17), "invalid type: integer"),
        (
            format!("{reconciler}diskPvc: {{volumeMode: block}}\n"),
            (4, 29),
            "unknown variant `block`, expected `Block` or `Filesystem`",
        ),
        ("- a\n".to_owned(), (1, 1), "expected keys and values"),
        ("/Manager: 1\n".to_owned(), (1, 11), "expected keys and values"),
    ] {
        let ConfigError(error) = Config::parse(&text).unwrap_err();
        let at = error.place();
        assert_eq!(at, Some(place), "{error}");
        assert!(error.to_string().contains(message), "{error}");
    }
}

#[test]
fn unknown_keys_inside_a_known_key_are_collected_too() {
    let config = Config::parse(
        "/Manager:\n  /Controller:\n    /Reconciler:\n      runnerDataPvc: {storageclassName: fast}\n      \
         loadBalancerService: {label: {a: b}, annotations: {c: d}}\n",
    )
    .unwrap();
    assert_eq!(
        config.unknown,
        [
            "/Manager/Controller/Reconciler: runnerDataPvc.storageclassName",
            "/Manager/Controller/Reconciler: loadBalancerService.label"
        ]
    );
    let LoadBalancerService::Metadata(metadata) = config.reconciler.load_balancer_service else { unreachable!() };
    assert_eq!(metadata.annotations, Some([("c".into(), Some("d".into()))].into()));
}

#[test]
fn keys_of_other_components_are_collected_and_not_refused() {
    let config = Config::parse(
        "/Manager:\n  /GuiHttpServer: {port: 8080, /Deep: {a: [1]}}\n  /Empty:\nloggingProperties: |\n  a=b\n",
    )
    .unwrap();
    assert_eq!(
        config.unknown,
        ["/Manager/GuiHttpServer: port", "/Manager/GuiHttpServer/Deep: a", ": loggingProperties"]
    );
}

#[test]
fn what_vms_may_have_is_read_and_nothing_by_default() {
    let read = |text: &str| Config::parse(&format!("/Manager:\n  /Controller:\n    /Reconciler: {text}\n"));
    let config = read(
        "{networks: {bridges: [br0, 'vlan*'], displayPorts: [7000, 7100-7110], cdUrls: ['https://cd.example.org/*']}, nodeNames: [n1], \
         runnerImages: [registry.example.org/runner], legacyRunnerImages: [ghcr.io/a/b], podLabels: [team], affinityNamespaces: ['*'], \
         extendedResources: [nvidia.com/*], services: {labels: [l], annotations: [a]}, \
         claims: {dataSources: ['PersistentVolumeClaim/golden-*'], volumeNames: [v], annotations: [x], labels: [y], other: 1}}",
    )
    .unwrap();
    assert_eq!(config.unknown, ["/Manager/Controller/Reconciler: claims.other"]);
    let allowed = config.reconciler.allowed;
    assert!(allowed.networks.bridges.contain("vlan7") && !allowed.networks.bridges.contain("br1"));
    let ports = [(7000, true), (7001, false), (7105, true), (5900, true), (5799, false), (10250, false)];
    for (port, expected) in ports {
        assert_eq!(allowed.networks.display_ports.contain(port), expected, "{port}");
    }
    assert!(allowed.claims.data_sources.contain("PersistentVolumeClaim/golden-1"));
    assert!(!allowed.claims.data_sources.contain("other:PersistentVolumeClaim/golden-1"));
    assert!(allowed.affinity_namespaces.contain_everything() && !allowed.claims.volume_names.contain_everything());
    // The process that renders templates gets it as JSON.
    let text = serde_json::to_string(&allowed).unwrap();
    assert_eq!(serde_json::from_str::<Allowed>(&text).unwrap(), allowed);
    let empty = Config::default().reconciler.allowed;
    assert!(
        !empty.networks.bridges.contain("br0") && !empty.pod_labels.contain("team") && !empty.claims.labels.contain("")
    );
    for (wrong, message) in [
        ("{networks: {displayPorts: [high]}}", "a range such as"),
        ("{legacyRunnerImages: ['org.jdrupes.vmoperator.runner.qemu-*']}", "does not name registry and path"),
        ("{networks: {bridges: br0}}", "invalid type"),
    ] {
        let error = read(wrong).unwrap_err();
        assert!(std::error::Error::source(&error).unwrap().to_string().contains(message), "{error:?}");
    }
}

#[test]
fn what_is_handed_to_other_processes_is_read_there() {
    let config = ReconcilerConfig { allowed: Allowed::everything(), ..ReconcilerConfig::default() };
    let read: ReconcilerConfig = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(read, config);
    let file = "{\"/Manager\": {\"/Controller\": {\"/Reconciler\": {runnerImages: ['*']}}}}";
    assert!(Config::parse(file).is_err());
}

#[test]
fn a_list_of_urls_names_hosts_and_contains_no_others() {
    use super::allowed::Urls;
    let list = |entries: &[&str]| Urls::try_from(entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>());
    for wrong in
        ["http://*/x", "http://mirror.example.com*", "*.example.org/x", "https://a.*.org/*", "https://u@a.org/*", "a*"]
    {
        assert!(list(&[wrong]).is_err(), "{wrong}");
    }
    let below =
        list(&["http://*.example.org/*", "https://cd.example.com:8443/isos/*.iso", "https://one.example.com/a.iso"])
            .unwrap();
    for url in [
        "http://a.example.org/x.iso",
        "http://a.b.example.org:80/x?y=1",
        "HTTP://A.Example.org/x",
        "https://cd.example.com:8443/isos/debian.iso",
        "https://one.example.com/a.iso",
    ] {
        assert!(below.contain(url), "{url}");
    }
    for url in [
        "http://127.0.0.1:2379/x.example.org/y",
        "http://example.org/x",
        "http://a.example.org:8080/x",
        "http://a.example.org@127.0.0.1/x",
        "http://evil@a.example.org/x",
        "http://127.0.0.1:10255#.example.org/",
        "http://127.0.0.1\\.example.org/",
        "http://a.example.org.evil.net/x",
        "http://badexample.org/x",
        "https://a.example.org/x",
        "https://cd.example.com:8443/isos/../secret.iso",
        "https://cd.example.com:8443/isos/%2e%2e/secret.iso",
        "https://one.example.com/a.iso2",
        "nbd://a.example.org/x",
        "no url",
    ] {
        assert!(!below.contain(url), "{url}");
    }
    assert!(list(&["*"]).unwrap().contain("http://127.0.0.1:2379/x"));
}

#[test]
fn a_key_that_occurs_twice_is_an_error() {
    let error = |text: &str| Config::parse(text).map(drop).map_err(|ConfigError(error)| error.to_string()).unwrap_err();
    let reconciler = "/Manager:\n  /Controller:\n    /Reconciler:\n";
    for (text, says) in [
        (
            format!("{reconciler}      cpuOvercommit: 2\n      cpuOvercommit: 3\n"),
            "/Manager./Controller./Reconciler: the key \"cpuOvercommit\" occurs twice at line 4 column 7",
        ),
        (format!("{reconciler}      templateValues: {{a: 1, a: 2}}\n"), "the key \"a\" occurs twice at line 4"),
        (format!("{reconciler}      cpuOvercommit: 2\n/Manager: {{}}\n"), "the key \"/Manager\" occurs twice"),
        (format!("a: {}", "[".repeat(100_000)), "at line 1"),
    ] {
        assert!(error(&text).contains(says), "{says}: {}", error(&text));
    }
    // Two ways to write where a section is.
    let sections = "/Manager: {/Controller: {namespace: a}}\n/Manager/Controller: {/Reconciler: {cpuOvercommit: 2}}\n";
    assert!(Config::parse(sections).is_ok());
}

#[test]
fn a_legacy_image_that_is_taken_out_is_a_limit_and_a_new_one_is_none() {
    let with = |images: &[&str]| {
        let mut config = ReconcilerConfig::default();
        let images: Vec<String> = images.iter().map(|image| (*image).to_owned()).collect();
        config.allowed.legacy_runner_images = images.try_into().unwrap();
        config
    };
    let (one, other) = ("a.example.org/x", "b.example.org/*");
    assert_eq!(with(&[one]).with_limits_of(&with(&[one, other])), with(&[one]));
    assert_eq!(with(&[one, other]).with_limits_of(&with(&[other])), with(&[other]));
    assert_eq!(with(&[one]).with_limits_of(&with(&[other])), with(&[]));
}

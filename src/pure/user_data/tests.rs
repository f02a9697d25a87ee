use super::*;

fn written(value: &Value) -> String {
    text(value, |value| Ok(serde_yaml::to_string(value).unwrap())).unwrap()
}

#[test]
fn what_cloud_init_knows_stays_as_it_is() {
    let long = format!("{}MIME-Version: 1.0\n", "X-A: b\n".repeat(100));
    for (text, kind) in [
        ("MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"B\"\n\n--B--\n", Kind::Mime),
        ("From nobody Fri Jan 11 07:00:00 1980\nContent-Type: text/plain\nmime-version: 1.0\n\nx", Kind::Mime),
        ("CONTENT-TYPE: multipart/mixed; boundary=B\nMIME-VERSION: 1.0\n\n--B--\n", Kind::Mime),
        (long.as_str(), Kind::Mime),
        ("\n\n#!/bin/sh\necho hello\n", Kind::Script),
        ("  \t#!/usr/bin/env python3\n", Kind::Script),
        ("rem cmd\necho hello\n", Kind::WindowsScript),
        ("rem   cmd\r\necho hello\r\n", Kind::WindowsScript),
        ("#ps1_sysnative\nx", Kind::WindowsScript),
        ("<powershell>x</powershell>", Kind::WindowsScript),
        ("## template: jinja\n#cloud-config\nruncmd: [\"{{ v1.local_hostname }}\"]\n", Kind::Template),
        ("## Template: Jinja\n#!/bin/sh\n", Kind::Template),
        ("#include\nhttps://example.org/a\n", Kind::Include),
        ("#include-once\nhttps://example.org/a\n", Kind::Include),
        ("#part-handler\n", Kind::Handler),
        ("#upstart-job\n", Kind::Handler),
        ("#cloud-boothook\n", Kind::Boothook),
        ("#cloud-config-archive\n- x\n", Kind::CloudConfigList),
        ("#cloud-config-jsonp\n[]\n", Kind::CloudConfigList),
        ("\n#Cloud-Config\r\npackages: []\r\n", Kind::CloudConfig),
        ("{\"ignition\": {\"version\": \"3.2.0\"}}\n", Kind::Ignition),
        (" {\"ignition\": {\"version\": \"3.4.0\"}, \"passwd\": {}}", Kind::Ignition),
    ] {
        assert_eq!(Kind::of(text), kind, "{text}");
        assert_eq!(written(&text.into()), text);
    }
}

#[test]
fn what_is_of_no_kind_becomes_a_cloud_config() {
    for text in [
        "packages: [vim]\n",
        "# the web servers\npackages: [vim]\n",
        "#the web servers\npackages: [vim]\n",
        "\npackages: [vim]\n",
        "{\"packages\": [\"vim\"]}",
        "{\"ignition\": \"no\"}",
        "echo hello\n",
    ] {
        assert_eq!(written(&text.into()), format!("#cloud-config\n{text}"));
    }
    assert_eq!(written(&json!({ "packages": ["vim"] })), "#cloud-config\npackages:\n- vim\n");
    assert_eq!(written(&json!({ "ignition": { "version": "3.2.0" } })), "{\"ignition\":{\"version\":\"3.2.0\"}}");
    // Another program may know it.
    assert_eq!(written(&"#of-another-program\nx y z".into()), "#of-another-program\nx y z");
    // Editors of Windows write a mark before the text, and cloud-init would not know the text behind it.
    assert_eq!(written(&"\u{feff}#cloud-config\na: 1\n".into()), "#cloud-config\na: 1\n");
    // Letters of several bytes are no end of a look at the beginning.
    assert_eq!(Kind::of(&"ä".repeat(5000)), Kind::Unknown);
}

#[test]
fn a_message_gets_the_header_by_which_it_is_known() {
    for (text, expected) in [
        (
            "content-type: text/cloud-config\n\n#cloud-config\npackages: [vim]\n",
            "content-type: text/cloud-config\nMIME-Version: 1.0\n\n#cloud-config\npackages: [vim]\n",
        ),
        (
            "Content-Type: multipart/mixed;\n boundary=B\n\n--B--\n",
            "Content-Type: multipart/mixed;\n boundary=B\nMIME-Version: 1.0\n\n--B--\n",
        ),
        (
            "Content-Type: text/plain\r\n\r\nx\r\n\r\ny",
            "Content-Type: text/plain\r\nMIME-Version: 1.0\r\n\r\nx\r\n\r\ny",
        ),
        ("Content-Type: text/plain", "Content-Type: text/plain\nMIME-Version: 1.0\n\n"),
    ] {
        assert_eq!(Kind::of(text), Kind::MimeWithoutVersion);
        assert_eq!(written(&text.into()), expected);
        assert_eq!(Kind::of(expected), Kind::Mime);
    }
}

#[test]
fn problems_are_told_with_their_place() {
    let shown = |value: Value| -> Vec<String> {
        let place =
            |at: Option<(usize, usize)>| at.map(|(line, column)| format!("{line}:{column}: ")).unwrap_or_default();
        let word = |all| if all { "all: " } else { "" };
        problems(&value).into_iter().map(|it| format!("{}{}{}", place(it.at), word(it.loses_all), it.message)).collect()
    };
    let text = |text: &str| shown(text.into());
    let bad = "#cloud-config\nusers:\n  - name: a\n   shell: /bin/sh\n";
    let [only] = text(bad).try_into().unwrap();
    assert!(only.starts_with("4:") && only.contains(": all: this cloud-config is no YAML"), "{only}");
    // Without the first line too.
    assert_eq!(text(&bad["#cloud-config\n".len()..]).len(), 1);
    assert!(text(&bad["#cloud-config\n".len()..])[0].starts_with("3:"));
    assert_eq!(
        text("#cloud-config\nusers:\n- name: cookie\n  sudo: true\nruncmd: echo hi\npackage: [vim]\n"),
        [
            "5:1: \"runcmd\" is no list, so cloud-init ignores it",
            "6:1: cloud-init has no key \"package\", and ignores it; \"packages\" is one",
            "4:1: \"sudo: true\" of the user \"cookie\" is no rule of sudo: write \"sudo: ALL=(ALL) NOPASSWD:ALL\"",
        ]
    );
    assert_eq!(shown(json!({ "pakages": [] })), ["cloud-init has no key \"pakages\", and ignores it"]);
    for all in [
        "#cloud-config\n- a\n",
        "#cloud-config\nhello\n",
        "I2Nsb3VkLWNvbmZpZwpwYWNrYWdlczogW3ZpbV0K",
        "apt-get update\n",
    ] {
        assert!(matches!(text(all).as_slice(), [only] if only.contains("all: ")), "{all}");
    }
    assert!(shown(json!({ "ignition": { "version": "3.2.0" } }))[0].contains("fw_cfg"));
    assert!(text("variant: fcos\nversion: 1.5.0\n")[0].contains("Butane"));
    assert_eq!(shown(json!([1])).len(), 1);
    // A text of a person is not in the message.
    assert!(!text("hunter2")[0].contains("hunter2"));
    for fine in [
        "",
        "#cloud-config\n",
        "#cloud-config\n{}\n",
        "#cloud-config\na: &x [1]\n".replace("a:", "runcmd:").as_str(),
        "#cloud-config\napt_mirror: x\nca_certs: {}\nusers: [default, {name: a, sudo: false}]\n",
        "#!/bin/sh\n: [\n",
        "## template: jinja\n#cloud-config\n{% if x %}\n",
        "machine: {}\ncluster: {}\nversion: v1alpha1\n",
        "rem cmd\n",
    ] {
        assert_eq!(text(fine), [""; 0], "{fine}");
    }
}

#[test]
fn the_keys_are_in_order() {
    assert!(KEYS.is_sorted() && LISTS.iter().all(|key| KEYS.binary_search(key).is_ok()));
}

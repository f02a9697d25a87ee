//! Who may do what: each path × nobody, somebody else, one with each single right, an administrator, and sessions that have ended.

use std::process::Command;

use futures::FutureExt;
use serde_json::{Value, json};

use super::{Browser, LIMIT, Web, configuration, until};
use crate::support::cluster::eventually;

const RIGHTS: [&str; 5] = ["start", "stop", "reset", "accessConsole", "takeConsole"];
const CONSOLE: &[&str] = &["accessConsole", "takeConsole"];

/// Who gets what at a path. An administrator always gets in.
struct Case {
    method: &'static str,
    path: String,
    body: String,
    /// What somebody gets who is not signed in.
    nobody: u16,
    /// What somebody gets who is signed in and has a right on the VM, but not this one.
    unentitled: u16,
    /// The rights that let in.
    entitled: &'static [&'static str],
}

/// All paths about the VM `apple` and about all VMs.
fn cases(web: &Web) -> Vec<Case> {
    let space = web.namespace.name();
    let case = |method, path: String, nobody, unentitled, entitled| Case {
        method,
        path,
        body: "from=detail".into(),
        nobody,
        unentitled,
        entitled,
    };
    let act = |action: &str| web.path("apple", &format!("/{action}"));
    let mut cases = vec![
        case("GET", web.path("apple", ""), 303, 200, RIGHTS.as_slice()),
        case("GET", format!("/live/vm/{space}/apple"), 401, 200, RIGHTS.as_slice()),
        case("GET", act("console"), 303, 403, CONSOLE),
        case("GET", act("serial"), 303, 403, CONSOLE),
        case("POST", act("connection"), 401, 403, CONSOLE),
        case("GET", act("objects"), 303, 403, &[]),
        Case { body: "cpus=&ram=".into(), ..case("POST", act("size"), 401, 403, &[]) },
        Case { body: format!("action=start&vm={space}/apple"), ..case("POST", "/vms/act".into(), 401, 404, &[]) },
        case("POST", act("release"), 401, 403, &[]),
    ];
    for (action, entitled) in [("start", &["start"][..]), ("stop", &["stop"]), ("reset", &["reset"])] {
        cases.push(case("POST", act(action), 401, 403, entitled));
    }
    cases.extend(["restart", "pause", "resume"].map(|action| case("POST", act(action), 401, 403, &[])));
    cases.extend(["/vms", "/vms/new", "/pools", "/templates"].map(|path| case("GET", path.to_owned(), 303, 404, &[])));
    cases.extend(["/live/list", "/live/pools"].map(|path| case("GET", path.to_owned(), 401, 404, &[])));
    cases.push(case("POST", "/vms/new".into(), 401, 404, &[]));
    cases
}

#[tokio::test]
async fn each_path_asks_for_its_right() {
    let users = [&["admin", "other", "gone", "removed"], RIGHTS.as_slice()].concat();
    let web = Web::new("web-rights", &configuration(&users)).await;
    let mut permissions: Vec<Value> = RIGHTS.map(|right| json!({ "user": right, "may": [right] })).into();
    permissions.extend(["gone", "removed"].map(|user| json!({ "user": user, "may": ["*"] })));
    web.create_vm("apple", json!(permissions)).await;
    let cases = cases(&web);
    let origin = format!("http://{}", web.address);
    let status = async |browser: &Browser, case: &Case| {
        browser.open(case.method, &case.path, &[("origin", &origin)], &case.body).await.0.status
    };
    let mut browsers = Vec::new();
    for user in &users {
        browsers.push((*user, web.sign_in(user).await));
    }
    let of = |user: &str| browsers.iter().find(|(known, _)| *known == user).unwrap().1.clone();
    // One session ends by its person, one by an administrator, and one because its user is removed.
    let (out, gone, removed) = (web.sign_in("start").await, of("gone"), of("removed"));
    out.post("/sign-out", "").await;
    let revoked = Command::new(env!("CARGO_BIN_EXE_vm-web"))
        .args(["revoke", "gone"])
        .env("KUBECONFIG", web.kubeconfig())
        .output()
        .unwrap();
    assert!(revoked.status.success(), "{}", String::from_utf8_lossy(&revoked.stderr));
    let remaining: Vec<_> = users.iter().copied().filter(|user| *user != "removed").collect();
    std::fs::write(web.folder.path().join("config.yaml"), configuration(&remaining)).unwrap();
    for ended in [&gone, &removed] {
        eventually("the session to end", LIMIT, async || (ended.get("/home").await.status == 303).then_some(())).await;
    }

    for case in &cases {
        let name = format!("{} {}", case.method, case.path);
        for (who, browser) in [("nobody", &web.nobody()), ("out", &out), ("revoked", &gone), ("removed", &removed)] {
            assert_eq!(status(browser, case).await, case.nobody, "{who}: {name}");
        }
        assert_eq!(status(&of("other"), case).await, 404, "other: {name}");
        for user in RIGHTS.iter().chain(&["admin"]) {
            let got = status(&of(user), case).await;
            // 409: the VM is not in a state for that.
            let is_let_in = *user == "admin" || case.entitled.contains(user);
            if is_let_in {
                assert!([200, 303, 409].contains(&got), "{user}: {name}: {got}");
            } else {
                assert_eq!(got, case.unentitled, "{user}: {name}");
            }
        }
    }
    // The sockets of the consoles. Whoever may not take the screen neither watches another person there nor asks her for it.
    for (console, wish, entitled) in [
        ("console", "control", CONSOLE),
        ("console", "watch", &["takeConsole"]),
        ("console", "ask", &["takeConsole"]),
        ("console", "takeOver", &["takeConsole"]),
        ("serial", "control", CONSOLE),
        ("serial", "watch", CONSOLE),
        ("serial", "ask", CONSOLE),
        ("serial", "takeOver", &["takeConsole"]),
    ] {
        let path = web.path("apple", &format!("/{console}/socket?wish={wish}"));
        let got = async |browser: &Browser| browser.socket(&path, Some(&origin)).await.err();
        for ended in [&web.nobody(), &out, &gone, &removed] {
            assert_eq!(got(ended).await, Some(303), "{path}");
        }
        assert_eq!(got(&of("other")).await, Some(404), "{path}");
        for user in RIGHTS.iter().chain(&["admin"]) {
            let is_let_in = *user == "admin" || entitled.contains(user);
            assert_eq!(got(&of(user)).await, (!is_let_in).then_some(403), "{user}: {path}");
        }
    }
    for (user, has_buttons) in [("accessConsole", false), ("takeConsole", true), ("admin", true)] {
        let page = of(user).get(&web.path("apple", "/console")).await.body;
        let buttons = ["watch", "ask", "take"].map(|name| page.contains(&format!("id=\"console-{name}\"")));
        assert_eq!(buttons, [has_buttons; 3], "{user}: {page}");
    }
    // Of many VMs, those that are not changed are named, also one that does not exist.
    let body = format!("action=start&vm={0}/apple&vm={0}/none", web.namespace.name());
    let answer = of("admin").post("/vms/act", &body).await;
    assert_eq!((answer.status, answer.body.contains("none"), answer.body.contains("apple:")), (409, true, false));
    // What is no VM of the page is asked of nobody.
    for key in ["kube-system/x", "..%2f..", &format!("{}/..%2fsecrets", web.namespace.name()), "a%3fb/c%23d"] {
        let answer = of("admin").post("/vms/act", &format!("action=start&vm={key}")).await;
        assert_eq!((answer.status, answer.body.contains("Not found")), (409, true), "{key}: {}", answer.body);
    }
    assert_eq!(of("admin").post("/vms/act", &body.replace("start", "explode")).await.status, 404);

    // A VM that is not for somebody is as one that does not exist.
    let other = of("other");
    let (foreign, missing) = (other.get(&web.path("apple", "")).await, other.get(&web.path("none", "")).await);
    assert_eq!((foreign.status, &foreign.body), (missing.status, &missing.body));
    for path in ["/nothing", "/vms/a", "/vms/a/b/c/d", "/assets/../../etc/passwd", "/live/other"] {
        let status = other.get(path).await.status;
        assert_eq!(status, 404, "{path}");
    }
    // Who searches finds what her pages have.
    let found = async |user: &str, typed: &str| of(user).get(&format!("/palette?q={typed}")).await.body;
    assert_eq!(web.nobody().get("/palette?q=apple").await.status, 303);
    for typed in ["", "apple", "start"] {
        assert!(!found("other", typed).await.contains("apple"), "{typed}");
    }
    web.create_vm("pear", json!([{ "user": "start", "may": ["start"] }, { "user": "reset", "may": ["reset"] }])).await;
    for (user, what) in [("admin", "pear/start"), ("start", "pear/start"), ("reset", "pear\"")] {
        let body = found(user, "pear").await;
        assert!(body.contains(what), "{user}: {body}");
    }
    assert!(!found("reset", "pear").await.contains("pear/start"));
    assert!(!found("stop", "pear").await.contains("pear"));
    assert!(!found("start", "vms").await.contains("/vms/new"));
    let script = of("admin").get("/palette?q=%3Cscript%3E").await;
    assert!(script.status == 200 && !script.body.contains("<script"), "{}", script.body);
    assert_eq!(of("admin").get(&format!("/palette?q={}", "%C3%BC".repeat(300))).await.status, 200);
    assert!(of("start").get("/home").await.body.contains("apple"));
    assert!(!of("other").get("/home").await.body.contains("apple"));
    assert_eq!(web.nobody().get("/home").await.status, 303);
}

#[tokio::test]
async fn whoever_comes_when_all_places_are_taken_waits() {
    let mut file: Value = serde_json::from_str(&configuration(&["admin"])).unwrap();
    file["/Manager"]["/GuiSocketServer"] = json!({ "maxConnections": 2 });
    let web = Web::with("web-places", &file.to_string(), &["--probes=127.0.0.1:0"]).await;
    web.create_vm("apple", json!([])).await;
    let admin = web.sign_in("admin").await;
    let (_, mut first) = admin.open("GET", "/live/list", &[], "").await;
    let (_, second) = admin.open("GET", "/live/list", &[], "").await;
    until(&mut first, "vms", "").await;
    let mut third = Box::pin(admin.get("/vms"));
    assert!((&mut third).now_or_never().is_none());
    // While the others go on, it gets no answer.
    for number in 0..3 {
        web.set_status("apple", json!({ "phase": "Starting", "nodeName": format!("n{number}") })).await;
        until(&mut first, "vm", &format!("n{number}")).await;
        assert!((&mut third).now_or_never().is_none(), "two places are taken");
    }
    // The kubelet gets one, or it would end the others. At its port there is nothing else.
    let kubelet = super::Browser { address: web.first.probes(), cookie: None };
    assert_eq!((kubelet.get("/livez").await.status, kubelet.get("/readyz").await.status), (200, 200));
    assert_eq!((kubelet.get("/sign-in").await.status, kubelet.get("/").await.status), (404, 404));
    drop(second);
    assert_eq!(third.await.status, 200);
}

#[tokio::test]
async fn attempts_are_counted_by_address_too() {
    let web = Web::new("web-attempts", &configuration(&["admin"])).await;
    let nobody = web.nobody();
    // Each attempt is for another user, and too long to be compared with anything.
    let (mut wrong, long) = (0, "x".repeat(2000));
    let refused = loop {
        let answer = nobody.sign_in(&format!("guess-{wrong}"), &long).await;
        if answer.status == 429 {
            break answer;
        }
        assert_eq!(answer.status, 401);
        wrong += 1;
        assert!(wrong < 2000, "nothing stops who guesses");
    };
    assert!(wrong >= 120, "{wrong}");
    assert_eq!(refused.header("set-cookie"), None);
    assert!(web.first.log().contains("too many attempts to sign in"));
}

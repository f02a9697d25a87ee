//! Signing in with a real provider of OpenID Connect, npm's oidc-provider, in a real browser. `make web-test` installs it and runs this.

use std::{
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::json;
use tokio::net::TcpStream;

use super::{Chromium, Web};
use crate::support::{cluster::eventually, managed_namespace::LIMIT};

struct Provider(Child);

impl Drop for Provider {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
#[ignore = "needs npm's oidc-provider: make web-test"]
async fn a_person_signs_in_and_out_at_a_real_provider() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oidc");
    let node = Command::new("node")
        .args(["provider.mjs", &port.to_string()])
        .current_dir(folder)
        .stdout(Stdio::null())
        .spawn()
        .expect("node");
    let _provider = Provider(node);
    eventually("the provider", LIMIT, async || TcpStream::connect(("127.0.0.1", port)).await.ok()).await;
    let lab = json!({
        "name": "lab", "displayName": "Lab account", "issuer": format!("http://127.0.0.1:{port}"), "clientId": "vm-operator", "secret": "of-the-client",
        "authorizedRoles": ["vm-users"], "roleMappings": [{ "from": "vm-(.*)", "to": "$1" }],
    });
    let configuration = json!({ "/Manager": { "clusterName": "Lab", "/GuiHttpServer": { "/ConsoleWeblet": { "/WebConsole": {
        "/LoginConlet": {
            "users": [{ "name": "admin", "password": super::super::hash() }],
            "oidcProviders": [lab],
        },
        "/RoleConfigurator": { "rolesByUser": { "admin": ["admins"] } },
        "/RoleConletFilter": { "conletTypesByRole": { "admins": ["*"], "users": ["org.jdrupes.vmoperator.vmaccess.VmAccess"] } },
    } } } } });
    let web = Web::new("browser-provider", &configuration.to_string()).await;
    web.create_vm("apple", json!([{ "role": "users", "may": ["start"] }])).await;
    web.create_vm("pear", json!([{ "user": "admin", "may": ["start"] }])).await;
    let browser = Chromium::start().await;
    let page = browser.page().await;
    page.go(&web, "/vms").await;
    page.shows("Lab account").await;
    page.is_good().await;
    page.click("a[href='/sign-in/oidc/lab']").await;
    // The pages of the provider: a name, and the person's consent.
    let at_provider = format!("location.port === '{port}' && document.readyState === 'complete'");
    page.until(&format!("{at_provider} && !!document.querySelector('[name=login]')")).await;
    page.fill("[name=login]", "ann").await;
    page.fill("[name=password]", "anything").await;
    page.click("[type=submit]").await;
    page.until(&format!("{at_provider} && document.body.innerText.includes('Continue')")).await;
    page.click("[type=submit]").await;
    page.until("location.pathname === '/home' && document.readyState === 'complete'").await;
    page.shows("ann of the lab").await;
    page.shows("apple").await;
    page.until("!document.body.innerText.includes('pear')").await;
    page.click("form.who button").await;
    page.until(&format!("{at_provider} && document.body.innerText.includes('sign me out')")).await;
    page.click("button[name=logout]").await;
    page.until("location.pathname === '/sign-in' && document.readyState === 'complete'").await;
    page.go(&web, "/home").await;
    page.shows("Lab account").await;
}

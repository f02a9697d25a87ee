//! Signing in with a provider of OpenID Connect, and what an attacker may try there.

use std::fs;

use serde_json::{Value, json};

use super::{
    Answer, Browser, Web, hash,
    oidc_provider::{CLIENT, Provider, SECRET, Trick},
};

/// A configuration with that provider, a user `admin` with a password and the administrator's view, and a local user `bob`.
fn configuration(provider: &Provider, keys: Value) -> String {
    let mut lab = json!({
        "name": "lab", "displayName": "The <Lab>", "issuer": provider.issuer(), "clientId": CLIENT, "secret": SECRET,
        "authorizedRoles": ["staff"], "roleMappings": [{ "from": "team-(.*)", "to": "$1s" }],
    });
    lab.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let users = ["admin", "bob"].map(|name| json!({ "name": name, "password": hash() }));
    json!({ "/Manager": { "/GuiHttpServer": { "/ConsoleWeblet": { "/WebConsole": {
        "/LoginConlet": { "users": users, "oidcProviders": [lab] },
        "/RoleConfigurator": { "rolesByUser": { "admin": ["admins"], "*": ["all"] } },
        "/RoleConletFilter": { "conletTypesByRole": { "admins": ["*"], "all": ["org.jdrupes.vmoperator.vmaccess.VmAccess"] } },
    } } } } })
    .to_string()
}

fn ann() -> Value {
    json!({ "preferred_username": "ann", "name": "Ann <Lee>", "roles": ["staff", "team-tester"] })
}

/// The browser with the cookies of the answer.
fn with_cookies(browser: &Browser, answer: &Answer) -> Browser {
    let set = answer.headers.iter().filter(|(name, value)| name == "set-cookie" && !value.contains("Max-Age=0"));
    let cookies: Vec<&str> = set.map(|(_, value)| value.split(';').next().unwrap()).collect();
    Browser { cookie: (!cookies.is_empty()).then(|| cookies.join("; ")), ..browser.clone() }
}

/// Begins to sign in: the browser with its cookie, and the URL of the provider.
async fn begin(web: &Web) -> (Browser, String) {
    let nobody = web.nobody();
    let answer = nobody.get("/sign-in/oidc/lab").await;
    assert_eq!(answer.status, 303, "{}", answer.body);
    (with_cookies(&nobody, &answer), answer.header("location").unwrap().to_owned())
}

/// Signs somebody in at the provider, and returns to the web interface.
async fn sign_in(web: &Web, provider: &Provider, claims: Value) -> (Browser, Answer) {
    let (browser, url) = begin(web).await;
    let answer = browser.get(&provider.sign_in(&url, claims)).await;
    (with_cookies(&browser, &answer), answer)
}

fn log(web: &Web) -> String {
    fs::read_to_string(web.folder.path().join("log")).unwrap()
}

fn has_session(answer: &Answer) -> bool {
    answer.headers.iter().any(|(name, value)| name == "set-cookie" && value.starts_with("__Host-session"))
}

#[tokio::test]
async fn a_person_of_a_provider_signs_in_and_out() {
    let provider = Provider::start().await;
    let web = Web::new("web-oidc", &configuration(&provider, json!({}))).await;
    web.create_vm("apple", json!([{ "role": "testers", "may": ["start"] }])).await;
    web.create_vm("pear", json!([{ "role": "team-tester", "may": ["start"] }])).await;
    let page = web.nobody().get("/sign-in").await.body;
    assert!(page.contains("href=\"&#x2f;sign-in&#x2f;oidc&#x2f;lab\"") && page.contains("The &lt;Lab&gt;"), "{page}");
    assert!(page.contains("name=\"password\""), "{page}");

    let begun = web.nobody().get("/sign-in/oidc/lab").await;
    let cookie = begun.header("set-cookie").unwrap();
    assert!(cookie.starts_with("__Host-oidc="), "{cookie}");
    for attribute in ["HttpOnly", "Secure", "SameSite=Lax", "Path=/"] {
        assert!(cookie.contains(attribute), "{cookie}");
    }
    let (browser, answer) = sign_in(&web, &provider, ann()).await;
    assert_eq!((answer.status, answer.header("location")), (303, Some("/")), "{} {}", answer.body, log(&web));
    assert!(!browser.cookie.as_ref().unwrap().contains("__Host-oidc"));
    let home = browser.get("/home").await.body;
    assert!(home.contains("Ann &lt;Lee&gt;") && home.contains("apple") && !home.contains("pear"), "{home}");

    let out = browser.post("/sign-out", "").await;
    let end = format!(
        "{}/end?theme=dark&client_id=vm+web&post_logout_redirect_uri=http%3A%2F%2F127.0.0.1%3A{}%2Fsign-in",
        provider.issuer(),
        web.address.port()
    );
    assert_eq!((out.status, out.header("refresh")), (200, Some(format!("0; url={end}").as_str())));
    assert!(
        out.body.contains(&format!("href=\"{}\"", end.replace('&', "&amp;").replace('/', "&#x2f;"))),
        "{}",
        out.body
    );
    assert_eq!(browser.get("/home").await.status, 303, "the session has ended");
    // A user with a password has nothing to do with the provider.
    let local = web.sign_in("admin").await.post("/sign-out", "").await;
    assert_eq!((local.status, local.header("location"), local.header("refresh")), (303, Some("/sign-in"), None));

    // Other signatures, other keys, and claims that are elsewhere.
    provider.play(Trick::Rsa);
    assert_eq!(sign_in(&web, &provider, ann()).await.1.status, 303, "{}", log(&web));
    for trick in [Trick::OwnParty, Trick::FastClock] {
        provider.play(trick);
        assert_eq!(sign_in(&web, &provider, ann()).await.1.status, 303, "{trick:?} {}", log(&web));
    }
    provider.play(Trick::UserinfoOnly);
    let (browser, _) = sign_in(&web, &provider, ann()).await;
    assert!(browser.get("/home").await.body.contains("apple"), "{}", log(&web));
    provider.play(Trick::None);
    provider.rotate();
    assert_eq!(sign_in(&web, &provider, ann()).await.1.status, 303, "{}", log(&web));

    // Her rights follow the configuration: she is not let in any more.
    let (browser, _) = sign_in(&web, &provider, ann()).await;
    assert_eq!(browser.get("/home").await.status, 200);
    let stricter = configuration(&provider, json!({ "authorizedRoles": ["chiefs"] }));
    fs::write(web.folder.path().join("config.yaml"), stricter).unwrap();
    crate::support::cluster::eventually("the end of her session", super::LIMIT, async || {
        (browser.get("/home").await.status == 303).then_some(())
    })
    .await;
    let log = log(&web);
    assert!(log.contains("\"user\":\"ann\"") && log.contains("\"provider\":\"lab\""), "{log}");
    for secret in [SECRET, "code+", "access-", "eyJ"] {
        assert!(!log.contains(secret), "{secret} in {log}");
    }
}

#[tokio::test]
async fn who_can_not_be_trusted_is_not_let_in() {
    let provider = Provider::start().await;
    let web = Web::new("web-oidc-attacks", &configuration(&provider, json!({}))).await;
    // The provider's answer, or somebody between.
    for (trick, why) in [
        (Trick::WrongNonce, "the ID token is of another sign-in"),
        (Trick::NoNonce, "the ID token is of another sign-in"),
        (Trick::WrongAudience, "the ID token is not for this program alone"),
        (Trick::TwoAudiences, "the ID token is not for this program alone"),
        (Trick::OtherIssuer, "the ID token was issued by another provider"),
        (Trick::Expired, "the ID token has expired"),
        (Trick::OtherParty, "the ID token was issued to another program"),
        (Trick::Future, "the ID token was issued in the future"),
        (Trick::Old, "the ID token was issued too long ago"),
        (Trick::NotYet, "the ID token is not in force yet"),
        (Trick::WrongSignature, "the ID token has a signature that is not the provider's"),
        (Trick::Unsigned, "the ID token is not signed with a key that others can check"),
        (Trick::SignedWithSecret, "the ID token is not signed with a key that others can check"),
        (Trick::OtherKey, "the ID token has a signature that is not the provider's"),
        (Trick::OtherAccessToken, "the ID token does not belong to the access token"),
        (Trick::OtherSubject, "speaks of another subject"),
        (Trick::NoIdToken, "has no ID token"),
        (Trick::NoJson, "does not answer as expected"),
    ] {
        provider.play(trick);
        let before = log(&web).len();
        let (_, answer) = sign_in(&web, &provider, ann()).await;
        assert_eq!((answer.status, has_session(&answer)), (502, false), "{trick:?}");
        assert!(log(&web)[before..].contains(why), "{trick:?}: {}", &log(&web)[before..]);
        assert!(!answer.body.contains("nonce") && !answer.body.contains("panicked"), "{}", answer.body);
    }
    provider.play(Trick::None);

    // Who is not let in.
    let page = |kind: &str| format!("<p>{kind}");
    let refused = [
        (json!({ "preferred_username": "ann", "roles": ["other"] }), "None of your roles lets you in here."),
        (json!({ "preferred_username": "ann" }), "None of your roles lets you in here."),
        (json!({ "preferred_username": "bob", "roles": ["staff"] }), "Another user has your name here."),
        (json!({ "roles": ["staff"] }), "What the other side says of you"),
        (json!({ "preferred_username": "a\nset-cookie: x=y", "roles": ["staff"] }), "What the other side says of you"),
    ];
    for (claims, text) in refused {
        let (_, answer) = sign_in(&web, &provider, claims.clone()).await;
        assert_eq!((answer.status, has_session(&answer)), (403, false), "{claims}");
        assert!(answer.body.contains(&page(text)), "{claims}: {}", answer.body);
    }

    // What comes back is not what was sent, or comes back to another browser.
    let asked = provider.token_requests();
    let (browser, url) = begin(&web).await;
    let (other, other_url) = begin(&web).await;
    let back = provider.sign_in(&url, ann());
    let state = |path: &str| path.split("state=").nth(1).unwrap().split('&').next().unwrap().to_owned();
    for (who, browser, path) in [
        ("nobody", &web.nobody(), back.clone()),
        ("another browser", &other, back.clone()),
        (
            "the state of another sign-in",
            &browser,
            back.replace(&state(&back), &state(&provider.sign_in(&other_url, ann()))),
        ),
        ("no state", &browser, back.replace("state=", "other=")),
        ("another issuer", &browser, back.replace("iss=http", "iss=https")),
        ("nothing", &browser, "/oauth/callback".into()),
    ] {
        let answer = browser.get(&path).await;
        assert_eq!((answer.status, has_session(&answer)), (400, false), "{who}");
        assert!(answer.header("set-cookie").unwrap().contains("Max-Age=0"), "{who}");
    }
    assert_eq!(provider.token_requests(), asked, "no code was exchanged");
    // The code of another sign-in, with the right state.
    let code = |path: &str| path.split("code=").nth(1).unwrap().split('&').next().unwrap().to_owned();
    let other_back = provider.sign_in(&other_url, ann());
    let answer = browser.get(&back.replace(&code(&back), &code(&other_back))).await;
    assert_eq!((answer.status, has_session(&answer)), (502, false));
    assert!(log(&web).contains("invalid_grant") && !log(&web).contains("code+"), "{}", log(&web));
    // It is good once.
    let first = browser.get(&back).await;
    assert!(has_session(&first), "{}", log(&web));
    assert_eq!(with_cookies(&browser, &first).get(&back).await.status, 400, "the cookie is gone");
    assert_eq!(browser.get(&back).await.status, 502, "and the provider knows the code");
    // A session that somebody has put into the browser is not the one that she gets.
    let (browser, url) = begin(&web).await;
    let planted = web.sign_in("admin").await.cookie.unwrap();
    let both = Browser { cookie: Some(format!("{planted}; {}", browser.cookie.as_ref().unwrap())), ..browser.clone() };
    let answer = both.get(&provider.sign_in(&url, ann())).await;
    assert!(has_session(&answer) && with_cookies(&browser, &answer).cookie.as_ref() != Some(&planted));
    assert_eq!(Browser { cookie: Some(planted), ..browser.clone() }.get("/vms").await.status, 303, "it has ended");

    // What the provider says is text.
    let (browser, url) = begin(&web).await;
    let state = state(&provider.sign_in(&url, ann()));
    let path = format!(
        "/oauth/callback?state={state}&error=access_denied&error_description=%3Cscript%3Ealert(1)%3C/script%3E%0d%0aset-cookie:%20a=b"
    );
    let answer = browser.get(&path).await;
    assert_eq!(answer.status, 403);
    assert!(
        answer.body.contains("access_denied: &lt;script&gt;") && !answer.body.contains("<script>alert"),
        "{}",
        answer.body
    );
    assert!(answer.headers.iter().all(|(_, value)| !value.contains("a=b")), "{:?}", answer.headers);
    // Without its state it is not shown at all.
    assert!(!web.nobody().get(&path).await.body.contains("access_denied"));
    assert_eq!(web.nobody().get("/sign-in/oidc/none").await.status, 404);
}

#[tokio::test]
async fn a_provider_that_can_not_be_used_is_no_way_in() {
    let provider = Provider::start().await;
    let elsewhere =
        json!({ "configurationEndpoint": "http://127.0.0.1:1/.well-known/openid-configuration", "issuer": null });
    let web = Web::new("web-oidc-down", &configuration(&provider, elsewhere)).await;
    let answer = web.nobody().get("/sign-in/oidc/lab").await;
    assert_eq!((answer.status, answer.header("set-cookie")), (502, None));
    assert!(log(&web).contains("the server can't be reached"), "{}", log(&web));
    // The document of another provider.
    let change = async |keys: Value| {
        let before = log(&web).len();
        fs::write(web.folder.path().join("config.yaml"), configuration(&provider, keys)).unwrap();
        crate::support::cluster::eventually("the new configuration", super::LIMIT, async || {
            log(&web)[before..].contains("has changed").then_some(())
        })
        .await;
        web.nobody().get("/sign-in/oidc/lab").await
    };
    let endpoint = format!("{}/.well-known/openid-configuration", provider.issuer());
    let answer = change(json!({ "configurationEndpoint": endpoint, "issuer": "https://id.example" })).await;
    assert_eq!(answer.status, 502);
    assert!(log(&web).contains("the discovery document is of the issuer"), "{}", log(&web));
    // Endpoints of the configuration take precedence, and so does the URI to which it sends people.
    let keys = json!({ "configurationEndpoint": endpoint, "authorizationEndpoint": "https://id.example/a?b=c", "scopes": ["groups"] });
    let answer = change(keys).await;
    let url = answer.header("location").unwrap();
    assert!(url.starts_with("https://id.example/a?b=c&") && url.contains("scope=openid+groups"), "{url}");
}

//! A provider of OpenID Connect for the tests: it checks what it is sent, signs with real keys, and plays a trick if a test wants one.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use axum::{
    Form, Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use k8s_openapi::{ByteString, jiff::Timestamp};
use ring::{
    hmac,
    rand::SystemRandom,
    rsa,
    signature::{self, EcdsaKeyPair, KeyPair, RsaKeyPair},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use url::Url;

/// The name and the password of the web interface there.
pub const CLIENT: &str = "vm web";
pub const SECRET: &str = "hush: 100%";

/// What is wrong with an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Trick {
    None,
    /// Signed with RSA instead of an elliptic curve: no trick.
    Rsa,
    /// Claims come from the userinfo endpoint alone: no trick.
    UserinfoOnly,
    WrongNonce,
    NoNonce,
    WrongAudience,
    TwoAudiences,
    OtherIssuer,
    Expired,
    /// It was issued to another client, for this one too.
    OtherParty,
    /// It was issued to this client: no trick.
    OwnParty,
    /// It will be issued in an hour.
    Future,
    /// It was issued an hour ago.
    Old,
    /// It is in force in an hour.
    NotYet,
    /// The clock of the provider is half a minute fast: no trick.
    FastClock,
    /// The claims were changed after they were signed.
    WrongSignature,
    /// `alg: none`.
    Unsigned,
    /// Signed with the client's secret.
    SignedWithSecret,
    /// Signed with a key that is not the provider's, under its name.
    OtherKey,
    OtherAccessToken,
    /// The userinfo endpoint speaks of somebody else.
    OtherSubject,
    NoIdToken,
    NoJson,
}

struct Grant {
    nonce: String,
    challenge: String,
    redirect: String,
    claims: Value,
}

struct Inner {
    issuer: String,
    trick: Trick,
    curve: EcdsaKeyPair,
    /// The name of that key; another one each time that it is made anew.
    number: usize,
    rsa: RsaKeyPair,
    codes: HashMap<String, Grant>,
    claims: Value,
    token_requests: usize,
}

#[derive(Clone)]
pub struct Provider(Arc<Mutex<Inner>>);

fn curve() -> EcdsaKeyPair {
    let (kind, random) = (&signature::ECDSA_P256_SHA256_FIXED_SIGNING, SystemRandom::new());
    let key = EcdsaKeyPair::generate_pkcs8(kind, &random).unwrap();
    EcdsaKeyPair::from_pkcs8(kind, key.as_ref(), &random).unwrap()
}

fn base64(bytes: &[u8]) -> String {
    json!(ByteString(bytes.to_vec())).as_str().unwrap().to_owned()
}

fn base64_url(bytes: &[u8]) -> String {
    base64(bytes).trim_end_matches('=').replace('+', "-").replace('/', "_")
}

impl Provider {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let inner = Inner {
            issuer: format!("http://{}", listener.local_addr().unwrap()),
            trick: Trick::None,
            curve: curve(),
            number: 1,
            rsa: RsaKeyPair::from_pkcs8(include_bytes!("rs256.pk8")).unwrap(),
            codes: HashMap::new(),
            claims: json!({}),
            token_requests: 0,
        };
        let provider = Self(Arc::new(Mutex::new(inner)));
        let routes = Router::new()
            .route("/.well-known/openid-configuration", get(discovery))
            .route("/keys", get(keys))
            .route("/token", post(token))
            .route("/userinfo", get(userinfo))
            .with_state(provider.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        provider
    }

    pub fn issuer(&self) -> String {
        self.0.lock().unwrap().issuer.clone()
    }

    /// How often a code was to be exchanged.
    pub fn token_requests(&self) -> usize {
        self.0.lock().unwrap().token_requests
    }

    pub fn play(&self, trick: Trick) {
        self.0.lock().unwrap().trick = trick;
    }

    /// From now on it signs with another key.
    pub fn rotate(&self) {
        let mut inner = self.0.lock().unwrap();
        inner.curve = curve();
        inner.number += 1;
    }

    /// A person with these claims signs in at the URL to which her browser was sent. Returns the path and the query to which it is sent then.
    pub fn sign_in(&self, url: &str, claims: Value) -> String {
        let url = Url::parse(url).unwrap();
        let query: HashMap<String, String> = url.query_pairs().into_owned().collect();
        let mut inner = self.0.lock().unwrap();
        assert_eq!(url.as_str().split('?').next().unwrap(), format!("{}/authorize", inner.issuer));
        assert_eq!((query["response_type"].as_str(), query["client_id"].as_str()), ("code", CLIENT));
        assert_eq!(
            (query["scope"].as_str(), query["code_challenge_method"].as_str()),
            ("openid profile email", "S256")
        );
        assert!(query["state"].len() >= 16 && query["nonce"].len() >= 16, "{query:?}");
        let code = format!("code+{}/{}", inner.codes.len(), base64_url(&Sha256::digest(&query["state"])));
        let redirect = query["redirect_uri"].clone();
        let grant = Grant {
            nonce: query["nonce"].clone(),
            challenge: query["code_challenge"].clone(),
            redirect: redirect.clone(),
            claims,
        };
        inner.codes.insert(code.clone(), grant);
        let mut back = Url::parse(&redirect).unwrap();
        back.query_pairs_mut()
            .append_pair("code", &code)
            .append_pair("state", &query["state"])
            .append_pair("iss", &inner.issuer);
        format!("{}?{}", back.path(), back.query().unwrap())
    }
}

async fn discovery(State(Provider(inner)): State<Provider>) -> Json<Value> {
    let issuer = inner.lock().unwrap().issuer.clone();
    Json(json!({
        "issuer": issuer, "authorization_endpoint": format!("{issuer}/authorize"), "token_endpoint": format!("{issuer}/token"),
        "jwks_uri": format!("{issuer}/keys"), "userinfo_endpoint": format!("{issuer}/userinfo"),
        "end_session_endpoint": format!("{issuer}/end?theme=dark"),
    }))
}

async fn keys(State(Provider(inner)): State<Provider>) -> Json<Value> {
    let inner = inner.lock().unwrap();
    let (point, rsa) =
        (inner.curve.public_key().as_ref(), rsa::PublicKeyComponents::<Vec<u8>>::from(inner.rsa.public()));
    Json(json!({ "keys": [
        { "kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "kid": format!("curve-{}", inner.number),
          "x": base64_url(&point[1..33]), "y": base64_url(&point[33..]) },
        { "kty": "RSA", "use": "sig", "alg": "RS256", "kid": "rsa", "n": base64_url(&rsa.n), "e": base64_url(&rsa.e) },
    ] }))
}

async fn token(
    State(Provider(inner)): State<Provider>,
    headers: HeaderMap,
    Form(form): Form<HashMap<String, String>>,
) -> Response {
    let mut inner = inner.lock().unwrap();
    inner.token_requests += 1;
    let refused = |code: &str| {
        let why = json!({ "error": code, "error_description": format!("not {}", form["code"]) });
        (StatusCode::BAD_REQUEST, Json(why)).into_response()
    };
    let expected = format!("Basic {}", base64(b"vm+web:hush%3A+100%25"));
    if headers.get(header::AUTHORIZATION).is_none_or(|value| *value != *expected) {
        return refused("invalid_client");
    }
    assert_eq!(form["grant_type"], "authorization_code");
    // A code is good once, and only for whoever began the sign-in.
    let Some(grant) = inner.codes.remove(&form["code"]) else { return refused("invalid_grant") };
    let verifier = base64_url(&Sha256::digest(&form["code_verifier"]));
    if verifier != grant.challenge || form["redirect_uri"] != grant.redirect {
        return refused("invalid_grant");
    }
    let access = format!("access-{}", inner.token_requests);
    inner.claims = grant.claims.clone();
    let trick = inner.trick;
    let now = Timestamp::now().as_second();
    let hashed = |text: &str| base64_url(&Sha256::digest(text)[..16]);
    let mut claims = json!({
        "iss": inner.issuer, "sub": "7", "aud": CLIENT, "iat": now, "exp": now + 60, "nonce": grant.nonce, "at_hash": hashed(&access),
    });
    if trick != Trick::UserinfoOnly && trick != Trick::OtherSubject {
        claims.as_object_mut().unwrap().extend(grant.claims.as_object().unwrap().clone());
    }
    match trick {
        Trick::WrongNonce => claims["nonce"] = json!("0123456789abcdef"),
        Trick::NoNonce => drop(claims.as_object_mut().unwrap().remove("nonce")),
        Trick::WrongAudience => claims["aud"] = json!("another program"),
        Trick::TwoAudiences => claims["aud"] = json!([CLIENT, "another program"]),
        Trick::OtherIssuer => claims["iss"] = json!("https://id.example"),
        Trick::Expired => (claims["iat"], claims["exp"]) = (json!(now - 120), json!(now - 60)),
        Trick::OtherParty => claims["azp"] = json!("another program"),
        Trick::OwnParty => claims["azp"] = json!(CLIENT),
        Trick::Future => (claims["iat"], claims["exp"]) = (json!(now + 3600), json!(now + 7200)),
        Trick::Old => claims["iat"] = json!(now - 3600),
        Trick::NotYet => claims["nbf"] = json!(now + 3600),
        Trick::FastClock => (claims["iat"], claims["nbf"]) = (json!(now + 30), json!(now + 30)),
        Trick::OtherAccessToken => claims["at_hash"] = json!(hashed("another one")),
        _ => {}
    }
    let mut answer = json!({ "access_token": access, "token_type": "Bearer", "expires_in": 60 });
    match trick {
        Trick::NoJson => return (StatusCode::OK, "<html>").into_response(),
        Trick::NoIdToken => {}
        _ => answer["id_token"] = inner.signed(&claims).into(),
    }
    Json(answer).into_response()
}

impl Inner {
    fn signed(&self, claims: &Value) -> String {
        let kid = format!("curve-{}", self.number);
        let head = match self.trick {
            Trick::Rsa => json!({ "alg": "RS256", "kid": "rsa" }),
            Trick::Unsigned => json!({ "alg": "none" }),
            Trick::SignedWithSecret => json!({ "alg": "HS256" }),
            _ => json!({ "alg": "ES256", "kid": kid, "typ": "JWT" }),
        };
        let text = |claims: &Value| {
            format!("{}.{}", base64_url(head.to_string().as_bytes()), base64_url(claims.to_string().as_bytes()))
        };
        let signed = text(claims);
        let random = SystemRandom::new();
        let signature = match self.trick {
            Trick::Rsa => {
                let mut signature = vec![0; self.rsa.public().modulus_len()];
                self.rsa.sign(&signature::RSA_PKCS1_SHA256, &random, signed.as_bytes(), &mut signature).unwrap();
                signature
            }
            Trick::Unsigned => Vec::new(),
            Trick::SignedWithSecret => {
                let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
                hmac::sign(&key, signed.as_bytes()).as_ref().to_vec()
            }
            Trick::OtherKey => curve().sign(&random, signed.as_bytes()).unwrap().as_ref().to_vec(),
            _ => self.curve.sign(&random, signed.as_bytes()).unwrap().as_ref().to_vec(),
        };
        let sent = match self.trick {
            Trick::WrongSignature => {
                let mut changed = claims.clone();
                changed["preferred_username"] = json!("somebody else");
                text(&changed)
            }
            _ => signed,
        };
        format!("{sent}.{}", base64_url(&signature))
    }
}

async fn userinfo(State(Provider(inner)): State<Provider>, headers: HeaderMap) -> Response {
    let inner = inner.lock().unwrap();
    let expected = format!("Bearer access-{}", inner.token_requests);
    if headers.get(header::AUTHORIZATION).is_none_or(|value| *value != *expected) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let mut claims = inner.claims.clone();
    claims["sub"] = json!(if inner.trick == Trick::OtherSubject { "8" } else { "7" });
    Json(claims).into_response()
}

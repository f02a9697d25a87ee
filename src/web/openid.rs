//! OpenID Connect as a client: the code flow with PKCE, nonce and discovery
//! (<https://openid.net/specs/openid-connect-core-1_0.html#CodeFlowAuth>, RFC 7636, RFC 9207).
//!
//! ```text
//!  begin ─▶ URL of the provider ─▶ (the person signs in) ─▶ code ─▶ finish ─▶ tokens ─▶ checked claims
//! ```
//!
//! # Guarantees
//! - Claims are of an ID token that [`super::id_token`] trusts, or of the userinfo endpoint for the same subject.
//! - No error has a code, a token or a secret.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use axum::http::{Request, Response, header, request::Builder};
use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;
use url::{Url, form_urlencoded};

use super::{
    id_token::{Expected, Keys, TokenError, verify},
    provider::{Profile, Provider, Secret, check_url},
    session::random_name,
    web_client::{WebClient, WebError},
};
use crate::process::{ErrorChain, lock};

/// How long what a provider says of itself is used. Its keys are read again sooner if a token is signed with another one.
const KEPT: Duration = Duration::from_secs(3600);
/// When a provider is asked again that could not be used.
const AGAIN: Duration = Duration::from_secs(5);

/// Why somebody can't sign in with a provider.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenIdError {
    /// It was asked a moment ago, and that failed.
    #[error("{0} (tried a moment ago)")]
    Before(String),
    /// The operating system has none.
    #[error("there are no random numbers")]
    Random(#[from] getrandom::Error),
    /// There is no answer.
    #[error("{url}")]
    Request {
        /// The URL.
        url: String,
        /// Why.
        source: WebError,
    },
    /// The answer is an error.
    #[error("{url} answers with {status}")]
    Status {
        /// The URL.
        url: String,
        /// The code.
        status: u16,
    },
    /// The answer is not what was asked for.
    #[error("{url} does not answer as expected")]
    Answer {
        /// The URL.
        url: String,
        /// Why.
        source: serde_json::Error,
    },
    /// The discovery document does not have what is needed.
    #[error("the discovery document has no {0}, and the configuration has none")]
    Missing(&'static str),
    /// The discovery document is of another provider.
    #[error("the discovery document is of the issuer {found}; if that is right, set the provider's issuer to it")]
    OtherIssuer {
        /// Of whom it is.
        found: String,
    },
    /// A URL can't be used.
    #[error("{0} is no URL")]
    Url(String),
    /// The provider does not take the code.
    #[error("the provider does not take the code: {0}")]
    Refused(String),
    /// The provider has sent no ID token.
    #[error("the provider's answer has no ID token")]
    NoToken,
    /// The ID token is not trusted.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The userinfo endpoint speaks of somebody else.
    #[error("{url} speaks of another subject")]
    OtherSubject {
        /// The URL.
        url: String,
    },
}

/// A sign-in that has begun: what the browser keeps until the person returns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Begun {
    /// The provider's name.
    pub provider: String,
    /// What the provider sends back with the person.
    pub state: String,
    /// Where it sends her.
    pub redirect: String,
    nonce: String,
    verifier: String,
}

/// The part of the answer to a code that is used (OpenID Connect Core 1.0, 3.1.3.3).
#[derive(Deserialize)]
struct Tokens {
    access_token: String,
    id_token: Option<String>,
}

/// The answer to a code that the provider does not take (RFC 6749, 5.2).
#[derive(Deserialize)]
struct RefusedCode {
    error: String,
    error_description: Option<String>,
}

/// The part of a discovery document that is used (OpenID Connect Discovery 1.0, 3; RP-Initiated Logout 1.0, 2.1).
#[derive(Default, Deserialize)]
struct Document {
    issuer: String,
    authorization_endpoint: Option<String>,
    token_endpoint: Option<String>,
    userinfo_endpoint: Option<String>,
    jwks_uri: Option<String>,
    end_session_endpoint: Option<String>,
    token_endpoint_auth_methods_supported: Option<Vec<String>>,
}

/// What is known of a provider.
struct Known {
    /// What was configured then.
    provider: Provider,
    issuer: String,
    authorization_endpoint: String,
    token_endpoint: String,
    userinfo_endpoint: Option<String>,
    end_session_endpoint: Option<String>,
    is_secret_in_body: bool,
    keys: Keys,
    since: Instant,
}

/// What came of asking a provider.
#[derive(Default)]
struct Asked {
    known: Option<Arc<Known>>,
    failure: Option<Failure>,
}

/// Why a provider can't be used.
struct Failure {
    /// What was configured then.
    provider: Provider,
    why: String,
    since: Instant,
}

/// Speaks with providers.
#[derive(Default)]
pub(super) struct OpenId {
    http: OnceLock<WebClient>,
    /// By the provider's name. Each is locked while that provider is asked, so that it is asked once, and nobody waits for another one.
    asked: std::sync::Mutex<HashMap<String, Arc<Mutex<Asked>>>>,
}

impl OpenId {
    /// Begins a sign-in: the URL to which the person goes, and what her browser keeps. The provider sends her to `redirect`.
    ///
    /// # Errors
    /// If the provider can't be asked, or says something wrong of itself.
    pub async fn begin(&self, provider: &Provider, redirect: &str) -> Result<(String, Begun), OpenIdError> {
        let known = self.known(provider, false).await?;
        let (state, nonce) = (random_name()?, random_name()?);
        let verifier = random_name()? + &random_name()?;
        let scopes: Vec<&str> = ["openid"].into_iter().chain(provider.scopes.iter().map(String::as_str)).collect();
        let mut url = url(&known.authorization_endpoint)?;
        url.query_pairs_mut()
            .append_pair("response_type", "code")
            .append_pair("client_id", &provider.client_id)
            .append_pair("redirect_uri", redirect)
            .append_pair("scope", &scopes.join(" "))
            .append_pair("state", &state)
            .append_pair("nonce", &nonce)
            .append_pair("code_challenge", &URL_SAFE_NO_PAD.encode(Sha256::digest(&verifier)))
            .append_pair("code_challenge_method", "S256");
        let begun = Begun { provider: provider.name.clone(), state, redirect: redirect.to_owned(), nonce, verifier };
        Ok((url.into(), begun))
    }

    /// Exchanges the code, and returns the claims about the person.
    ///
    /// # Errors
    /// If the provider does not take the code, or its answer can't be trusted.
    pub async fn finish(
        &self,
        provider: &Provider,
        begun: Begun,
        code: String,
    ) -> Result<Map<String, Value>, OpenIdError> {
        let known = self.known(provider, false).await?;
        let Tokens { access_token, id_token } = self.exchange(&known, &begun, &code).await?;
        let token = id_token.ok_or(OpenIdError::NoToken)?;
        let verified = |known: &Known| {
            let expected = Expected {
                issuer: &known.issuer,
                client: &provider.client_id,
                nonce: &begun.nonce,
                access_token: &access_token,
                now: Timestamp::now().as_second(),
            };
            verify(&token, &known.keys, &expected)
        };
        let mut all = match verified(&known) {
            Err(TokenError::UnknownKey) => verified(&*self.known(provider, true).await?),
            result => result,
        }?;
        let is_asked = provider.userinfo_endpoint.is_some() || !Profile::is_complete(&all, &provider.roles_claim);
        if let Some(endpoint) = known.userinfo_endpoint.as_ref().filter(|_| is_asked) {
            let subject = all.get("sub").and_then(Value::as_str).unwrap_or_default();
            let info = self.userinfo(endpoint, &access_token, subject).await?;
            // What is signed counts.
            for (name, value) in info {
                all.entry(name).or_insert(value);
            }
        }
        Ok(all)
    }

    /// Where a person signs out of the provider too, if that is possible. Then the provider sends her to `back`.
    ///
    /// # Errors
    /// If the provider can't be asked.
    pub async fn end_session(&self, provider: &Provider, back: &str) -> Result<Option<String>, OpenIdError> {
        let known = self.known(provider, false).await?;
        let Some(endpoint) = &known.end_session_endpoint else { return Ok(None) };
        let mut url = url(endpoint)?;
        url.query_pairs_mut()
            .append_pair("client_id", &provider.client_id)
            .append_pair("post_logout_redirect_uri", back);
        Ok(Some(url.into()))
    }

    /// Whether the provider is the one who sends a person back: some say so.
    ///
    /// # Errors
    /// If the provider can't be asked.
    pub async fn is_issuer(&self, provider: &Provider, issuer: &str) -> Result<bool, OpenIdError> {
        Ok(self.known(provider, false).await?.issuer == issuer)
    }

    /// What is known of the provider. With `anew` its documents are read again.
    async fn known(&self, provider: &Provider, anew: bool) -> Result<Arc<Known>, OpenIdError> {
        let asked = lock(&self.asked).entry(provider.name.clone()).or_default().clone();
        let mut asked = asked.lock().await;
        let is_fresh = |known: &&Arc<Known>| !anew && known.provider == *provider && known.since.elapsed() < KEPT;
        if let Some(known) = asked.known.as_ref().filter(is_fresh) {
            return Ok(known.clone());
        }
        // Whoever has waited for the answer need not wait for the next one, too.
        let is_recent = |failure: &&Failure| failure.provider == *provider && failure.since.elapsed() < AGAIN;
        if let Some(failure) = asked.failure.as_ref().filter(is_recent) {
            return Err(OpenIdError::Before(failure.why.clone()));
        }
        match self.discover(provider).await {
            Ok(known) => {
                let known = Arc::new(known);
                *asked = Asked { known: Some(known.clone()), failure: None };
                Ok(known)
            }
            Err(error) => {
                let why = ErrorChain(&error).to_string();
                asked.failure = Some(Failure { provider: provider.clone(), why, since: Instant::now() });
                Err(error)
            }
        }
    }

    async fn discover(&self, provider: &Provider) -> Result<Known, OpenIdError> {
        let document = match &provider.discovery {
            Some(url) => {
                let document: Document = self.get(url, None).await?;
                let expected = provider.issuer.as_deref().or_else(|| Provider::issuer_of(url)).unwrap_or_default();
                if document.issuer != expected {
                    return Err(OpenIdError::OtherIssuer { found: document.issuer });
                }
                document
            }
            None => Document { issuer: provider.issuer.clone().unwrap_or_default(), ..Document::default() },
        };
        // Browsers are sent to some of them.
        let found = [&document.authorization_endpoint, &document.end_session_endpoint, &document.userinfo_endpoint];
        if let Some(wrong) = found.into_iter().flatten().find(|url| check_url(url).is_err()) {
            return Err(OpenIdError::Url(wrong.clone()));
        }
        let needed = |configured: &Option<String>, found: Option<String>, name| {
            configured.clone().or(found).ok_or(OpenIdError::Missing(name))
        };
        let keys = needed(&provider.jwks_uri, document.jwks_uri, "jwks_uri")?;
        let methods = document.token_endpoint_auth_methods_supported;
        Ok(Known {
            issuer: document.issuer,
            authorization_endpoint: needed(
                &provider.authorization_endpoint,
                document.authorization_endpoint,
                "authorization_endpoint",
            )?,
            token_endpoint: needed(&provider.token_endpoint, document.token_endpoint, "token_endpoint")?,
            userinfo_endpoint: provider.userinfo_endpoint.clone().or(document.userinfo_endpoint),
            end_session_endpoint: document.end_session_endpoint,
            is_secret_in_body: methods.is_some_and(|methods| {
                let has = |method: &str| methods.iter().any(|known| known == method);
                has("client_secret_post") && !has("client_secret_basic")
            }),
            keys: self.get(&keys, None).await?,
            provider: provider.clone(),
            since: Instant::now(),
        })
    }

    async fn exchange(&self, known: &Known, begun: &Begun, code: &str) -> Result<Tokens, OpenIdError> {
        let (url, (request, body)) = (&known.token_endpoint, code_request(known, begun, code));
        let answer = self.send(url, request, body).await?;
        if answer.status().is_client_error()
            && let Ok(RefusedCode { error, error_description }) = serde_json::from_slice(answer.body())
        {
            let why = error_description.map_or_else(|| error.clone(), |text| format!("{error}: {text}"));
            return Err(OpenIdError::Refused(why.replace(code, "(the code)")));
        }
        read(url, &answer)
    }

    async fn userinfo(&self, endpoint: &str, token: &str, subject: &str) -> Result<Map<String, Value>, OpenIdError> {
        let info: Map<String, Value> = self.get(endpoint, Some(token)).await?;
        match info.get("sub").and_then(Value::as_str) == Some(subject) {
            true => Ok(info),
            false => Err(OpenIdError::OtherSubject { url: endpoint.to_owned() }),
        }
    }

    async fn get<T: DeserializeOwned>(&self, url: &str, token: Option<&str>) -> Result<T, OpenIdError> {
        let mut request = Request::get(url);
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        read(url, &self.send(url, request, Vec::new()).await?)
    }

    async fn send(&self, url: &str, request: Builder, body: Vec<u8>) -> Result<Response<Vec<u8>>, OpenIdError> {
        let request = request.header(header::ACCEPT, "application/json").body(body);
        let request = request.map_err(|_| OpenIdError::Url(url.to_owned()))?;
        let failed = |source| OpenIdError::Request { url: url.to_owned(), source };
        self.client().map_err(failed)?.send(request).await.map_err(failed)
    }

    fn client(&self) -> Result<&WebClient, WebError> {
        match self.http.get() {
            Some(client) => Ok(client),
            None => {
                let client = WebClient::new()?;
                Ok(self.http.get_or_init(|| client))
            }
        }
    }
}

/// The request that exchanges a code (RFC 6749, 4.1.3), with its body. The name and the password of this program are sent as 2.3.1 says.
fn code_request(known: &Known, begun: &Begun, code: &str) -> (Builder, Vec<u8>) {
    let Provider { client_id, secret, .. } = &known.provider;
    let mut form = form_urlencoded::Serializer::new(String::new());
    form.append_pair("grant_type", "authorization_code")
        .append_pair("code", code)
        .append_pair("redirect_uri", &begun.redirect)
        .append_pair("code_verifier", &begun.verifier);
    let mut request = Request::post(&known.token_endpoint);
    match secret {
        Some(Secret(secret)) if !known.is_secret_in_body => {
            let encoded = |text: &str| form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>();
            let both = STANDARD.encode(format!("{}:{}", encoded(client_id), encoded(secret)));
            request = request.header(header::AUTHORIZATION, format!("Basic {both}"));
        }
        Some(Secret(secret)) => {
            form.append_pair("client_id", client_id).append_pair("client_secret", secret);
        }
        None => {
            form.append_pair("client_id", client_id);
        }
    }
    (request.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded"), form.finish().into_bytes())
}

/// The content of an answer that is no error.
fn read<T: DeserializeOwned>(url: &str, answer: &Response<Vec<u8>>) -> Result<T, OpenIdError> {
    if !answer.status().is_success() {
        return Err(OpenIdError::Status { url: url.to_owned(), status: answer.status().as_u16() });
    }
    serde_json::from_slice(answer.body()).map_err(|source| OpenIdError::Answer { url: url.to_owned(), source })
}

fn url(text: &str) -> Result<Url, OpenIdError> {
    Url::parse(text).map_err(|_| OpenIdError::Url(text.to_owned()))
}

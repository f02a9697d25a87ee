//! OpenID Connect as a client: the code flow with PKCE, nonce and discovery
//! (<https://openid.net/specs/openid-connect-core-1_0.html#CodeFlowAuth>, RFC 7636, RFC 9207).
//!
//! ```text
//!  begin ─▶ URL of the provider ─▶ (the person signs in) ─▶ code ─▶ finish ─▶ tokens ─▶ checked claims
//! ```
//!
//! # Guarantees
//! - Claims are of an ID token whose signature, issuer, audience, party, times and nonce are right, or of the userinfo endpoint for the same subject.
//! - Only signatures with a public key count: neither `none` nor one with the client's secret.
//! - No error has a code, a token or a secret.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use axum::http::{Method, Request, Response, header};
use futures::future::BoxFuture;
use k8s_openapi::jiff::Timestamp;
use openidconnect::{
    AccessTokenHash, AdditionalClaims, AsyncHttpClient, AuthType, AuthUrl, AuthenticationFlow, AuthorizationCode,
    ClaimsVerificationError, ClientId, ClientSecret, CsrfToken, IdToken, IssuerUrl, Nonce, OAuth2TokenResponse,
    PkceCodeChallenge, PkceCodeVerifier, RedirectUrl, RequestTokenError, Scope, SignatureVerificationError,
    TokenResponse, TokenUrl,
    core::{
        CoreClient, CoreGenderClaim, CoreIdTokenVerifier, CoreJsonWebKeySet, CoreJweContentEncryptionAlgorithm,
        CoreJwsSigningAlgorithm, CoreResponseType, CoreTokenResponse,
    },
    url::Url,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use tokio::sync::Mutex;

use super::{
    provider::{Profile, Provider, check_url},
    web_client::{WebClient, WebError},
};
use crate::process::{ErrorChain, lock};

/// How long what a provider says of itself is used. Its keys are read again sooner if a token is signed with another one.
const KEPT: Duration = Duration::from_secs(3600);
/// When a provider is asked again that could not be used.
const AGAIN: Duration = Duration::from_secs(5);

/// By how much the clock of a provider may differ from this one's, in seconds.
const SKEW: i64 = 60;
/// How old an ID token may be, in seconds: a person who signs in has this time, and her token is issued at its end.
const OLDEST: i64 = 600;

/// The signatures that count.
const SIGNATURES: [CoreJwsSigningAlgorithm; 9] = [
    CoreJwsSigningAlgorithm::RsaSsaPkcs1V15Sha256,
    CoreJwsSigningAlgorithm::RsaSsaPkcs1V15Sha384,
    CoreJwsSigningAlgorithm::RsaSsaPkcs1V15Sha512,
    CoreJwsSigningAlgorithm::RsaSsaPssSha256,
    CoreJwsSigningAlgorithm::RsaSsaPssSha384,
    CoreJwsSigningAlgorithm::RsaSsaPssSha512,
    CoreJwsSigningAlgorithm::EcdsaP256Sha256,
    CoreJwsSigningAlgorithm::EcdsaP384Sha384,
    CoreJwsSigningAlgorithm::EdDsa,
];

/// Why somebody can't sign in with a provider.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenIdError {
    /// It was asked a moment ago, and that failed.
    #[error("{0} (tried a moment ago)")]
    Before(String),
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
    /// The ID token can't be read.
    #[error("the ID token can't be read")]
    Unreadable,
    /// The ID token is not for this program, not for this sign-in, too old, or not the provider's.
    #[error("the ID token can't be trusted")]
    Untrusted(#[source] ClaimsVerificationError),
    /// The ID token was issued to another program of the same provider.
    #[error("the ID token was issued to {0}")]
    OtherParty(String),
    /// The ID token is of another time.
    #[error("the ID token {0}: if its provider's clock is right, look at the clock of this computer")]
    Time(&'static str),
    /// The access token is not the one of the ID token.
    #[error("the access token does not belong to the ID token")]
    OtherAccessToken,
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

/// The claims that the library does not know.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Others {
    #[serde(flatten)]
    claims: Map<String, Value>,
}

impl AdditionalClaims for Others {}

type Token = IdToken<Others, CoreGenderClaim, CoreJweContentEncryptionAlgorithm, CoreJwsSigningAlgorithm>;

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
    issuer: IssuerUrl,
    authorization_endpoint: String,
    token_endpoint: String,
    userinfo_endpoint: Option<String>,
    end_session_endpoint: Option<String>,
    is_secret_in_body: bool,
    keys: CoreJsonWebKeySet,
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
        let client =
            CoreClient::new(ClientId::new(provider.client_id.clone()), known.issuer.clone(), known.keys.clone())
                .set_auth_uri(url(&known.authorization_endpoint, AuthUrl::new)?)
                .set_redirect_uri(url(redirect, RedirectUrl::new)?);
        let (challenge, verifier) = PkceCodeChallenge::new_random_sha256();
        let flow = AuthenticationFlow::<CoreResponseType>::AuthorizationCode;
        let (url, state, nonce) = client
            .authorize_url(flow, CsrfToken::new_random, Nonce::new_random)
            .add_scopes(provider.scopes.iter().cloned().map(Scope::new))
            .set_pkce_challenge(challenge)
            .url();
        let begun = Begun {
            provider: provider.name.clone(),
            state: state.into_secret(),
            redirect: redirect.to_owned(),
            nonce: nonce.secret().clone(),
            verifier: verifier.into_secret(),
        };
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
        let answer = self.exchange(&known, &begun, code).await?;
        let token = answer.id_token().ok_or(OpenIdError::NoToken)?.to_string();
        let token: Token = token.parse().map_err(|_| OpenIdError::Unreadable)?;
        let nonce = Nonce::new(begun.nonce);
        let known = match token.claims(&known.verifier(), &nonce) {
            // The provider may have begun to use another key.
            Err(ClaimsVerificationError::SignatureVerification(SignatureVerificationError::NoMatchingKey)) => {
                self.known(provider, true).await?
            }
            _ => known,
        };
        let verifier = known.verifier();
        let claims = token.claims(&verifier, &nonce).map_err(OpenIdError::Untrusted)?;
        let others = &claims.additional_claims().claims;
        let party = claims.authorized_party().map(|party| party.as_str());
        check_party(party, &provider.client_id)?;
        check_times(claims.issue_time().timestamp(), others.get("nbf"), Timestamp::now().as_second())?;
        if let Some(expected) = claims.access_token_hash() {
            let wrong = |error| OpenIdError::Untrusted(ClaimsVerificationError::SignatureVerification(error));
            let (algorithm, key) = (token.signing_alg().map_err(wrong)?, token.signing_key(&verifier).map_err(wrong)?);
            let found = AccessTokenHash::from_token(answer.access_token(), algorithm, key);
            if !found.is_ok_and(|found| found == *expected) {
                return Err(OpenIdError::OtherAccessToken);
            }
        }
        let mut all = claims.additional_claims().claims.clone();
        let name = claims.name().and_then(|name| name.get(None)).map(|name| name.to_string());
        let known_to_library =
            [("preferred_username", claims.preferred_username().map(|name| name.to_string())), ("name", name)];
        all.extend(known_to_library.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.into()))));
        let is_asked = provider.userinfo_endpoint.is_some() || !Profile::is_complete(&all, &provider.roles_claim);
        if let Some(endpoint) = known.userinfo_endpoint.as_ref().filter(|_| is_asked) {
            let info = self.userinfo(endpoint, answer.access_token().secret(), claims.subject().as_str()).await?;
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
        let mut url = Url::parse(endpoint).map_err(|_| OpenIdError::Url(endpoint.clone()))?;
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
        Ok(self.known(provider, false).await?.issuer.as_str() == issuer)
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
            issuer: url(&document.issuer, IssuerUrl::new)?,
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

    async fn exchange(&self, known: &Known, begun: &Begun, code: String) -> Result<CoreTokenResponse, OpenIdError> {
        let provider = &known.provider;
        let mut client =
            CoreClient::new(ClientId::new(provider.client_id.clone()), known.issuer.clone(), known.keys.clone())
                .set_token_uri(url(&known.token_endpoint, TokenUrl::new)?)
                .set_redirect_uri(url(&begun.redirect, RedirectUrl::new)?)
                .set_auth_type(if known.is_secret_in_body { AuthType::RequestBody } else { AuthType::BasicAuth });
        if let Some(secret) = &provider.secret {
            client = client.set_client_secret(ClientSecret::new(secret.0.clone()));
        }
        let sent = code.clone();
        let request_failed = |source| OpenIdError::Request { url: known.token_endpoint.clone(), source };
        let exchange = client
            .exchange_code(AuthorizationCode::new(code))
            .set_pkce_verifier(PkceCodeVerifier::new(begun.verifier.clone()))
            .request_async(self.client().map_err(request_failed)?);
        exchange.await.map_err(|error| match error {
            RequestTokenError::ServerResponse(answer) => {
                OpenIdError::Refused(answer.to_string().replace(&sent, "(the code)"))
            }
            RequestTokenError::Request(source) => request_failed(source),
            RequestTokenError::Parse(error, _) => {
                OpenIdError::Answer { url: known.token_endpoint.clone(), source: error.into_inner() }
            }
            RequestTokenError::Other(why) => OpenIdError::Refused(why),
        })
    }

    async fn userinfo(&self, endpoint: &str, token: &str, subject: &str) -> Result<Map<String, Value>, OpenIdError> {
        let info: Map<String, Value> = self.get(endpoint, Some(token)).await?;
        match info.get("sub").and_then(Value::as_str) == Some(subject) {
            true => Ok(info),
            false => Err(OpenIdError::OtherSubject { url: endpoint.to_owned() }),
        }
    }

    async fn get<T: DeserializeOwned>(&self, url: &str, token: Option<&str>) -> Result<T, OpenIdError> {
        let mut request = Request::builder().method(Method::GET).uri(url).header(header::ACCEPT, "application/json");
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(Vec::new()).map_err(|_| OpenIdError::Url(url.to_owned()))?;
        let failed = |source| OpenIdError::Request { url: url.to_owned(), source };
        let answer = self.client().map_err(failed)?.send(request).await.map_err(failed)?;
        if !answer.status().is_success() {
            return Err(OpenIdError::Status { url: url.to_owned(), status: answer.status().as_u16() });
        }
        serde_json::from_slice(answer.body()).map_err(|source| OpenIdError::Answer { url: url.to_owned(), source })
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

impl<'c> AsyncHttpClient<'c> for WebClient {
    type Error = WebError;
    type Future = BoxFuture<'c, Result<Response<Vec<u8>>, WebError>>;

    fn call(&'c self, request: Request<Vec<u8>>) -> Self::Future {
        Box::pin(self.send(request))
    }
}

impl Known {
    fn verifier(&self) -> CoreIdTokenVerifier<'static> {
        let client = ClientId::new(self.provider.client_id.clone());
        CoreIdTokenVerifier::new_public_client(client, self.issuer.clone(), self.keys.clone())
            .set_allowed_algs(SIGNATURES)
    }
}

/// Whether a token is this program's (OpenID Connect Core 1.0, 3.1.3.7): a token that another program of the provider has got is none, even if this one is
/// among those for which it is.
fn check_party(party: Option<&str>, client: &str) -> Result<(), OpenIdError> {
    match party {
        Some(party) if party != client => {
            Err(OpenIdError::OtherParty(party.chars().filter(|it| !it.is_control()).take(100).collect()))
        }
        _ => Ok(()),
    }
}

/// Whether a token is of this time: issued neither in the future nor long ago, and in force.
fn check_times(issued: i64, not_before: Option<&Value>, now: i64) -> Result<(), OpenIdError> {
    let not_before = match not_before {
        None | Some(Value::Null) => i64::MIN,
        #[allow(clippy::cast_possible_truncation, reason = "a number with a fraction is a time, too (RFC 7519, 2)")]
        Some(value) => value
            .as_i64()
            .or_else(|| value.as_f64().map(|seconds| seconds as i64))
            .ok_or(OpenIdError::Time("has an nbf that is no time"))?,
    };
    match () {
        () if issued > now.saturating_add(SKEW) => Err(OpenIdError::Time("was issued in the future")),
        () if issued < now.saturating_sub(OLDEST + SKEW) => Err(OpenIdError::Time("was issued too long ago")),
        () if not_before > now.saturating_add(SKEW) => Err(OpenIdError::Time("is not in force yet")),
        () => Ok(()),
    }
}

fn url<T, E>(text: &str, of: impl FnOnce(String) -> Result<T, E>) -> Result<T, OpenIdError> {
    of(text.to_owned()).map_err(|_| OpenIdError::Url(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_token_is_of_this_time_within_a_minute() {
        const NOW: i64 = 1_800_000_000;
        let is = |issued: i64, not_before: Option<Value>| check_times(NOW + issued, not_before.as_ref(), NOW).is_ok();
        for issued in [0, -5, SKEW, -OLDEST, -OLDEST - SKEW] {
            assert!(is(issued, None), "{issued}");
        }
        for issued in [SKEW + 1, 3600, -OLDEST - SKEW - 1, -86400, i64::MIN / 2] {
            assert!(!is(issued, None), "{issued}");
        }
        for not_before in [json!(NOW), json!(NOW + SKEW), json!(0), json!(NOW as f64 + 0.5), Value::Null] {
            assert!(is(0, Some(not_before.clone())), "{not_before}");
        }
        for not_before in [json!(NOW + SKEW + 1), json!("soon"), json!([]), json!(1e300), json!(i64::MAX)] {
            assert!(!is(0, Some(not_before.clone())), "{not_before}");
        }
    }

    #[test]
    fn a_token_of_another_program_is_none() {
        assert!(check_party(None, "web").is_ok() && check_party(Some("web"), "web").is_ok());
        for party in ["other", "", "Web", "web "] {
            assert!(check_party(Some(party), "web").is_err(), "{party}");
        }
    }
}

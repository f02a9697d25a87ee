//! The ID token of a provider: which keys it has (RFC 7517, 7518), whether the token is signed with one of them (RFC 7515), and whether it is for this
//! program and this sign-in (<https://openid.net/specs/openid-connect-core-1_0.html#IDTokenValidation>).
//!
//! | of the token | is right |
//! |---|---|
//! | header | neither `crit` nor `cty`; `typ`, if it is there, is that of a JWT |
//! | signature | by the one key of the provider that has its `kid` and is made for its algorithm, which is one of [`Algorithm`] |
//! | `iss` | the provider |
//! | `aud` | this program, and nobody else |
//! | `azp` | this program, if it is there |
//! | `exp`, `iat`, `nbf` | now |
//! | `nonce` | that of the sign-in |
//! | `at_hash` | that of the access token, if it is there |

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use ring::{
    digest,
    signature::{self, RsaPublicKeyComponents, UnparsedPublicKey},
};
use serde::{Deserialize, Deserializer, de};
use serde_json::{Map, Number, Value};

/// By how much the clock of a provider may differ from this one's, in seconds.
const SKEW: i64 = 60;
/// How old a token may be, in seconds: a person who signs in has this time, and her token is issued at its end.
const OLDEST: i64 = 600;

/// Why a token is not trusted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum TokenError {
    /// It is no token.
    #[error("the ID token can't be read")]
    Unreadable,
    /// The provider may have begun to use another key.
    #[error("the ID token is not signed with a key of the provider")]
    UnknownKey,
    /// It is not for this program, not for this sign-in, not of this time, or not the provider's.
    #[error("the ID token {0}")]
    Untrusted(String),
}

fn untrusted<T>(why: impl Into<String>) -> Result<T, TokenError> {
    Err(TokenError::Untrusted(why.into()))
}

/// The signatures that count: those with a public key, neither `none` nor one with the client's secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Algorithm {
    RS256,
    RS384,
    RS512,
    PS256,
    PS384,
    PS512,
    ES256,
    ES384,
    EdDSA,
}

impl Algorithm {
    fn rsa(self) -> Option<&'static signature::RsaParameters> {
        match self {
            Self::RS256 => Some(&signature::RSA_PKCS1_2048_8192_SHA256),
            Self::RS384 => Some(&signature::RSA_PKCS1_2048_8192_SHA384),
            Self::RS512 => Some(&signature::RSA_PKCS1_2048_8192_SHA512),
            Self::PS256 => Some(&signature::RSA_PSS_2048_8192_SHA256),
            Self::PS384 => Some(&signature::RSA_PSS_2048_8192_SHA384),
            Self::PS512 => Some(&signature::RSA_PSS_2048_8192_SHA512),
            Self::ES256 | Self::ES384 | Self::EdDSA => None,
        }
    }

    /// Of which the hash of the access token is.
    fn digest(self) -> &'static digest::Algorithm {
        match self {
            Self::RS256 | Self::PS256 | Self::ES256 => &digest::SHA256,
            Self::RS384 | Self::PS384 | Self::ES384 => &digest::SHA384,
            Self::RS512 | Self::PS512 | Self::EdDSA => &digest::SHA512,
        }
    }
}

/// The keys of a provider. Those that this program does not understand are left out.
#[derive(Debug)]
pub(super) struct Keys(Vec<Key>);

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Set {
            keys: Vec<Value>,
        }
        let Set { keys } = Set::deserialize(deserializer)?;
        Ok(Self(keys.into_iter().filter_map(|key| serde_json::from_value(key).ok()).collect()))
    }
}

#[derive(Debug, Deserialize)]
struct Key {
    kid: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    alg: Option<String>,
    #[serde(flatten)]
    public: PublicKey,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "kty")]
enum PublicKey {
    #[serde(rename = "RSA")]
    Rsa { n: Bytes, e: Bytes },
    #[serde(rename = "EC")]
    Curve { crv: Curve, x: Bytes, y: Bytes },
    #[serde(rename = "OKP")]
    Edwards { crv: EdwardsCurve, x: Bytes },
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum Curve {
    #[serde(rename = "P-256")]
    P256,
    #[serde(rename = "P-384")]
    P384,
}

#[derive(Clone, Copy, Debug, Deserialize)]
enum EdwardsCurve {
    Ed25519,
}

/// Bytes, written in base64url.
#[derive(Debug)]
struct Bytes(Vec<u8>);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        URL_SAFE_NO_PAD.decode(text).map(Self).map_err(de::Error::custom)
    }
}

/// A key that is used with an algorithm.
enum Verifier<'a> {
    Rsa(&'static signature::RsaParameters, RsaPublicKeyComponents<&'a [u8]>),
    Point(UnparsedPublicKey<Vec<u8>>),
}

impl Verifier<'_> {
    fn is_right(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Rsa(parameters, key) => key.verify(parameters, message, signature).is_ok(),
            Self::Point(key) => key.verify(message, signature).is_ok(),
        }
    }
}

impl Key {
    /// The key for an algorithm, if it is made for that, and for signatures.
    fn verifier(&self, named: &str, algorithm: Algorithm) -> Option<Verifier<'_>> {
        let is = |wanted: &Option<String>, found: &str| wanted.as_deref().is_none_or(|wanted| wanted == found);
        if !is(&self.purpose, "sig") || !is(&self.alg, named) {
            return None;
        }
        let point = |x: &Bytes, y: &Bytes| [&[4], x.0.as_slice(), y.0.as_slice()].concat();
        match (&self.public, algorithm) {
            (PublicKey::Rsa { n: Bytes(n), e: Bytes(e) }, algorithm) => {
                // Some write the sign of the number, too.
                let n = n.strip_prefix(&[0]).unwrap_or(n);
                Some(Verifier::Rsa(algorithm.rsa()?, RsaPublicKeyComponents { n, e }))
            }
            (PublicKey::Curve { crv: Curve::P256, x, y }, Algorithm::ES256) => {
                Some(Verifier::Point(UnparsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, point(x, y))))
            }
            (PublicKey::Curve { crv: Curve::P384, x, y }, Algorithm::ES384) => {
                Some(Verifier::Point(UnparsedPublicKey::new(&signature::ECDSA_P384_SHA384_FIXED, point(x, y))))
            }
            (PublicKey::Edwards { crv: EdwardsCurve::Ed25519, x: Bytes(x) }, Algorithm::EdDSA) => {
                Some(Verifier::Point(UnparsedPublicKey::new(&signature::ED25519, x.clone())))
            }
            (PublicKey::Curve { .. } | PublicKey::Edwards { .. }, _) => None,
        }
    }
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    typ: Option<String>,
    cty: Option<Value>,
    crit: Option<Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Several(Vec<String>),
}

/// The claims about the token itself.
#[derive(Deserialize)]
struct Claims {
    iss: String,
    aud: Audience,
    azp: Option<String>,
    exp: Number,
    iat: Number,
    nbf: Option<Number>,
    nonce: Option<String>,
    at_hash: Option<String>,
    /// It is read elsewhere, but no token is without it.
    #[serde(rename = "sub")]
    _sub: String,
}

/// What a token must be.
pub(super) struct Expected<'a> {
    /// Who has issued it.
    pub issuer: &'a str,
    /// The name of this program there.
    pub client: &'a str,
    /// The nonce of the sign-in.
    pub nonce: &'a str,
    /// The access token that came with it.
    pub access_token: &'a str,
    /// The time, in seconds since 1970.
    pub now: i64,
}

/// The claims of a token, if it can be trusted.
///
/// # Errors
/// If it can't.
pub(super) fn verify(token: &str, keys: &Keys, expected: &Expected<'_>) -> Result<Map<String, Value>, TokenError> {
    let (message, signature) = token.rsplit_once('.').ok_or(TokenError::Unreadable)?;
    let (header, payload) = message.split_once('.').ok_or(TokenError::Unreadable)?;
    let decode = |text: &str| URL_SAFE_NO_PAD.decode(text).map_err(|_| TokenError::Unreadable);
    let (header, payload, signature) = (decode(header)?, decode(payload)?, decode(signature)?);
    let header: Header = serde_json::from_slice(&header).map_err(|_| TokenError::Unreadable)?;
    let algorithm = check_signature(&header, keys, message.as_bytes(), &signature)?;
    let claims: Claims = serde_json::from_slice(&payload).map_err(|_| TokenError::Unreadable)?;
    check_claims(&claims, expected)?;
    if let Some(hash) = &claims.at_hash {
        let found = digest::digest(algorithm.digest(), expected.access_token.as_bytes());
        let (half, _) = found.as_ref().split_at(found.as_ref().len() / 2);
        if *hash != URL_SAFE_NO_PAD.encode(half) {
            return untrusted("does not belong to the access token");
        }
    }
    serde_json::from_slice(&payload).map_err(|_| TokenError::Unreadable)
}

fn check_signature(header: &Header, keys: &Keys, message: &[u8], signature: &[u8]) -> Result<Algorithm, TokenError> {
    let Header { alg, kid, typ, cty, crit } = header;
    let typ = typ.as_deref().map(|typ| typ.to_ascii_lowercase());
    let is_jwt = typ.as_deref().is_none_or(|typ| typ.strip_prefix("application/").unwrap_or(typ) == "jwt");
    if !is_jwt || cty.is_some() || crit.is_some() {
        return untrusted("has a header that is not understood");
    }
    let Ok(algorithm) = Algorithm::deserialize(de::value::StrDeserializer::<de::value::Error>::new(alg)) else {
        return untrusted("is not signed with a key that others can check");
    };
    let named = keys.0.iter().filter(|key| kid.is_none() || key.kid == *kid);
    let mut verifiers = named.filter_map(|key| key.verifier(alg, algorithm));
    match (verifiers.next(), verifiers.next()) {
        (None, _) => Err(TokenError::UnknownKey),
        (Some(_), Some(_)) => untrusted("does not say with which key it is signed"),
        (Some(verifier), None) if verifier.is_right(message, signature) => Ok(algorithm),
        (Some(_), None) => untrusted("has a signature that is not the provider's"),
    }
}

fn check_claims(claims: &Claims, expected: &Expected<'_>) -> Result<(), TokenError> {
    let Claims { iss, aud, azp, exp, iat, nbf, nonce, .. } = claims;
    if iss != expected.issuer {
        return untrusted("was issued by another provider");
    }
    let is_for_this = match aud {
        Audience::One(client) => client == expected.client,
        // A token that is for others too may come from them.
        Audience::Several(clients) => !clients.is_empty() && clients.iter().all(|client| client == expected.client),
    };
    if !is_for_this {
        return untrusted("is not for this program alone");
    }
    // A token that another program of the provider has got is none, even if it is for this one.
    if azp.as_ref().is_some_and(|party| party != expected.client) {
        return untrusted("was issued to another program");
    }
    check_times(seconds(exp), seconds(iat), nbf.as_ref().map(seconds), expected.now)?;
    if nonce.as_deref() != Some(expected.nonce) {
        return untrusted("is of another sign-in");
    }
    Ok(())
}

/// A number with a fraction is a time, too (RFC 7519, 2).
#[allow(clippy::cast_possible_truncation, reason = "a time beyond all numbers is one in a distant future")]
fn seconds(time: &Number) -> i64 {
    time.as_i64().or_else(|| time.as_f64().map(|seconds| seconds as i64)).unwrap_or(i64::MAX)
}

/// Whether a token is of this time: issued neither in the future nor long ago, and in force.
fn check_times(expires: i64, issued: i64, not_before: Option<i64>, now: i64) -> Result<(), TokenError> {
    let why = match () {
        () if expires <= now => "has expired",
        () if issued > now.saturating_add(SKEW) => "was issued in the future",
        () if issued < now.saturating_sub(OLDEST + SKEW) => "was issued too long ago",
        () if not_before.is_some_and(|time| time > now.saturating_add(SKEW)) => "is not in force yet",
        () => return Ok(()),
    };
    untrusted(format!("{why}: if its provider's clock is right, look at the clock of this computer"))
}

#[cfg(test)]
mod tests {
    use ring::{
        hmac,
        rand::SystemRandom,
        signature::{EcdsaKeyPair, Ed25519KeyPair, KeyPair, RsaKeyPair},
    };
    use serde_json::json;

    use super::*;

    const NOW: i64 = 1_800_000_000;
    const EXPECTED: Expected<'_> =
        Expected { issuer: "https://id.example", client: "web", nonce: "7", access_token: "access", now: NOW };

    fn base64(bytes: impl AsRef<[u8]>) -> String {
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// A provider with a key of each kind.
    struct Provider {
        curve: EcdsaKeyPair,
        long_curve: EcdsaKeyPair,
        edwards: Ed25519KeyPair,
        rsa: RsaKeyPair,
    }

    impl Provider {
        fn new() -> Self {
            let random = SystemRandom::new();
            let curve = |kind| {
                let key = EcdsaKeyPair::generate_pkcs8(kind, &random).unwrap();
                EcdsaKeyPair::from_pkcs8(kind, key.as_ref(), &random).unwrap()
            };
            Self {
                curve: curve(&signature::ECDSA_P256_SHA256_FIXED_SIGNING),
                long_curve: curve(&signature::ECDSA_P384_SHA384_FIXED_SIGNING),
                edwards: Ed25519KeyPair::from_pkcs8(Ed25519KeyPair::generate_pkcs8(&random).unwrap().as_ref()).unwrap(),
                rsa: RsaKeyPair::from_pkcs8(include_bytes!("../../tests/api_server/web/rs256.pk8")).unwrap(),
            }
        }

        fn keys(&self) -> Value {
            let rsa = signature::RsaPublicKeyComponents::<Vec<u8>>::from(self.rsa.public());
            let curve = |kid: &str, crv: &str, point: &[u8]| {
                let (x, y) = point[1..].split_at(point.len() / 2);
                json!({ "kty": "EC", "kid": kid, "crv": crv, "use": "sig", "x": base64(x), "y": base64(y) })
            };
            json!({ "keys": [
                curve("short", "P-256", self.curve.public_key().as_ref()), curve("long", "P-384", self.long_curve.public_key().as_ref()),
                { "kty": "OKP", "kid": "edwards", "crv": "Ed25519", "x": base64(self.edwards.public_key()) },
                { "kty": "RSA", "kid": "rsa", "n": base64([&[0][..], &rsa.n].concat()), "e": base64(&rsa.e) },
                { "kty": "oct", "kid": "secret", "k": "AAAA" }, { "kty": "EC", "kid": "unknown", "crv": "P-521", "x": "", "y": "" }, {},
            ] })
        }

        fn sign(&self, header: &Value, claims: &Value) -> String {
            let message = format!("{}.{}", base64(header.to_string()), base64(claims.to_string()));
            let random = SystemRandom::new();
            let rsa = |padding| {
                let mut signature = vec![0; self.rsa.public().modulus_len()];
                self.rsa.sign(padding, &random, message.as_bytes(), &mut signature).unwrap();
                signature
            };
            let curve = |key: &EcdsaKeyPair| key.sign(&random, message.as_bytes()).unwrap().as_ref().to_vec();
            let signature = match header["alg"].as_str().unwrap() {
                "RS256" => rsa(&signature::RSA_PKCS1_SHA256),
                "RS384" => rsa(&signature::RSA_PKCS1_SHA384),
                "RS512" => rsa(&signature::RSA_PKCS1_SHA512),
                "PS256" => rsa(&signature::RSA_PSS_SHA256),
                "PS384" => rsa(&signature::RSA_PSS_SHA384),
                "PS512" => rsa(&signature::RSA_PSS_SHA512),
                "ES256" => curve(&self.curve),
                "ES384" => curve(&self.long_curve),
                "EdDSA" => self.edwards.sign(message.as_bytes()).as_ref().to_vec(),
                "HS256" => {
                    // With what everybody knows, as if it were a secret.
                    let key = hmac::Key::new(hmac::HMAC_SHA256, self.curve.public_key().as_ref());
                    hmac::sign(&key, message.as_bytes()).as_ref().to_vec()
                }
                _ => Vec::new(),
            };
            format!("{message}.{}", base64(signature))
        }
    }

    fn claims() -> Value {
        json!({ "iss": "https://id.example", "sub": "1", "aud": "web", "iat": NOW, "exp": NOW + 60, "nonce": "7", "name": "Ann" })
    }

    fn verified(token: &str, keys: Value) -> Result<Map<String, Value>, String> {
        verify(token, &serde_json::from_value(keys).unwrap(), &EXPECTED).map_err(|error| error.to_string())
    }

    #[test]
    fn each_signature_with_a_public_key_counts() {
        let provider = Provider::new();
        for (alg, kid) in [
            ("RS256", "rsa"),
            ("RS384", "rsa"),
            ("RS512", "rsa"),
            ("PS256", "rsa"),
            ("PS384", "rsa"),
            ("PS512", "rsa"),
            ("ES256", "short"),
            ("ES384", "long"),
            ("EdDSA", "edwards"),
        ] {
            for header in [json!({ "alg": alg, "kid": kid, "typ": "JWT" }), json!({ "alg": alg })] {
                let token = provider.sign(&header, &claims());
                assert_eq!(
                    verified(&token, provider.keys()).map(|all| all["name"].clone()),
                    Ok(json!("Ann")),
                    "{header}"
                );
                // Each part of it counts, and so does the key.
                for (at, _) in token.match_indices('.').chain([(token.len() - 2, "")]) {
                    let mut other = token.clone().into_bytes();
                    other[at - 3] = if other[at - 3] == b'A' { b'B' } else { b'A' };
                    assert!(verified(&String::from_utf8(other).unwrap(), provider.keys()).is_err(), "{header} {at}");
                }
                assert!(verified(&token, Provider::new().keys()).is_err() || kid == "rsa", "{header}");
            }
        }
    }

    #[test]
    fn what_is_signed_otherwise_is_not_trusted() {
        let provider = Provider::new();
        let public = "the ID token is not signed with a key that others can check";
        let unknown = "the ID token is not signed with a key of the provider";
        let header = "the ID token has a header that is not understood";
        for (head, expected) in [
            (json!({ "alg": "none" }), public),
            (json!({ "alg": "HS256", "kid": "secret" }), public),
            (json!({ "alg": "HS256", "kid": "short" }), public),
            (json!({ "alg": "ES512", "kid": "unknown" }), public),
            (json!({ "alg": "ES256", "kid": "long" }), unknown),
            (json!({ "alg": "RS256", "kid": "short" }), unknown),
            (json!({ "alg": "ES256", "kid": "new" }), unknown),
            (json!({ "alg": "ES256", "kid": "short", "typ": "at+jwt" }), header),
            (json!({ "alg": "ES256", "kid": "short", "cty": "JWT" }), header),
            (json!({ "alg": "ES256", "kid": "short", "crit": ["exp"] }), header),
        ] {
            assert_eq!(verified(&provider.sign(&head, &claims()), provider.keys()), Err(expected.into()), "{head}");
        }
        // A key that is not for signatures, for another algorithm, or one of two.
        let token = provider.sign(&json!({ "alg": "ES256" }), &claims());
        let with = |key: &str, value: &str| {
            let mut keys = provider.keys();
            keys["keys"][0][key] = json!(value);
            verified(&token, keys)
        };
        assert_eq!(with("use", "enc"), Err(unknown.into()));
        assert_eq!(with("alg", "ES384"), Err(unknown.into()));
        assert!(with("alg", "ES256").is_ok());
        let mut keys = provider.keys();
        let again = keys["keys"][0].clone();
        keys["keys"].as_array_mut().unwrap().push(again);
        assert_eq!(verified(&token, keys), Err("the ID token does not say with which key it is signed".into()));
        for text in ["", ".", "..", "a.b.c", "e30.e30.", "e30.e30.e30.e30"] {
            assert_eq!(verified(text, provider.keys()), Err("the ID token can't be read".into()), "{text}");
        }
    }

    #[test]
    fn a_token_is_for_this_program_this_sign_in_and_this_time() {
        let provider = Provider::new();
        let with = |changes: Value| {
            let mut claims = claims();
            json_patch::merge(&mut claims, &changes);
            verified(&provider.sign(&json!({ "alg": "ES256" }), &claims), provider.keys()).map(drop)
        };
        let hash = base64(&digest::digest(&digest::SHA256, b"access").as_ref()[..16]);
        for right in [
            json!({ "aud": ["web"] }),
            json!({ "azp": "web" }),
            json!({ "at_hash": hash }),
            json!({ "nbf": NOW }),
            json!({ "iat": NOW as f64 + 0.5 }),
        ] {
            assert_eq!(with(right.clone()), Ok(()), "{right}");
        }
        let (alone, party, sign_in) =
            ("is not for this program alone", "was issued to another program", "is of another sign-in");
        for (wrong, expected) in [
            (json!({ "iss": "https://id.example/" }), "was issued by another provider"),
            (json!({ "aud": "Web" }), alone),
            (json!({ "aud": ["web", "other"] }), alone),
            (json!({ "aud": [] }), alone),
            (json!({ "azp": "other" }), party),
            (json!({ "azp": "" }), party),
            (json!({ "azp": "web " }), party),
            (json!({ "nonce": "8" }), sign_in),
            (json!({ "nonce": null }), sign_in),
            (json!({ "exp": NOW }), "has expired"),
            (json!({ "iat": NOW + 61 }), "was issued in the future"),
            (json!({ "nbf": 1e300 }), "is not in force yet"),
            (json!({ "at_hash": "other" }), "does not belong to the access token"),
            (json!({ "nbf": "soon" }), "can't be read"),
            (json!({ "exp": "never" }), "can't be read"),
            (json!({ "exp": null }), "can't be read"),
            (json!({ "sub": null }), "can't be read"),
            (json!({ "aud": null }), "can't be read"),
            (json!({ "azp": 7 }), "can't be read"),
        ] {
            let found = with(wrong.clone()).unwrap_err();
            assert!(found.starts_with(&format!("the ID token {expected}")), "{wrong}: {found}");
        }
    }

    #[test]
    fn a_token_is_of_this_time_within_a_minute() {
        let is = |expires: i64, issued: i64, not_before: Option<i64>| {
            check_times(NOW + expires, NOW + issued, not_before.map(|time| NOW.saturating_add(time)), NOW).is_ok()
        };
        for issued in [0, -5, SKEW, -OLDEST, -OLDEST - SKEW] {
            assert!(is(1, issued, None), "{issued}");
        }
        for issued in [SKEW + 1, 3600, -OLDEST - SKEW - 1, -86400, i64::MIN / 2] {
            assert!(!is(1, issued, None), "{issued}");
        }
        for (not_before, expected) in [(0, true), (SKEW, true), (-NOW, true), (SKEW + 1, false), (i64::MAX, false)] {
            assert_eq!(is(1, 0, Some(not_before)), expected, "{not_before}");
        }
        assert!(!is(0, 0, None) && !is(-1, 0, None));
    }
}

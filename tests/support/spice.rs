//! As much of a SPICE viewer as a server takes for one: the link of the main channel
//! (<https://www.spice-space.org/spice-protocol.html>).

use num_bigint::BigUint;
use sha1::{Digest, Sha1};
use std::{
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    time::Duration,
};

/// The main channel.
const MAIN: u8 = 1;
/// Bytes of the server's RSA modulus, and of what is encrypted with it.
const KEY: usize = 128;
/// Where the modulus is in the public key of that size (`SubjectPublicKeyInfo`, RFC 5280); the exponent is 65537.
const MODULUS: std::ops::Range<usize> = 29..29 + KEY;

/// Connects to a display. The viewer is there until the connection is dropped. A display without a password takes any.
pub fn view(display: impl ToSocketAddrs, password: &str) -> io::Result<TcpStream> {
    let mut server = TcpStream::connect(display)?;
    server.set_read_timeout(Some(Duration::from_secs(10)))?;
    let (any_session, channel_id, no_capabilities) = (0_u32.to_le_bytes(), 0, 0_u32.to_le_bytes());
    let mut message = [any_session.as_slice(), &[MAIN, channel_id], &no_capabilities, &no_capabilities].concat();
    let size = u32::try_from(message.len()).unwrap() + 4;
    message.extend(size.to_le_bytes());
    let (major, minor) = (2_u32.to_le_bytes(), 2_u32.to_le_bytes());
    server.write_all(&[b"REDQ".as_slice(), &major, &minor, &size.to_le_bytes(), &message].concat())?;
    let mut header = [0; 16];
    server.read_exact(&mut header)?;
    let mut reply = vec![0; u32::from_le_bytes(header[12..].try_into().unwrap()).try_into().unwrap()];
    server.read_exact(&mut reply)?;
    let error_code = 4;
    server.write_all(&encrypt(password, &reply[error_code..][MODULUS]))?;
    let mut result = [0; 4];
    server.read_exact(&mut result)?;
    match u32::from_le_bytes(result) {
        0 => Ok(server),
        error => Err(io::Error::other(format!("the display refuses: {error}"))),
    }
}

/// RSA with OAEP (RFC 8017, section 7.1.1).
fn encrypt(password: &str, modulus: &[u8]) -> [u8; KEY] {
    let mut seed = [7; 20];
    let text = [password.as_bytes(), &[0]].concat();
    let mut block = Sha1::digest([]).to_vec();
    block.resize(KEY - 1 - seed.len() - 1 - text.len(), 0);
    block.push(1);
    block.extend(text);
    mask(&mut block, &seed);
    mask(&mut seed, &block);
    let plain = BigUint::from_bytes_be(&[seed.as_slice(), &block].concat());
    let cipher = plain.modpow(&65537_u32.into(), &BigUint::from_bytes_be(modulus)).to_bytes_be();
    let mut padded = [0; KEY];
    padded[KEY - cipher.len()..].copy_from_slice(&cipher);
    padded
}

/// MGF1 (RFC 8017, appendix B.2.1).
fn mask(bytes: &mut [u8], seed: &[u8]) {
    for (counter, chunk) in (0_u32..).zip(bytes.chunks_mut(20)) {
        let hash = Sha1::new().chain_update(seed).chain_update(counter.to_be_bytes()).finalize();
        chunk.iter_mut().zip(hash).for_each(|(byte, mask)| *byte ^= mask);
    }
}

//! As much of a VNC viewer as a server takes for one (RFC 6143).

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::Duration,
};

use des::{
    Des,
    cipher::{BlockCipherEncrypt, KeyInit},
};

/// A viewer of a VNC display, if the password lets it in (RFC 6143, sections 7.1 to 7.3.1).
pub fn view(port: u16, password: &str) -> Option<TcpStream> {
    let enter = || -> io::Result<(u32, TcpStream)> {
        let mut server = TcpStream::connect(("127.0.0.1", port))?;
        server.set_read_timeout(Some(Duration::from_secs(10)))?;
        server.read_exact(&mut [0; 12])?;
        server.write_all(b"RFB 003.008\n")?;
        let mut count = [0];
        server.read_exact(&mut count)?;
        let mut types = vec![0; count[0].into()];
        server.read_exact(&mut types)?;
        const BY_PASSWORD: u8 = 2;
        assert_eq!(types, [BY_PASSWORD], "nobody gets in without");
        server.write_all(&[BY_PASSWORD])?;
        let mut challenge = [0; 16];
        server.read_exact(&mut challenge)?;
        let mut key = [0; 8];
        key.iter_mut().zip(password.bytes()).for_each(|(key, byte)| *key = byte.reverse_bits());
        let cipher = Des::new(&key.into());
        for block in challenge.chunks_exact_mut(8) {
            cipher.encrypt_block(block.try_into().unwrap());
        }
        server.write_all(&challenge)?;
        let mut result = [0; 4];
        server.read_exact(&mut result)?;
        const SHARED: u8 = 1;
        server.write_all(&[SHARED])?;
        Ok((u32::from_be_bytes(result), server))
    };
    let (result, server) = enter().ok()?;
    (result == 0).then_some(server)
}

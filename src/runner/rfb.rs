//! What a viewer sends to QEMU by VNC (RFB, RFC 6143), made harmless. Pure.
//!
//! No viewer disconnects the others: QEMU does that if a viewer wants the screen for itself. Of one that only watches, nothing reaches
//! QEMU that changes something: no keys, pointer, clipboard, or size of the screen.

/// The longest list of encodings or screens. Viewers send some dozens.
const LONGEST_LIST: usize = 4096;

/// The viewer has sent what RFB does not have at this place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is not RFB, or a message that viewers who only watch can't send")]
pub struct NotRfb;

/// Where the conversation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The viewer's version: 12 bytes.
    Version,
    /// The kind of authentication: a byte.
    Security,
    /// Whether the viewer shares the screen: a byte.
    Init,
    /// Messages.
    Messages,
}

/// Lets a viewer's bytes pass, or not.
#[derive(Debug)]
pub struct Filter {
    only_watches: bool,
    stage: Stage,
    /// The begin of a message of which not enough has arrived.
    begun: Vec<u8>,
    /// The bytes of a message of which the rest is left out.
    skip: usize,
}

/// A message: how long it is, and whether it passes.
struct Message {
    length: usize,
    passes: bool,
}

impl Filter {
    /// For a new connection.
    pub fn new(only_watches: bool) -> Self {
        Self { only_watches, stage: Stage::Version, begun: Vec::new(), skip: 0 }
    }

    /// The bytes that QEMU gets.
    ///
    /// # Errors
    /// If the bytes can't be understood. The connection must be ended then.
    pub fn pass(&mut self, bytes: &[u8]) -> Result<Vec<u8>, NotRfb> {
        if self.stage == Stage::Messages && !self.only_watches {
            return Ok(bytes.to_vec());
        }
        let skipped = self.skip.min(bytes.len());
        self.skip -= skipped;
        self.begun.extend_from_slice(bytes.get(skipped..).unwrap_or_default());
        let mut passed = Vec::new();
        let begun = std::mem::take(&mut self.begun);
        let mut rest = begun.as_slice();
        while self.step(&mut rest, &mut passed)? {}
        self.begun = rest.to_vec();
        Ok(passed)
    }

    /// Takes the next part out of what has arrived. Returns whether there may be another one.
    fn step(&mut self, rest: &mut &[u8], passed: &mut Vec<u8>) -> Result<bool, NotRfb> {
        match (self.stage, *rest) {
            (_, []) => return Ok(false),
            (Stage::Version, _) => {
                let Some((version, after)) = rest.split_at_checked(12) else { return Ok(false) };
                let minor =
                    version.strip_prefix(b"RFB 003.").and_then(|rest| rest.strip_suffix(b"\n")).ok_or(NotRfb)?;
                // Exactly as they are written: QEMU reads numbers more loosely, and must not take another version for granted.
                self.stage = match minor {
                    // Before 3.7 the server chooses.
                    b"003" | b"005" => Stage::Init,
                    b"007" | b"008" => Stage::Security,
                    _ => return Err(NotRfb),
                };
                passed.extend_from_slice(version);
                *rest = after;
            }
            // 1 is "none": QEMU's socket in the Pod wants no password.
            (Stage::Security, [1, after @ ..]) => {
                self.stage = Stage::Init;
                passed.push(1);
                *rest = after;
            }
            (Stage::Security, _) => return Err(NotRfb),
            (Stage::Init, [_, after @ ..]) => {
                self.stage = Stage::Messages;
                passed.push(1);
                *rest = after;
            }
            (Stage::Messages, all) if !self.only_watches => {
                passed.extend_from_slice(all);
                *rest = &[];
            }
            (Stage::Messages, all) => {
                let Some(message) = message(all)? else { return Ok(false) };
                match all.split_at_checked(message.length) {
                    Some((whole, after)) => {
                        if message.passes {
                            passed.extend_from_slice(whole);
                        }
                        *rest = after;
                    }
                    None if message.passes => return Ok(false),
                    None => {
                        self.skip = message.length - all.len();
                        *rest = &[];
                    }
                }
            }
        }
        Ok(true)
    }
}

/// The message that begins here. `None`: more bytes are needed to know.
///
/// The messages are those of RFC 6143, 7.5, and of the community's registry (<https://github.com/rfbproto/rfbproto>).
fn message(begun: &[u8]) -> Result<Option<Message>, NotRfb> {
    let passes = |length| Some(Message { length, passes: true });
    let is_left_out = |length| Some(Message { length, passes: false });
    let list = |begun: &[u8], at: usize, head: usize, each: usize| -> Result<Option<usize>, NotRfb> {
        let Some(&[high, low]) = begun.get(at..at + 2) else { return Ok(None) };
        let count = usize::from(u16::from_be_bytes([high, low]));
        if count <= LONGEST_LIST { Ok(Some(head + each * count)) } else { Err(NotRfb) }
    };
    Ok(match begun {
        [] => None,
        // SetPixelFormat, SetEncodings, FramebufferUpdateRequest.
        [0, ..] => passes(20),
        [2, ..] => list(begun, 2, 4, 4)?.and_then(passes),
        [3, ..] => passes(10),
        // KeyEvent, PointerEvent.
        [4, ..] => is_left_out(8),
        [5, ..] => is_left_out(6),
        // ClientCutText. The extended one has a negative length.
        [6, ..] => match begun.get(4..8) {
            Some(&[a, b, c, d]) => {
                let length = i32::from_be_bytes([a, b, c, d]).unsigned_abs();
                is_left_out(8 + usize::try_from(length).map_err(|_| NotRfb)?)
            }
            _ => None,
        },
        // EnableContinuousUpdates, and the answer to a fence.
        [150, ..] => passes(10),
        [248, ..] => begun.get(8).and_then(|length| passes(9 + usize::from(*length))),
        // Power, and SetDesktopSize.
        [250, ..] => is_left_out(4),
        [251, ..] => match begun.get(6) {
            Some(screens) => is_left_out(8 + 16 * usize::from(*screens)),
            None => None,
        },
        // QEMU's own: a key with its scan code, and sound (on, off, or its format).
        [255, 0, ..] => is_left_out(12),
        [255, 1, _, 0 | 1, ..] => passes(4),
        [255, 1, _, 2, ..] => passes(10),
        [255] | [255, 1] | [255, 1, _] => None,
        _ => return Err(NotRfb),
    })
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const GREETING: &[u8] = b"RFB 003.008\n\x01\x00";

    fn of_watcher(bytes: &[u8]) -> Result<Vec<u8>, NotRfb> {
        let mut filter = Filter::new(true);
        let mut all = filter.pass(GREETING).unwrap();
        assert_eq!(all, b"RFB 003.008\n\x01\x01");
        all = filter.pass(bytes)?;
        Ok(all)
    }

    #[test]
    fn nobody_gets_the_screen_for_himself() {
        for (version, greeting, passed) in [
            ("3.8", GREETING, b"RFB 003.008\n\x01\x01".as_slice()),
            ("3.3", b"RFB 003.003\n\x00", b"RFB 003.003\n\x01"),
        ] {
            assert_eq!(Filter::new(false).pass(greeting).unwrap(), passed, "{version}");
        }
        let mut filter = Filter::new(false);
        assert_eq!(filter.pass(b"RFB 003.008\n\x01\x00\x04key").unwrap(), b"RFB 003.008\n\x01\x01\x04key");
        assert_eq!(filter.pass(b"anything").unwrap(), b"anything");
    }

    #[test]
    fn of_who_watches_nothing_passes_that_changes_something() {
        let encodings = b"\x02\x00\x00\x02AAAABBBB";
        let request = b"\x03123456789";
        let keys = [b"\x04\x01\x00\x00\x00\x00\x00a".as_slice(), b"\xff\x00\x00\x01\x00\x00\x00a\x00\x00\x00\x1e"];
        let pointer = b"\x05\x01\x00\x01\x00\x01";
        let text = b"\x06\x00\x00\x00\x00\x00\x00\x04text";
        let extended = b"\x06\x00\x00\x00\xff\xff\xff\xfctext";
        let size = [b"\xfb\x00\x04\x00\x03\x00\x01\x00".as_slice(), &[7; 16]].concat();
        let power = b"\xfa\x00\x01\x02";
        let sound = b"\xff\x01\x00\x01";
        let sent =
            [encodings.as_slice(), keys[0], pointer, text, request, keys[1], extended, &size, power, sound, request]
                .concat();
        let expected = [encodings.as_slice(), request, sound, request].concat();
        assert_eq!(of_watcher(&sent).unwrap(), expected);
    }

    #[test]
    fn what_is_not_rfb_ends_the_connection() {
        assert_eq!(Filter::new(true).pass(b"GET / HTTP/1.1\r\n"), Err(NotRfb));
        for version in [b"RFB 003. 08\n", b"RFB 003.+08\n", b"RFB 003.0x8\n", b"RFB 003.889\n", b"RFB 003.8\n\n\n"] {
            assert_eq!(Filter::new(true).pass(version), Err(NotRfb), "QEMU would read it as 3.8, or not at all");
        }
        assert_eq!(Filter::new(false).pass(b"RFB 003.008\n\x02"), Err(NotRfb), "another kind of authentication");
        assert_eq!(of_watcher(b"\x63"), Err(NotRfb));
        assert_eq!(of_watcher(b"\x02\x00\xff\xff"), Err(NotRfb), "too many encodings");
    }

    proptest! {
        #[test]
        fn it_does_not_matter_how_the_bytes_are_cut(cuts in vec(1..9usize, 0..40)) {
            let sent = [b"RFB 003.008\n\x01\x00\x02\x00\x00\x01AAAA".as_slice(), b"\x06\x00\x00\x00\x00\x00\x00\x04text",
                b"\x04\x01\x00\x00\x00\x00\x00a", b"\x03123456789"].concat();
            let mut filter = Filter::new(true);
            let (mut rest, mut passed) = (sent.as_slice(), Vec::new());
            for cut in cuts {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                passed.extend(filter.pass(now).unwrap());
                rest = later;
            }
            passed.extend(filter.pass(rest).unwrap());
            prop_assert_eq!(passed, b"RFB 003.008\n\x01\x01\x02\x00\x00\x01AAAA\x03123456789".to_vec());
        }

        #[test]
        fn no_bytes_make_it_panic_or_keep_much(bytes in vec(vec(any::<u8>(), 0..200), 0..20)) {
            let mut filter = Filter::new(true);
            filter.pass(GREETING).unwrap();
            for piece in bytes {
                if filter.pass(&piece).is_err() {
                    break;
                }
                prop_assert!(filter.begun.len() <= 4 + 4 * LONGEST_LIST + 200);
            }
        }
    }
}

//! Makes what nobody would send of what somebody would.

use fastrand::Rng;
use serde_json::{Value, json};

/// Parts that mean something to one of the parsers.
const PIECES: &[&[u8]] = &[
    b"\n",
    b"\r\n",
    b"\0",
    b"\xff",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    b"\"",
    b"{",
    b"}",
    b"[[[[[[[[",
    b"null",
    b"1e999",
    b"-1",
    b"18446744073709551616",
    b"\"\\ud800\"",
    b"{\"return\": {}}",
    b"{\"error\": {}}",
    b"{\"event\": 7}",
    b"220 ",
    b"201 ",
    b"202 ",
    b"501 no",
    b"login root",
    b"- &a [*a, *a]",
    b"<<: {a: b}",
    b"!!binary x",
    b"? ",
    b"---\n",
];
const TEXTS: &[&str] =
    &["", "no", "\u{0}\u{2028}\u{feff}", "\u{1b}[2J", "-1", "+300", "x", "../..", "fat:x", "ä", "a\nb"];

pub struct Mutator {
    pub random: Rng,
}

impl Mutator {
    pub fn new(seed: u64) -> Self {
        Self { random: Rng::with_seed(seed) }
    }

    /// Another one for another peer, so that the order in which peers work does not matter.
    pub fn fork(&mut self) -> Self {
        Self::new(self.random.u64(..))
    }

    pub fn once_in(&mut self, times: u32) -> bool {
        self.random.u32(..times) == 0
    }

    pub fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.random.usize(..list.len())]
    }

    /// A text, which may be strange and is seldom long.
    pub fn text(&mut self) -> String {
        let length = match self.random.u32(..40) {
            0 => self.random.usize(..200_000),
            1..5 => self.random.usize(..1_000),
            _ => 1,
        };
        self.pick(TEXTS).repeat(length)
    }

    /// The bytes, with some of them changed, taken out, doubled, or put elsewhere.
    pub fn bytes(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        for _ in 0..self.random.u32(1..4) {
            let start = self.random.usize(..=bytes.len());
            let end = (start + self.random.usize(..40)).min(bytes.len());
            let new: Vec<u8> = match self.random.u32(..9) {
                0 => Vec::new(),
                1 => bytes[start..end].repeat(2),
                2 => bytes[start..end].repeat(self.random.usize(..500)),
                3 => self.pick(PIECES).to_vec(),
                4 => self.pick(PIECES).repeat(self.random.usize(..200)),
                5 => (0..self.random.usize(..40)).map(|_| self.random.u8(..)).collect(),
                6 => bytes[start..end].iter().map(|byte| byte ^ 1 << self.random.u32(..8)).collect(),
                7 => {
                    bytes.truncate(start);
                    continue;
                }
                // Longer than a line may be.
                _ if self.once_in(20) => vec![b'x'; self.random.usize(..3 << 20)],
                _ => {
                    let from = self.random.usize(..=bytes.len());
                    bytes[from..(from + 30).min(bytes.len())].to_vec()
                }
            };
            bytes.splice(start..end, new);
        }
        bytes
    }

    /// The value, with other values and types in some places.
    pub fn value(&mut self, mut value: Value) -> Value {
        for _ in 0..self.random.u32(1..4) {
            self.change(&mut value);
        }
        value
    }

    fn change(&mut self, value: &mut Value) {
        let replace = self.once_in(6);
        match value {
            Value::Object(map) if !map.is_empty() && !replace => {
                let key = map.keys().nth(self.random.usize(..map.len())).unwrap().clone();
                match self.random.u32(..8) {
                    0 => drop(map.remove(&key)),
                    1 => drop(map.insert(self.text(), json!(self.random.u64(..)))),
                    _ => self.change(&mut map[&key]),
                }
            }
            Value::Array(list) if !list.is_empty() && !replace => {
                let index = self.random.usize(..list.len());
                if self.once_in(6) {
                    let item = list[index].clone();
                    let most = 2_000.min((1 << 20) / item.to_string().len());
                    list.extend(vec![item; self.random.usize(..=most)]);
                } else {
                    self.change(&mut list[index]);
                }
            }
            Value::String(_) if !replace => *value = json!(self.text()),
            Value::Number(_) if !replace => {
                let numbers = [json!(0), json!(-1), json!(u64::MAX), json!(i64::MIN), json!(0.5), json!(1e300)];
                *value = self.pick(&numbers).clone();
            }
            _ => {
                let others = [json!(null), json!([]), json!({}), json!("x"), json!(7), json!(true), json!([[[[7]]]])];
                *value = self.pick(&others).clone();
            }
        }
    }

    /// The message, changed as a value or as text.
    pub fn message(&mut self, message: Value) -> Vec<u8> {
        if self.random.bool() {
            self.value(message).to_string().into_bytes()
        } else {
            self.bytes(message.to_string().as_bytes())
        }
    }
}

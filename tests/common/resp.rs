//! RESP, versions 2 and 3, read by a road of our own: what the tests see does not depend on the
//! client library that the crate uses.

use std::fmt;
use std::io;

/// One value that a server sent.
#[derive(Clone, PartialEq)]
pub enum Reply {
    Nil,
    /// Integers and booleans.
    Int(i64),
    /// Status lines, strings, doubles and big numbers.
    Text(Vec<u8>),
    Error(String),
    /// Arrays and sets; maps as key, value, key, value.
    List(Vec<Reply>),
    /// What nobody asked for, in RESP3.
    Push(Vec<Reply>),
}

impl Reply {
    /// The integer, or the integer that the text spells.
    pub fn int(&self) -> i64 {
        match self {
            Self::Int(value) => *value,
            Self::Text(_) => {
                let text = self.text();
                let parsed = text.parse();
                parsed.unwrap_or_else(|_| panic!("an integer was expected, not {text:?}"))
            }
            other => panic!("an integer was expected, not {other:?}"),
        }
    }

    /// The text; an integer is spelled out.
    pub fn text(&self) -> String {
        match self {
            Self::Text(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Self::Int(value) => value.to_string(),
            other => panic!("text was expected, not {other:?}"),
        }
    }

    /// The text, or `None` for nil.
    pub fn text_if_any(&self) -> Option<String> {
        (!self.is_nil()).then(|| self.text())
    }

    /// The elements.
    pub fn list(self) -> Vec<Self> {
        match self {
            Self::List(items) | Self::Push(items) => items,
            other => panic!("a list was expected, not {other:?}"),
        }
    }

    /// The elements, as texts.
    pub fn texts(self) -> Vec<String> {
        self.list().iter().map(Self::text).collect()
    }

    /// The error's message.
    pub fn error(&self) -> String {
        match self {
            Self::Error(message) => message.clone(),
            other => panic!("an error was expected, not {other:?}"),
        }
    }

    pub fn is_nil(&self) -> bool {
        *self == Self::Nil
    }

    pub fn is_error(&self) -> bool {
        matches!(self, Self::Error(_))
    }

    /// Panics, with the message, if the server refused.
    pub fn ok(self) -> Self {
        assert!(!self.is_error(), "the server refused: {self:?}");
        self
    }

    /// First element of a list, if that is text.
    pub(super) fn head(&self) -> Option<&[u8]> {
        match self {
            Self::List(items) | Self::Push(items) => match items.first() {
                Some(Self::Text(bytes)) => Some(bytes),
                _ => None,
            },
            _ => None,
        }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => f.write_str("nil"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Text(bytes) => write!(f, "\"{}\"", bytes.escape_ascii()),
            Self::Error(message) => write!(f, "error {message:?}"),
            Self::List(items) => f.debug_list().entries(items).finish(),
            Self::Push(items) => {
                f.write_str("push ")?;
                f.debug_list().entries(items).finish()
            }
        }
    }
}

/// A command as it goes over the wire.
pub fn request<A: AsRef<[u8]>>(args: &[A]) -> Vec<u8> {
    let mut wire = format!("*{}\r\n", args.len()).into_bytes();
    for arg in args {
        let arg = arg.as_ref();
        wire.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
        wire.extend_from_slice(arg);
        wire.extend_from_slice(b"\r\n");
    }
    wire
}

/// The first whole value in `wire` and its length in bytes; `None` if more must be read.
pub fn parse(wire: &[u8]) -> io::Result<Option<(Reply, usize)>> {
    let Some(line_len) = wire.windows(2).position(|two| two == b"\r\n") else {
        return Ok(None);
    };
    let (kind, rest) = (wire[0], &wire[1..line_len.max(1)]);
    let after = line_len + 2;
    let number = || -> io::Result<i64> {
        let parsed = std::str::from_utf8(rest)
            .ok()
            .and_then(|text| text.parse().ok());
        parsed.ok_or_else(|| garbage(wire))
    };
    let whole = |reply| Ok(Some((reply, after)));
    match kind {
        b'+' | b',' | b'(' => whole(Reply::Text(rest.to_vec())),
        b'-' => whole(Reply::Error(String::from_utf8_lossy(rest).into_owned())),
        b':' => whole(Reply::Int(number()?)),
        b'#' => whole(Reply::Int(i64::from(rest == b"t"))),
        b'_' => whole(Reply::Nil),
        b'$' | b'!' | b'=' => {
            let Ok(len) = usize::try_from(number()?) else {
                return whole(Reply::Nil);
            };
            let Some(body) = wire.get(after..after + len + 2) else {
                return Ok(None);
            };
            let body = &body[..len];
            let reply = match kind {
                b'$' => Reply::Text(body.to_vec()),
                b'!' => Reply::Error(String::from_utf8_lossy(body).into_owned()),
                // A verbatim string starts with its format: `txt:`.
                _ => Reply::Text(body.get(4..).unwrap_or_default().to_vec()),
            };
            Ok(Some((reply, after + len + 2)))
        }
        b'*' | b'~' | b'>' | b'%' | b'|' => {
            let Ok(len) = usize::try_from(number()?) else {
                return whole(Reply::Nil);
            };
            let len = if matches!(kind, b'%' | b'|') {
                2 * len
            } else {
                len
            };
            let Some((items, end)) = parse_items(wire, after, len)? else {
                return Ok(None);
            };
            match kind {
                b'>' => Ok(Some((Reply::Push(items), end))),
                // Attributes go before the value they belong to.
                b'|' => Ok(parse(&wire[end..])?.map(|(reply, len)| (reply, end + len))),
                _ => Ok(Some((Reply::List(items), end))),
            }
        }
        _ => Err(garbage(wire)),
    }
}

fn parse_items(wire: &[u8], mut at: usize, len: usize) -> io::Result<Option<(Vec<Reply>, usize)>> {
    let mut items = Vec::new();
    for _ in 0..len {
        let Some((item, item_len)) = parse(&wire[at..])? else {
            return Ok(None);
        };
        items.push(item);
        at += item_len;
    }
    Ok(Some((items, at)))
}

fn garbage(wire: &[u8]) -> io::Error {
    let start = wire[..wire.len().min(40)].escape_ascii();
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("this is no RESP: {start}"),
    )
}

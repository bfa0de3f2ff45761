//! A real server for the comparison, and a connection to it that waits for each reply.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, Stdio};

use fred::types::Value;
use tempfile::TempDir;

use super::steps::members;
use super::{Everything, NAMES, name_of};
use crate::key::KeyScheme;
use crate::kind::Kind;
use crate::store::redis::script::{self, Decoded, Publish, Script};
use crate::store::{Answer, Channel, Op};

/// Calls of our scripts on a server.
pub(super) struct Redis {
    pub(super) connection: Connection,
    time_as_argument: bool,
    dump: Script,
    shorten: Script,
}

impl Redis {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection,
            time_as_argument: false,
            dump: Script::new(DUMP.to_owned()),
            shorten: Script::new(SHORTEN.to_owned()),
        }
    }

    pub(super) fn with_time_as_argument(connection: Connection) -> Self {
        let mut redis = Self::new(connection);
        redis.time_as_argument = true;
        for (_, script) in script::all() {
            let text = script.with_time_as_argument().text;
            redis.connection.ask(&["SCRIPT", "LOAD", &text]).unwrap();
        }
        redis
    }

    /// As the store does it, with a deadline far away.
    pub(super) fn submit(&mut self, ops: &[Op]) -> Vec<Answer> {
        self.call(1, u64::MAX, None, ops).answers
    }

    pub(super) fn call(
        &mut self,
        attempt: u64,
        deadline_us: u64,
        now_us: Option<u64>,
        ops: &[Op],
    ) -> Decoded {
        let (keys, args) = script::encode(
            &KeyScheme::Redisson,
            Publish::Plain,
            attempt,
            deadline_us,
            ops,
        );
        let (keys, mut args) = (keys.to_strings(), args.to_strings());
        let script = script::script_for(&ops[0]);
        let reply = match now_us {
            None => self.connection.eval(script, &keys, &args),
            Some(now_us) => {
                args.push(now_us.to_string());
                let script = script.with_time_as_argument();
                self.connection.eval(&script, &keys, &args)
            }
        };
        script::decode(&reply.unwrap(), ops).unwrap()
    }

    /// Which commands an op makes the server run, and how often.
    pub(super) fn cost_of(&mut self, op: &Op) -> BTreeMap<String, u64> {
        self.connection.ask(&["CONFIG", "RESETSTAT"]).unwrap();
        self.submit(std::slice::from_ref(op));
        let info = text(self.connection.ask(&["INFO", "commandstats"]).unwrap());
        let lines = info.lines();
        let stats = lines.filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(":calls="));
        stats
            .map(|(command, rest)| {
                let (calls, _) = rest.split_once(',').unwrap();
                (command.to_owned(), calls.parse().unwrap())
            })
            .filter(|(command, _)| !command.starts_with("eval") && !command.starts_with("config"))
            .collect()
    }

    pub(super) fn keys(&mut self) -> usize {
        match self.connection.ask(&["DBSIZE"]) {
            Ok(Value::Integer(keys)) => usize::try_from(keys).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn everything(&mut self) -> Vec<Everything> {
        let reply = self.connection.eval(&self.dump, &all_keys(), &[]);
        let Ok(Value::Array(names)) = reply else {
            panic!("{reply:?}");
        };
        names
            .chunks_exact(9)
            .map(|name| Everything {
                list: match &name[4] {
                    Value::Array(list) => Some(list.iter().map(text).collect()),
                    _ => None,
                },
                deadlines: times(&name[5]),
                beats: times(&name[6]),
                beats_ttl_ms: ttl(&name[7]),
                fields: match &name[0] {
                    Value::Array(pairs) => Some(
                        pairs
                            .chunks_exact(2)
                            .map(|pair| (text(&pair[0]), text(&pair[1])))
                            .collect(),
                    ),
                    Value::Integer(1) => Some(BTreeMap::new()),
                    _ => None,
                },
                ttl_ms: ttl(&name[1]),
                counter: match &name[2] {
                    Value::Integer(0) => None,
                    value => Some(text(value)),
                },
                counter_ttl_ms: ttl(&name[3]),
                readers: readers(&name[8]),
            })
            .collect()
    }

    pub(super) fn shorten(&mut self, ms: u64) {
        let args = [ms.to_string()];
        self.connection
            .eval(&self.shorten, &all_keys(), &args)
            .unwrap();
    }
}

/// Hears the messages of all names.
pub(super) struct Listener {
    connection: Connection,
}

impl Listener {
    pub(super) fn start(mut connection: Connection) -> Self {
        let mut channels = vec![END.to_owned()];
        channels.extend(all_channels().map(|channel| KeyScheme::Redisson.channel(&channel)));
        for channel in &channels {
            connection.ask(&["SUBSCRIBE", channel]).unwrap();
        }
        Self { connection }
    }

    /// The channels told since this was asked last, in order. A message of our own, sent by the
    /// connection that ran the scripts, comes after theirs.
    pub(super) fn since_then(&mut self, sender: &mut Connection) -> Vec<Channel> {
        sender.ask(&["PUBLISH", END, ""]).unwrap();
        let mut told = Vec::new();
        loop {
            let Ok(Value::Array(message)) = self.connection.read() else {
                panic!("no message");
            };
            let channel = text(&message[1]);
            if channel == END {
                return told;
            }
            // The second message of two to the same.
            if channel.starts_with("redisson_rwlock") && text(&message[2]) == "0" {
                continue;
            }
            told.extend(all_channels().find(|one| KeyScheme::Redisson.channel(one) == channel));
        }
    }
}

/// Every channel a message may come on.
fn all_channels() -> impl Iterator<Item = Channel> {
    (0..NAMES).map(name_of).flat_map(|name| {
        let waiters = members().map({
            let name = name.clone();
            move |member| Channel::Fair(name.clone(), member.into())
        });
        let sides = [Kind::Plain, Kind::Read].map(|kind| kind.channel(&name));
        sides.into_iter().chain(waiters)
    })
}

/// A server of our own, ended when dropped.
pub(super) struct Server {
    process: Child,
    _output: BufReader<ChildStdout>,
    dir: TempDir,
}

impl Server {
    pub(super) fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let binary = std::env::var("LEASEHOLD_REDIS_SERVER");
        let binary = binary.unwrap_or_else(|_| "redis-server".to_owned());
        let mut process = Command::new(&binary)
            .args(["--port", "0", "--save", "", "--unixsocket"])
            .arg(dir.path().join("socket"))
            .arg("--dir")
            .arg(dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|problem| {
                panic!(
                    "{binary}: {problem}; install a server (Debian: apt-get install redis-server) \
                     or name one in LEASEHOLD_REDIS_SERVER"
                )
            });
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        while !line.to_lowercase().contains("ready to accept connections") {
            line.clear();
            let read = output.read_line(&mut line).unwrap();
            assert!(read > 0, "{binary} ended while starting");
        }
        Self {
            process,
            _output: output,
            dir,
        }
    }

    pub(super) fn connect(&self) -> Connection {
        let stream = UnixStream::connect(self.dir.path().join("socket")).unwrap();
        Connection {
            replies: BufReader::new(stream.try_clone().unwrap()),
            stream,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A connection that waits for each reply: no client library, no runtime.
pub(super) struct Connection {
    stream: UnixStream,
    replies: BufReader<UnixStream>,
}

impl Connection {
    pub(super) fn send<S: AsRef<str>>(&mut self, parts: &[S]) {
        let mut bytes = format!("*{}\r\n", parts.len()).into_bytes();
        for part in parts.iter().map(AsRef::as_ref) {
            bytes.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
            bytes.extend_from_slice(part.as_bytes());
            bytes.extend_from_slice(b"\r\n");
        }
        self.stream.write_all(&bytes).unwrap();
    }

    pub(super) fn ask<S: AsRef<str>>(&mut self, parts: &[S]) -> Result<Value, String> {
        self.send(parts);
        self.read()
    }

    /// What the server says it is.
    pub(super) fn version(&mut self) -> String {
        let info = text(self.ask(&["INFO", "server"]).unwrap());
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name));
            line.map(str::to_owned)
        };
        match (field("valkey_version:"), field("redis_version:")) {
            (Some(version), _) => format!("Valkey {version}"),
            (None, Some(version)) => format!("Redis {version}"),
            (None, None) => "an unknown server".to_owned(),
        }
    }

    /// By hash, and by text if the server does not know it.
    pub(super) fn eval(
        &mut self,
        script: &Script,
        keys: &[String],
        args: &[String],
    ) -> Result<Value, String> {
        let count = keys.len().to_string();
        let mut parts = vec!["EVALSHA", &script.sha, &count];
        parts.extend(keys.iter().chain(args).map(String::as_str));
        match self.ask(&parts) {
            Err(problem) if problem.starts_with("NOSCRIPT") => {
                parts[0] = "EVAL";
                parts[1] = &script.text;
                self.ask(&parts)
            }
            reply => reply,
        }
    }

    pub(super) fn read(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        self.replies.read_line(&mut line).unwrap();
        let (kind, rest) = line.trim_end().split_at(1);
        let number = || rest.parse::<i64>().unwrap();
        match kind {
            "+" => Ok(rest.into()),
            "-" => Err(rest.to_owned()),
            ":" => Ok(Value::Integer(number())),
            "$" => Ok(match usize::try_from(number()) {
                Err(_) => Value::Null,
                Ok(size) => {
                    let mut bytes = vec![0; size + 2];
                    self.replies.read_exact(&mut bytes).unwrap();
                    bytes.truncate(size);
                    String::from_utf8(bytes).unwrap().into()
                }
            }),
            "*" => (0..number())
                .map(|_| self.read())
                .collect::<Result<_, _>>()
                .map(Value::Array),
            other => panic!("{other:?}"),
        }
    }
}

fn all_keys() -> Vec<String> {
    (0..NAMES)
        .map(name_of)
        .flat_map(|name| {
            let scheme = KeyScheme::Redisson;
            let [queue, deadlines, beats] = scheme.queue(&name);
            [
                scheme.hash(&name).into_owned(),
                scheme.token(&name),
                queue,
                deadlines,
                beats,
            ]
        })
        .collect()
}

/// Members and their times; `None`: another type.
fn times(value: &Value) -> Option<BTreeMap<String, u64>> {
    let Value::Array(items) = value else {
        return None;
    };
    let pairs = items.chunks_exact(2);
    Some(
        pairs
            .map(|pair| (text(&pair[0]), text(&pair[1]).parse().unwrap()))
            .collect(),
    )
}

/// Whose leases there are, and what is left of them.
fn readers(value: &Value) -> BTreeMap<(String, u32), Option<u64>> {
    let Value::Array(all) = value else {
        panic!("{value:?}");
    };
    all.chunks_exact(2)
        .map(|lease| {
            let key = text(&lease[0]);
            let (reader, number) = key.split_once(":rwlock_timeout:").unwrap();
            let (_, reader) = reader.split_once("}:").unwrap();
            ((reader.to_owned(), number.parse().unwrap()), ttl(&lease[1]))
        })
        .collect()
}

fn ttl(value: &Value) -> Option<u64> {
    match value {
        Value::Integer(ms) => u64::try_from(*ms).ok(),
        other => panic!("{other:?}"),
    }
}

pub(super) fn text(value: impl Borrow<Value>) -> String {
    value.borrow().as_string().unwrap()
}

/// A channel of the tests' own.
const END: &str = "end";

/// For each lock and counter: fields (1: another type, 0: none), PTTL, text (0: none), PTTL; for its queue:
/// the list, deadlines, beats (1: another type), PTTL of the beats; and the leases of readers, each with its
/// PTTL.
const DUMP: &str = r"
local all = {}
local function whole(key, kind, command, ...)
  local type_of_key = redis.call('TYPE', key).ok
  if type_of_key == 'none' then return {} end
  if type_of_key ~= kind then return 1 end
  return redis.call(command, key, ...)
end
for i = 1, #KEYS, 5 do
  local lock, counter, queue, deadlines, beats = unpack(KEYS, i, i + 4)
  local type_of_lock = redis.call('TYPE', lock).ok
  local type_of_counter = redis.call('TYPE', counter).ok
  local fields, text = 1, 'a list'
  if type_of_lock == 'hash' then fields = redis.call('HGETALL', lock) end
  if type_of_lock == 'none' then fields = 0 end
  if type_of_counter == 'string' then text = redis.call('GET', counter) end
  if type_of_counter == 'none' then text = 0 end
  local readers = {}
  for _, key in ipairs(redis.call('KEYS', '{' .. lock .. '}:*:rwlock_timeout:*')) do
    readers[#readers + 1] = key
    readers[#readers + 1] = redis.call('PTTL', key)
  end
  for _, item in ipairs({
    fields, redis.call('PTTL', lock), text, redis.call('PTTL', counter),
    whole(queue, 'list', 'LRANGE', 0, -1), whole(deadlines, 'zset', 'ZRANGE', 0, -1, 'WITHSCORES'),
    whole(beats, 'zset', 'ZRANGE', 0, -1, 'WITHSCORES'), redis.call('PTTL', beats), readers,
  }) do
    all[#all + 1] = item
  end
end
return all
";

/// Lets ARGV[1] milliseconds pass for every key.
const SHORTEN: &str = r"
local all = redis.call('KEYS', '*:rwlock_timeout:*')
for _, key in ipairs(KEYS) do
  all[#all + 1] = key
end
for _, key in ipairs(all) do
  local left = redis.call('PTTL', key)
  if left >= 0 then
    redis.call('PEXPIRE', key, left - ARGV[1])
  end
end
";

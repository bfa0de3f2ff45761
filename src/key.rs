//! Every key and channel name, in both key schemes. Nothing else builds one.

use std::borrow::Cow;
use std::fmt::Write as _;

use uuid::Uuid;

use crate::error::Error;
use crate::store::{Channel, OwnerId};

/// How the keys and channels of a name are called.
///
/// Two services exclude each other only if they use the same scheme.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KeyScheme {
    /// Redisson's names, so that a Java service can share the lock: the lock is the key `name`
    /// itself, its token counter `redisson_lock_token:{name}`, its channel
    /// `redisson_lock__channel:{name}`. The default.
    #[default]
    Redisson,
    /// Every key and channel begins with this prefix and a colon, and carries the name as its one
    /// hash tag: for ACLs by prefix (`~app:* &app:*`), and for names with any braces.
    ///
    /// The prefix is 1 to 256 bytes without `{` and `}`.
    Prefix(String),
}

/// Longest name, in bytes. Longer ones are refused before anything is sent.
pub(crate) const MAX_NAME_BYTES: usize = 64 * 1024;

const MAX_PREFIX_BYTES: usize = 256;

impl KeyScheme {
    /// Refuses a prefix that would spoil the hash tag.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let Self::Prefix(prefix) = self else {
            return Ok(());
        };
        if prefix.is_empty() || prefix.len() > MAX_PREFIX_BYTES {
            return Err(Error::config(format!(
                "a key prefix has 1 to {MAX_PREFIX_BYTES} bytes, this one {}",
                prefix.len()
            )));
        }
        if prefix.contains(['{', '}']) {
            return Err(Error::config("a key prefix cannot contain `{` or `}`"));
        }
        Ok(())
    }

    /// The hash that is the lock.
    pub(crate) fn hash<'a>(&self, name: &'a str) -> Cow<'a, str> {
        match self {
            Self::Redisson => Cow::Borrowed(name),
            Self::Prefix(prefix) => Cow::Owned(tagged(prefix, "lock", name)),
        }
    }

    /// The counter of fencing tokens.
    pub(crate) fn token(&self, name: &str) -> String {
        match self {
            Self::Redisson => redisson_prefix("redisson_lock_token", name),
            Self::Prefix(prefix) => tagged(prefix, "token", name),
        }
    }

    /// The channel that tells of a release.
    pub(crate) fn channel(&self, channel: &Channel) -> String {
        match (self, channel) {
            (Self::Redisson, Channel::Lock(name)) => {
                redisson_prefix("redisson_lock__channel", name)
            }
            (Self::Prefix(prefix), Channel::Lock(name)) => tagged(prefix, "channel", name),
            (Self::Redisson, Channel::ReadWrite(name)) => redisson_prefix("redisson_rwlock", name),
            (Self::Prefix(prefix), Channel::ReadWrite(name)) => tagged(prefix, "rwchannel", name),
            // Redisson's spelling, in both schemes: the scripts put the owner id behind it.
            (_, Channel::Fair(name, owner)) => {
                let mut channel = self.channel(&Channel::Lock(name.clone()));
                let _ = write!(channel, ":{owner}");
                channel
            }
        }
    }

    /// The queue of a fair lock: its list, its deadlines for Redisson's clients, and our beats.
    pub(crate) fn queue(&self, name: &str) -> [String; 3] {
        match self {
            Self::Redisson => [
                "redisson_lock_queue",
                "redisson_lock_timeout",
                "leasehold_lock_beat",
            ]
            .map(|prefix| redisson_prefix(prefix, name)),
            Self::Prefix(prefix) => {
                ["queue", "timeout", "beat"].map(|kind| tagged(prefix, kind, name))
            }
        }
    }

    /// What the keys with the leases of readers begin with.
    pub(crate) fn readers(&self, name: &str) -> String {
        match self {
            Self::Redisson if name.contains('{') => name.to_owned(),
            Self::Redisson => format!("{{{name}}}"),
            Self::Prefix(prefix) => tagged(prefix, "reader", name),
        }
    }

    /// The key with a reader's lease. Redisson numbers them by hold count; one is enough for us.
    pub(crate) fn reader(&self, name: &str, owner: OwnerId) -> String {
        format!("{}:{owner}:rwlock_timeout:1", self.readers(name))
    }

    /// What a client says of itself.
    pub(crate) fn client(&self, client: Uuid) -> String {
        match self {
            Self::Redisson => format!("leasehold_client:{}", client.hyphenated()),
            Self::Prefix(prefix) => format!("{prefix}:client:{}", client.hyphenated()),
        }
    }
}

/// Redisson's `prefixName`: braces around the name unless it has an opening one.
fn redisson_prefix(prefix: &str, name: &str) -> String {
    if name.contains('{') {
        format!("{prefix}:{name}")
    } else {
        format!("{prefix}:{{{name}}}")
    }
}

/// `prefix:kind:{name}`, with what could end or open a tag percent-encoded.
fn tagged(prefix: &str, kind: &str, name: &str) -> String {
    let mut key = String::with_capacity(prefix.len() + kind.len() + name.len() + 8);
    let _ = write!(key, "{prefix}:{kind}:{{");
    for c in name.chars() {
        match c {
            '{' => key.push_str("%7B"),
            '}' => key.push_str("%7D"),
            '%' => key.push_str("%25"),
            other => key.push(other),
        }
    }
    key.push('}');
    key
}

/// Refuses a name that cannot be a key.
pub(crate) fn validate_name(name: &str) -> Result<(), Error> {
    match name.len() {
        0 => Err(Error::config("a lock needs a name of at least one byte")),
        1..=MAX_NAME_BYTES => Ok(()),
        bytes => Err(Error::config(format!(
            "a lock's name has at most {MAX_NAME_BYTES} bytes, this one {bytes}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashMap;

    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};

    use super::*;

    fn lock(name: &str) -> Channel {
        Channel::Lock(name.into())
    }

    #[test]
    fn redisson_names_are_redissons() {
        let scheme = KeyScheme::Redisson;
        assert_eq!(scheme.hash("job"), "job");
        assert_eq!(scheme.token("job"), "redisson_lock_token:{job}");
        assert_eq!(scheme.channel(&lock("job")), "redisson_lock__channel:{job}");
        assert_eq!(
            scheme.channel(&lock("a:{t}:b")),
            "redisson_lock__channel:a:{t}:b"
        );
        assert_eq!(
            scheme.queue("job"),
            [
                "redisson_lock_queue:{job}",
                "redisson_lock_timeout:{job}",
                "leasehold_lock_beat:{job}"
            ]
        );
        assert_eq!(
            scheme.channel(&Channel::Fair("job".into(), "u:7".into())),
            "redisson_lock__channel:{job}:u:7"
        );
    }

    #[test]
    fn prefixed_names_begin_with_the_prefix_and_keep_names_apart() {
        let scheme = KeyScheme::Prefix("app".into());
        assert_eq!(scheme.hash("job"), "app:lock:{job}");
        assert_eq!(scheme.token("a}b"), "app:token:{a%7Db}");
        assert_ne!(scheme.hash("a%7Db"), scheme.hash("a}b"));
    }

    #[test]
    fn bad_prefixes_and_names_are_refused() {
        for bad in ["", "a{b", "a}b"] {
            assert!(KeyScheme::Prefix(bad.into()).validate().is_err(), "{bad}");
        }
        assert!(validate_name("").is_err());
        assert!(validate_name(&"x".repeat(MAX_NAME_BYTES)).is_ok());
        assert!(validate_name(&"x".repeat(MAX_NAME_BYTES + 1)).is_err());
    }

    /// B73: a cluster refuses a script whose keys lie in different slots. Whatever the name, those of
    /// one name share theirs; and no two names share a key.
    #[test]
    fn all_keys_of_any_name_share_one_slot_under_a_prefix() {
        let seen: RefCell<HashMap<String, String>> = RefCell::default();
        let mut runner = TestRunner::new(Config {
            failure_persistence: None,
            ..Config::default()
        });
        let scheme = KeyScheme::Prefix("app:v-1".into());
        let result = runner.run(&any_name(), |name| {
            validate_name(&name).unwrap();
            let [queue, deadlines, beats] = scheme.queue(&name);
            let keys = [
                scheme.hash(&name).into_owned(),
                scheme.token(&name),
                scheme.channel(&lock(&name)),
                scheme.channel(&Channel::Fair(name.as_str().into(), "client:1".into())),
                queue,
                deadlines,
                beats,
            ];
            let slots = keys.each_ref().map(|key| slot(key));
            prop_assert!(slots.iter().all(|slot| *slot == slots[0]), "{:?}", slots);
            for key in &keys {
                prop_assert!(key.starts_with("app:v-1:"));
                prop_assert_eq!(key.matches('{').count(), 1);
            }
            let [hash, ..] = keys;
            let earlier = seen.borrow_mut().insert(hash, name.clone());
            prop_assert!(earlier.is_none_or(|earlier| earlier == name));
            Ok(())
        });
        result.unwrap_or_else(|failure| panic!("{failure}"));
    }

    /// Under Redisson's names they share it exactly if the name has no brace, or a tag of its own:
    /// then its keys begin and end differently, but the tag is what counts. With any other name a
    /// lock works on a single server only, and clusters are refused (`store::redis::url`).
    #[test]
    fn keys_share_one_slot_under_redissons_names_if_the_name_has_a_tag_or_no_brace() {
        let names = prop_oneof![
            3 => any_name(),
            1 => "[^{}]{1,40}",
            1 => "[^{}]{0,8}[{][^}]{1,8}[}].{0,8}",
            1 => "[^{}]{0,4}[{][{]{1,3}[^}]{0,4}[}][{}]{0,4}",
        ];
        let mut runner = TestRunner::new(Config {
            failure_persistence: None,
            ..Config::default()
        });
        let result = runner.run(&names, |name| {
            let tagged = match name.split_once('{') {
                None => !name.contains('}'),
                Some((_, rest)) => rest.find('}').is_some_and(|at| at > 0),
            };
            let keys = redissons_keys(&name);
            let counts = keys.each_ref().map(|key| hashed(key));
            prop_assert_eq!(counts.iter().all(|part| *part == counts[0]), tagged);
            Ok(())
        });
        result.unwrap_or_else(|failure| panic!("{failure}"));
    }

    /// Names of all that is odd, of one byte to as many as a name may have.
    fn any_name() -> impl Strategy<Value = String> {
        let bytes = prop_oneof![1..=MAX_NAME_BYTES, Just(MAX_NAME_BYTES)];
        let long = ("[{}%:a\\x00]{1,8}", bytes).prop_map(|(part, bytes)| {
            let mut name = part.repeat(bytes / part.len() + 1);
            name.truncate(bytes);
            name
        });
        let odd = [
            "\0", "a\0b", "{}", "{}x", "}{", "}{x}", "{\0}", "{", "}", "{{}}", "%7B",
        ];
        prop_oneof![
            4 => "[{}%:a\\x00]{1,8}",
            2 => ".{1,40}",
            2 => any::<String>().prop_filter("no name", |name| !name.is_empty()),
            2 => proptest::sample::select(odd.to_vec()).prop_map(str::to_owned),
            1 => long,
        ]
    }

    /// Java spells the keys of such names in the same way, so we may not spell them better. A cluster
    /// refuses them all but those that share a slot; `Prefix` takes any name.
    #[test]
    fn redissons_names_of_odd_braces_are_as_java_spells_them() {
        let odd = [
            // An opening brace of its own, so none is added; but no tag, so the whole key counts.
            ("{", "redisson_lock_token:{", false),
            ("{}", "redisson_lock_token:{}", false),
            ("{}x{y}", "redisson_lock_token:{}x{y}", false),
            ("a}{b", "redisson_lock_token:a}{b", false),
            // No opening brace, so both are added; the name's own ends the tag too soon.
            ("}", "redisson_lock_token:{}}", false),
            ("a}b", "redisson_lock_token:{a}b}", false),
            // The first tag counts, and an opening brace may be in it.
            ("a{b}c{d}", "redisson_lock_token:a{b}c{d}", true),
            ("a{{b}}", "redisson_lock_token:a{{b}}", true),
            ("a}{b}", "redisson_lock_token:a}{b}", true),
        ];
        for (name, token, share) in odd {
            let keys = redissons_keys(name);
            assert_eq!(keys[0], name);
            assert_eq!(keys[1], token);
            assert_eq!(keys[2], token.replace("_token:", "__channel:"));
            let slots = keys.map(|key| slot(&key));
            assert_eq!(slots.iter().all(|slot| *slot == slots[0]), share, "{name}");

            let prefixed = KeyScheme::Prefix("app".into());
            let hash = slot(&prefixed.hash(name));
            assert_eq!(slot(&prefixed.token(name)), hash, "{name}");
            assert_eq!(slot(&prefixed.channel(&lock(name))), hash, "{name}");
        }
    }

    /// The tests' own idea of a slot is that of the cluster's specification.
    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot("123456789"), 0x31c3);
        assert_eq!(slot("{user1000}.following"), slot("user1000"));
        assert_eq!(slot("foo{{bar}}zap"), slot("{bar"));
        assert_eq!(slot("foo{bar}{zap}"), slot("bar"));
        assert_ne!(slot("foo{}{bar}"), slot("bar"));
        for key in ["{", "}", "{}", "a}{b}", "{a}{b}", ""] {
            assert_eq!(slot(key), fred::util::redis_keyslot(key.as_bytes()));
        }
    }

    fn redissons_keys(name: &str) -> [String; 7] {
        let scheme = KeyScheme::Redisson;
        let [queue, deadlines, beats] = scheme.queue(name);
        [
            scheme.hash(name).into_owned(),
            scheme.token(name),
            scheme.channel(&lock(name)),
            scheme.channel(&Channel::Fair(name.into(), "client:1".into())),
            queue,
            deadlines,
            beats,
        ]
    }

    /// What of a key counts for its slot: its first tag, or all of it if that is empty.
    ///
    /// <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/>
    fn hashed(key: &str) -> &str {
        key.split_once('{')
            .and_then(|(_, rest)| rest.split_once('}'))
            .map(|(tag, _)| tag)
            .filter(|tag| !tag.is_empty())
            .unwrap_or(key)
    }

    /// The slot of a key: CRC16 (XMODEM) of what counts.
    fn slot(key: &str) -> u16 {
        let mut crc = 0_u16;
        for byte in hashed(key).bytes() {
            crc ^= u16::from(byte) << 8;
            for _ in 0..8 {
                let carry = crc & 0x8000 != 0;
                crc <<= 1;
                if carry {
                    crc ^= 0x1021;
                }
            }
        }
        crc % 16384
    }
}

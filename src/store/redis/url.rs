//! From a URL to a configuration of fred, refusing what fred would take silently.
//!
//! Measured with fred 10.1.0: `rediss://` without a TLS feature connects in plaintext, an unknown
//! scheme is taken for `redis`, unknown parameters and a user name without password are ignored.
//! No message shows any part of the URL but its scheme and the names of its parameters.

use fred::types::config::{Config, ServerConfig};

use crate::error::Error;

/// Reads `redis://[[user]:password@]host[:port][/database]`, `rediss://` (TLS), the same with
/// `valkey` and `valkeys`, and
/// `redis-sentinel://[[user]:password@]host[:port][/database]?sentinelServiceName=name&node=host:port`.
pub(crate) fn parse_url(url: &str) -> Result<Config, Error> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(Error::config(
            "not a server URL: write redis://[[user]:password@]host[:port][/database]",
        ));
    };
    let sentinel = check_scheme(&scheme.to_ascii_lowercase())?;
    let (rest, fragment) = split(rest, '#');
    let (rest, query) = split(rest, '?');
    let (authority, path) = split(rest, '/');
    if fragment.is_some() {
        return Err(Error::config(
            "the server URL has a `#`: percent-encode it (%23) if the password contains one",
        ));
    }
    if path.is_some_and(|path| path.contains('@')) {
        return Err(Error::config(
            "the server URL has a `/` before an `@`: percent-encode it (%2F) in the password",
        ));
    }
    check_authority(authority)?;
    check_database(path.unwrap_or_default())?;
    check_query(query.unwrap_or_default(), sentinel)?;

    let config = Config::from_url(url).map_err(|_| {
        // fred's words may repeat parts of the URL, hence of the password.
        Error::config(
            "the server URL cannot be read: check host and port, and percent-encode special \
             characters of user name and password",
        )
    })?;
    validate(&config)?;
    Ok(config)
}

/// Refuses a configuration that cannot work, or not as it says.
pub(crate) fn validate(config: &Config) -> Result<(), Error> {
    match &config.server {
        ServerConfig::Clustered { .. } => return Err(no_cluster()),
        ServerConfig::Sentinel { service_name, .. } if service_name.is_empty() => {
            return Err(no_service());
        }
        _ => {}
    }
    let hosts = config.server.hosts();
    if hosts.is_empty() || hosts.iter().any(|server| server.host.is_empty()) {
        return Err(no_host());
    }
    if config.server.is_centralized() && hosts.iter().any(|server| server.port == 0) {
        return Err(Error::config("port 0 of the server cannot be connected to"));
    }
    Ok(())
}

/// Whether the scheme is one of Sentinel.
fn check_scheme(scheme: &str) -> Result<bool, Error> {
    let (base, suffix) = scheme
        .split_once(['-', '+'])
        .map_or((scheme, ""), |(base, suffix)| (base, suffix));
    let tls = match base {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        _ => return Err(unknown_scheme(scheme)),
    };
    if tls && !cfg!(feature = "tls") {
        return Err(Error::config(format!(
            "{scheme}:// needs TLS: switch on the feature `tls` of leasehold"
        )));
    }
    match suffix {
        "" if !scheme.ends_with(['-', '+']) => Ok(false),
        "sentinel" if scheme.contains('-') => Ok(true),
        "cluster" if scheme.contains('-') => Err(no_cluster()),
        _ => Err(unknown_scheme(scheme)),
    }
}

fn check_authority(authority: &str) -> Result<(), Error> {
    let (credentials, host) = authority
        .rsplit_once('@')
        .map_or((None, authority), |(credentials, host)| {
            (Some(credentials), host)
        });
    if host.is_empty() || host.starts_with(':') {
        return Err(no_host());
    }
    if let Some(credentials) = credentials {
        let password = credentials.split_once(':').map(|(_, password)| password);
        // fred would connect without authentication, as the default user.
        if password.is_none_or(str::is_empty) && !credentials.is_empty() {
            return Err(Error::config(
                "the server URL has a user name without a password: write \
                 redis://:password@host, or redis://user:password@host",
            ));
        }
    }
    Ok(())
}

fn check_database(path: &str) -> Result<(), Error> {
    if path.is_empty() || path.bytes().all(|b| b.is_ascii_digit()) && path.parse::<u8>().is_ok() {
        Ok(())
    } else {
        Err(Error::config(
            "the database in the server URL is not a number from 0 to 255",
        ))
    }
}

fn check_query(query: &str, sentinel: bool) -> Result<(), Error> {
    let mut service = false;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        match key {
            "sentinelServiceName" if sentinel => service = !value.is_empty(),
            "node" if sentinel => {}
            _ if is_tame(key) => {
                return Err(Error::config(format!(
                    "unknown parameter `{key}` in the server URL"
                )));
            }
            _ => return Err(Error::config("unknown parameter in the server URL")),
        }
    }
    if sentinel && !service {
        return Err(no_service());
    }
    Ok(())
}

fn split(text: &str, at: char) -> (&str, Option<&str>) {
    text.split_once(at)
        .map_or((text, None), |(head, tail)| (head, Some(tail)))
}

/// Short and plain enough to be shown: not a piece of a password with special characters.
fn is_tame(text: &str) -> bool {
    text.len() <= 24
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"+-_.".contains(&b))
}

fn unknown_scheme(scheme: &str) -> Error {
    let known = "redis://, rediss://, valkey://, valkeys:// or redis-sentinel://";
    if is_tame(scheme) {
        Error::config(format!(
            "unknown scheme `{scheme}` of the server URL: {known}"
        ))
    } else {
        Error::config(format!("unknown scheme of the server URL: {known}"))
    }
}

fn no_host() -> Error {
    Error::config("the server URL names no host")
}

fn no_service() -> Error {
    Error::config("Sentinel needs the name of the service: add ?sentinelServiceName=...")
}

fn no_cluster() -> Error {
    Error::config("Redis Cluster is not supported yet: use redis:// or redis-sentinel://")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_that_work_are_read() {
        for (url, host, port, database) in [
            ("redis://localhost", "localhost", 6379, None),
            ("redis://127.0.0.1:7000/3", "127.0.0.1", 7000, Some(3)),
            ("REDIS://h:1/", "h", 1, None),
            ("valkey://:pw@h:2/255", "h", 2, Some(255)),
            ("redis://[::1]:6380", "[::1]", 6380, None),
        ] {
            let config = parse_url(url).unwrap();
            let hosts = config.server.hosts();
            assert_eq!(
                (&*hosts[0].host, hosts[0].port, config.database),
                (host, port, database),
                "{url}"
            );
        }
        let config = parse_url("redis://app:p%40ss%2F@h").unwrap();
        assert_eq!(config.username.as_deref(), Some("app"));
        assert_eq!(config.password.as_deref(), Some("p@ss/"));
        let config =
            parse_url("redis-sentinel://a:1/2?sentinelServiceName=main&node=b:2&node=c:3").unwrap();
        assert!(config.server.is_sentinel());
        assert_eq!(config.server.hosts().len(), 3);
        assert_eq!(config.database, Some(2));
    }

    #[test]
    fn urls_that_cannot_work_are_refused_with_the_reason() {
        for (url, reason) in [
            ("", "not a server URL"),
            ("localhost:6379", "not a server URL"),
            ("secret", "not a server URL"),
            ("redis:/h", "not a server URL"),
            ("http://h", "unknown scheme `http`"),
            ("redis+unix:///tmp/secret", "unknown scheme `redis+unix`"),
            ("redis-://h", "unknown scheme `redis-`"),
            ("secret/se cret://h", "unknown scheme of"),
            ("redis-cluster://h:1", "not supported yet"),
            ("valkey-cluster://h:1", "not supported yet"),
            ("redis://", "no host"),
            ("redis:///0", "no host"),
            ("redis://:6379", "no host"),
            ("redis://:secret@", "no host"),
            ("redis://:secret@:6379", "no host"),
            ("redis://secret@h", "user name without a password"),
            ("redis://secret:@h", "user name without a password"),
            ("redis://h/secret", "not a number"),
            ("redis://h/256", "not a number"),
            ("redis://h/-1", "not a number"),
            ("redis://h/+1", "not a number"),
            ("redis://h/1/2", "not a number"),
            ("redis://h:0", "port 0"),
            ("redis://h:99999", "cannot be read"),
            ("redis://h:secret", "cannot be read"),
            ("redis://:sec#ret@h", "has a `#`"),
            ("redis://:sec/ret@h", "has a `/`"),
            ("redis://h?db=3", "unknown parameter `db`"),
            ("redis://h?sec ret=1", "unknown parameter in"),
            ("redis://:a?secret@h", "no host"),
            ("redis-sentinel://h:1", "sentinelServiceName"),
            (
                "redis-sentinel://h:1?sentinelServiceName=",
                "sentinelServiceName",
            ),
            (
                "redis-sentinel://h:1?sentinelServiceName=m&sentinelPassword=secret",
                "unknown parameter `sentinelPassword`",
            ),
            (
                "redis-sentinel://h:1?sentinelServiceName=m&node=secret",
                "cannot be read",
            ),
        ] {
            let Err(Error::Config { problem }) = parse_url(url) else {
                panic!("{url} was taken, or refused with another kind of error");
            };
            assert!(problem.contains(reason), "{url}: {problem}");
            assert!(!problem.contains("secret"), "{url}: {problem}");
        }
    }

    #[test]
    fn tls_is_never_dropped_silently() {
        for url in [
            "rediss://h",
            "valkeys://h",
            "rediss-sentinel://h?sentinelServiceName=m",
        ] {
            let parsed = parse_url(url);
            if cfg!(feature = "tls") {
                assert!(parsed.unwrap().uses_tls(), "{url}");
            } else {
                let error = parsed.unwrap_err().to_string();
                assert!(error.contains("feature `tls`"), "{url}: {error}");
            }
        }
    }
}

//! Bytes, times and states as text and as JSON.

use std::io::{self, Write};
use std::time::Duration;

use idemlog::{KeyState, Outcome};
use serde_json::{Map, Value, json};

use crate::exit::Stop;

/// Writes bytes to stdout and hands them to the system.
pub(crate) fn print(bytes: &[u8]) -> Result<(), Stop> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .map_err(|e| Stop::io("cannot write stdout", &e))
}

pub(crate) fn print_line(line: &str) -> Result<(), Stop> {
    print(format!("{line}\n").as_bytes())
}

/// Shows bytes in a message: UTF-8 text without control characters as it is, others escaped.
pub(crate) fn show_bytes(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_string(),
        _ => bytes.escape_ascii().to_string(),
    }
}

/// Quotes bytes so that a shell reads them as one word.
pub(crate) fn shell_word(bytes: &[u8]) -> String {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"-_./:@%+,=".contains(b);
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.is_empty() && bytes.iter().all(plain) => text.to_string(),
        Ok(text) if !text.chars().any(char::is_control) => {
            format!("'{}'", text.replace('\'', r"'\''"))
        }
        _ => format!(
            "$'{}'",
            bytes.escape_ascii().to_string().replace("\\\"", "\"")
        ),
    }
}

/// Shows a time to its two largest units.
pub(crate) fn show_duration(time: Duration) -> String {
    let seconds = time.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match seconds {
        0 => format!("{}ms", time.as_millis()),
        1..60 => format!("{}.{}s", seconds, time.subsec_millis() / 100),
        60..3600 => format!("{minutes}m{}s", seconds % 60),
        3600..86_400 => format!("{hours}h{minutes}m"),
        _ => format!("{days}d{hours}h"),
    }
}

/// Makes one line of clap's page: what is wrong, and where the rest stands.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let page = error.to_string();
    let what = page.split("\n\nUsage:").next().unwrap_or(&page);
    let what = what
        .split("\n\nFor more information")
        .next()
        .unwrap_or(what);
    let words: Vec<_> = what.split_whitespace().collect();
    let line = words.join(" ");
    format!(
        "{}; see idemlog --help",
        line.strip_prefix("error: ").unwrap_or(&line)
    )
}

/// Adds bytes under a name: a string if they are UTF-8, else hexadecimal digits under `name_hex`.
pub(crate) fn put_bytes(object: &mut Map<String, Value>, name: &str, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => object.insert(name.to_string(), json!(text)),
        Err(_) => {
            let digits: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
            object.insert(format!("{name}_hex"), json!(digits))
        }
    };
}

/// Returns what is known about a key as JSON.
pub(crate) fn state_json(key: &[u8], state: &KeyState) -> Map<String, Value> {
    let mut object = Map::new();
    put_bytes(&mut object, "key", key);
    object.insert("state".to_string(), json!(state.name()));
    let mut put = |name: &str, value: Value| object.insert(name.to_string(), value);
    match state {
        KeyState::Absent | KeyState::Seen => {}
        KeyState::Pending {
            epoch,
            attempt,
            started,
            owner,
            lease_left,
            since_ms,
            evidence,
        } => {
            put("epoch", json!(epoch.get()));
            put("attempt", json!(attempt));
            put("started", json!(started));
            put("pid", json!(owner.pid));
            put("detached", json!(owner.detached));
            put("lease_left_ms", millis(*lease_left));
            put("since_ms", json!(since_ms));
            put_bytes(&mut object, "evidence", evidence);
        }
        KeyState::Done(done) => {
            put("epoch", json!(done.epoch.get()));
            put("attempt", json!(done.attempt));
            put("first_seen_ms", json!(done.first_seen_ms));
            put("committed_at_ms", json!(done.committed_at_ms));
            match &done.outcome {
                Outcome::Kept(bytes) => put_bytes(&mut object, "outcome", bytes),
                Outcome::Dropped => drop(put("outcome", Value::Null)),
            }
        }
        KeyState::Failed {
            epoch,
            attempt,
            error,
            retry_after,
        } => {
            put("epoch", json!(epoch.get()));
            put("attempt", json!(attempt));
            put("retry_after_ms", millis(*retry_after));
            put_bytes(&mut object, "error", error);
        }
        KeyState::Rejected { epoch, error } => {
            put("epoch", json!(epoch.get()));
            put_bytes(&mut object, "error", error);
        }
        KeyState::InDoubt(doubt) => {
            put("epoch", json!(doubt.epoch.get()));
            put("attempt", json!(doubt.attempt));
            put("since_ms", json!(doubt.since_ms));
            put_bytes(&mut object, "evidence", &doubt.evidence);
        }
        KeyState::Dead { attempts, error } => {
            put("attempts", json!(attempts));
            put_bytes(&mut object, "error", error);
        }
    }
    object
}

/// Returns what is known about a key as one line: the state, then facts as key=value.
pub(crate) fn state_line(key: &[u8], state: &KeyState) -> String {
    let mut line = state.name().to_string();
    for (name, value) in state_json(key, state) {
        match (name.as_str(), value) {
            ("state", _) => {}
            (name, Value::String(text)) => {
                line.push_str(&format!(" {name}={}", show_bytes(text.as_bytes())));
            }
            (name, Value::Null) => line.push_str(&format!(" {name}=dropped")),
            (name, value) => line.push_str(&format!(" {name}={value}")),
        }
    }
    line
}

fn millis(time: Duration) -> Value {
    json!(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_show_two_units() {
        assert_eq!(show_duration(Duration::from_millis(7)), "7ms");
        assert_eq!(show_duration(Duration::from_millis(9_480)), "9.4s");
        assert_eq!(show_duration(Duration::from_secs(61)), "1m1s");
        assert_eq!(show_duration(Duration::from_secs(3 * 3600 + 120)), "3h2m");
        assert_eq!(
            show_duration(Duration::from_secs(8 * 86_400 + 3600)),
            "8d1h"
        );
    }

    #[test]
    fn a_shell_reads_one_word() {
        assert_eq!(shell_word(b"order-1"), "order-1");
        assert_eq!(shell_word(b""), "''");
        assert_eq!(shell_word(b"it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(shell_word(b"a\nb\xff"), r"$'a\nb\xff'");
    }

    #[test]
    fn bytes_show_without_control_characters() {
        assert_eq!(show_bytes("na\u{ef}ve".as_bytes()), "na\u{ef}ve");
        assert_eq!(show_bytes(b"a\x1b[31m"), r"a\x1b[31m");
    }
}

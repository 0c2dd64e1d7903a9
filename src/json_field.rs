//! One field of a JSON text, as key bytes.

use std::fmt;

use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::{Error, Result};

/// Returns the text of the string, number or boolean at a path: names of members, and indexes
/// into arrays, from the outside in.
///
/// The text decides, not the value: `"5"` and `5` are two keys, and so are integers beyond what a
/// double tells apart, and `1` and `1.0`. Only strings are brought to one spelling, since escapes
/// are no difference: a string that could be written without one is.
///
/// ```
/// let json = br#"{"user": {"id": 12345678901234567890123, "tags": ["new"]}}"#;
/// let id = idemlog::json_field(json, &["user", "id"])?;
/// assert_eq!(id, b"12345678901234567890123");
/// assert_eq!(idemlog::json_field(json, &["user", "tags", "0"])?, b"\"new\"");
/// assert!(idemlog::json_field(json, &["user", "name"]).is_err());
/// # Ok::<(), idemlog::Error>(())
/// ```
///
/// # Errors
/// `Invalid` if it is not one JSON value, if there is nothing at the path or the member there is
/// there twice (of which different parsers take different ones), and if what is there is `null`,
/// an object or an array.
pub fn json_field(json: &[u8], path: &[&str]) -> Result<Vec<u8>> {
    let mut value: &RawValue = serde_json::from_slice(json)
        .map_err(|e| Error::invalid(format!("not a JSON value: {e}")))?;
    for (depth, step) in path.iter().enumerate() {
        let walked = || {
            path.iter()
                .take(depth + 1)
                .copied()
                .collect::<Vec<_>>()
                .join(".")
        };
        value = match child(value, step) {
            Child::One(child) => child,
            Child::None => {
                return Err(Error::invalid(format!("nothing at path={}", walked())));
            }
            Child::Many => {
                return Err(Error::invalid(format!(
                    "more than one member at path={}",
                    walked()
                )));
            }
        };
    }
    match value.get().as_bytes().first() {
        Some(b'"') => {
            let text: String = serde_json::from_str(value.get())
                .map_err(|e| Error::invalid(format!("not a JSON string: {e}")))?;
            serde_json::to_vec(&text).map_err(|e| Error::invalid(e.to_string()))
        }
        Some(b'{' | b'[' | b'n') | None => Err(Error::invalid(format!(
            "the value at path={} is no string, number or boolean",
            path.join(".")
        ))),
        Some(_) => Ok(value.get().as_bytes().to_vec()),
    }
}

enum Child<'a> {
    One(&'a RawValue),
    None,
    Many,
}

fn child<'a>(value: &'a RawValue, step: &str) -> Child<'a> {
    let one = |child: Option<&'a RawValue>| child.map_or(Child::None, Child::One);
    match value.get().as_bytes().first() {
        Some(b'{') => {
            let mut object = serde_json::Deserializer::from_str(value.get());
            object.deserialize_map(Member(step)).unwrap_or(Child::None)
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(value.get()).unwrap_or_default();
            // One spelling for each index: `01` and `+1` lead nowhere.
            let index = step.parse::<usize>().ok().filter(|i| i.to_string() == step);
            one(index.and_then(|index| items.get(index).copied()))
        }
        _ => Child::None,
    }
}

/// Looks for one member of an object.
struct Member<'s>(&'s str);

impl<'de> Visitor<'de> for Member<'_> {
    type Value = Child<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Child<'de>, A::Error> {
        let mut found = Child::None;
        while let Some(name) = map.next_key::<String>()? {
            if name != self.0 {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            found = match (found, map.next_value::<&'de RawValue>()?) {
                (Child::None, value) => Child::One(value),
                _ => Child::Many,
            };
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn text(json: &str, path: &str) -> std::result::Result<String, String> {
        let path: Vec<&str> = path.split('.').collect();
        match json_field(json.as_bytes(), &path) {
            Ok(key) => Ok(String::from_utf8(key).unwrap()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Invalid);
                Err(error.to_string())
            }
        }
    }

    #[test]
    fn a_path_leads_to_a_scalar() {
        let json = r#" {"user": {"id": 7, "tags": ["a", "b"]}, "on": true} "#;
        assert_eq!(text(json, "user.id").unwrap(), "7");
        assert_eq!(text(json, "user.tags.1").unwrap(), "\"b\"");
        assert_eq!(text(json, "on").unwrap(), "true");
        assert!(text(json, "user").unwrap_err().contains("path=user"));
        assert!(
            text(json, "user.name.first")
                .unwrap_err()
                .contains("path=user.name")
        );
        assert!(text(r#"{"id": null}"#, "id").is_err());
        assert!(text("{\"id\": 1", "id").unwrap_err().contains("JSON"));
        assert!(text("{\"id\": 1} 2", "id").unwrap_err().contains("JSON"));
        assert!(json_field(b"{\"id\": \"\xff\"}", &["id"]).is_err());
        assert_eq!(json_field(b"17", &[]).unwrap(), b"17");
        assert_eq!(json_field(br#"{"a.b": 1}"#, &["a.b"]).unwrap(), b"1");
    }

    #[test]
    fn different_values_are_different_keys() {
        let big = |n| text(&format!(r#"{{"id":{n}}}"#), "id").unwrap();
        assert_ne!(big("123456789012345678901"), big("123456789012345678902"));
        assert_ne!(big("5"), big("\"5\""));
        assert_eq!(big("1.0"), "1.0");
        assert_eq!(big("-0e1"), "-0e1");
    }

    #[test]
    fn escapes_are_no_difference() {
        assert_eq!(
            text(r#"{"id":"\u0061b"}"#, "id"),
            text(r#"{"id":"ab"}"#, "id")
        );
        assert_eq!(text(r#"{"\u0069d":1}"#, "id"), Ok("1".to_owned()));
        assert_eq!(
            text(r#"{"id":"\uD83D\uDE00\/\n"}"#, "id"),
            Ok("\"\u{1f600}/\\n\"".to_owned())
        );
    }

    #[test]
    fn a_member_that_is_there_twice_is_refused() {
        let json = r#"{"id": 1, "a": 2, "a": 3, "\u0069d": 1, "o": {"p": 1, "p": 1}}"#;
        assert!(text(json, "id").unwrap_err().contains("path=id"));
        assert!(text(json, "o.p").unwrap_err().contains("path=o.p"));
        // A repeat that is not asked for is none of the key's business.
        assert_eq!(text(r#"{"a": 2, "a": 3, "id": 1}"#, "id").unwrap(), "1");
    }

    #[test]
    fn an_index_has_one_spelling() {
        for step in ["01", "+1", "-0", " 1", "2", ""] {
            assert!(text(r#"["a", "b"]"#, step).is_err(), "{step}");
        }
        assert_eq!(text(r#"["a", "b"]"#, "1").unwrap(), "\"b\"");
    }

    #[test]
    fn deep_nesting_neither_overflows_nor_misleads() {
        let deep = format!(
            "{{\"a\": {}{}, \"id\": 1}}",
            "[".repeat(50_000),
            "]".repeat(50_000)
        );
        assert_eq!(text(&deep, "id").unwrap_or_default(), "1");
    }
}

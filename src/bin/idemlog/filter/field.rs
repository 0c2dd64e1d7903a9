//! The key inside a JSON line.

use std::collections::HashMap;

use serde_json::value::RawValue;

/// Returns the JSON text of the scalar at a dotted path; a number is an index into an array.
///
/// The text, not the value: `"5"` and `5` stay two keys, and so do integers beyond what a double
/// tells apart. Only strings are brought to one spelling, since escapes are no difference.
pub(super) fn key(line: &[u8], path: &str) -> Result<Vec<u8>, String> {
    let mut value: &RawValue =
        serde_json::from_slice(line).map_err(|e| format!("not a JSON value: {e}"))?;
    let mut walked = String::new();
    for step in path.split('.') {
        if !walked.is_empty() {
            walked.push('.');
        }
        walked.push_str(step);
        value = child(value, step).ok_or_else(|| format!("nothing at path={walked}"))?;
    }
    match value.get().as_bytes().first() {
        Some(b'"') => {
            let text: String = serde_json::from_str(value.get()).map_err(|e| e.to_string())?;
            serde_json::to_vec(&text).map_err(|e| e.to_string())
        }
        Some(b'{' | b'[' | b'n') | None => Err(format!(
            "the value at path={path} is no string, number or boolean"
        )),
        Some(_) => Ok(value.get().as_bytes().to_vec()),
    }
}

fn child<'a>(value: &'a RawValue, step: &str) -> Option<&'a RawValue> {
    match value.get().as_bytes().first() {
        Some(b'{') => {
            let fields: HashMap<String, &RawValue> = serde_json::from_str(value.get()).ok()?;
            fields.get(step).copied()
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(value.get()).ok()?;
            items.get(step.parse::<usize>().ok()?).copied()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(line: &str, path: &str) -> Result<String, String> {
        key(line.as_bytes(), path).map(|key| String::from_utf8(key).unwrap())
    }

    #[test]
    fn a_path_leads_to_a_scalar() {
        let line = r#" {"user": {"id": 7, "tags": ["a", "b"]}, "on": true} "#;
        assert_eq!(text(line, "user.id").unwrap(), "7");
        assert_eq!(text(line, "user.tags.1").unwrap(), "\"b\"");
        assert_eq!(text(line, "on").unwrap(), "true");
        assert!(text(line, "user").unwrap_err().contains("path=user"));
        assert!(
            text(line, "user.name.first")
                .unwrap_err()
                .contains("path=user.name")
        );
        assert!(text(r#"{"id": null}"#, "id").is_err());
        assert!(text("{\"id\": 1", "id").unwrap_err().contains("JSON"));
        assert!(key(b"{\"id\": \"\xff\"}", "id").is_err());
    }

    #[test]
    fn different_values_are_different_keys() {
        let big = |n| text(&format!(r#"{{"id":{n}}}"#), "id").unwrap();
        assert_ne!(big("123456789012345678901"), big("123456789012345678902"));
        assert_ne!(big("5"), big("\"5\""));
    }

    #[test]
    fn escapes_are_no_difference() {
        assert_eq!(
            text(r#"{"id":"\u0061b"}"#, "id"),
            text(r#"{"id":"ab"}"#, "id")
        );
    }
}

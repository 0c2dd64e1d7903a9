//! Lists of the keys that wait for somebody.

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use idemlog::{KeyState, Result, Unsettled};
use serde_json::{Value, json};

use crate::args::Common;
use crate::exit::{Code, Stop};
use crate::output::{print_line, show_bytes, show_duration, state_json};

pub(crate) fn in_doubt(common: &Common) -> std::result::Result<u8, Stop> {
    list(common, idemlog::DedupLog::in_doubt)
}

pub(crate) fn pending(common: &Common) -> std::result::Result<u8, Stop> {
    list(common, idemlog::DedupLog::pending)
}

fn list(
    common: &Common,
    call: impl FnOnce(&idemlog::DedupLog) -> Result<Vec<Unsettled>>,
) -> std::result::Result<u8, Stop> {
    let store = common.open_to_read()?;
    let mut found = call(&store)?;
    store.close()?;
    if let Some(name) = &common.namespace {
        found.retain(|one| one.namespace == *name);
    }
    found.sort_by(|a, b| b.age.cmp(&a.age).then_with(|| a.key.cmp(&b.key)));
    if common.json {
        let all: Vec<_> = found.iter().map(to_json).collect();
        print_line(&Value::Array(all).to_string())?;
    } else if !found.is_empty() {
        print_line(&table(&found))?;
    }
    Ok(Code::Done as u8)
}

fn to_json(one: &Unsettled) -> Value {
    let mut object = state_json(&one.key, &one.state);
    object.insert("namespace".to_string(), json!(one.namespace));
    let age_ms = u64::try_from(one.age.as_millis()).unwrap_or(u64::MAX);
    object.insert("age_ms".to_string(), json!(age_ms));
    Value::Object(object)
}

fn table(found: &[Unsettled]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header([
        "NAMESPACE",
        "KEY",
        "STATE",
        "EPOCH",
        "ATTEMPT",
        "AGE",
        "OWNER",
        "EVIDENCE",
    ]);
    for one in found {
        let (state, epoch, attempt, owner, evidence) = match &one.state {
            KeyState::Pending {
                epoch,
                attempt,
                started,
                owner,
                lease_left,
                evidence,
                ..
            } => {
                let phase = if *started { "started" } else { "claimed" };
                let lease = if lease_left.is_zero() {
                    "gone".to_string()
                } else {
                    format!("lease {}", show_duration(*lease_left))
                };
                let owner = format!("pid {}, {lease}", owner.pid);
                (phase, *epoch, *attempt, owner, evidence)
            }
            KeyState::InDoubt(doubt) => (
                "in doubt",
                doubt.epoch,
                doubt.attempt,
                String::new(),
                &doubt.evidence,
            ),
            // The store lists only the two above.
            _ => continue,
        };
        table.add_row([
            one.namespace.clone(),
            show_bytes(&one.key),
            state.to_string(),
            epoch.to_string(),
            attempt.to_string(),
            show_duration(one.age),
            owner,
            show_bytes(evidence),
        ]);
    }
    table.trim_fmt()
}

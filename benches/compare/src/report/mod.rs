//! The report: tables between markers of a Markdown file, and plots beside it.

mod data;
mod goals;
pub(crate) mod machine;
mod plots;
mod svg;
mod tables;

use std::fs;
use std::path::Path;

use serde_json::Value;

use self::data::Data;
use crate::Fallible;
use crate::runner::Finished;

/// Replaces what is between the markers of `path`, and writes the plots into the folder beside
/// it that has its name.
pub(crate) fn write(path: &Path, finished: &[Finished], runs: &[Value]) -> Fallible<()> {
    let data = Data::new(finished);
    let mut text = fs::read_to_string(path)?;
    let plots = plots::all(&data);
    let folder = path.with_extension("");
    if !plots.is_empty() {
        fs::create_dir_all(&folder)?;
    }
    for (name, _, svg) in &plots {
        fs::write(folder.join(format!("{name}.svg")), svg)?;
    }
    let stem = folder
        .file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let links = plots
        .iter()
        .map(|(name, title, _)| format!("![{title}]({stem}/{name}.svg)\n"));
    let mut sections = tables::all(&data);
    sections.push(("goals", goals::table(&data)));
    sections.push(("machine", machine::text(runs, data.rounds_max())));
    sections.push(("plots", links.collect::<Vec<_>>().join("\n")));
    for (name, content) in sections {
        text = replace(&text, name, &content)?;
    }
    Ok(fs::write(path, text)?)
}

/// Puts `content` between `<!-- begin NAME -->` and `<!-- end NAME -->`.
fn replace(text: &str, name: &str, content: &str) -> Fallible<String> {
    let (begin, end) = (
        format!("<!-- begin {name} -->"),
        format!("<!-- end {name} -->"),
    );
    let parts = text.split_once(&begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(&end)?;
        Some((before, after))
    });
    let (before, after) =
        parts.ok_or_else(|| format!("the report has no markers {begin} and {end}"))?;
    Ok(format!(
        "{before}{begin}\n{}\n{end}{after}",
        content.trim_end()
    ))
}

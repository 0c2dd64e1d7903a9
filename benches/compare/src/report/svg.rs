//! Bar charts as SVG, on a logarithmic axis where values lie far apart.

use std::fmt::Write;

use super::data::show;

const WIDTH: f64 = 760.0;
const LABEL_WIDTH: f64 = 210.0;
const VALUE_WIDTH: f64 = 90.0;
const BAR_HEIGHT: f64 = 20.0;
const GAP: f64 = 6.0;
const TOP: f64 = 44.0;

/// One bar.
#[derive(Clone, Debug)]
pub(crate) struct Bar {
    pub(crate) label: String,
    pub(crate) value: f64,
    /// idemlog's own bars and the limits have colours of their own.
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ours,
    Limit,
    Peer,
}

impl Kind {
    pub(crate) fn of(store: &str) -> Kind {
        match store {
            "idemlog" | "idemlog-4m" => Kind::Ours,
            "ram" | "ramlog" | "append" | "pwrite64" | "pwrite4k" => Kind::Limit,
            _ => Kind::Peer,
        }
    }

    fn colour(self) -> &'static str {
        match self {
            Kind::Ours => "#1f6feb",
            Kind::Limit => "#8c959f",
            Kind::Peer => "#d4a72c",
        }
    }
}

/// A chart of bars, as they are given; values must not be negative.
pub(crate) fn bars(title: &str, unit: &str, bars: &[Bar]) -> String {
    let positive = bars
        .iter()
        .map(|bar| bar.value)
        .filter(|value| *value > 0.0);
    let (least, most) = positive.fold((f64::INFINITY, 0.0_f64), |(a, b), v| (a.min(v), b.max(v)));
    let logarithmic = most > 20.0 * least;
    let room = WIDTH - LABEL_WIDTH - VALUE_WIDTH;
    let length = |value: f64| {
        if value <= 0.0 || most <= 0.0 {
            return 0.0;
        }
        if logarithmic {
            // The shortest bar keeps a tenth of a decade, so that it is seen.
            let from = least.log10() - 0.1;
            return room * (value.log10() - from) / (most.log10() - from);
        }
        room * value / most
    };
    let height = TOP + bars.len() as f64 * (BAR_HEIGHT + GAP) + GAP;
    let scale = if logarithmic { ", logarithmic" } else { "" };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"8\" y=\"18\" font-size=\"15\" font-weight=\"bold\">{}</text>\n\
         <text x=\"8\" y=\"35\" fill=\"#57606a\">{}{scale}</text>\n",
        escape(title),
        escape(unit),
    );
    for (index, bar) in bars.iter().enumerate() {
        let y = TOP + index as f64 * (BAR_HEIGHT + GAP);
        let text_y = y + BAR_HEIGHT * 0.72;
        let long = length(bar.value);
        // Writing to a string cannot fail.
        writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{text_y:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{LABEL_WIDTH}\" y=\"{y:.1}\" width=\"{long:.1}\" height=\"{BAR_HEIGHT}\" \
             fill=\"{}\"/><text x=\"{:.1}\" y=\"{text_y:.1}\">{}</text>",
            LABEL_WIDTH - 8.0,
            escape(&bar.label),
            bar.kind.colour(),
            LABEL_WIDTH + long + 6.0,
            show(bar.value),
        )
        .unwrap_or_default();
    }
    svg.push_str("</svg>\n");
    svg
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

"""The pages of jobs' reports: one HTML page, light and dark, without scripts and parts from other hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from app.terminal import measured

STYLE: Final = """
:root {
  color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #68717d; --line: #d5dae1;
  --good: #1a7f4b; --bad: #b3261e;
  --admit: #4a90c4; --delay: #d9a514; --throttle: #d9682b; --reject: #a02c5a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e4e8ee; --paper: #14181d; --faint: #98a2b0; --line: #333b46; --good: #55c48a; --bad: #ff7b72;
    --admit: #5aa5dc; --delay: #e5bd4b; --throttle: #ee8a54; --reject: #d66a98;
  }
}
body {
  background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
}
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.faint, th { color: var(--faint); }
.held { color: var(--good); } .failed { color: var(--bad); }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th {
  border-bottom: 1px solid var(--line); padding: .25rem .9rem .25rem 0; text-align: left;
  vertical-align: top; font-weight: normal;
}
td.n, th.n { text-align: right; white-space: nowrap; }
td:not(.n) { min-width: 7rem; } td:not(.n):nth-child(2) { min-width: 11rem; }
svg { width: 100%; min-width: 40rem; height: auto; }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
.axis { stroke: var(--line); } .bound { stroke: var(--ink); stroke-dasharray: 4 3; }
.admit { fill: var(--admit); } .delay { fill: var(--delay); } .throttle { fill: var(--throttle); }
.reject { fill: var(--reject); } .usage { fill: none; stroke: var(--admit); stroke-width: 1.5; }
.before { fill: var(--delay); stroke: var(--delay); } .after { fill: var(--reject); stroke: var(--reject); }
path.before, path.after { fill: none; stroke-dasharray: 5 3; stroke-width: 1.5; }
.within { fill: var(--good); } .beyond { fill: var(--bad); }
span.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; }
span.key:first-child { margin-left: 0; }
span.key.admit { background: var(--admit); } span.key.delay { background: var(--delay); }
span.key.before { background: var(--delay); } span.key.after { background: var(--reject); }
span.key.throttle { background: var(--throttle); } span.key.reject { background: var(--reject); }
"""

HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head><body>
"""


def head(title: str) -> str:
    """The beginning of a page."""
    return HEAD.format(style=STYLE, title=escape(title))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns whose head begins with # have numbers."""
    kinds = [" class='n'" if head.startswith("#") else "" for head in heads]

    def cells(tag: str, texts: Sequence[str]) -> str:
        pairs = zip(texts, kinds, strict=True)
        return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for text, kind in pairs)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = cells("th", [head.removeprefix("#") for head in heads])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def number(value: float | None) -> str:
    """A number for people; 0 for none."""
    if value is None:
        return "0"
    return measured(value)


def shortened(shown: int, count: int, name: str) -> str:
    """The sentence under a table that shows only the first rows of a Parquet table; else empty."""
    if count <= shown:
        return ""
    return f'<p class="faint">{shown:,} of {count:,}; the table <code>{name}</code> has all.</p>'

"""The comparison as one page: a timeline a policy and the table. Needs no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .chart import Scale, chart
from .measures import CHANGES
from .report import conditions, fallbacks, name_of, rows
from .timeline import end_s, span_of

MAX_LISTED = 500
"""Events that are listed as text for each policy."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --quiet: #57606a; --rule: #d8dee4;
  --decode: #1f6feb; --prefill: #b35900; --waited: #cf222e; --behind: #2c7a7b; --mark: #6f42c1; --ready: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --quiet: #9da7b3; --rule: #30363d;
  --decode: #6cb6ff; --prefill: #f0a04b; --waited: #ff7b72; --behind: #56c4c0; --mark: #c9a4ff; --ready: #57d364; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
p, figcaption, summary { color: var(--quiet); } figure { margin: 0; overflow-x: auto; }
svg { width: 100%; min-width: 640px; height: auto; display: block; }
text { fill: var(--ink); font: 11px system-ui, sans-serif; } .tick, .label { fill: var(--quiet); }
.moment { font-weight: 600; } .grid { stroke: var(--rule); stroke-width: .7; } .axis { stroke: var(--quiet); }
.decode { fill: var(--decode); fill-opacity: .75; } .prefill { fill: none; stroke: var(--prefill); stroke-width: 1.4; }
.after { fill: var(--rule); fill-opacity: .45; }
.waited { fill: var(--waited); } .behind { fill: var(--behind); } .mark { fill: var(--mark); }
.ready { stroke: var(--ready); stroke-width: 1.6; stroke-dasharray: 5 3; }
.settled { stroke: var(--mark); stroke-width: 1.6; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; list-style: none; padding: 0; color: var(--quiet); }
.key svg { display: inline; width: 22px; min-width: 0; height: 14px; vertical-align: -2px; margin-right: .35rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } div.wide { overflow-x: auto; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--rule); text-align: right; }
th[scope=row], td.text { text-align: left; font-weight: 400; } thead th { font-weight: 600; }
caption { text-align: left; color: var(--quiet); padding-bottom: .4rem; } td.best { font-weight: 700; }
""".strip()

KEY = (
    ('<circle class="decode" cx="11" cy="7" r="3.5"/>', "a decode step"),
    ('<circle class="prefill" cx="11" cy="7" r="3.5"/>', "a prefill step"),
    ('<rect class="waited" x="2" y="3" width="18" height="8"/>', "work that a step waited for"),
    ('<rect class="behind" x="2" y="3" width="18" height="8"/>', "work that no step waited for"),
    ('<path class="mark" d="M11 1 l5 6 l-5 6 l-5 -6 z"/>', "a promotion, or another moment"),
    ('<line class="ready" x1="11" x2="11" y1="0" y2="14"/>', "ready: requests are accepted"),
    ('<line class="settled" x1="11" x2="11" y1="0" y2="14"/>', "settled: every bucket at its best"),
    ('<rect class="after" x="1" y="1" width="20" height="12"/>', "after the trace: two rounds of every size"),
)


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """The HTML of a comparison; `results` as `bench startup --json` writes them."""
    made = [dict(result) for result in results]
    scale = Scale.of([step for result in made for step in result["steps"]], end_s(made))
    keys = "\n".join(f'<li><svg viewBox="0 0 22 14" aria-hidden="true">{shape}</svg>{text}</li>' for shape, text in KEY)
    sections = "\n".join(_section(result, scale, number) for number, result in enumerate(made, start=1))
    about = "<br>\n".join(map(escape, conditions(made).splitlines()))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Piecework: startup policies compared</title>
<style>
{STYLE}
</style>
</head>
<body>
<h1>Startup policies compared</h1>
<p>{about}</p>
<ul class="key">
{keys}
</ul>
{sections}
<h2>Side by side</h2>
{_table(made)}
{"".join(f"<p>{escape(line)}</p>" for line in fallbacks(made))}
</body>
</html>
"""


def _section(result: dict[str, Any], scale: Scale, number: int) -> str:
    name = name_of(result)
    return (
        f"<section>\n<h2>{escape(name)}</h2>\n<figure>\n{chart(result, scale, number=number, name=name)}\n</figure>\n"
        f"{_events(result)}\n</section>"
    )


def _events(result: Mapping[str, Any]) -> str:
    """The changes of the chart as text, folded away."""
    changes = [event for event in result["events"] if event["kind"] in CHANGES]
    lines = "\n".join(f"<li>{escape(span_of(event).text)}</li>" for event in changes[:MAX_LISTED])
    left_out = f"<p>{len(changes) - MAX_LISTED} more are left out.</p>" if len(changes) > MAX_LISTED else ""
    return (
        f"<details>\n<summary>{len(changes)} traces, compiles, captures and promotions as text</summary>\n<ol>\n{lines}"
        f"\n</ol>\n{left_out}</details>"
    )


def _table(results: Sequence[dict[str, Any]]) -> str:
    heads = "".join(f'<th scope="col">{escape(name_of(result))}</th>' for result in results)
    lines = []
    for row in rows(results):
        cells = "".join(
            f'<td class="best">{escape(cell)} *</td>' if best else f"<td>{escape(cell)}</td>"
            for cell, best in zip(row.cells, row.is_best, strict=True)
        )
        lines.append(f'<tr><th scope="row">{escape(row.title)}</th>{cells}<td class="text">{row.better}</td></tr>')
    body = "\n".join(lines)
    return (
        '<div class="wide"><table>\n<caption>* the best of the row</caption>\n'
        f"<thead><tr><td></td>{heads}<td></td></tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )

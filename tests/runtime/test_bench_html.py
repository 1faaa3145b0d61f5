"""The page and the trace file of `piecework bench startup`: what they hold, and that a browser draws the page."""

from __future__ import annotations

import copy
import html.parser
import itertools
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.bench.chart import LEFT, RIGHT, WIDTH, Scale
from piecework.runtime.bench.chrome_trace import chrome_trace
from piecework.runtime.bench.page import MAX_LISTED, page
from piecework.runtime.bench.timeline import Span, apart, lanes

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def event(at_s: float, kind: str, seconds: float = 0.0, *, in_step: bool = False, **more: Any) -> dict[str, Any]:
    place = {"phase": more.pop("phase", None), "bucket": more.pop("bucket", None)}
    return {"at_s": at_s, "kind": kind, "seconds": seconds, "in_step": in_step, **place, "detail": more}


def result(policy: str, *, ready_s: float, settled_s: float, events: list[dict[str, Any]]) -> dict[str, Any]:
    # Every fourth step is a prompt; no two lie at the same place.
    steps = [
        {
            "at_s": ready_s + 0.5 * (i + 1),
            "seconds": 0.002 * (i + 1),
            "phase": "decode" if i % 4 else "prefill",
            "bucket": None if i == 8 else 4,
            "num_tokens": 2,
        }
        for i in range(20)
    ]
    seconds = dict.fromkeys(
        ("first_token_s", "worst_first_token_s", "worst_step_s", "ramp_p50_s", "steady_step_s"), 0.04
    )
    counts = ("in_step_compiles", "compiles_before_ready", "promotions", "captures", "in_step_captures", "pool_bytes")
    return {
        "policy": policy,
        "cold": True,
        "ready_s": ready_s,
        "settled_s": settled_s,
        "settled": True,
        "served_s": ready_s + 8.0,
        **seconds,
        "ramp_p99_s": None,
        **dict.fromkeys((*counts, "in_boundary_captures", "peak_bytes"), 1),
        "tokens_by_s": {"5": 1, "10": 2, "30": 3, "60": 3},
        "counters": {"fallbacks": {"a <reason> & more": 2}},
        "conditions": {
            "torch": "2.13.0",
            "python": "3.11.7",
            "device": "cpu, 2 threads",
            "model": {"architecture": "Llama", "num_layers": 3, "hidden_size": 64, "dtype": "float32"},
            "config": {phase: {"backend": "full", "compiler": "inductor"} for phase in ("prefill", "decode")},
            "buckets": {"prefill": [16, 64], "decode": [1, 4]},
            "num_requests": 45,
            "last_arrival_s": 29.6,
        },
        "steps": steps,
        "events": events,
    }


TIERED_EVENTS = [
    event(4.0, "worker_start", 3.7, worker=0),
    event(4.1, "worker_start", 3.8, worker=1),
    event(5.0, "trace", 0.9),
    event(1.4, "capture", 0.03, phase="decode", bucket=4),
    event(6.0, "worker_job", 1.0, worker=0, job="compile", fingerprint="<ab>"),
    event(7.0, "worker_job", 1.5, worker=1, job="compile"),
    event(7.0, "compile_general", 2.0, where="worker", bucket=4),
    event(7.1, "load", 0.03),
    event(7.2, "first_call", 0.02),
    event(7.3, "promote", 0.01, phase="decode", bucket=4, to="general"),
    event(7.31, "boundary", 0.02, done=1),
    event(7.4, "warning", text="said"),
    event(7.5, "entry", 3.0),
    event(7.5, "ready"),
]
RESULTS = [
    result(
        "eager",
        ready_s=4.0,
        settled_s=4.0,
        events=[event(2.0, "trace", 1.0), event(3.9, "compile_general", 1.5)],
    ),
    result("lazy", ready_s=0.1, settled_s=9.0, events=[event(9.0, "compile_specialized", 1.5, in_step=True, bucket=4)]),
    result("tiered", ready_s=0.2, settled_s=7.3, events=TIERED_EVENTS),
]


# ---- lanes


def test_lanes_keep_workers_apart_and_what_is_no_work_out() -> None:
    drawn = lanes(RESULTS[2])
    names = ["trace", "worker 0", "worker 1", "arrived", "load", "capture", "promotion", "notes"]
    assert [lane.name for lane in drawn] == names
    by_name = {lane.name: lane.spans for lane in drawn}
    assert [span.name for span in by_name["worker 0"]] == ["worker start", "worker job"]
    # What a worker made is in its own lane for as long as it took, and here when it came.
    [arrived] = by_name["arrived"]
    assert (arrived.start_s, arrived.is_mark) == (7.0, True)
    # A promotion is a moment, though applying it took time: the boundary around it is the span.
    assert [(span.name, span.is_mark) for span in by_name["promotion"]] == [
        ("boundary", False),
        ("promote decode 4", True),
    ]
    assert by_name["promotion"][1].text == "promote decode 4 at 7.300 s, to general"
    [waited] = lanes(RESULTS[1])[0].spans
    assert (waited.start_s, waited.end_s, waited.in_step) == (7.5, 9.0, True)
    assert waited.text == "compile specialized 4 at 7.500 s, 1.500 s, a step waited"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=12))
def test_spans_of_a_row_do_not_overlap_and_none_is_lost(times: list[tuple[int, int]]) -> None:
    spans = [Span(start_s=a, end_s=a + d, name=str(i), in_step=False, detail={}) for i, (a, d) in enumerate(times)]
    made = apart(spans)
    assert sorted(span.name for row in made for span in row) == sorted(span.name for span in spans)
    for row in made:
        bars = [span for span in row if not span.is_mark]
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(bars))
    busiest = max((sum(s.start_s <= at < s.end_s for s in spans) for at in range(26)), default=0)
    assert len(made) == max(1, busiest)


# ---- the page


class Elements(html.parser.HTMLParser):
    """Counts elements, and checks that those that are opened are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.classes: Counter[str | None] = Counter()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.classes[dict(attrs).get("class")] += 1
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    elements.close()
    assert elements.open == []
    return elements


def test_the_page_draws_every_step_event_and_moment() -> None:
    text = page(RESULTS)
    elements = parsed(text)
    key = 8  # pictures beside their meaning
    assert elements.count["svg"] == 3 + key
    assert elements.count["circle"] == 3 * 20 + 2
    assert (elements.classes["prefill"], elements.classes["decode"]) == (3 * 5 + 1, 3 * 15 + 1)
    # Eager's trace and compile, two starts, two jobs, a trace, a capture, a load, a first call and a boundary.
    assert elements.classes["behind"] == 2 + 9 + 1
    assert elements.classes["waited"] == 1 + 1
    assert elements.classes["mark"] == 3 + 1
    assert elements.classes["ready"] == elements.classes["settled"] == 3 + 1
    assert elements.count["figure"] == 3
    assert "unpadded: 18.00 ms" in text
    assert '<th scope="row">first token</th>' in text
    assert "<td>-</td>" in text
    assert "settled 7.3 s" in text


def test_the_page_needs_nothing_else_and_says_in_words_what_it_draws() -> None:
    text = page(RESULTS)
    elements = parsed(text)
    assert not {"script", "link", "img", "iframe", "style src"} & set(elements.count)
    assert not [name for name, _ in elements.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    ids = [value or "" for name, value in elements.attributes if name == "id"]
    named = " ".join(value or "" for name, value in elements.attributes if name == "aria-labelledby").split()
    assert sorted(ids) == sorted(named)
    assert len(ids) == len(set(ids)) == 2 * 3
    assert "Ready at 0.20 s, every bucket at its best at 7.30 s. 20 steps, the longest 0.040 s. 1 traces" in text
    assert "<li>promote decode 4 at 7.300 s, to general</li>" in text


def test_text_of_others_is_text_on_the_page() -> None:
    text = page(RESULTS)
    assert "fingerprint &lt;ab&gt;" in text
    assert "a &lt;reason&gt; &amp; more" in text
    assert "<ab>" not in text


def test_steps_that_lie_on_each_other_are_drawn_once_and_long_lists_are_cut() -> None:
    many = copy.deepcopy(RESULTS[0])
    many["steps"] = [dict(many["steps"][0]) for _ in range(5000)]
    many["events"] = [event(0.001 * i, "compile_general", 0.0005) for i in range(MAX_LISTED + 3)]
    elements = parsed(text := page([many]))
    assert elements.count["circle"] == 1 + 2
    assert elements.count["li"] == 8 + MAX_LISTED
    assert "3 more are left out." in text


def test_everything_lies_inside_the_chart() -> None:
    scale = Scale.of(RESULTS[0]["steps"], 14.0)
    assert (scale.least_s, scale.most_s) == (1e-3, 1e-1)
    assert (scale.x(-1), scale.x(0), scale.x(14), scale.x(99)) == (LEFT, LEFT, WIDTH - RIGHT, WIDTH - RIGHT)
    assert scale.y(1e-9) == scale.y(1e-3) > scale.y(0.01) > scale.y(0.1) == scale.y(5)
    one = Scale.of([{"seconds": 0.01}], 0)
    assert one.most_s > one.least_s
    assert one.end_s > 0


# ---- the trace file


def test_the_trace_has_a_process_a_policy_and_a_thread_a_lane() -> None:
    events = json.loads(json.dumps(chrome_trace(RESULTS)))["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    assert [names[pid, None] for pid in (1, 2, 3)] == ["eager", "lazy", "tiered"]
    assert [name for (pid, tid), name in names.items() if pid == 3 and tid is not None] == [
        "steps",
        *[lane.name for lane in lanes(RESULTS[2])],
    ]
    assert {e["ph"] for e in events} == {"M", "X", "i"}
    assert all((e["pid"], e["tid"]) in names for e in events if e["ph"] != "M")
    [job] = [e for e in events if e["args"].get("fingerprint")]
    assert (job["ts"], job["dur"], names[job["pid"], job["tid"]]) == (5e6, 1e6, "worker 0")
    assert sum(e["ph"] == "X" and e["cat"] == "step" for e in events) == 60
    [promoted] = [e for e in events if e["name"].startswith("promote")]
    assert (promoted["ph"], promoted["ts"], promoted["args"]) == ("i", pytest.approx(7.3e6), {"to": "general"})
    moments = [(e["pid"], e["name"], e["ts"]) for e in events if e["name"] in ("ready", "settled")]
    assert len(moments) == 6
    assert (3, "settled", 7.3e6) in moments


# ---- a browser

MEASURE = """<script>
const drawn = [...document.querySelectorAll('figure svg')].map(svg => {
  const box = svg.getBoundingClientRect(), all = [...svg.querySelectorAll('circle, .behind, .waited, .mark')];
  const inside = all.map(e => e.getBoundingClientRect()).filter(
    b => b.width > 0 && b.height > 0 && b.left >= box.left && b.right <= box.right + 1 && b.top >= box.top);
  const color = getComputedStyle(svg.querySelector('circle.decode')).fill;
  return {width: box.width, height: box.height, shapes: all.length, inside: inside.length, color};
});
document.body.setAttribute('data-drawn', JSON.stringify(drawn));
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on PATH; on Debian: apt install chromium")
def test_a_browser_draws_the_charts(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(RESULTS).replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1100,1400"]
    own = f"--user-data-dir={tmp_path / 'profile'}"
    # It may not reach anything, and must not need to.
    nowhere = "--host-resolver-rules=MAP * ~NOTFOUND"
    done = subprocess.run(
        [CHROMIUM, *options, own, nowhere, "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    elements = parsed_attributes(done.stdout)
    drawn = json.loads(elements["data-drawn"])
    assert len(drawn) == 3
    for chart, shapes in zip(drawn, (20 + 2, 20 + 1, 20 + 9 + 3), strict=True):
        assert chart["width"] > 600
        assert chart["height"] > 200
        assert chart["shapes"] == chart["inside"] == shapes
        assert chart["color"] in ("rgb(31, 111, 235)", "rgb(108, 182, 255)")  # light or dark: the style applies
    assert done.stdout.count("<circle") == 3 * 20 + 2


def parsed_attributes(text: str) -> dict[str, str]:
    elements = Elements()
    elements.handle_endtag = lambda tag: None  # type: ignore[method-assign]
    elements.feed(text)
    return {name: value for name, value in elements.attributes if value is not None}

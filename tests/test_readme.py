"""The README's example runs and says what is true; its flags table is the one that the config makes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from piecework.phases import flag_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def section(name: str) -> str:
    found = re.search(rf"<!-- {name}: begin.*?-->\n(.*?)<!-- {name}: end -->", README, flags=re.DOTALL)
    assert found is not None
    return found.group(1)


def test_the_flags_table_is_the_generated_one():
    assert section("flags").strip() == flag_table().strip()


def test_the_example_is_fifteen_lines():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 15


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example as a module that was imported: Dynamo and a split op's location want a real file."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "readme_example.py").write_text("\n".join(BLOCKS))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield vars(importlib.import_module("readme_example"))


def test_the_example_runs_and_counts_what_the_text_says(example, capsys):
    import torch

    import piecework as pw

    runtime, model = example["runtime"], example["model"]
    assert example["y"].shape == (10, 64)
    with runtime.counters.expect(traces=0, compiles_general=0, compiles_specialized=0):
        for num_tokens in (1, 16, 17, 64, 65):
            x = torch.randn(num_tokens, 64)
            with torch.inference_mode():
                expected = model(x)
            torch.testing.assert_close(runtime.run("prefill", {"input": x}), expected)
    counters = runtime.counters.as_dict()
    assert (counters["traces"], counters["pieces"], counters["distinct_pieces"]) == (1, 5, 3)
    assert (counters["compiles_general"], counters["compiles_specialized"]) == (3, 3)
    assert "readme_example::causal_attention" in [op.name for op in pw.split_ops()]
    assert example["scores"].shape == (3, 8)
    assert example["scorer"].runtime.counters["steps"] == 1


def test_the_capture_examples_do_what_their_comments_say(example):
    import torch

    captured, again, kept, model = (example[name] for name in ("captured", "again", "kept", "model"))
    assert example["first"].shape == (3, 64)
    counters = captured.counters.as_dict()
    assert (counters["captures"], counters["replays"], counters["fallbacks"]) == (1, 2, {})
    assert again.data_ptr() != kept.data_ptr()
    with torch.inference_mode():
        expected = model(torch.ones(2, 64))
    torch.testing.assert_close(kept, expected)
    torch.testing.assert_close(again[:2], expected)  # that step has overwritten it
    last = captured.run("decode", {"input": torch.zeros(2, 64)})
    assert last.data_ptr() == again.data_ptr()
    torch.testing.assert_close(kept, expected)

    scaled = example["scaled"]
    counters = scaled.counters.as_dict()
    assert (counters["captures"], counters["replays"], counters["fallbacks"]) == (1, 1, {})
    with torch.inference_mode():
        plain = torch.nn.Linear.forward(scaled.model, torch.ones(3, 64))
    torch.testing.assert_close(example["scaled_y"], plain * torch.tensor([3.0, 3.0, 4.0])[:, None])


def test_the_tiered_example_does_what_its_comments_say(example):
    tiered = example["tiered"]
    assert tiered.settled
    counters = tiered.counters.as_dict()
    assert counters["captures"] == 2
    assert counters["in_step_seconds"] == 0
    [entry] = [entry for entry in tiered.entries if entry.num_steps]
    assert (entry.bucket, entry.program.kind) == (4, "general")
    # What is above the ladder gets the program too, unasked: it is one for all sizes.
    replays = [e.kind for e in tiered.events if e.kind in ("capture", "promote") and e.scope.bucket is not None]
    assert replays == ["capture", "promote", "capture"]
    tiered.close()


def test_every_command_that_the_readme_names_exists():
    from piecework.runtime.cli import make_parser

    subcommands = make_parser()._subparsers._group_actions[0].choices
    named = set(re.findall(r"^piecework (\w+)", README, flags=re.MULTILINE)) | {"explain"}
    assert named <= set(subcommands)

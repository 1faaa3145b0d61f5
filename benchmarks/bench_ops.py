"""Each fused op alone: its native body, eager and compiled, and each of its kernels that can serve here.

    python benchmarks/bench_ops.py [--device cuda] [--ops rms_norm,sample] [--max-seconds 200] [--json FILE]

Shapes of Llama-3-8B in bf16: hidden 4096, 2 x 14336 for SiLU-and-mul, 32 + 8 heads of 128 for rotary embedding; 1, 32,
512 and 4096 tokens. `sample` draws from float32 logits of 128,256 tokens at 1, 32 and 128 rows, temperature 0.8, top-p
0.95. On the CPU tiny ones. (`linear` has a script of its own, bench_linear.py.)
A time is a call's, in a CUDA graph of calls on inputs that take turns, random ones, which together with their results
are larger than the L2 cache; medians of replays, all ways of a row in turn. `bytes` are those of arguments and results,
each once: what the op must move; `share_of_copy` is their rate against the bandwidth of a large copy in the same run.
`relative_error` is the largest difference from the native body in float64, by its largest entry; for `sample` the share
of rows in which another token was drawn. A kernel that cannot serve says why (`passed_over`); a way that fails, or for
which no time is left, says so in its row.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report import NOT_BEGUN, Deadline, attempt, conditions, errors_of, in_short, inductor_cache, write_json
from timing import Clock, copy_bandwidth

from piecework.ops.activation import silu_and_mul
from piecework.ops.fused import FusedOp, KernelSpec
from piecework.ops.norm import fused_add_rms_norm, rms_norm
from piecework.ops.rotary import qk_norm_rotary, rotary_embedding
from piecework.ops.sampling import sample

NATIVE = "native, eager"
COLD_BYTES = 96 << 20
"""Of all inputs and results of a row: twice the L2 cache of an H200."""
MAX_SETS = 3000
ROUNDS = 5
MAX_RELATIVE_ERROR = 0.05
"""A way farther from float64 is wrong: bf16 rounds to 4e-3."""
EPS = 1e-5

Arguments = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a model's activations."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    """Of logits."""
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int


LLAMA = Sizes(
    tokens=(1, 32, 512, 4096),
    rows=(1, 32, 128),
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_size=128,
    vocab=128256,
)
TINY = Sizes(tokens=(1, 3), rows=(2,), hidden=64, intermediate=96, heads=4, kv_heads=2, head_size=16, vocab=200)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ops", default=",".join(op.name for op in OPS), help="some of the ops, with commas")
    parser.add_argument("--max-seconds", type=float, default=200.0, help="no row is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    names = parsed.ops.split(",")
    if unknown := set(names) - {op.name for op in OPS}:
        known = ", ".join(op.name for op in OPS)
        parser.error(f"--ops: expected some of {known}, got {', '.join(sorted(unknown))}")
    deadline = Deadline(parsed.max_seconds)
    command = ["python", "benchmarks/bench_ops.py", *(sys.argv[1:] if arguments is None else arguments)]
    about = {**conditions(parsed.device), "command": " ".join(command)}
    result: dict[str, Any] = {}
    with inductor_cache(), torch.inference_mode():
        for measured in Bench(parsed.device).measure([op for op in OPS if op.name in names], deadline):
            result = {**measured, **about, "seconds": deadline.passed}
            write_json(parsed.json, result)
    print(table(result))
    return 0 if not any(errors_of(row) for row in result["rows"]) else 1


class Bench:
    """All rows on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.clock = Clock(self.device)
        self.dtype = torch.bfloat16 if self.clock.on_cuda else torch.float32
        self.sizes = LLAMA if self.clock.on_cuda else TINY
        self.bandwidth = copy_bandwidth(self.device)
        self.compiler = "inductor" if self.clock.on_cuda else "aot_eager"
        capability = torch.cuda.get_device_capability(self.device) if self.clock.on_cuda else None
        self.spec = KernelSpec(device_type=self.device.type, dtype=self.dtype, capability=capability)

    def measure(self, ops: list[FusedOp[Any, Any]], deadline: Deadline) -> Iterator[dict[str, Any]]:
        """The result so far, after each row."""
        rows: list[dict[str, Any]] = []
        result = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "sizes": dataclasses.asdict(self.sizes),
            "copy_bytes_per_s": self.bandwidth,
            "rounds": ROUNDS,
            "rows": rows,
        }
        yield result
        # The smallest of all ops first: they say the most, and a run that is cut short has them.
        wanted = [(count, op) for op in ops for count in (self.sizes.rows if op is sample else self.sizes.tokens)]
        for count, op in sorted(wanted, key=lambda each: each[0]):
            rows.append(row := {"op": op.name, "tokens": count, "ways": {}})
            if deadline.has():
                torch.manual_seed(0)
                attempt(row, lambda row=row, op=op: self.measure_row(row, op))
                self.forget()
            else:
                row["error"] = NOT_BEGUN
            yield result

    def measure_row(self, row: dict[str, Any], op: FusedOp[Any, Any]) -> None:
        """All ways of one op at one size, in turn."""
        first = arguments_of(op, row["tokens"], self.sizes, self.dtype, self.device)
        results = _tensors(op.native(*first))
        row["bytes"] = sum(each.nbytes for each in (*_tensors(first), *results))
        count = max(4, min(-(-COLD_BYTES // row["bytes"]), MAX_SETS)) if self.clock.on_cuda else 2
        row["sets"] = count
        sets = [first]
        while len(sets) < count:
            sets.append(arguments_of(op, row["tokens"], self.sizes, self.dtype, self.device))
        wide = tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in first)
        expected = _tensors(op.native(*wide))
        runs: dict[str, Callable[[], object]] = {}
        for name, body in self.bodies(op, row["ways"]).items():
            way = row["ways"][name]
            if attempt(way, lambda body=body, way=way: self.check(way, body(*first), expected)) is not None:
                run = attempt(way, lambda body=body: self.repeated(body, sets))
                if run is not None:
                    runs[name] = run
        self.time(row, runs)

    def bodies(self, op: FusedOp[Any, Any], ways: dict[str, Any]) -> dict[str, Callable[..., Any]]:
        """What runs, by name; writes to `ways` all of these, and why another kernel does not."""
        native = op.native
        bodies: dict[str, Callable[..., Any]] = {
            NATIVE: native,
            # A function of its own: what was compiled for another size is no matter here.
            f"native, {self.compiler}": torch.compile(
                lambda *arguments: native(*arguments), backend=self.compiler, fullgraph=True, dynamic=False
            ),
        }
        ways |= {name: {} for name in bodies}
        for kernel in op.kernels:
            reason = kernel.reject(self.spec)
            ways[kernel.name] = {} if reason is None else {"passed_over": reason}
            if reason is None:
                bodies[kernel.name] = kernel.body
        return bodies

    def check(self, way: dict[str, Any], got: Any, expected: tuple[torch.Tensor, ...]) -> bool:
        """Writes how far a result is off. Raises: ValueError: it is something else."""
        errors = [0.0]
        for one, other in zip(_tensors(got), expected, strict=True):
            if other.is_floating_point():
                largest = other.abs().max().clamp(min=1e-300)
                errors.append(((one.double() - other).abs().max() / largest).item())
            else:
                errors.append((one != other).double().mean().item())
        way["relative_error"] = max(errors)
        if not way["relative_error"] <= MAX_RELATIVE_ERROR:
            raise ValueError(f"differs from float64 by {way['relative_error']:.2g} of its largest entry")
        return True

    def repeated(self, body: Callable[..., Any], sets: list[Arguments]) -> Callable[[], object]:
        """Calls `body` on all sets; on CUDA by replay of a graph."""
        for arguments in sets[:2]:
            body(*arguments)
        if not self.clock.on_cuda:
            return lambda: [body(*arguments) for arguments in sets]
        self.clock.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [body(*arguments) for arguments in sets]  # each has memory of its own, also at a replay
        del kept
        return graph.replay

    def time(self, row: dict[str, Any], runs: dict[str, Callable[[], object]]) -> None:
        """Writes microseconds a call, and the share of a copy's bandwidth."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                if "error" not in row["ways"][name]:
                    timed = attempt(row["ways"][name], lambda run=run: self.clock.back_to_back(lambda i: run(), 3))
                    times[name] += timed or []
        for name, found in times.items():
            way = row["ways"][name]
            if "error" not in way:
                way["us"] = statistics.median(found) * 1e3 / row["sets"]
                way["us_min"], way["us_max"] = (f(found) * 1e3 / row["sets"] for f in (min, max))
                way["share_of_copy"] = row["bytes"] / way["us"] * 1e6 / self.bandwidth

    def forget(self) -> None:
        """Gives back what a row held."""
        torch._dynamo.reset()
        gc.collect()
        if self.clock.on_cuda:
            torch.cuda.empty_cache()


def arguments_of(
    op: FusedOp[Any, Any], count: int, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Arguments:
    """Random arguments for `count` tokens, or rows of logits."""

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    if op in (rms_norm, fused_add_rms_norm):
        rows = [drawn(count, sizes.hidden) for _ in range(2 if op is fused_add_rms_norm else 1)]
        return (*rows, 1 + 0.1 * drawn(sizes.hidden), EPS)
    if op is silu_and_mul:
        return (drawn(count, 2 * sizes.intermediate),)
    if op is sample:
        columns = (torch.full((count,), value, dtype=torch.float64, device=device) for value in (0.8, 0.0, 0.95))
        uniform = torch.rand(count, dtype=torch.float64, device=device)
        return (3 * drawn(count, sizes.vocab, dtype=torch.float32), uniform, *columns)
    # As models have them: parts of one projection.
    heads = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
    q, k, _ = drawn(count, sum(heads), sizes.head_size).split(heads, dim=1)
    angles = 100 * torch.rand(count, sizes.head_size // 2, device=device)
    tables = (angles.cos().to(dtype), angles.sin().to(dtype))
    weights = [1 + 0.1 * drawn(sizes.head_size) for _ in range(2)]
    return (q, k, *tables) if op is rotary_embedding else (q, k, *weights, *tables, EPS)


def _tensors(values: Any) -> tuple[torch.Tensor, ...]:
    every = values if isinstance(values, tuple) else (values,)
    return tuple(value for value in every if isinstance(value, torch.Tensor))


def table(result: dict[str, Any]) -> str:
    """A line a row: each way's microseconds and share of the copy's bandwidth; its errors; then what failed."""
    rows = sorted(result["rows"], key=lambda row: (row["op"], row["tokens"]))
    names = list(dict.fromkeys(name for row in rows for name in row["ways"]))
    lines = []
    for head, key, form in (
        ("us a call (share of copy)", "us", "{us:.2f} ({share_of_copy:.2f})"),
        ("error against float64", "relative_error", "{relative_error:.1e}"),
    ):
        lines.append(f"{head:<34}" + "".join(name.rjust(18) for name in names))
        for row in rows:
            ways = [row["ways"].get(name, {}) for name in names]
            cells = [form.format(**way) if key in way else "-" for way in ways]
            lines.append(f"{row['op']} {row['tokens']}".ljust(34) + "".join(cell.rjust(18) for cell in cells))
    notes: dict[str, None] = {}
    for row in rows:
        if "error" in row:
            notes[f"{row['op']} {row['tokens']}: {row['error']}"] = None
        for name, way in row["ways"].items():
            for key in {"error", "passed_over"} & way.keys():
                notes[f"{row['op']}, {name}: {way[key]}"] = None
    about = f"{result['dtype']}, copies at {result['copy_bytes_per_s'] / 1e12:.2f} TB/s; {in_short(result)}"
    return "\n".join([*lines, *notes, about])


OPS: tuple[FusedOp[Any, Any], ...] = (
    rms_norm,
    fused_add_rms_norm,
    silu_and_mul,
    rotary_embedding,
    qk_norm_rotary,
    sample,
)


if __name__ == "__main__":
    raise SystemExit(main())

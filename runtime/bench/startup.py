"""`piecework bench startup`: what each startup policy costs, and when it is paid. Loads torch only when it runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...phases import BucketLadder, GraphConfig, Phase, Startup, add_graph_flags, graph_config_from_args, resolve
from ..progress import Progress
from .chrome_trace import chrome_trace
from .fresh import WorkerSpec, run_fresh
from .page import page
from .report import table
from .traffic import TrafficShape, make_round, make_trace

if TYPE_CHECKING:
    from ..engine.config import ModelConfig

DEFAULT_FLAGS: dict[str, Any] = {
    "cuda_graph_tc_compiler": "inductor",
    "cuda_graph_specialize_prefill": ["all"],
    "cuda_graph_specialize_decode": ["all"],
}
DEFAULT_BUCKETS = {Phase.PREFILL: [16, 64], Phase.DECODE: [1, 4]}
"""Few, since each costs a policy three pieces of a few seconds; they hold where neither a flag nor JSON says more."""
STEADY_NEW_TOKENS = 4

DESCRIPTION = """\
Compares startup policies. Each runs in a fresh process with empty compile caches of its own, one after the other, and
gets the same requests at the same seconds, counted from the start of the engine's construction: an open loop, in which
a request that arrives before anybody is ready waits. They come as a Poisson process, with prompts and answers of mixed
lengths; every size has come by second 10. When all are answered, two short rounds of every size follow, and the second
is the steady state."""

EPILOG = """\
what is measured, in seconds from the start of the engine's construction, after torch was imported:
  ready_s                until the engine accepts requests
  first_token_s          until the first token of any request
  settled_s              until no bucket gets a better program any more: the end of the last trace, compile, capture or
                         promotion; ready_s if there was none after it; `settled` is false if that took too long
  served_s               until the last request of the trace is answered
of one request
  worst_first_token_s    the longest time from a request's arrival to its first token
of one step of the engine, in which some or all requests get a token
  worst_step_s           the longest
  ramp_p50_s, ramp_p99_s half of the steps, and 99 of 100, before settled_s were no longer; null if there was none
  steady_step_s          the median of the last round, after everything settled
and
  tokens_by_s            tokens that were served by second 5, 10, 30 and 60
  in_step_compiles       pieces compiled while a step waited for them
  compiles_before_ready  pieces compiled before the engine accepted requests
  promotions             entries that got a better program between two steps
  captures               captures made
  in_step_captures       those of them that were made while a step waited for them
  in_boundary_captures   those of them that were made between two steps
  pool_bytes             what the captures hold of the device at the end; static buffers are not in it
  peak_bytes             peak memory: resident of the process itself on CPU, reserved on the device on CUDA;
                         without what compile workers take
  steps, events          every step, and every trace, compile, capture and promotion, with its second

Without --cuda-graph-config, the compiler is inductor and every bucket is specialised; the buckets are 16 and 64 in
prefill, 1 and 4 in decode. Flags change that. With --cuda-graph-config, it and the flags are the whole config. A step
has at most as many tokens and requests as the largest buckets, so that no step lies above its ladder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the benchmark to `parser`."""
    add = parser.add_argument
    add("--model", metavar="DIR", help="a Hugging Face checkpoint (default: a toy Llama, made now)")
    add(
        "--policies",
        default="eager,lazy,tiered",
        metavar="NAMES",
        help="comma-separated (default: eager,lazy,tiered)",
    )
    add("--warm", action="store_true", help="run each once more, over the caches that its first run left")
    add("--json", nargs="?", const="-", metavar="FILE", help="write JSON too; without FILE, or to -, on stdout")
    add("--html", metavar="FILE", help="write a page with the timelines, to open in a browser")
    add("--trace", metavar="FILE", help="write the timelines as a trace, to open in https://ui.perfetto.dev")
    add("--duration", type=float, default=30.0, metavar="S", help="seconds in which requests arrive (default: 30)")
    add("--rate", type=float, default=2.0, metavar="N", help="arrivals a second, of one or more requests (default: 2)")
    add(
        "--max-new-tokens",
        type=int,
        default=16,
        metavar="N",
        help="of the longest answer; others are shorter (default: 16)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the requests (default: 0)")
    add("--dtype", metavar="NAME", help="of weights and KV cache (default: the checkpoint's)")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add_graph_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the comparison that the flags describe, prints its table and writes the files; returns 0.

    Everything that can be known is checked before the first process starts.

    Raises:
        ConfigError: a flag is not acceptable, or a policy is not available.
        ModelError: the checkpoint cannot be used, or the toy cannot be made.
        PieceworkError: a process failed; what it wrote to stderr is on stderr.
    """
    policies, config = _policies(arguments.policies), _config(arguments)
    ladders = _check(policies, config, arguments.device)
    _check_traffic(arguments)
    for flag in ("json", "html", "trace"):
        _check_writable(f"--{flag}", getattr(arguments, flag))
    with _end_on_sigterm(), contextlib.ExitStack() as stack:
        model_dir = _model_dir(arguments.model, stack)
        results = compare(_spec(arguments, config, ladders, model_dir), policies, warm=arguments.warm)
    for result in results:
        result["conditions"]["seed"] = arguments.seed
        result["conditions"]["model"]["path"] = arguments.model  # None: the toy
    _write(results, arguments)
    return 0


def compare(spec: WorkerSpec, policies: Sequence[Startup], *, warm: bool = False) -> list[dict[str, Any]]:
    """Runs each policy in a fresh process, one after the other; one result a policy, in the same order.

    Args:
        warm: each once more over the caches that it left; two results a policy, then.

    Raises: PieceworkError: a process failed.
    """
    results = []
    for i, policy in enumerate(policies):
        with Progress(f"bench startup: {policy} ({i + 1} of {len(policies)})"):
            results += run_fresh(dataclasses.replace(spec, config={**spec.config, "startup": str(policy)}), warm=warm)
    return results


def _spec(
    arguments: argparse.Namespace, config: GraphConfig, ladders: Mapping[Phase, BucketLadder], model_dir: Path
) -> WorkerSpec:
    """Raises: ConfigError if the model's context is too short for the answers, or the ladders do not fit together."""
    model = _model_config(model_dir)
    longest = max(arguments.max_new_tokens, STEADY_NEW_TOKENS)
    if model.max_position_embeddings <= longest:
        raise ConfigError(
            f"--max-new-tokens: expected less than the model's context of {model.max_position_embeddings}, "
            f"got {longest}; lower it"
        )
    prefill, decode = ladders[Phase.PREFILL], ladders[Phase.DECODE]
    sizes = {"vocab_size": model.vocab_size, "max_prompt_tokens": model.max_position_embeddings - longest}
    shape = TrafficShape(
        duration_s=arguments.duration,
        arrivals_per_s=arguments.rate,
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
    )
    return WorkerSpec(
        model_dir=str(model_dir.absolute()),
        config=config.as_dict(),
        dtype=arguments.dtype,
        device=arguments.device,
        trace=[dataclasses.asdict(request) for request in make_trace(prefill, decode, shape, **sizes)],
        steady=make_round(prefill, decode, seed=arguments.seed, **sizes),
        steady_new_tokens=STEADY_NEW_TOKENS,
        max_num_seqs=decode.max,
        max_num_batched_tokens=prefill.max,
    )


def _policies(text: str) -> tuple[Startup, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    policies = tuple(Startup.parse(name, "--policies") for name in names)
    if not policies or len(set(policies)) < len(policies):
        raise ConfigError(f"--policies: expected each policy once, got {text!r}; write it like eager,lazy")
    return policies


def _config(arguments: argparse.Namespace) -> GraphConfig:
    """The config of the flags, over the benchmark's own defaults."""
    if arguments.startup is not None:
        raise ConfigError(f"--startup: expected no policy here, got {arguments.startup}; name it in --policies")
    if arguments.manifest is not None:
        raise ConfigError(
            f"--manifest: expected none here, got {arguments.manifest!r}, since each start would know what came in the "
            f"one before; leave it out"
        )
    if arguments.cuda_graph_config is None:
        defaults = dict(DEFAULT_FLAGS)
        for phase, buckets in DEFAULT_BUCKETS.items():
            if getattr(arguments, f"cuda_graph_max_bs_{phase}") is None:
                defaults[f"cuda_graph_bs_{phase}"] = buckets
        given = {name: value for name, value in vars(arguments).items() if value is not None}
        arguments = argparse.Namespace(**{**defaults, **given})
    return graph_config_from_args(arguments)


def _check(policies: Sequence[Startup], config: GraphConfig, device: str | None) -> dict[Phase, BucketLadder]:
    """The ladders. Raises: NotAvailableError for what this build or this device cannot do."""
    import torch

    cuda_available = torch.cuda.is_available()
    device_type = (device or ("cuda" if cuda_available else "cpu")).partition(":")[0]
    for policy in policies:
        each = dataclasses.replace(config, startup=policy)
        resolved = resolve(each, device_type=device_type, cuda_available=cuda_available)
    return dict(resolved.ladders)


def _check_traffic(arguments: argparse.Namespace) -> None:
    """Raises: ConfigError for requests that cannot be made."""
    for name in ("duration", "rate"):
        value = getattr(arguments, name)
        if not 0 < value < float("inf"):
            raise ConfigError(f"--{name}: expected a number above 0, got {value:g}; raise it")
    if arguments.max_new_tokens < 2:
        raise ConfigError(f"--max-new-tokens: expected 2 or more, got {arguments.max_new_tokens}; raise it")


def _check_writable(flag: str, file: str | None) -> None:
    """Finds out before minutes of work whether the result has a place."""
    if file is None or (flag == "--json" and file == "-"):
        return
    path = Path(file)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: expected a file that can be written to, got {file!r}; name another")


def _model_dir(given: str | None, stack: contextlib.ExitStack) -> Path:
    if given is not None:
        return Path(given)
    from ..engine.toy_checkpoint import make_checkpoint

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="piecework-toy-"))
    return make_checkpoint(folder, num_layers=3)


def _model_config(directory: Path) -> ModelConfig:
    from ..engine.config import ModelConfig
    from ..engine.models import ARCHITECTURES

    return ModelConfig.from_directory(directory, frozenset(ARCHITECTURES))


@contextlib.contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM an exception inside, so that processes and folders go away; restores what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write(results: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """The table to stdout and everything else to its file; or the JSON to stdout and the table to stderr."""
    text = json.dumps(results, indent=2) + "\n"
    on_stdout = arguments.json == "-"
    if on_stdout:
        sys.stdout.write(text)
        sys.stdout.flush()
    print(table(results), file=sys.stderr if on_stdout else sys.stdout)
    files = {"json": text if arguments.json != "-" else None}
    if arguments.html is not None:
        files["html"] = page(results)
    if arguments.trace is not None:
        files["trace"] = json.dumps(chrome_trace(results)) + "\n"
    for flag, content in files.items():
        file = getattr(arguments, flag)
        if file is None or content is None:
            continue
        try:
            Path(file).write_text(content, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--{flag}: expected a file that can be written to, got {file!r} ({error}); name another"
            ) from error

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...phases import BucketLadder, GraphConfig, Phase, Startup, add_graph_flags, graph_config_from_args, resolve
from ..progress import Progress
from .fresh import WorkerSpec, run_fresh
from .report import table
from .traffic import make_traffic

if TYPE_CHECKING:
    from ..engine.config import ModelConfig

DEFAULT_FLAGS: dict[str, Any] = {
    "cuda_graph_tc_compiler": "inductor",
    "cuda_graph_specialize_prefill": ["all"],
    "cuda_graph_specialize_decode": ["all"],
}
DEFAULT_BUCKETS = {Phase.PREFILL: [16, 64], Phase.DECODE: [1, 4]}
"""Few, since each costs a policy three pieces of a few seconds; they hold where neither a flag nor JSON says more."""

DESCRIPTION = """\
Compares startup policies. Each runs in a fresh process with empty compile caches of its own, one after the other, and
gets the same requests: they meet every bucket and sizes between, in several rounds, so that the last one is steady."""

EPILOG = """\
what is measured, in seconds from the start of the engine's construction, after torch was imported:
  ready_s                until the engine accepts requests
  first_token_s          until the first token of the first request
  settled_s              until no bucket gets a better program any more: the end of the last step that came with a
                         trace, a compile, a capture or a promotion; ready_s if none did
and
  worst_step_s           the longest wait for a step's token, from the request or the token before it
  steady_step_s          the same in the last round, the median
  in_step_compiles       pieces compiled while a step waited for them
  compiles_before_ready  pieces compiled before the engine accepted requests
  captures               captures made
  in_step_captures       those of them that were made while a step waited for them
  pool_bytes             what the captures hold of the device at the end; static buffers are not in it
  peak_bytes             peak memory: resident of the process itself on CPU, reserved on the device on CUDA

Without --cuda-graph-config, the compiler is inductor and every bucket is specialised; the buckets are 16 and 64 in
prefill, 1 and 4 in decode. Flags change that. With --cuda-graph-config, it and the flags are the whole config."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the benchmark to `parser`."""
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face checkpoint (default: a toy Llama, made now)")
    parser.add_argument(
        "--policies", default="eager,lazy", metavar="NAMES", help="comma-separated (default: eager,lazy)"
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON too; without FILE, or to -, on stdout"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times that all sizes come (default: 3)")
    parser.add_argument("--max-new-tokens", type=int, default=4, metavar="N", help="for each request (default: 4)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests (default: 0)")
    parser.add_argument("--dtype", metavar="NAME", help="of weights and KV cache (default: the checkpoint's)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add_graph_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the comparison that the flags describe, prints its table and writes the JSON; returns 0.

    Everything that can be known is checked before the first process starts.

    Raises:
        ConfigError: a flag is not acceptable, or a policy is not available.
        ModelError: the checkpoint cannot be used, or the toy cannot be made.
        PieceworkError: a process failed; what it wrote to stderr is on stderr.
    """
    policies, config = _policies(arguments.policies), _config(arguments)
    ladders = _check(policies, config, arguments.device)
    for name, least in (("rounds", 1), ("max_new_tokens", 2)):
        if getattr(arguments, name) < least:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: expected {least} or more, got {getattr(arguments, name)}; raise it")
    _check_writable(arguments.json)
    with _end_on_sigterm(), contextlib.ExitStack() as stack:
        model_dir = _model_dir(arguments.model, stack)
        model = _model_config(model_dir)
        _check_reachable(config, model)
        if model.max_position_embeddings <= arguments.max_new_tokens:
            raise ConfigError(
                f"--max-new-tokens: expected less than the model's context of {model.max_position_embeddings}, "
                f"got {arguments.max_new_tokens}; lower it"
            )
        spec = WorkerSpec(
            model_dir=str(model_dir.absolute()),
            config=config.as_dict(),
            dtype=arguments.dtype,
            device=arguments.device,
            rounds=make_traffic(
                ladders[Phase.PREFILL],
                ladders[Phase.DECODE],
                vocab_size=model.vocab_size,
                max_prompt_tokens=model.max_position_embeddings - arguments.max_new_tokens,
                num_rounds=arguments.rounds,
                seed=arguments.seed,
            ),
            max_new_tokens=arguments.max_new_tokens,
        )
        results = compare(spec, policies)
    for result in results:
        result["conditions"]["seed"] = arguments.seed
        result["conditions"]["model"]["path"] = arguments.model  # None: the toy
    _write(results, arguments.json)
    return 0


def compare(spec: WorkerSpec, policies: Sequence[Startup]) -> list[dict[str, Any]]:
    """Runs each policy in a fresh process, one after the other; one result a policy, in the same order.

    Raises: PieceworkError: a process failed.
    """
    results = []
    for i, policy in enumerate(policies):
        with Progress(f"bench startup: {policy} ({i + 1} of {len(policies)})"):
            results.append(run_fresh(dataclasses.replace(spec, config={**spec.config, "startup": str(policy)})))
    return results


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


def _check_reachable(config: GraphConfig, model: ModelConfig) -> None:
    """Raises: ConfigError for a bucket that no step of the engine can take, as the engine itself would."""
    from ..engine.arguments import reachable_buckets, step_limits_of

    max_num_seqs, max_num_batched_tokens = step_limits_of(
        max_num_seqs=None,
        max_num_batched_tokens=None,
        enable_chunked_prefill=True,
        max_model_len=model.max_position_embeddings,
    )
    reachable_buckets(config, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


def _check_writable(file: str | None) -> None:
    """Finds out before minutes of work whether the result has a place."""
    if file is None or file == "-":
        return
    path = Path(file)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--json: expected a file that can be written to, got {file!r}; name another")


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


def _write(results: Sequence[dict[str, Any]], file: str | None) -> None:
    """The table to stdout and the JSON to its file; or the JSON to stdout and the table to stderr."""
    text = json.dumps(results, indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        print(table(results), file=sys.stderr)
        return
    print(table(results))
    if file is not None:
        try:
            Path(file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--json: expected a file that can be written to, got {file!r} ({error}); name another"
            ) from error

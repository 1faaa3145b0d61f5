"""The command `piecework`: generate, bench startup, ops, explain, prewarm.

torch is imported when a command needs it, so that `--help` and wrong flags answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import ConfigError, InputError
from ..phases import Backend, Compiler, GraphConfig, Phase, Startup, add_graph_flags, graph_config_from_args
from .bench import startup as bench_startup
from .console import exit_code, print_json, printable

if TYPE_CHECKING:
    from .engine.engine import LLMEngine
    from .engine.output import RequestOutput
    from .engine.params import SamplingParams
    from .listing import AttentionShape

DEFAULT_MODEL = "default: the small model that comes with piecework"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 after an error.

    Raises:
        SystemExit: from argparse, after `--help`, `--version` or a command line that it cannot read.
    """
    return exit_code(lambda: _run(argv))


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; the namespace's `run` is the command to call."""
    parser = argparse.ArgumentParser(
        prog="piecework", allow_abbrev=False, description="Compiles a PyTorch model piece by piece."
    )
    parser.add_argument("--version", action="version", version=f"piecework {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    generate = _command(commands, "generate", _generate, "continue prompts with a checkpoint")
    _add_engine_flags(generate, default=DEFAULT_MODEL)
    _add_generate_flags(generate)
    add_graph_flags(generate)

    bench = commands.add_parser("bench", help="measure", description="Measures Piecework on this machine.")
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    startup = benches.add_parser(
        "startup",
        allow_abbrev=False,
        help="compare startup policies",
        description=bench_startup.DESCRIPTION,
        epilog=bench_startup.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench_startup.add_arguments(startup)
    startup.set_defaults(run=bench_startup.run)

    ops = _command(
        commands,
        "ops",
        _ops,
        "list the split ops and fused ops; with --model, also how many nodes of its graph a split op matched",
    )
    _add_engine_flags(ops, default="default: none")
    add_graph_flags(ops)

    explain = _command(commands, "explain", _explain, "warm up every bucket, then say what runs for each and why")
    _add_engine_flags(explain, default=DEFAULT_MODEL)
    explain.add_argument("--dump", metavar="DIR", help="write the split graph to DIR, as Python to read and to run")
    add_graph_flags(explain)

    text = "build ahead of time what --manifest says will come, and serve nothing; --startup-budget limits the seconds"
    prewarm = _command(commands, "prewarm", _prewarm, text)
    prewarm.epilog = (
        "--manifest is required. Give the other flags as the server gets them. --startup-budget is the most seconds "
        "that it may take, 0 for no limit; what says how a server starts and promotes has no effect here."
    )
    _add_engine_flags(prewarm, default=DEFAULT_MODEL)
    add_graph_flags(prewarm)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser, *, default: str) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="DIR", help=f"a Hugging Face checkpoint's directory ({default})")
    group.add_argument("--dtype", metavar="NAME", help="of weights and KV cache (default: the checkpoint's)")
    group.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt and answer, in tokens")
    group.add_argument("--num-blocks", type=int, metavar="N", help="blocks of the KV cache")
    group.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a block (default: 16)")
    add = parser.add_argument_group("batching").add_argument
    add("--max-num-seqs", type=int, metavar="N", help="requests in one step at most (default: 256)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens in one step at most (default: 8192 or more)")


def _add_generate_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", action="append", required=True, metavar="TEXT", help="a text to continue; may be given many times")
    add("--max-new-tokens", type=int, default=16, metavar="N", help="tokens to add to each prompt (default: 16)")
    add("--stream", action="store_true", help="print text as it comes")
    add("--explain", action="store_true", help="say on stderr afterwards what ran and why")
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)")
    add("--top-k", type=int, default=0, metavar="N", help="draw from the N likeliest tokens only (default: 0, all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest that reach P (default: 1, all)")
    add("--seed", type=int, metavar="N", help="draw the same each time (default: differently each time)")
    add("--stop", action="append", default=[], metavar="TEXT", help="a text to end before; may be given many times")
    add("--logprobs", type=int, metavar="N", help="log-probabilities, also of the N likeliest tokens (default: none)")


def _run(argv: Sequence[str] | None) -> int:
    arguments = make_parser().parse_args(argv)
    code: int = arguments.run(arguments)
    return code


def _engine(arguments: argparse.Namespace, config: GraphConfig) -> LLMEngine:
    from .engine.engine import LLMEngine

    return LLMEngine(
        arguments.model,
        config,
        dtype=arguments.dtype,
        device=arguments.device,
        block_size=arguments.block_size,
        num_blocks=arguments.num_blocks,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.stream and arguments.json:
        raise ConfigError("--stream: expected one of --stream and --json, got both; leave one out")
    config, params = graph_config_from_args(arguments), _sampling_params(arguments)
    prompts = arguments.prompt
    _check_prompts(prompts)
    with _engine(arguments, config) as engine:
        outputs = engine.generate(prompts, params, on_output=_Printer(prompts).add if arguments.stream else None)
        counters = engine.runtime.counters.as_dict()
        explanation = engine.runtime.explain()
        if arguments.json:
            results = [_as_json(output) for output in outputs]
            entries = explanation.as_dict()["entries"]
            print_json({"model": str(engine.directory), "results": results, "entries": entries, "counters": counters})
        elif not arguments.stream:
            printer = _Printer(prompts)
            for i, output in enumerate(outputs):
                printer.add(i, dataclasses.replace(output, new_text=output.text))
        if arguments.logprobs is not None and not arguments.json:
            for output in outputs:
                _print_logprobs(engine, output)
    if arguments.explain:
        sys.stdout.flush()  # so that both streams are in order where they meet
        print(f"\n{explanation}", file=sys.stderr)
    return 0


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    from .engine.params import SamplingParams

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop", "logprobs")
    return SamplingParams(**{name: getattr(arguments, name) for name in names})


class _Printer:
    """Prints answers in the order of their prompts, each as it comes; what belongs to a later prompt waits."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._waiting = [""] * len(prompts)
        self._finished = [False] * len(prompts)
        self._current = -1
        self._begin_next()

    def add(self, index: int, output: RequestOutput) -> None:
        self._waiting[index] += printable(output.new_text)
        self._finished[index] = output.finish_reason is not None
        while self._current < len(self._prompts):
            print(self._waiting[self._current], end="")
            self._waiting[self._current] = ""
            if not self._finished[self._current]:
                break
            print()
            self._begin_next()
        sys.stdout.flush()

    def _begin_next(self) -> None:
        self._current += 1
        if self._current < len(self._prompts):
            prompt = printable(self._prompts[self._current])
            print(("\n" if self._current else "") + f"prompt: {prompt}\ntext:   ", end="")


def _as_json(output: RequestOutput) -> dict[str, Any]:
    """All of an answer; what was new in its last output says nothing once it is whole."""
    fields = dataclasses.asdict(output)
    return {name: value for name, value in fields.items() if name not in ("new_token_ids", "new_text")}


def _print_logprobs(engine: LLMEngine, output: RequestOutput) -> None:
    assert output.logprobs is not None
    assert output.prompt is not None
    print(f"\nlog-probabilities: {printable(output.prompt)}")
    for token in output.logprobs:
        best = "".join(f"  {engine.tokenizer.token(each)!r} {value:.4f}" for each, value in token.top)
        print(f"  {engine.tokenizer.token(token.token_id)!r} {token.logprob:.4f}{';' if best else ''}{best}")


def _check_prompts(prompts: Sequence[str]) -> None:
    """Refuses bytes of the command line that are no text: Python hands them on as lone surrogates."""
    for i, prompt in enumerate(prompts):
        if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise InputError(f"prompt {i}: expected text in the terminal's encoding, got {prompt!r}; write it in UTF-8")


def _ops(arguments: argparse.Namespace) -> int:
    config = graph_config_from_args(arguments)
    from ..ops.registry import split_ops
    from .listing import AttentionShape, attention_data, attention_text, fused_op_text, fused_ops_data, split_op_text

    device_type, shape, dtype = _device_type(arguments.device), AttentionShape(), None
    if arguments.dtype is not None:
        from .engine.arguments import dtype_of

        dtype = dtype_of(arguments.dtype)
        shape = dataclasses.replace(shape, dtype=dtype or shape.dtype)
    if arguments.model is not None:
        with _engine(arguments, _tracing_config(config)) as engine:
            engine.runtime.warm_up()
            shape = _attention_of(engine, arguments.block_size)
            dtype = shape.dtype
    ops = split_ops()
    fused = fused_ops_data(config, device_type, dtype)
    attention = attention_data(config.attention_backend, device_type, shape)
    traced = any(op.num_matched is not None for op in ops)
    never_matched = [op.name for op in ops if op.num_matched == 0]
    if arguments.json:
        listed = [dataclasses.asdict(op) for op in ops]
        unmatched = never_matched if traced else None
        tables = {"attention": attention, "fused_ops": fused}
        print_json({"traced": traced, "split_ops": listed, "never_matched": unmatched, **tables})
        return 0
    print("\n\n".join([*map(split_op_text, ops), attention_text(attention), *map(fused_op_text, fused)]))
    if never_matched:
        print(f"\nnever matched: {', '.join(never_matched)} (this model's graph does not call them)")
    return 0


def _attention_of(engine: LLMEngine, block_size: int) -> AttentionShape:
    """What a model asks of attention."""
    from .listing import AttentionShape

    config = engine.model_config
    return AttentionShape(
        dtype=next(engine.model.parameters()).dtype,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        block_size=block_size,
        window_size=min((size for size in config.window_sizes if size), default=0),
    )


def _tracing_config(config: GraphConfig) -> GraphConfig:
    """The config with the least work that traces: at the first request, nothing specialised and nothing captured.

    Where a config compiles nothing, nothing would be traced; `aot_eager` traces and generates no code.
    """
    compiles = any(config.phase(phase).compiler is not Compiler.EAGER for phase in Phase)
    for phase in Phase:
        compiler = config.phase(phase).compiler if compiles else Compiler.AOT_EAGER
        config = config.with_phase(phase, backend=Backend.DISABLED, specialize=(), compiler=compiler)
    return config if config.startup is not Startup.EAGER else dataclasses.replace(config, startup=Startup.LAZY)


def _device_type(device: str | None) -> str:
    """The type of the device that a model would get; it need not be here. Raises: ConfigError if there is no such."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    device_type = device.partition(":")[0]
    if device_type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, got {device!r}; use one of these")
    return device_type


def _explain(arguments: argparse.Namespace) -> int:
    config = graph_config_from_args(arguments)
    if arguments.dump is not None and not any(_traces(config, phase) for phase in Phase):
        raise ConfigError(
            "--dump: expected a compiler that traces, got eager in both phases; "
            "add --cuda-graph-tc-compiler aot_eager or inductor, or take backend tc_piecewise"
        )
    with _engine(arguments, config) as engine:
        engine.runtime.warm_up()
        explanation = engine.runtime.explain()
        dumped = _dump(engine, arguments.dump) if arguments.dump is not None else None
    if arguments.json:
        print_json({**explanation.as_dict(), "dump": dumped})
    else:
        print(explanation)
        if dumped is not None:
            print(f"dump: {dumped}")
    return 0


def _prewarm(arguments: argparse.Namespace) -> int:
    """1 when nothing was covered."""
    from .prewarm import load_manifest, prewarm, prewarming_config

    config = graph_config_from_args(arguments)
    manifest = load_manifest(config.manifest)
    with _engine(arguments, prewarming_config(config)) as engine:
        report = prewarm(engine.runtime, manifest, path=str(config.manifest), budget_s=config.startup_budget)
        model = str(engine.directory)
    if arguments.json:
        print_json({"model": model, "manifest": config.manifest, **report.as_dict()})
    else:
        print(report)
    return 0 if report.covered else 1


def _traces(config: GraphConfig, phase: Phase) -> bool:
    """Whether a phase runs anything but the eager forward."""
    chosen = config.phase(phase)
    return chosen.compiler is not Compiler.EAGER or chosen.backend is Backend.TC_PIECEWISE


def _dump(engine: LLMEngine, directory: str) -> str:
    try:
        return str(engine.runtime.dump(directory))
    except OSError as error:
        raise ConfigError(
            f"--dump: expected a directory that can be written to, got {directory!r} ({error}); name another"
        ) from error


if __name__ == "__main__":
    raise SystemExit(main())

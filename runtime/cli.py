"""The command `piecework`: generate, bench startup, ops, explain.

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
from ..phases import Compiler, GraphConfig, Phase, Startup, add_graph_flags, graph_config_from_args
from .bench import startup as bench_startup
from .console import columns, exit_code, print_json, printable

if TYPE_CHECKING:
    from ..ops.registry import SplitOp
    from .engine.engine import Engine


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
    generate = _command(commands, "generate", _generate, "continue prompts with a checkpoint, greedily")
    _add_engine_flags(generate, model_required=True)
    generate.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="a text to continue; may be given many times"
    )
    generate.add_argument(
        "--max-new-tokens", type=int, default=16, metavar="N", help="tokens to add to each prompt (default: 16)"
    )
    generate.add_argument("--explain", action="store_true", help="say on stderr afterwards what ran and why")
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
        "list the registered split ops; with --model, also how many nodes of its graph each matched",
    )
    _add_engine_flags(ops, model_required=False)
    add_graph_flags(ops)

    explain = _command(commands, "explain", _explain, "compile every bucket, then say what runs for each and why")
    _add_engine_flags(explain, model_required=True)
    explain.add_argument("--dump", metavar="DIR", help="write the split graph to DIR, as Python to read and to run")
    add_graph_flags(explain)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text.capitalize()}.", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser, *, model_required: bool) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", required=model_required, metavar="DIR", help="a Hugging Face checkpoint's directory")
    group.add_argument("--dtype", metavar="NAME", help="of weights and KV cache (default: the checkpoint's)")
    group.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt and answer, in tokens")
    group.add_argument("--num-blocks", type=int, metavar="N", help="blocks of the KV cache")
    group.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a block (default: 16)")


def _run(argv: Sequence[str] | None) -> int:
    arguments = make_parser().parse_args(argv)
    code: int = arguments.run(arguments)
    return code


def _engine(arguments: argparse.Namespace, config: GraphConfig) -> Engine:
    from .engine.engine import Engine

    return Engine(
        arguments.model,
        config,
        dtype=arguments.dtype,
        device=arguments.device,
        block_size=arguments.block_size,
        num_blocks=arguments.num_blocks,
        max_model_len=arguments.max_model_len,
    )


def _generate(arguments: argparse.Namespace) -> int:
    config = graph_config_from_args(arguments)
    _check_prompts(arguments.prompt)
    with _engine(arguments, config) as engine:
        generations = engine.generate(arguments.prompt, max_new_tokens=arguments.max_new_tokens)
        counters = engine.runtime.counters.as_dict()
        explanation = str(engine.runtime.explain())
    results = [
        {"prompt": prompt, **dataclasses.asdict(generation)}
        for prompt, generation in zip(arguments.prompt, generations, strict=True)
    ]
    if arguments.json:
        print_json({"model": arguments.model, "results": results, "counters": counters})
    else:
        for i, result in enumerate(results):
            print(("\n" if i else "") + f"prompt: {printable(result['prompt'])}\ntext:   {printable(result['text'])}")
    if arguments.explain:
        sys.stdout.flush()  # so that both streams are in order where they meet
        print(f"\n{explanation}", file=sys.stderr)
    return 0


def _check_prompts(prompts: Sequence[str]) -> None:
    """Refuses bytes of the command line that are no text: Python hands them on as lone surrogates."""
    for i, prompt in enumerate(prompts):
        if not prompt.isascii() and any("\ud800" <= char <= "\udfff" for char in prompt):
            raise InputError(f"prompt {i}: expected text in the terminal's encoding, got {prompt!r}; write it in UTF-8")


def _ops(arguments: argparse.Namespace) -> int:
    config = graph_config_from_args(arguments)
    if arguments.model is not None:
        with _engine(arguments, _tracing_config(config)) as engine:
            engine.runtime.warm_up()
    from ..ops.registry import split_ops

    ops = split_ops()
    traced = any(op.num_matched is not None for op in ops)
    never_matched = [op.name for op in ops if op.num_matched == 0]
    if arguments.json:
        listed = [dataclasses.asdict(op) for op in ops]
        print_json({"traced": traced, "split_ops": listed, "never_matched": never_matched if traced else None})
        return 0
    print("\n\n".join(_describe(op) for op in ops) if ops else "no split op is registered")
    if never_matched:
        print(f"\nnever matched: {', '.join(never_matched)} (this model's graph does not call them)")
    return 0


def _tracing_config(config: GraphConfig) -> GraphConfig:
    """The config with the least work that traces: at the first request, with no bucket specialised.

    Where a config compiles nothing, nothing would be traced; `aot_eager` traces and generates no code.
    """
    compiles = any(config.phase(phase).compiler is not Compiler.EAGER for phase in Phase)
    for phase in Phase:
        compiler = config.phase(phase).compiler if compiles else Compiler.AOT_EAGER
        config = config.with_phase(phase, specialize=(), compiler=compiler)
    return config if config.startup is not Startup.EAGER else dataclasses.replace(config, startup=Startup.LAZY)


def _describe(op: SplitOp) -> str:
    matched = "not traced" if op.num_matched is None else f"{op.num_matched} graph nodes"
    facts = [
        ("  schema", op.schema),
        ("  mutates", ", ".join(op.mutates_args) or "nothing"),
        ("  defined", op.location),
        ("  matched", matched),
    ]
    return f"{op.name}.{op.overload}\n{columns(facts)}"


def _explain(arguments: argparse.Namespace) -> int:
    config = graph_config_from_args(arguments)
    if arguments.dump is not None and all(config.phase(phase).compiler is Compiler.EAGER for phase in Phase):
        raise ConfigError(
            "--dump: expected a compiler that traces, got eager in both phases; "
            "add --cuda-graph-tc-compiler aot_eager or inductor"
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


def _dump(engine: Engine, directory: str) -> str:
    try:
        return str(engine.runtime.dump(directory))
    except OSError as error:
        raise ConfigError(
            f"--dump: expected a directory that can be written to, got {directory!r} ({error}); name another"
        ) from error


if __name__ == "__main__":
    raise SystemExit(main())

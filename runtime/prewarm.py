"""`piecework prewarm`: builds ahead of time what a manifest says will come, and serves nothing.

What outlives the process are the files that compilers keep for themselves; a server that starts later finds them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, PieceworkError
from ..phases import Compiler, GraphConfig, Phase, Resolved, Startup
from .console import columns
from .entry_table import is_captured, is_traced
from .events import Counters, Recorder
from .jit_watch import JitWatch, program_name
from .manifest import Manifest, PhaseRecord, model_id

if TYPE_CHECKING:
    from .runtime import Runtime

CACHE = "TORCHINDUCTOR_CACHE_DIR"
_DO = "name the file that a server with --manifest wrote"


@dataclass(frozen=True, kw_only=True, slots=True)
class Covered:
    """A recorded bucket for which everything that the config asks for was built."""

    phase: str
    bucket: int
    steps: int
    program: str
    captured: bool
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncovered:
    """Something that the manifest records and that was not built."""

    what: str
    """Such as `decode 8`, or `triton: a_kernel (x: *bf16)`."""
    count: int
    """Steps, or compiles after ready."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PrewarmReport:
    """What was built, and what was not."""

    covered: tuple[Covered, ...]
    uncovered: tuple[Uncovered, ...]
    jit_covered: tuple[str, ...]
    """What servers had to compile after ready, and what is compiled now."""
    kept_in: str
    """Where the artifacts lie, in words."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"covered {len(self.covered)}, not covered {len(self.uncovered)}, in {self.seconds:.1f} s"]
        if self.covered:
            rows = [("bucket", "steps", "program", "captured", "seconds")]
            rows += [
                (f"{c.phase} {c.bucket}", str(c.steps), c.program, "yes" if c.captured else "no", f"{c.seconds:.2f}")
                for c in self.covered
            ]
            lines.append(columns(rows))
        lines += [f"compiled again: {name}" for name in self.jit_covered]
        lines += [f"not covered: {each.what}, {each.count} times: {each.reason}" for each in self.uncovered]
        return "\n".join([*lines, self.kept_in])


def load_manifest(path: str | None) -> Manifest:
    """The manifest to build for, of whatever model. Raises: ConfigError for a missing or a bad one, with the reason."""
    if path is None:
        raise ConfigError(f"--manifest: expected the file that says what will come, got none; {_DO}")
    try:
        return Manifest.load(path)
    except FileNotFoundError:
        raise ConfigError(f"--manifest: expected a file, {path!r} does not exist; {_DO}") from None
    except ValueError as error:
        raise ConfigError(f"--manifest: expected a manifest that can be used, got {path!r}: {error}; {_DO}") from None


def prewarming_config(config: GraphConfig) -> GraphConfig:
    """The config of a runtime that builds when it is told to, and leaves the manifest as it is: nothing is traffic.

    It makes what the server's own policy would make.
    """
    casts = config.emulates_precision_casts
    phases: dict[str, Any] = {str(p): dataclasses.replace(config.phase(p), startup=None) for p in Phase}
    return dataclasses.replace(
        config, **phases, startup=Startup.LAZY, manifest=None, startup_budget=0.0, emulate_precision_casts=casts
    )


def prewarm(
    runtime: Runtime,
    manifest: Manifest,
    *,
    path: str,
    budget_s: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> PrewarmReport:
    """Builds one recorded bucket after the other, the most frequent first, and what lies above the ladder.

    Args:
        path: of the manifest, for errors.
        budget_s: begins with nothing more after so many seconds; 0: no limit.

    Raises:
        ConfigError: the manifest is of another model.
    """
    try:
        manifest.check_model(model_id(runtime.model, runtime.config), any_ladder=True)
    except ValueError as error:
        raise ConfigError(f"--manifest: expected a manifest of this model, got {path!r}: {error}; {_DO}") from None
    started = clock()
    watch = JitWatch(Recorder(Counters()), log_level=logging.DEBUG)  # nothing is served yet: no miss
    watch.start()
    try:
        work = _Work(runtime, manifest, deadline=started + budget_s if budget_s else None, clock=clock)
        work.build()
    finally:
        watch.stop()
    names = {program_name(event) for event in runtime.events if event.kind.startswith("compile_")}
    jit_covered = work.compare_jit({(what, name) for what, name, _ in watch.seen}, set(watch.seen), names)
    return PrewarmReport(
        covered=tuple(work.covered),
        uncovered=tuple(work.uncovered),
        jit_covered=tuple(jit_covered),
        kept_in=_kept_in(runtime.resolved),
        seconds=clock() - started,
    )


class _Work:
    """One prewarm."""

    def __init__(
        self, runtime: Runtime, manifest: Manifest, *, deadline: float | None, clock: Callable[[], float]
    ) -> None:
        self.covered: list[Covered] = []
        self.uncovered: list[Uncovered] = []
        self._runtime = runtime
        self._manifest = manifest
        self._deadline = deadline
        self._clock = clock

    def build(self) -> None:
        """Everything that the manifest records."""
        recorded = [
            (self._manifest.phases[phase].buckets[bucket].steps, phase, bucket)
            for phase in Phase
            for bucket in self._manifest.order(phase)
        ]
        for steps, phase, bucket in sorted(recorded, key=lambda item: -item[0]):
            reason = self._why_not(phase, bucket) or self._build(phase, bucket, steps)
            if reason is not None:
                self.uncovered.append(Uncovered(what=f"{phase} {bucket}", count=steps, reason=reason))
        for phase in Phase:
            self._tell_missed(phase, self._manifest.phases.get(phase, PhaseRecord()))

    def _why_not(self, phase: Phase, bucket: int) -> str | None:
        config, ladder = self._runtime.config.phase(phase), self._runtime.resolved.ladders[phase]
        if not is_traced(config) and not is_captured(config):
            return "this phase runs the eager forward, uncaptured: there is nothing to build"
        if bucket not in ladder:
            return f"no bucket of the ladder {', '.join(map(str, ladder))} any more"
        if self._deadline is not None and self._clock() >= self._deadline:
            return "the startup budget was spent"
        return None

    def _build(self, phase: Phase, bucket: int, steps: int) -> str | None:
        """Builds one bucket. Returns why it could not."""
        started = self._clock()
        try:
            self._runtime.warm_up(phase, buckets=(bucket,))
        except PieceworkError as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        entries = [e for e in self._runtime.entries if (e.phase, e.bucket) == (phase, bucket)]
        shares = self._runtime.counters.by_phase_and_bucket().get((str(phase), bucket), {})
        captured = bool(shares.get("captures"))
        if any(entry.captures for entry in entries) and not captured:
            return "it was built, and could not be captured"
        if is_traced(self._runtime.config.phase(phase)) and all(e.program.kind == "eager" for e in entries):
            return f"the eager forward runs there: {entries[0].why}"
        kinds = sorted({entry.program.kind for entry in entries})
        self.covered.append(
            Covered(
                phase=str(phase),
                bucket=bucket,
                steps=steps,
                program=", ".join(kinds),
                captured=captured,
                seconds=self._clock() - started,
            )
        )
        return None

    def _tell_missed(self, phase: Phase, record: PhaseRecord) -> None:
        """Sizes that no bucket took when they came; a ladder that has grown since may take them."""
        ladder = self._runtime.resolved.ladders[phase]
        for size, count in record.missed.items():
            what = f"{phase}, other sizes" if size is None else f"{phase}, {size} tokens"
            reason = f"above the ladder, which ends at {ladder.max}: it runs unpadded, uncaptured; add a bucket for it"
            if size is not None and size <= ladder.max:
                reason = "no bucket took it when it came: its padding was too much, or the ladder was another one"
            self.uncovered.append(Uncovered(what=what, count=count, reason=reason))

    def compare_jit(
        self, names: set[tuple[str, str]], seen: set[tuple[str, str, str]], programs: set[str]
    ) -> list[str]:
        """What of the recorded JIT entries was compiled now, in words; the others are not covered."""
        covered = []
        for (what, name, signature), count in self._manifest.jit.items():
            text = f"{what}: {name}" + (f" ({signature})" if signature else "")
            if (what, name, signature) in seen or (what == "inductor" and name in programs):
                covered.append(text)
                continue
            reason = "it was compiled for other shapes or dtypes" if (what, name) in names else "nothing here needed it"
            self.uncovered.append(Uncovered(what=text, count=count, reason=reason))
        return covered


def _kept_in(resolved: Resolved) -> str:
    """Where a later server finds what was built."""
    if not resolved.whole and not any(resolved.config.phase(phase).compiler is Compiler.INDUCTOR for phase in Phase):
        return "nothing is kept: only compiler inductor leaves files, and captures live in their process"
    directory = os.environ.get(CACHE)
    place = f"{directory} ({CACHE})" if directory else f"Inductor's own cache directory; {CACHE} names another"
    return f"compiled artifacts are in {place}; start the server with the same setting. Captures live in their process"

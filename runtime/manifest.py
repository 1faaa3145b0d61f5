"""The manifest: what buckets came, how often, what ran for them, and what had to JIT after ready.

A file of JSON that servers leave for their next start. It is advice: whatever is wrong with one costs its advice, and
never a request. Reading and merging are here; `manifest_keeper.py` says when it is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..phases import GraphConfig, Phase
from .manifest_format import MAX_COUNT, OTHER, parse, read_json

if TYPE_CHECKING:
    import torch

    from .events import Recorder

FORMAT = 1
MAX_BUCKETS = 1024
"""Of a phase; the most frequent stay."""
MAX_MISSED = 64
"""Sizes above the ladder, of a phase; the others are counted together."""
MAX_JIT = 256
"""Of the most frequent."""

_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRecord:
    """What came of one bucket."""

    steps: int = 0
    compiled: tuple[str, ...] = ()
    """Kinds of programs that there were for it: `general`, `specialized`, `whole`; sorted."""
    captured: bool = False
    program: str = "eager"
    """The kind that ran last."""

    def merged(self, later: BucketRecord) -> BucketRecord:
        """Both together."""
        return BucketRecord(
            steps=min(self.steps + later.steps, MAX_COUNT),
            compiled=tuple(sorted({*self.compiled, *later.compiled})),
            captured=self.captured or later.captured,
            program=later.program if later.steps or not self.steps else self.program,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecord:
    """What came of one phase."""

    buckets: Mapping[int, BucketRecord] = field(default_factory=dict)
    missed: Mapping[int | None, int] = field(default_factory=dict)
    """Steps above the ladder, by their number of tokens; None: those of sizes that nobody kept."""

    def merged(self, later: PhaseRecord) -> PhaseRecord:
        """Both together, within the bounds."""
        buckets = dict(self.buckets)
        for bucket, record in later.buckets.items():
            buckets[bucket] = buckets.get(bucket, BucketRecord()).merged(record)
        kept = sorted(buckets, key=lambda bucket: (-buckets[bucket].steps, bucket))[:MAX_BUCKETS]
        missed = _bounded_sizes(_added(self.missed, later.missed))
        return PhaseRecord(buckets={bucket: buckets[bucket] for bucket in sorted(kept)}, missed=missed)


class AnotherModelError(ValueError):
    """A whole manifest, but of another model or of other ladders."""


JitKey = tuple[str, str, str]
"""What compiled (`triton`, `inductor`, `autotune`), the name of what was compiled, and its shapes and dtypes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What the runs of one model so far met."""

    model: str
    """As `model_id` gives it."""
    phases: Mapping[Phase, PhaseRecord] = field(default_factory=dict)
    jit: Mapping[JitKey, int] = field(default_factory=dict)
    """What had to be compiled after ready, and how often."""
    runs: int = 0

    def order(self, phase: Phase | str, among: Collection[int] | None = None) -> tuple[int, ...]:
        """The buckets of a phase that came, the most frequent first; with `among` only those, such as the ladder's."""
        buckets = self.phases.get(Phase(phase), PhaseRecord()).buckets
        came = [bucket for bucket in buckets if buckets[bucket].steps and (among is None or bucket in among)]
        return tuple(sorted(came, key=lambda bucket: (-buckets[bucket].steps, bucket)))

    def merged(self, later: Manifest) -> Manifest:
        """Both together: counts add up, and stay within the bounds."""
        phases = {
            phase: self.phases.get(phase, PhaseRecord()).merged(later.phases.get(phase, PhaseRecord()))
            for phase in Phase
            if phase in self.phases or phase in later.phases
        }
        jit = _added(self.jit, later.jit)
        kept = sorted(jit, key=lambda key: (-jit[key], key))[:MAX_JIT]
        return Manifest(
            model=self.model,
            phases=phases,
            jit={key: jit[key] for key in kept},
            runs=min(self.runs + later.runs, MAX_COUNT),
        )

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "format": FORMAT,
            "piecework": __version__,
            "model": self.model,
            "phases": {str(phase): _phase_as_dict(record) for phase, record in self.phases.items()},
            "jit": [
                {"what": what, "name": name, "signature": signature, "count": count}
                for (what, name, signature), count in self.jit.items()
            ],
            "runs": self.runs,
        }

    @classmethod
    def from_dict(cls, data: object) -> Manifest:
        """Reads the JSON form. Raises: ValueError with the first thing that is wrong with it."""
        raw = parse(data, format=FORMAT, version=__version__, max_buckets=MAX_BUCKETS, max_jit=MAX_JIT)
        phases = {}
        for name, phase in raw["phases"].items():
            buckets = {
                int(bucket): BucketRecord(**{**record, "compiled": tuple(sorted(set(record["compiled"])))})
                for bucket, record in phase["buckets"].items()
            }
            missed = {None if size == OTHER else int(size): count for size, count in phase["missed"].items()}
            phases[Phase(name)] = PhaseRecord(buckets=buckets, missed=missed)
        jit: dict[JitKey, int] = {}
        for entry in raw["jit"]:
            key = (entry["what"], entry["name"], entry["signature"])
            jit[key] = min(jit.get(key, 0) + entry["count"], MAX_COUNT)
        return cls(model=raw["model"], phases=phases, jit=jit, runs=raw["runs"])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Reads a file, of whatever model.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it cannot be read, or is no whole manifest of this format and version; the text is the reason.
        """
        return cls.from_dict(read_json(path))

    @classmethod
    def read(cls, path: str | os.PathLike[str], model_id: str, recorder: Recorder | None = None) -> Manifest | None:
        """The manifest of this model in a file; None where there is none, or it is of no use: the recorder then warns.

        Never raises.
        """
        try:
            manifest = cls.load(path)
            manifest.check_model(model_id)
        except FileNotFoundError:
            return None
        except ValueError as error:
            if recorder is not None:
                recorder.warn(f"manifest {os.fspath(path)}: ignored, since {error}")
                recorder.record("manifest", action="ignored", path=os.fspath(path), reason=str(error))
            return None
        if recorder is not None:
            recorder.record("manifest", action="read", path=os.fspath(path), runs=manifest.runs)
        return manifest

    def check_model(self, model_id: str, *, any_ladder: bool = False) -> None:
        """Raises: AnotherModelError if it is of another model, or of other ladders unless `any_ladder`."""
        (own, own_ladders), (model, ladders) = self.model.split("-"), model_id.split("-")
        if own != model:
            raise AnotherModelError(
                "it is of another model: a class, a tensor's name, shape or dtype, a compiler or a backend differs"
            )
        if own_ladders != ladders and not any_ladder:
            raise AnotherModelError("it is of other ladders")

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file in one piece: who reads it meanwhile sees the old one. Raises: OSError."""
        path = Path(os.path.realpath(path))
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}.tmp")
        try:
            # Not a NamedTemporaryFile: the umask decides who may read it, as for any other file.
            with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "w", encoding="utf-8") as file:
                json.dump(self.as_dict(), file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def model_id(model: torch.nn.Module, config: GraphConfig) -> str:
    """What a recorded bucket depends on, as two hashes: of the model and how its phases run, and of the ladders.

    Values of tensors do not count, nor does when things are compiled. `config` is the resolved one, without "auto".
    """
    described = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "tensors": sorted(_described_tensors(model)),
        "phases": {str(p): [str(config.phase(p).compiler), str(config.phase(p).backend)] for p in Phase},
    }
    ladders = {str(phase): list(config.phase(phase).ladder(phase)) for phase in Phase}
    return "-".join(hashlib.sha256(json.dumps(part).encode()).hexdigest()[:32] for part in (described, ladders))


def _described_tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each parameter and buffer.

    Of buffers that no checkpoint holds only the number of dims: a KV cache has as many blocks as memory was free.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        loose = module._non_persistent_buffers_set
        tensors = itertools.chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in tensors:
            shape = [-1] * tensor.dim() if name in loose else list(tensor.shape)
            yield f"{prefix}.{name}", str(tensor.dtype), shape


def _bounded_sizes(missed: Mapping[int | None, int]) -> dict[int | None, int]:
    """The most frequent sizes, and the rest of the steps together."""
    sizes = sorted((size for size in missed if size is not None), key=lambda size: (-missed[size], size))
    other = missed.get(None, 0) + sum(missed[size] for size in sizes[MAX_MISSED:])
    kept: dict[int | None, int] = {size: missed[size] for size in sorted(sizes[:MAX_MISSED])}
    return {**kept, None: min(other, MAX_COUNT)} if other else kept


def _added(counts: Mapping[Any, int], more: Mapping[Any, int]) -> dict[Any, int]:
    return {key: min(counts.get(key, 0) + more.get(key, 0), MAX_COUNT) for key in {**counts, **more}}


def _phase_as_dict(record: PhaseRecord) -> dict[str, Any]:
    buckets = {
        str(bucket): {
            "steps": each.steps,
            "compiled": list(each.compiled),
            "captured": each.captured,
            "program": each.program,
        }
        for bucket, each in record.buckets.items()
    }
    missed = {OTHER if size is None else str(size): count for size, count in record.missed.items()}
    return {"buckets": buckets, "missed": missed}

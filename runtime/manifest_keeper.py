"""When a manifest is written: on a timer, and at shutdown."""

from __future__ import annotations

import collections
import itertools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from ..errors import ConfigError
from ..phases import Phase
from .events import Counters, Event, Recorder
from .manifest import AnotherModelError, BucketRecord, JitKey, Manifest, PhaseRecord
from .manifest_format import MAX_TEXT, PROGRAMS

WRITE_EVERY_S = 60.0
LOCK_TIMEOUT_S = 5.0
_MAX_SIZES = 4096
_MAX_BAD = 10


class EntryView(Protocol):
    """What a manifest says of an entry."""

    phase: Phase
    bucket: int | None

    @property
    def program(self) -> Any: ...


class RuntimeView(Protocol):
    """What a manifest is made of: a Runtime, or what looks like one."""

    @property
    def counters(self) -> Counters: ...

    @property
    def events(self) -> Sequence[Event]: ...

    @property
    def entries(self) -> Sequence[EntryView]: ...


class MissedSizes:
    """The sizes of steps that no bucket took; `note` is called for each such step, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Phase, collections.Counter[int | None]] = {phase: collections.Counter() for phase in Phase}

    def note(self, phase: Phase, num_tokens: int) -> None:
        """Counts a step. Beyond a few thousand different sizes no further ones are kept."""
        with self._lock:
            counts = self._counts[phase]
            if num_tokens > 0 and (num_tokens in counts or len(counts) < _MAX_SIZES):
                counts[num_tokens] += 1

    def counts(self, phase: Phase) -> dict[int | None, int]:
        """Steps by number of tokens, as in a PhaseRecord."""
        with self._lock:
            return dict(self._counts[phase])


def manifest_of(view: RuntimeView, model: str, missed: MissedSizes | None = None) -> Manifest:
    """What one runtime met so far, as the manifest of a single run; all but the JIT entries that its log has lost."""
    shares = view.counters.by_phase_and_bucket()
    kinds: dict[tuple[Phase, int | None], list[str]] = collections.defaultdict(list)
    for entry in view.entries:
        kinds[entry.phase, entry.bucket].append(str(entry.program.kind))
    phases = {}
    for phase in Phase:
        buckets = {
            bucket: _bucket_record(share, kinds[phase, bucket])
            for (name, bucket), share in shares.items()
            if name == phase and bucket is not None and (share.get("steps", 0) or share.get("captures", 0))
        }
        sizes = missed.counts(phase) if missed is not None else {}
        unpadded = int(shares.get((str(phase), None), {}).get("steps", 0))
        rest = unpadded - sum(sizes.values())
        record = PhaseRecord(buckets=buckets, missed={**sizes, None: rest} if rest > 0 else sizes)
        if record.buckets or record.missed:
            phases[phase] = record
    return Manifest(model=model, phases=phases, jit=jit_of(view.events), runs=1)


def _bucket_record(share: Mapping[str, float], kinds: Sequence[str]) -> BucketRecord:
    """`kinds`: of the programs of its entries, one for each set of inputs."""
    compiled = {kind for kind in kinds if kind != "eager"}
    compiled |= {kind for kind in ("specialized", "whole") if share.get(f"compiles_{kind}")}
    best = max(kinds, key=PROGRAMS.index, default="eager")
    return BucketRecord(
        steps=int(share.get("steps", 0)),
        compiled=tuple(sorted(compiled)),
        captured=bool(share.get("captures")),
        program=best,
    )


def jit_of(events: Sequence[Event], since_s: float = -1.0) -> dict[JitKey, int]:
    """What `jit` events after a time tell, and how often."""
    found: collections.Counter[JitKey] = collections.Counter()
    for event in events:
        if event.kind == "jit" and event.at_s > since_s:
            what, name, signature = (str(event.detail.get(key, ""))[:MAX_TEXT] for key in ("what", "name", "signature"))
            found[what, name, signature] += int(event.detail.get("count", 1))
    return dict(found)


class ManifestKeeper:
    """Adds what a runtime meets to the manifest in a file, now and then and at the end.

    Several keepers, also of several processes, may share a file: each reads, adds and writes under a lock. Nothing that
    goes wrong with the file reaches a step: the recorder warns of it, and what was not written is tried again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        view: RuntimeView,
        recorder: Recorder,
        *,
        model: str,
        missed: MissedSizes | None = None,
        interval_s: float = WRITE_EVERY_S,
    ) -> None:
        """Touches no file. Raises: ConfigError if the path is that of a directory.

        Args:
            model: as `model_id` gives it.
        """
        if os.path.isdir(path):
            raise ConfigError(
                f"manifest: expected the path of a file, got the directory {os.fspath(path)!r}; name a file in it"
            )
        if os.path.exists(path) and not os.path.isfile(path):
            raise ConfigError(
                f"manifest: expected the path of a file, got {os.fspath(path)!r}, which is a device or the like; name "
                f"another, or leave it out"
            )
        self.path = Path(os.path.realpath(path))
        self._view = view
        self._recorder = recorder
        self._model = model
        self._missed = missed
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._jit: collections.Counter[JitKey] = collections.Counter()
        self._read_until_s = -1.0
        self._written: Manifest | None = None
        """What of this run is in the file already."""

    def start(self) -> Manifest | None:
        """Starts the timer, and returns what the file has of earlier runs; warns if it cannot be written to."""
        before = Manifest.read(self.path, self._model, self._recorder)
        self._check_writable()
        self._thread = threading.Thread(
            target=_write_on_a_timer,
            args=(weakref.ref(self), self._ended, self._interval_s),
            name="piecework-manifest",
            daemon=True,
        )
        self._thread.start()
        return before

    def stop(self) -> None:
        """Writes a last time and ends the timer. Called before the runtime drops its entries; twice is fine."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self.write_now()

    def write_now(self) -> bool:
        """Adds what came since the last time to the file. Returns whether it is there; never raises."""
        try:
            with self._lock:
                self._write()
        except (OSError, RuntimeError, ValueError) as error:
            self._failed(error)
            return False
        return True

    def data(self) -> Manifest:
        """What this run met so far."""
        with self._lock:
            return self._collect()

    def _collect(self) -> Manifest:
        events = [event for event in self._view.events if event.at_s > self._read_until_s]
        self._jit.update(jit_of(events))
        self._read_until_s = max((event.at_s for event in events), default=self._read_until_s)
        now = manifest_of(self._view, self._model, self._missed)
        return Manifest(model=now.model, phases=now.phases, jit=dict(self._jit), runs=1)

    def _write(self) -> None:
        now = self._collect()
        self._check_directory()  # the lock would make it, and nobody asked for that
        with FileLock(f"{self.path}.lock", timeout=LOCK_TIMEOUT_S):
            try:
                before = Manifest.load(self.path)
                before.check_model(self._model)
            except FileNotFoundError:
                before = None
            except ValueError as error:
                before = None
                if self._written is not None and isinstance(error, AnotherModelError):
                    # They would take the file from each other for ever.
                    raise ValueError("a runtime of another model or of other ladders writes it too") from None
                self._put_aside(str(error))
            if before is None:
                self._written = None  # all of this run
            new = now if self._written is None else _difference(now, self._written)
            merged = before.merged(new) if before is not None else Manifest(model=self._model).merged(new)
            merged.write(self.path)
            self._written = now
        self._recorder.record("manifest", action="written", path=str(self.path), runs=merged.runs)

    def _put_aside(self, reason: str) -> None:
        """Keeps a file of no use under another name."""
        if not self.path.is_file():
            raise OSError(f"{self.path} is no regular file")
        names = itertools.chain([".bad"], map(".bad.{}".format, range(2, _MAX_BAD)))
        bad = next((bad for name in names if not (bad := self.path.with_name(self.path.name + name)).exists()), None)
        if bad is None:
            raise OSError(f"there are {_MAX_BAD} files of no use beside it already; look at them")
        os.replace(self.path, bad)
        self._recorder.warn(f"manifest {self.path}: what was there is kept as {bad}, since {reason}")
        self._recorder.record("manifest", action="put_aside", path=str(bad), reason=reason)

    def _check_writable(self) -> None:
        try:
            self._check_directory()
            probe = self.path.with_name(f".{self.path.name}.{os.getpid()}.{id(self)}.tmp")
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            probe.unlink()
        except OSError as error:
            self._failed(error)

    def _check_directory(self) -> None:
        if not self.path.parent.is_dir():
            raise FileNotFoundError(2, f"there is no directory {self.path.parent}")

    def _failed(self, error: Exception) -> None:
        reason = "another process holds its lock" if isinstance(error, TimeoutError) else _reason(error)
        self._recorder.warn(
            f"manifest {self.path}: cannot be written ({reason}); serving goes on, and what came is kept for the next "
            "attempt; make its directory writable or name another file"
        )
        self._recorder.record("manifest", action="failed", path=str(self.path), reason=reason)


def _write_on_a_timer(keeper: weakref.ReferenceType[ManifestKeeper], ended: threading.Event, interval_s: float) -> None:
    """The timer's thread: holds no runtime alive, and waits by the monotonic clock."""
    while not ended.wait(interval_s):
        alive = keeper()
        if alive is None:
            return
        alive.write_now()
        del alive


def _difference(now: Manifest, before: Manifest) -> Manifest:
    """What came between two moments of one run."""
    phases = {}
    for phase, record in now.phases.items():
        old = before.phases.get(phase, PhaseRecord())
        buckets = {
            bucket: BucketRecord(
                steps=max(0, each.steps - old.buckets.get(bucket, BucketRecord()).steps),
                compiled=each.compiled,
                captured=each.captured,
                program=each.program,
            )
            for bucket, each in record.buckets.items()
        }
        missed = {size: count - old.missed.get(size, 0) for size, count in record.missed.items()}
        phases[phase] = PhaseRecord(buckets=buckets, missed={k: count for k, count in missed.items() if count > 0})
    jit = {key: count - before.jit.get(key, 0) for key, count in now.jit.items()}
    return Manifest(model=now.model, phases=phases, jit={k: count for k, count in jit.items() if count > 0}, runs=0)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

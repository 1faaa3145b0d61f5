"""What a runtime remembers for the next start, and what it sees compile after ready, when a step may wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..phases import GraphConfig, Phase, Resolved, Startup
from .events import Recorder
from .jit_watch import JitWatch
from .manifest import Manifest, model_id
from .manifest_keeper import ManifestKeeper, MissedSizes, RuntimeView, manifest_of


class Remembering:
    """The manifest and the watch of one runtime."""

    def __init__(self, model: torch.nn.Module, resolved: Resolved, view: RuntimeView, recorder: Recorder) -> None:
        """Reads the manifest of earlier runs. Raises: ConfigError if its path is that of a directory."""
        config = resolved.config
        self.missed = MissedSizes()
        self._resolved = resolved
        self._view = view
        self._model = model
        self._keeper: ManifestKeeper | None = None
        self._before: Manifest | None = None
        self._watch = JitWatch(recorder) if _expects_no_compiles(config) else None
        if config.manifest is not None:
            self._keeper = ManifestKeeper(
                config.manifest, view, recorder, model=model_id(model, config), missed=self.missed
            )
            self._before = self._keeper.start()

    def order(self, phase: Phase) -> Sequence[int]:
        """The buckets of a phase that came in earlier runs, the most frequent first."""
        buckets = self._resolved.ladders[phase].buckets
        return self._before.order(phase, among=buckets) if self._before is not None else ()

    def data(self) -> dict[str, Any]:
        """What this run met so far, as the manifest would have it."""
        if self._keeper is not None:
            return self._keeper.data().as_dict()
        return manifest_of(self._view, model_id(self._model, self._resolved.config), self.missed).as_dict()

    def ready(self) -> None:
        """From now on, a compile in this process is one that a step may wait for."""
        if self._watch is not None:
            self._watch.start()

    def foreseen(self) -> contextlib.AbstractContextManager[None]:
        """Around what this thread compiles beside the steps."""
        return self._watch.foreseen() if self._watch is not None else contextlib.nullcontext()

    def close(self) -> None:
        """Writes a last time; before the entries are dropped. Twice is fine."""
        if self._watch is not None:
            self._watch.stop()
        if self._keeper is not None:
            self._keeper.stop()


def _expects_no_compiles(config: GraphConfig) -> bool:
    """Whether a phase compiles before or beside its steps; under `lazy` each compile is one in a step, and said."""
    return any(config.startup_of(phase) is not Startup.LAZY for phase in Phase)

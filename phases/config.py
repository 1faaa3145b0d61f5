"""What an operator chooses for a runtime and for each phase. Checks what can be known without a device.

Flags and JSON only build these classes, so every check and every error text is here, in ladder.py or in resolve.py.
A path such as `prefill.buckets` names a field; a PhaseConfig built alone does not know its phase and says `buckets`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError
from .choices import Backend, CaptureDevice, Compiler, Phase, Startup, not_one_of
from .fused import check_fused_ops
from .ladder import BucketLadder, check_size, check_sizes
from .values import (
    ATTENTION_BACKENDS,
    AUTO,
    DEFAULT_MODE,
    KERNEL_BACKENDS,
    check_attention_backend,
    check_count,
    check_flag,
    check_kernel_backend,
    check_mode,
    check_num_bytes,
    check_path,
    check_seconds,
    check_share,
)


def _doc(
    text: str,
    *,
    metavar: str | None = None,
    numeric: bool = False,
    many: bool = False,
    commas: bool = False,
    switch: bool = False,
) -> dict[str, Any]:
    """The documentation of a field and how its flag reads values: the one source of `--help` and of the README."""
    return {
        "doc": text,
        "metavar": metavar,
        "numeric": numeric,
        "many": many,
        "commas": commas,
        "switch": switch,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseConfig:
    """How one phase executes, and for which buckets.

    Raises: ConfigError if a value is not allowed, or if two do not go together.
    """

    backend: Backend = field(
        default=Backend.AUTO,
        metadata=_doc("how the phase executes; auto decides by phase, compiler and device"),
    )
    compiler: Compiler = field(
        default=Compiler.EAGER,
        metadata=_doc("what compiles a piece"),
    )
    buckets: tuple[int, ...] | None = field(
        default=None,
        metadata=_doc(
            "the ladder, ascending, in tokens; if unset, the phase's default ladder",
            metavar="N",
            numeric=True,
            many=True,
        ),
    )
    max_num_tokens: int | None = field(
        default=None,
        metadata=_doc("the last bucket, in tokens; larger steps run unpadded", metavar="N", numeric=True),
    )
    specialize: tuple[int, ...] | Literal["all"] = field(
        default=(),
        metadata=_doc(
            "'all', or the buckets that get a program compiled for exactly their size",
            metavar="N",
            numeric=True,
            many=True,
        ),
    )
    max_padding_waste: float | None = field(
        default=None,
        metadata=_doc(
            "the largest share of padded rows, 0 to 1, in a bucket; beyond it a step runs unpadded",
            metavar="SHARE",
            numeric=True,
        ),
    )
    startup: Startup | None = field(
        default=None,
        metadata=_doc("the startup policy of this phase alone; if unset, that of both", metavar="{eager,lazy,tiered}"),
    )

    if TYPE_CHECKING:  # callers may pass plain words and lists; __post_init__ makes them what the fields declare

        def __init__(
            self,
            *,
            backend: Backend | str = ...,
            compiler: Compiler | str = ...,
            buckets: Sequence[int] | None = ...,
            max_num_tokens: int | None = ...,
            specialize: Sequence[int] | Literal["all"] = ...,
            max_padding_waste: float | None = ...,
            startup: Startup | str | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        _set(self, "backend", Backend.parse(self.backend, "backend"))
        _set(self, "compiler", Compiler.parse(self.compiler, "compiler"))
        if self.backend is Backend.BREAKABLE and self.compiler is not Compiler.EAGER:
            raise ConfigError(
                f"compiler: expected eager, since backend breakable captures the eager forward, got {self.compiler}; "
                "leave the compiler out, or use backend tc_piecewise"
            )
        if self.buckets is not None:
            _set(self, "buckets", check_sizes(self.buckets, "buckets"))
        if self.max_num_tokens is not None:
            check_size(self.max_num_tokens, "max_num_tokens")
        _set(self, "specialize", _specialize(self.specialize))
        _set(self, "max_padding_waste", check_share(self.max_padding_waste, "max_padding_waste"))
        if self.startup is not None:
            _set(self, "startup", Startup.parse(self.startup, "startup"))
        if self.buckets is not None:
            self._check_maximum(self.buckets[-1])
            self._check_specialize(BucketLadder(self.buckets), "")

    def ladder(self, phase: Phase | str) -> BucketLadder:
        """The buckets, or else the default ladder of `phase` cut at `max_num_tokens`."""
        return BucketLadder.default(phase, self.max_num_tokens) if self.buckets is None else BucketLadder(self.buckets)

    def _check_maximum(self, last: int) -> None:
        maximum = self.max_num_tokens
        if maximum is None or maximum == last:
            return
        do = f"add {maximum} or lower" if last < maximum else f"remove the buckets above {maximum} or raise"
        raise ConfigError(f"buckets: the last bucket is {last} but max_num_tokens is {maximum}; {do} max_num_tokens")

    def _check_specialize(self, ladder: BucketLadder, prefix: str) -> None:
        """Every specialised size is a bucket. Called where the ladder is known; `prefix` is `prefill.` or empty."""
        for size in () if self.specialize == "all" else self.specialize:
            if size not in ladder:
                raise ConfigError(
                    f"{prefix}specialize: expected 'all' or buckets of the ladder {', '.join(map(str, ladder))}, "
                    f"got {size}; remove {size} or list it in buckets"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig:
    """How a runtime executes: one PhaseConfig a phase (a mapping of its fields will do), and what both share.

    Raises: ConfigError if a value is not allowed, or if two do not go together.
    """

    prefill: PhaseConfig = field(default_factory=PhaseConfig, metadata=_doc("the prefill phase"))
    decode: PhaseConfig = field(default_factory=PhaseConfig, metadata=_doc("the decode phase"))
    startup: Startup = field(
        default=Startup.LAZY,
        metadata=_doc(
            "eager: everything before ready; lazy: at first appearance, inside the step; "
            "tiered: serve now, promote in the background"
        ),
    )
    promotion_budget_ms: float = field(
        default=30.0,
        metadata=_doc(
            "tiered: the most milliseconds that promotions take before a step; one that takes longer is made alone; 0: "
            "only Runtime.promote and wait_settled promote",
            metavar="MS",
            numeric=True,
        ),
    )
    compile_workers: int = field(
        default=2,
        metadata=_doc(
            "tiered: processes of low priority that compile beside the steps; 0: a thread of this process does",
            metavar="N",
            numeric=True,
        ),
    )
    compile_timeout_s: float = field(
        default=600.0,
        metadata=_doc(
            "tiered: seconds after which a worker that has not compiled its piece is ended",
            metavar="SECONDS",
            numeric=True,
        ),
    )
    manifest: str | None = field(
        default=None,
        metadata=_doc(
            "the file that remembers what buckets came, for the next start; if unset, nothing is remembered",
            metavar="FILE",
        ),
    )
    startup_budget: float = field(
        default=0.0,
        metadata=_doc(
            "tiered: seconds before ready for what the manifest says will come, the most frequent first",
            metavar="SECONDS",
            numeric=True,
        ),
    )
    emulate_precision_casts: bool | None = field(
        default=None,
        metadata=_doc(
            "inductor rounds where eager code does, so that a promotion changes fewer tokens; if unset, under tiered",
            switch=True,
        ),
    )
    capture_device: CaptureDevice = field(
        default=CaptureDevice.AUTO,
        metadata=_doc("what records captures: CUDA graphs, or the tape that stands in for them on CPU"),
    )
    cache_dir: str | None = field(
        default=None,
        metadata=_doc(
            "the directory of Inductor's and Triton's caches, so that a restart reuses what was compiled and tried "
            "out; if unset, theirs are where torch and Triton put them",
            metavar="DIR",
        ),
    )
    enable_torch_compile: bool = field(
        default=False,
        metadata=_doc("backend full: compile the whole forward, for each bucket up to torch_compile_max_bs"),
    )
    torch_compile_max_bs: int | None = field(
        default=None,
        metadata=_doc(
            "the largest bucket that whole-forward compile serves; if unset, 32 or the last bucket below it",
            metavar="N",
            numeric=True,
        ),
    )
    torch_compile_mode: str = field(
        default=DEFAULT_MODE,
        metadata=_doc("the mode of torch.compile for it: default, or max-autotune-no-cudagraphs", metavar="MODE"),
    )
    fused_ops: tuple[str, ...] = field(
        default=(),
        metadata=_doc(
            "who runs fused ops, as in none,+rms_norm: all (kernels) or none (native bodies), then +name and -name; "
            "if unset, native bodies under inductor where it fuses them and no kernel was measured to be as fast, and "
            "kernels otherwise",
            metavar="LIST",
            commas=True,
        ),
    )
    kernel_backend: str = field(
        default=AUTO,
        metadata=_doc(
            "where the kernels of fused ops come from: auto takes each op's first that can serve; native takes none; "
            "another one runs in every op that has it, under every compiler; fused_ops wins for the ops that it names",
            metavar="{" + ",".join(KERNEL_BACKENDS) + "}",
        ),
    )
    attention_backend: str = field(
        default=AUTO,
        metadata=_doc(
            "what serves paged attention; auto takes the first that supports the call",
            metavar="{" + ",".join(ATTENTION_BACKENDS) + "}",
        ),
    )
    evaluate_guards: bool = field(
        default=False,
        metadata=_doc("debugging: keep the guards of the trace and fail on a recompile"),
    )
    cuda_graph_memory_budget: int | None = field(
        default=None,
        metadata=_doc(
            "the most bytes that the pool of the captures holds of the device, such as 512MiB or 1.5GB; beyond it the "
            "least useful capture is dropped; if unset, no limit",
            metavar="SIZE",
        ),
    )
    max_captures: int | None = field(
        default=512,
        metadata=_doc(
            "the most buckets, of both phases together, that hold a capture; null: no limit", metavar="N", numeric=True
        ),
    )
    late_address_check: bool = field(
        default=False,
        metadata=_doc(
            "look whether the model's tensors are where they were captured behind each replay, not before it: saves "
            "host time while the device waits; a step that finds one moved fails, where it would have been captured "
            "again"
        ),
    )
    debug_captures: bool = field(
        default=False,
        metadata=_doc("debugging: check every replay's inputs, and fill padded rows with NaN"),
    )

    if TYPE_CHECKING:  # as above

        def __init__(
            self,
            *,
            prefill: PhaseConfig | Mapping[str, Any] = ...,
            decode: PhaseConfig | Mapping[str, Any] = ...,
            startup: Startup | str = ...,
            promotion_budget_ms: float = ...,
            compile_workers: int = ...,
            compile_timeout_s: float = ...,
            manifest: str | os.PathLike[str] | None = ...,
            startup_budget: float = ...,
            emulate_precision_casts: bool | None = ...,
            capture_device: CaptureDevice | str = ...,
            cache_dir: str | os.PathLike[str] | None = ...,
            enable_torch_compile: bool = ...,
            torch_compile_max_bs: int | None = ...,
            torch_compile_mode: str = ...,
            fused_ops: Sequence[str] = ...,
            kernel_backend: str = ...,
            attention_backend: str = ...,
            evaluate_guards: bool = ...,
            cuda_graph_memory_budget: int | str | None = ...,
            max_captures: int | None = ...,
            late_address_check: bool = ...,
            debug_captures: bool = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for phase in Phase:
            _set(self, phase, _phase_config(getattr(self, phase), phase))
        _set(self, "startup", Startup.parse(self.startup, "startup"))
        _set(self, "capture_device", CaptureDevice.parse(self.capture_device, "capture_device"))
        _set(self, "cache_dir", check_path(self.cache_dir, "cache_dir", "a directory"))
        if self.torch_compile_max_bs is not None:
            check_size(self.torch_compile_max_bs, "torch_compile_max_bs")
        _set(self, "torch_compile_mode", check_mode(self.torch_compile_mode, "torch_compile_mode"))
        _set(self, "fused_ops", check_fused_ops(self.fused_ops, "fused_ops"))
        _set(self, "kernel_backend", check_kernel_backend(self.kernel_backend, "kernel_backend"))
        _set(self, "attention_backend", check_attention_backend(self.attention_backend, "attention_backend"))
        budget_ms = check_seconds(self.promotion_budget_ms, "promotion_budget_ms", unit="milliseconds")
        _set(self, "promotion_budget_ms", budget_ms)
        check_count(self.compile_workers, "compile_workers")
        _set(self, "compile_timeout_s", check_seconds(self.compile_timeout_s, "compile_timeout_s"))
        _set(self, "manifest", check_path(self.manifest, "manifest", "a file"))
        _set(self, "startup_budget", check_seconds(self.startup_budget, "startup_budget"))
        for name in ("enable_torch_compile", "evaluate_guards", "late_address_check", "debug_captures"):
            check_flag(getattr(self, name), name)
        if self.emulate_precision_casts is not None:
            check_flag(self.emulate_precision_casts, "emulate_precision_casts")
        if self.evaluate_guards and any(self.startup_of(phase) is Startup.TIERED for phase in Phase):
            raise ConfigError(
                "startup: expected eager or lazy under evaluate_guards, since guards are of a trace in the step's own "
                "thread, got tiered; drop one of the two"
            )
        budget = check_num_bytes(self.cuda_graph_memory_budget, "cuda_graph_memory_budget")
        _set(self, "cuda_graph_memory_budget", budget)
        if self.max_captures is not None:
            check_size(self.max_captures, "max_captures")

    def phase(self, phase: Phase | str) -> PhaseConfig:
        """The config of one phase."""
        return self.prefill if Phase.parse(phase, "phase") is Phase.PREFILL else self.decode

    def startup_of(self, phase: Phase | str) -> Startup:
        """The startup policy of one phase: its own, or that of both."""
        own = self.phase(phase).startup
        return own if own is not None else self.startup

    @property
    def emulates_precision_casts(self) -> bool:
        """`emulate_precision_casts`, or what holds where it is unset: programs take each other's place under tiered."""
        if self.emulate_precision_casts is not None:
            return self.emulate_precision_casts
        return any(self.startup_of(phase) is Startup.TIERED for phase in Phase)

    def with_phase(self, phase: Phase | str, **changes: Any) -> GraphConfig:
        """A copy in which fields of one phase are replaced."""
        changed: dict[str, Any] = {Phase.parse(phase, "phase"): replace(self.phase(phase), **changes)}
        return replace(self, **changed)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in the JSON form."""
        shared = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in list(Phase)}
        phases = {str(p): {f.name: _plain(getattr(self.phase(p), f.name)) for f in fields(PhaseConfig)} for p in Phase}
        return {**phases, **shared}

    def to_json(self) -> str:
        return json.dumps(self.as_dict())

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> GraphConfig:
        """Reads the JSON form, as text or already parsed; what it does not name keeps its default.

        Raises: ConfigError for text that is not JSON, a key that is no field, or a value that is not allowed.
        """
        return cls(**read_object(parse_json(source) if isinstance(source, str) else source, cls, ""))


def parse_json(text: str) -> Any:
    """Parses JSON, in which no key may be given twice. Raises: ConfigError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ConfigError(f"config: expected each key once, got {key!r} twice; keep one")
            seen[key] = value
        return seen

    try:
        return json.loads(text, object_pairs_hook=unique)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"config: expected a JSON object, got {short_repr(text)} ({error}); "
            'write it like {"decode": {"buckets": [1, 2, 4]}}'
        ) from None


def read_object(value: object, kind: type[PhaseConfig] | type[GraphConfig], where: str) -> dict[str, Any]:
    """`value`, found at the path `where` (empty: the whole), as keyword arguments of `kind`.

    Raises: ConfigError if it is no mapping or a key is no field.
    """
    names = [f.name for f in fields(kind)]
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where or 'config'}: expected an object with keys from {', '.join(names)}, got {short_repr(value)}; "
            "write an object, {} for the defaults"
        )
    for key in value:
        if key not in names:
            raise not_one_of(f"{where}.{key}" if where else str(key), key, names, "one of the keys")
    return dict(value)


def _phase_config(value: object, phase: Phase) -> PhaseConfig:
    if not isinstance(value, PhaseConfig):
        given = read_object(value, PhaseConfig, phase)
        try:
            value = PhaseConfig(**given)
        except ConfigError as error:
            raise ConfigError(f"{phase}.{error}") from None
    value._check_specialize(value.ladder(phase), f"{phase}.")
    return value


def _specialize(value: object) -> tuple[int, ...] | Literal["all"]:
    if isinstance(value, str):
        if value != "all":
            raise not_one_of("specialize", value, ["all"], "a list of buckets or")
        return "all"
    if isinstance(value, Sequence) and not value:
        return ()
    return check_sizes(value, "specialize")


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, str) else value


def _set(config: object, name: str, value: object) -> None:
    """Normalises a field of a frozen config; only for `__post_init__`."""
    object.__setattr__(config, name, value)

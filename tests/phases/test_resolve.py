"""resolve(): "auto" becomes a value with a reason; what this build cannot do is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import ConfigError, NotAvailableError
from piecework.phases import Backend, Compiler, GraphConfig, Phase, PhaseConfig, Resolved, resolve
from piecework.phases.resolve import ANY, NOT_BUILT

# What a build could lack: this one lacks nothing, and the tests say what another one does.
LACKING: frozenset[tuple[str, object]] = frozenset({("cache_dir", ANY), ("debug_captures", True)})
DEVICES = [("cpu", False), ("cpu", True), ("cuda", True), ("cuda", False)]


def with_backends(prefill: str, decode: str, **shared: Any) -> GraphConfig:
    return GraphConfig(prefill=PhaseConfig(backend=prefill), decode=PhaseConfig(backend=decode), **shared)


@pytest.mark.parametrize(
    ("device", "compiler", "capture_device", "prefill", "decode", "captures_on"),
    [
        (("cuda", True), "eager", "auto", "breakable", "full", "cuda"),
        (("cuda", True), "inductor", "auto", "tc_piecewise", "full", "cuda"),
        (("cuda", True), "aot_eager", "cuda", "tc_piecewise", "full", "cuda"),
        (("cuda", False), "eager", "auto", "disabled", "disabled", "tape"),
        (("cpu", True), "eager", "auto", "disabled", "disabled", "tape"),
        (("cpu", False), "inductor", "auto", "disabled", "disabled", "tape"),
        (("cpu", False), "eager", "tape", "breakable", "full", "tape"),
        (("cpu", False), "inductor", "tape", "tc_piecewise", "full", "tape"),
    ],
)
def test_auto_follows_the_contract(
    device: tuple[str, bool], compiler: str, capture_device: str, prefill: str, decode: str, captures_on: str
) -> None:
    config = GraphConfig(
        prefill=PhaseConfig(compiler=compiler), decode=PhaseConfig(compiler=compiler), capture_device=capture_device
    )
    resolved = resolve(config, device_type=device[0], cuda_available=device[1])
    got = resolved.config
    assert (got.prefill.backend, got.decode.backend, got.capture_device) == (prefill, decode, captures_on)
    assert got.prefill.compiler == got.decode.compiler == compiler


def test_reasons_where_captures_are_possible() -> None:
    assert resolve(GraphConfig(), device_type="cuda", cuda_available=True).reasons == (
        "capture_device: auto -> cuda (the model is on cuda)",
        "prefill.backend: auto -> breakable",
        "decode.backend: auto -> full",
    )


def test_reasons_on_a_device_that_cannot_capture() -> None:
    cpu = resolve(GraphConfig(), device_type="cpu", cuda_available=True)
    why = "the model is on cpu, where auto captures only if capture_device says tape"
    assert cpu.reasons == (
        "capture_device: auto -> tape (the model is on cpu; nothing captures on it)",
        f"prefill.backend: auto -> disabled (breakable: {why})",
        f"decode.backend: auto -> disabled (full: {why})",
    )
    lost = resolve(GraphConfig(), device_type="cuda")
    assert lost.reasons[0] == (
        "capture_device: auto -> tape (the model is on cuda, which is not available; nothing captures on it)"
    )


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_a_backend_that_is_named_gets_the_tape_on_cpu_and_is_told_what_that_is(backend: str) -> None:
    """What is asked for is done; the other phase, which asks for nothing, stays as it is on a CPU."""
    resolved = resolve(with_backends("auto", backend), device_type="cpu")
    got = resolved.config
    assert (got.prefill.backend, got.decode.backend, got.capture_device) == ("disabled", backend, "tape")
    assert resolved.reasons[0] == (
        "capture_device: auto -> tape (the model is on cpu; the tape stands in for a GPU: it checks what a capture "
        "would do, and makes nothing faster)"
    )


@pytest.mark.parametrize(("device_type", "cuda_available"), DEVICES)
def test_auto_keeps_what_is_asked_for_beside_it(device_type: str, cuda_available: bool) -> None:
    config = GraphConfig(decode=PhaseConfig(compiler="inductor", buckets=(1, 2), specialize="all"))
    resolved = resolve(config, device_type=device_type, cuda_available=cuda_available)
    assert resolved.config.decode.compiler is Compiler.INDUCTOR
    assert resolved.config.decode.specialize == "all"
    assert [reason.partition(":")[0] for reason in resolved.reasons] == [
        "capture_device",
        "prefill.backend",
        "decode.backend",
    ]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            GraphConfig(cache_dir="/var/cache/pw"),
            "cache_dir: /var/cache/pw is not available in this build; allowed now: none; leave it out to get none",
        ),
        (
            with_backends("disabled", "disabled", debug_captures=True),
            "debug_captures: true is not available in this build; allowed now: false; leave it out to get false",
        ),
    ],
)
@pytest.mark.parametrize(("device_type", "cuda_available"), DEVICES)
def test_asking_for_what_is_not_built(config: GraphConfig, text: str, device_type: str, cuda_available: bool) -> None:
    with pytest.raises(NotAvailableError) as caught:
        resolve(config, device_type=device_type, cuda_available=cuda_available, not_built=LACKING)
    assert str(caught.value) == text
    # The lines of the table are what refuses it.
    assert not NOT_BUILT
    resolve(config, device_type=device_type, cuda_available=cuda_available)


@pytest.mark.parametrize(("device_type", "cuda_available"), DEVICES)
@pytest.mark.parametrize("startup", ["eager", "lazy", "tiered"])
def test_every_startup_policy_is_available(startup: str, device_type: str, cuda_available: bool) -> None:
    config = GraphConfig(startup=startup, decode={"startup": startup})
    got = resolve(config, device_type=device_type, cuda_available=cuda_available).config
    assert {got.startup, got.decode.startup} == {startup}


def test_cuda_captures_need_a_cuda_device() -> None:
    config = GraphConfig(capture_device="cuda")
    with pytest.raises(NotAvailableError) as caught:
        resolve(config, device_type="cpu", cuda_available=True)
    assert str(caught.value) == (
        "capture_device: cuda needs a model on an available CUDA device, got one on cpu; "
        "leave it out, or disable both backends"
    )
    idle = with_backends("disabled", "disabled", capture_device="cuda")
    assert resolve(idle, device_type="cpu").config == replace(idle, emulate_precision_casts=False)


@pytest.mark.parametrize(
    ("said", "startup", "decode_startup", "compiler", "casts", "is_told"),
    [
        (None, "lazy", None, "inductor", False, False),
        (None, "tiered", None, "inductor", True, True),
        (None, "tiered", "eager", "inductor", True, True),
        (None, "eager", "tiered", "inductor", True, True),
        (None, "tiered", None, "aot_eager", True, False),
        (False, "tiered", None, "inductor", False, False),
        (True, "lazy", None, "inductor", True, False),
    ],
)
def test_precision_casts_are_emulated_where_programs_take_each_others_place(
    said: bool | None, startup: str, decode_startup: str | None, compiler: str, casts: bool, is_told: bool
) -> None:
    config = GraphConfig(
        decode=PhaseConfig(compiler=compiler, startup=decode_startup), startup=startup, emulate_precision_casts=said
    )
    resolved = resolve(config, device_type="cpu")
    assert config.emulates_precision_casts is resolved.config.emulate_precision_casts is casts
    told = "emulate_precision_casts: unset -> true (under tiered, programs take the place of eager code)"
    assert (told in resolved.reasons) is is_told


@given(
    st.sampled_from(DEVICES),
    st.sampled_from(list(Compiler)),
    st.sampled_from(["lazy", "tiered"]),
    st.sampled_from(list(Backend)),
    st.booleans(),
    st.sampled_from([None, 4, 64]),
)
def test_resolving_again_changes_nothing(
    device: tuple[str, bool], compiler: Compiler, startup: str, decode: Backend, is_whole: bool, bound: int | None
) -> None:
    compiler = Compiler.EAGER if decode is Backend.BREAKABLE else compiler
    config = GraphConfig(
        prefill=PhaseConfig(compiler=compiler),
        decode=PhaseConfig(backend=decode, compiler=compiler, specialize=(1, 128)),
        startup=startup,
        enable_torch_compile=is_whole,
        torch_compile_max_bs=bound,
    )
    try:
        once = resolve(config, device_type=device[0], cuda_available=device[1])
    except ConfigError:
        assert is_whole
        return
    # Two are decided elsewhere: for each op, and for each call.
    assert ': "auto"' not in replace(once.config, kernel_backend="native", attention_backend="torch").to_json()
    again = resolve(once.config, device_type=device[0], cuda_available=device[1])
    assert (again.config, again.ladders, again.whole) == (once.config, once.ladders, once.whole)
    # What was decided is decided; what has no effect still has none.
    assert set(again.reasons) <= set(once.reasons)
    assert not any("->" in reason for reason in again.reasons)


def compiled_whole(decode: dict[str, Any], prefill: dict[str, Any] | None = None, **shared: Any) -> Resolved:
    config = GraphConfig(prefill=prefill or {}, decode=decode, enable_torch_compile=True, **shared)
    return resolve(config, device_type="cuda", cuda_available=True)


@pytest.mark.parametrize(
    ("buckets", "bound", "largest"),
    [
        (None, None, 32),
        (None, 256, 256),
        ((1, 2, 4, 8), None, 8),
        ((1, 30, 48, 64), None, 30),
        ((1, 30, 48, 64), 48, 48),
        ((1, 30, 48, 64), 1, 1),
    ],
)
def test_buckets_up_to_the_bound_are_compiled_whole(
    buckets: tuple[int, ...] | None, bound: int | None, largest: int
) -> None:
    """Of decode alone: "auto" makes no `full` of prefill."""
    resolved = compiled_whole({"buckets": buckets}, torch_compile_max_bs=bound)
    assert resolved.whole == {Phase.DECODE: largest}
    assert resolved.config.torch_compile_max_bs == largest
    told = [reason for reason in resolved.reasons if reason.startswith("torch_compile")]
    assert told == ([f"torch_compile_max_bs: unset -> {largest} in decode"] if bound is None else [])


def test_nothing_is_compiled_whole_unless_asked_for() -> None:
    resolved = resolve(with_backends("full", "full"), device_type="cuda", cuda_available=True)
    assert not resolved.whole
    assert resolved.config.torch_compile_max_bs is None


def test_prefill_is_compiled_whole_only_where_its_backend_is_named_full() -> None:
    decode = {"buckets": (1, 2, 48)}
    for compiler in Compiler:
        assert compiled_whole(decode, {"compiler": compiler}).whole == {Phase.DECODE: 2}
    both = compiled_whole(decode, {"backend": "full", "buckets": (16, 30, 64)})
    assert both.whole == {Phase.PREFILL: 30, Phase.DECODE: 2}
    assert "torch_compile_max_bs: unset -> 30 in prefill and 2 in decode" in both.reasons
    # A bucket of one phase bounds the other one too, which takes the last of its own below it.
    both = compiled_whole(decode, {"backend": "full", "buckets": (16, 30, 64)}, torch_compile_max_bs=48)
    assert both.whole == {Phase.PREFILL: 30, Phase.DECODE: 48}
    # And a phase whose buckets all are larger has none.
    both = compiled_whole(decode, {"backend": "full", "buckets": (64,)}, torch_compile_max_bs=2)
    assert both.whole == {Phase.DECODE: 2}


@pytest.mark.parametrize(
    ("bound", "prefill", "text"),
    [
        (
            3,
            {},
            "torch_compile_max_bs: expected a bucket of a phase with backend full (decode: 1, 2, 48), got 3; "
            "name one of these, or list 3 in decode.buckets",
        ),
        (
            47,
            {"backend": "full", "buckets": (16, 64)},
            "torch_compile_max_bs: expected a bucket of a phase with backend full (prefill: 16, 64; decode: 1, 2, 48), "
            "got 47; name one of these, or list 47 in decode.buckets",
        ),
        (
            64,
            {"buckets": (16, 64)},
            "torch_compile_max_bs: expected at most 48, the last bucket of decode, got 64; "
            "lower it, or add 64 to decode.buckets",
        ),
        (
            65,
            {"backend": "full", "buckets": (16, 64)},
            "torch_compile_max_bs: expected at most 64, the last bucket of prefill, got 65; "
            "lower it, or add 65 to prefill.buckets",
        ),
    ],
)
def test_a_bound_that_is_no_bucket(bound: int, prefill: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compiled_whole({"buckets": (1, 2, 48)}, prefill, torch_compile_max_bs=bound)
    assert str(caught.value) == text


def test_a_ladder_above_the_default_bound() -> None:
    with pytest.raises(ConfigError) as caught:
        compiled_whole({"buckets": (48, 64)})
    assert str(caught.value) == (
        "torch_compile_max_bs: expected a bucket of a phase with backend full (decode: 48, 64), got unset, which "
        "stands for one of at most 32; name one of these"
    )
    assert compiled_whole({"buckets": (48, 64)}, torch_compile_max_bs=48).whole == {Phase.DECODE: 48}


@pytest.mark.parametrize(
    ("config", "device", "got", "do"),
    [
        (
            with_backends("auto", "tc_piecewise"),
            ("cuda", True),
            "prefill.backend breakable and decode.backend tc_piecewise",
            "set decode.backend to full",
        ),
        (
            with_backends("disabled", "disabled"),
            ("cpu", False),
            "prefill.backend disabled and decode.backend disabled",
            "set decode.backend to full",
        ),
        (
            GraphConfig(),
            ("cpu", False),
            "prefill.backend disabled and decode.backend disabled (auto -> disabled: the model is on cpu, where auto "
            "captures only if capture_device says tape)",
            "set capture_device to tape",
        ),
        (
            GraphConfig(),
            ("cuda", False),
            "prefill.backend disabled and decode.backend disabled (auto -> disabled: the model is on cuda, which is "
            "not available, where auto captures only if capture_device says tape)",
            "set capture_device to tape",
        ),
    ],
)
def test_no_phase_has_a_whole_forward(config: GraphConfig, device: tuple[str, bool], got: str, do: str) -> None:
    config = replace(config, enable_torch_compile=True)
    with pytest.raises(ConfigError) as caught:
        resolve(config, device_type=device[0], cuda_available=device[1])
    assert str(caught.value) == (
        f"enable_torch_compile: expected a phase with backend full, which captures a whole forward, got {got}; {do}, "
        "or leave enable_torch_compile out"
    )
    mended = replace(config, capture_device="tape") if "tape" in do else config.with_phase("decode", backend="full")
    assert resolve(mended, device_type=device[0], cuda_available=device[1]).whole == {Phase.DECODE: 32}


def test_options_of_whole_forward_compile_without_it_have_no_effect_and_say_so() -> None:
    config = GraphConfig(torch_compile_max_bs=7, torch_compile_mode="default")  # 7 is no bucket, and nobody minds
    for _ in range(2):
        resolved = resolve(config, device_type="cuda", cuda_available=True)
        assert resolved.reasons[-2:] == (
            "torch_compile_max_bs: 7 has no effect without enable_torch_compile",
            "torch_compile_mode: default has no effect without enable_torch_compile",
        )
        config = resolved.config
    assert not any("no effect" in reason for reason in compiled_whole({}, torch_compile_mode="default").reasons)


@pytest.mark.parametrize(
    ("specialize", "compiler", "both"),
    [
        ((2, 48), "inductor", "2"),
        ("all", "aot_eager", "1, 2"),
        ((48,), "inductor", None),
        ((), "inductor", None),
        ((2,), "eager", None),  # whose entries say that it has no effect
    ],
)
def test_a_bucket_that_is_specialized_and_compiled_whole(specialize: Any, compiler: str, both: str | None) -> None:
    resolved = compiled_whole({"buckets": (1, 2, 48), "specialize": specialize, "compiler": compiler})
    told = [reason for reason in resolved.reasons if reason.startswith("decode.specialize")]
    assert told == (
        [
            f"decode.specialize: the whole forward of {both} is compiled too, and takes the place of the specialized "
            "program where it is faster"
        ]
        if both is not None
        else []
    )


def test_precision_casts_are_emulated_in_a_whole_forward_too() -> None:
    """Inductor compiles it, whatever the compiler of the phase is."""
    told = "emulate_precision_casts: unset -> true (under tiered, programs take the place of eager code)"
    assert told in compiled_whole({}, startup="tiered").reasons
    assert told not in resolve(GraphConfig(startup="tiered"), device_type="cuda", cuda_available=True).reasons


def test_ladders_of_both_phases() -> None:
    config = GraphConfig(prefill=PhaseConfig(max_num_tokens=40), decode=PhaseConfig(buckets=(1, 3)))
    ladders = resolve(config, device_type="cpu").ladders
    assert set(ladders) == set(Phase)
    assert ladders[Phase.PREFILL].buckets == (16, 24, 32, 40)
    assert ladders[Phase.DECODE].buckets == (1, 3)

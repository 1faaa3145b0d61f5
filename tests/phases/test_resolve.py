"""resolve(): "auto" becomes a value with a reason; what this build cannot do is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import NotAvailableError
from piecework.phases import Backend, Compiler, GraphConfig, Phase, PhaseConfig, resolve
from piecework.phases.resolve import NOT_BUILT

EVERYTHING: frozenset[tuple[str, object]] = frozenset()  # nothing is missing
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
            with_backends("disabled", "disabled", enable_torch_compile=True),
            "enable_torch_compile: true is not available in this build; allowed now: false; leave it out to get false",
        ),
    ],
)
@pytest.mark.parametrize(("device_type", "cuda_available"), DEVICES)
def test_asking_for_what_is_not_built(config: GraphConfig, text: str, device_type: str, cuda_available: bool) -> None:
    with pytest.raises(NotAvailableError) as caught:
        resolve(config, device_type=device_type, cuda_available=cuda_available)
    assert str(caught.value) == text
    # The lines of the table are what refuses it.
    resolve(config, device_type=device_type, cuda_available=cuda_available, not_built=EVERYTHING)


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
    st.sets(st.sampled_from(sorted(NOT_BUILT, key=str))),
    st.sampled_from(list(Backend)),
)
def test_resolving_again_changes_nothing(
    device: tuple[str, bool], compiler: Compiler, not_built: set[tuple[str, object]], decode: Backend
) -> None:
    config = GraphConfig(prefill=PhaseConfig(compiler=compiler), decode=PhaseConfig(backend=decode))
    once = resolve(config, device_type=device[0], cuda_available=device[1], not_built=not_built)
    assert "auto" not in once.config.to_json()
    again = resolve(once.config, device_type=device[0], cuda_available=device[1], not_built=not_built)
    assert (again.config, again.ladders, again.reasons) == (once.config, once.ladders, ())


def test_ladders_of_both_phases() -> None:
    config = GraphConfig(prefill=PhaseConfig(max_num_tokens=40), decode=PhaseConfig(buckets=(1, 3)))
    ladders = resolve(config, device_type="cpu").ladders
    assert set(ladders) == set(Phase)
    assert ladders[Phase.PREFILL].buckets == (16, 24, 32, 40)
    assert ladders[Phase.DECODE].buckets == (1, 3)

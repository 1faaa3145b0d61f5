"""resolve(): "auto" becomes a value with a reason; what this build cannot do is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import NotAvailableError
from piecework.phases import Backend, CaptureDevice, Compiler, GraphConfig, Phase, PhaseConfig, resolve
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
def test_auto_follows_the_contract_when_everything_is_built(
    device: tuple[str, bool], compiler: str, capture_device: str, prefill: str, decode: str, captures_on: str
) -> None:
    config = GraphConfig(
        prefill=PhaseConfig(compiler=compiler), decode=PhaseConfig(compiler=compiler), capture_device=capture_device
    )
    resolved = resolve(config, device_type=device[0], cuda_available=device[1], not_built=EVERYTHING)
    got = resolved.config
    assert (got.prefill.backend, got.decode.backend, got.capture_device) == (prefill, decode, captures_on)
    assert got.prefill.compiler == got.decode.compiler == compiler


def test_the_first_preferred_backend_that_is_built_wins() -> None:
    resolved = resolve(
        GraphConfig(), device_type="cuda", cuda_available=True, not_built=frozenset({("backend", Backend.BREAKABLE)})
    )
    assert (resolved.config.prefill.backend, resolved.config.decode.backend) == (Backend.DISABLED, Backend.FULL)
    assert resolved.reasons == (
        "capture_device: auto -> cuda (the model is on cuda)",
        "prefill.backend: auto -> disabled (breakable is not available in this build)",
        "decode.backend: auto -> full",
    )


def test_reasons_on_a_device_that_cannot_capture() -> None:
    cpu = resolve(GraphConfig(), device_type="cpu", cuda_available=True, not_built=EVERYTHING)
    why = "the model is on cpu, where auto captures only if capture_device says tape"
    assert cpu.reasons == (
        "capture_device: auto -> tape (the model is on cpu)",
        f"prefill.backend: auto -> disabled (breakable: {why})",
        f"decode.backend: auto -> disabled (full: {why})",
    )
    lost = resolve(GraphConfig(), device_type="cuda", not_built=EVERYTHING)
    [capture, *_] = resolve(GraphConfig(), device_type="cpu").reasons  # in this build capture_device="tape" is refused
    assert capture == (
        "capture_device: auto -> tape (the model is on cpu; it is not available in this build, so nothing captures)"
    )
    assert lost.reasons[0] == "capture_device: auto -> tape (the model is on cuda, which is not available)"


def test_a_capture_device_that_is_not_built_disables_auto_and_refuses_the_rest() -> None:
    not_built = frozenset({("capture_device", CaptureDevice.CUDA)})
    resolved = resolve(GraphConfig(), device_type="cuda", cuda_available=True, not_built=not_built)
    assert {resolved.config.phase(phase).backend for phase in Phase} == {Backend.DISABLED}
    assert resolved.reasons[2] == (
        "decode.backend: auto -> disabled (full: capture_device cuda is not available in this build)"
    )
    with pytest.raises(NotAvailableError) as caught:
        resolve(with_backends("auto", "full"), device_type="cuda", cuda_available=True, not_built=not_built)
    assert str(caught.value) == (
        "decode.backend: full captures on cuda, which is not available in this build; leave it out"
    )


@pytest.mark.parametrize(("device_type", "cuda_available"), DEVICES)
def test_auto_avoids_what_this_build_cannot_do(device_type: str, cuda_available: bool) -> None:
    config = GraphConfig(decode=PhaseConfig(compiler="inductor", buckets=(1, 2), specialize="all"))
    resolved = resolve(config, device_type=device_type, cuda_available=cuda_available)
    assert resolved.config.prefill.backend is resolved.config.decode.backend is Backend.DISABLED
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
            with_backends("auto", "full"),
            "decode.backend: full is not available in this build; "
            "allowed now: auto, disabled; leave it out to get auto",
        ),
        (
            with_backends("breakable", "auto"),
            "prefill.backend: breakable is not available in this build; "
            "allowed now: auto, disabled; leave it out to get auto",
        ),
        (
            with_backends("tc_piecewise", "disabled"),
            "prefill.backend: tc_piecewise is not available in this build; "
            "allowed now: auto, disabled; leave it out to get auto",
        ),
        (
            GraphConfig(startup="tiered"),
            "startup: tiered is not available in this build; allowed now: eager, lazy; leave it out to get lazy",
        ),
        (
            GraphConfig(capture_device="tape"),
            "capture_device: tape is not available in this build; allowed now: auto; leave it out to get auto",
        ),
        (
            with_backends("disabled", "auto", capture_device="cuda"),
            "capture_device: cuda is not available in this build; allowed now: auto; leave it out to get auto",
        ),
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
    # The lines of the table are what refuses it: without them, it is refused for the device at most.
    if config.capture_device is not CaptureDevice.CUDA:
        resolve(config, device_type=device_type, cuda_available=cuda_available, not_built=EVERYTHING)


def test_cuda_captures_need_a_cuda_device() -> None:
    config = GraphConfig(capture_device="cuda")
    with pytest.raises(NotAvailableError) as caught:
        resolve(config, device_type="cpu", cuda_available=True, not_built=EVERYTHING)
    assert str(caught.value) == (
        "capture_device: cuda needs a model on an available CUDA device, got one on cpu; "
        "leave it out, or disable both backends"
    )
    idle = with_backends("disabled", "disabled", capture_device="cuda")
    assert resolve(idle, device_type="cpu", not_built=EVERYTHING).config == idle


@given(
    st.sampled_from(DEVICES),
    st.sampled_from(list(Compiler)),
    st.sets(st.sampled_from(sorted(NOT_BUILT, key=str))),
    st.sampled_from([Backend.AUTO, Backend.DISABLED]),
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

"""The table of who runs fused ops, as far as it needs no op. The errors of the list are in test_errors.py."""

from __future__ import annotations

import pytest

from piecework.errors import ConfigError
from piecework.phases import Compiler
from piecework.phases.fused import Preference, check_fused_ops, named_ops, preference

NATIVE, KERNEL, REQUIRED = Preference


@pytest.mark.parametrize(
    ("fused_ops", "eager", "aot_eager", "inductor"),
    [
        ((), KERNEL, KERNEL, NATIVE),
        (("all",), KERNEL, KERNEL, KERNEL),
        (("none",), NATIVE, NATIVE, NATIVE),
        (("none", "+op"), REQUIRED, REQUIRED, REQUIRED),
        (("+op", "all"), REQUIRED, REQUIRED, REQUIRED),
        (("all", "-op"), NATIVE, NATIVE, NATIVE),
        (("-op", "none"), NATIVE, NATIVE, NATIVE),
        (("none", "+other", "-third"), NATIVE, NATIVE, NATIVE),
        (("all", "-other"), KERNEL, KERNEL, KERNEL),
    ],
)
def test_the_table(fused_ops: tuple[str, ...], eager: Preference, aot_eager: Preference, inductor: Preference) -> None:
    assert check_fused_ops(list(fused_ops), "x") == fused_ops
    for compiler, expected in zip(Compiler, (eager, aot_eager, inductor), strict=True):
        wish, why = preference(fused_ops, "op", compiler)
        assert wish is expected
        signs = [item for item in fused_ops if item[1:] == "op"]
        assert (why == f"fused_ops has {''.join(signs)}") == bool(signs)
        assert ("fused_ops" in why) == bool(fused_ops)


def test_names_are_those_of_the_exceptions() -> None:
    assert named_ops(("+a", "none", "-b")) == ("a", "b")
    assert named_ops(("all",)) == named_ops(()) == ()


def test_an_error_says_where() -> None:
    with pytest.raises(ConfigError, match=r"^here: expected exactly one of all and none, got only -a; add none"):
        check_fused_ops(["-a"], "here")

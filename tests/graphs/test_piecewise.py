"""Backend `tc_piecewise` on the tape: what crosses between pieces and split ops, in every form."""

from __future__ import annotations

import pytest

from .staging_models import MODELS, check


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_argument_and_result(name: str, compiler: str) -> None:
    check(MODELS[name], "tc_piecewise", compiler)

"""Backend `breakable` on the tape: what crosses between segments and split ops, in every form."""

from __future__ import annotations

import pytest

from .staging_models import MODELS, check


@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_argument_and_result(name: str) -> None:
    check(MODELS[name], "breakable", "eager")

"""The reference set keeps every contract."""

from __future__ import annotations

import pytest

from transformer_engine_fl import testing


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in testing.cases("reference.torch")]
)
def test_reference(case: testing.Case) -> None:
    case.run()

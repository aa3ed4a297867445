"""Tests Acme's implementations against the contracts, on every device here."""

from __future__ import annotations

import pytest

from transformer_engine_fl import get_default_manager, testing

IMPL_ID = "vendor.acme"

CASES = [
    pytest.param(case, id=f"{device}/{case.name}")
    for device in testing.devices(IMPL_ID)
    for case in testing.cases(IMPL_ID, device=device)
]


@pytest.mark.parametrize("case", CASES)
def test_it_keeps_the_contract(case: testing.Case) -> None:
    outcome = case.run()
    if outcome.declined is not None:
        pytest.skip(outcome.declined)


def test_it_is_found_by_its_entry_point() -> None:
    name = "entry point acme"
    (report,) = [it for it in get_default_manager().plugins if it.name == name]
    assert report.error is None
    assert any(label.endswith(f"/{IMPL_ID}") for label in report.registered)

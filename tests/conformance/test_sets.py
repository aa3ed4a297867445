"""Every set keeps every contract: on a CPU the sets that run there, on a GPU all of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from operator_names import EPILOGUES_OF_EACH_KIND

from transformer_engine_fl import testing
from transformer_engine_fl.ops.epilogue import EPILOGUES

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED_DTYPES = ("float32", "bfloat16")  # the interpreter is slow
SETS = {
    # The interpreter does not affect the reference; the suite's other run tests it.
    "reference.torch": () if INTERPRETED else ("cpu", *(("cuda",) if GPU else ())),
    "default.flagos": ("cpu",) if INTERPRETED else ("cuda",) if GPU else (),
    "vendor.cuda": ("cuda",) if GPU else (),
}


Cases = tuple[testing.Case, ...]


def _refused(case: testing.Case) -> str:
    """The prefix of the names of refusal cases, which are many and quick: those that share it form
    one test. Empty for other cases.
    """
    head, refuses, _ = case.name.partition("/refuses/")
    return head + refuses if refuses else ""


def _is_worth_it(case: testing.Case) -> bool:
    """Whether to run a case; the slow interpreter skips those that add nothing to the others."""
    if not INTERPRETED:
        return True
    if "/deterministic/" in case.name:  # interpreted programs always run in the same order
        return False
    alike = case.operator in EPILOGUES and case.operator not in EPILOGUES_OF_EACH_KIND
    return not alike or case.dtype == "bfloat16"


def _tests() -> Iterator[object]:
    for impl_id, devices in SETS.items():
        for device in devices:
            few = INTERPRETED_DTYPES if INTERPRETED else None
            found = testing.cases(impl_id, device=device, dtypes=few)
            for shared, cases in itertools.groupby(filter(_is_worth_it, found), _refused):
                if shared:
                    yield pytest.param(tuple(cases), id=f"{shared}{device}")
                    continue
                for case in cases:
                    yield pytest.param((case,), id=f"{case.name}/{device}")


@pytest.mark.parametrize("cases", list(_tests()))
def test_set(cases: Cases) -> None:
    failed, declined = [], []
    for case in cases:
        try:
            declined.append(case.run().declined)
        except testing.ConformanceError as error:
            if len(cases) == 1:
                raise
            failed.append(str(error))
    assert not failed, "\n".join(failed)
    if all(declined):
        pytest.skip(str(declined[0]))

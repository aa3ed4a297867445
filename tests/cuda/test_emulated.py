"""The CUDA set keeps every contract on a machine without a GPU: its kernels run on the CPU.

Every family that the set registers is tested, without being named here.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

import cuda_emulation
import pytest
from operator_names import EPILOGUES_OF_EACH_KIND

from transformer_engine_fl import testing
from transformer_engine_fl.core.manager import OpManager
from transformer_engine_fl.ops.epilogue import EPILOGUES

LEFT_OUT = ("float16", "float64")
"""Dtypes that share their code with others; runs on a GPU test them."""
ALL = bool(os.environ.get("TE_FL_EMULATE_ALL"))
"""Whether to test these dtypes, and every epilogue, too, which takes many minutes."""
MISSING = cuda_emulation.missing()


def _tests() -> Iterator[object]:
    """One test for the cases of one operator, dtype and kind."""
    if MISSING:
        return
    kinds = defaultdict(list)
    here = cuda_emulation.registry_for_any_device()
    manager = OpManager(here, builtins=False, plugins=False)
    for case in testing.cases("vendor.cuda", manager=manager):
        if not ALL and case.operator in EPILOGUES and case.operator not in EPILOGUES_OF_EACH_KIND:
            continue
        # Emulated kernels tell devices apart by index, and meta's equals the CPU's.
        if (ALL or case.dtype not in LEFT_OUT) and "/a tensor on meta" not in case.name:
            kinds["/".join(case.name.split("/")[:4])].append(case)
    for kind, cases in kinds.items():
        yield pytest.param(tuple(cases), id=kind)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("cases", list(_tests()))
def test_the_set_keeps_its_contracts(cases: tuple[testing.Case, ...]) -> None:
    failed, declined = [], []
    with cuda_emulation.running():
        for case in cases:
            try:
                declined.append(case.run().declined)
            except testing.ConformanceError as error:
                failed.append(str(error))
    assert not failed, "\n".join(failed)
    if all(declined):
        pytest.skip(str(declined[0]))

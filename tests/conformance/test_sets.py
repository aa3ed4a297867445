"""Every set keeps every contract: on the CPU what runs there, on a GPU all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from transformer_engine_fl import testing

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED_DTYPES = ("float32", "bfloat16")  # the interpreter is slow
SETS = {
    "reference.torch": ("cpu", *(("cuda",) if GPU else ())),
    "default.flagos": ("cpu",) if INTERPRETED else ("cuda",) if GPU else (),
    "vendor.cuda": ("cuda",) if GPU else (),
}


def _cases() -> Iterator[object]:
    for impl_id, devices in SETS.items():
        for device in devices:
            few = INTERPRETED_DTYPES if INTERPRETED else None
            for case in testing.cases(impl_id, device=device, dtypes=few):
                yield pytest.param(case, id=f"{case.name}/{device}")


@pytest.mark.parametrize("case", list(_cases()))
def test_set(case: testing.Case) -> None:
    declined = case.run().declined
    if declined is not None:
        pytest.skip(declined)

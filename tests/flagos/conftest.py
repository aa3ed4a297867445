"""Where Triton's kernels run in these tests: a GPU, or the interpreter.

Triton decides when it is imported whether it interprets, so tests that run a kernel
without a GPU need ``TRITON_INTERPRET=1`` from the start; ``make test`` has a run of
its own for them.
"""

import os

import pytest
import torch


@pytest.fixture
def device() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (make test sets it in its second run)")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in whatever order tests run."""
    torch.manual_seed(0)

"""Check a test's own operator calls against the contracts, as the kit checks samples."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_engine_fl import BackendImplKind, OpImpl
from transformer_engine_fl.core.contract import Sample
from transformer_engine_fl.core.registry import Entry
from transformer_engine_fl.ops import CATALOGUE
from transformer_engine_fl.testing import Guarded
from transformer_engine_fl.testing.arguments import clone, tensors
from transformer_engine_fl.testing.checks import Run


def checking(module: ModuleType) -> Callable[..., Any]:
    """A function that calls an operator of a module and checks what it returns and writes.

    It takes the operator's name and arguments and returns the operator's outputs; a single
    output is not wrapped in a tuple. Memory allocated during the call is poisoned and fenced.
    """

    def check(op: str, /, *args: Any, **kwargs: Any) -> Any:
        contract = CATALOGUE[op]
        impl = OpImpl(op, "tested", BackendImplKind.REFERENCE, getattr(module, op))
        dispatch = next(tensors(contract.bind(*args, **kwargs)[contract.dispatch_on]))
        dtype = str(dispatch.dtype).removeprefix("torch.")
        before = Sample("a test's call", clone(args), clone(kwargs))
        run = Run(Entry(impl, module.__name__, contract), contract, dtype, before)
        with Guarded() as allocations:
            values = run.serve(Sample(before.label, args, kwargs))
        outside = allocations.broken()
        assert outside is None, outside
        run.check_values(values)
        outputs = values[: run.outputs]
        return outputs[0] if len(outputs) == 1 else outputs

    return check


RECTIFIERS = ("drelu", "dbias_drelu", "dreglu", "dsrelu", "dbias_dsrelu", "dsreglu")


def with_nan(op: str, device: str) -> tuple[Tensor, Tensor]:
    """A gradient and an input with some NaNs for an operator of :data:`RECTIFIERS`."""
    x = torch.tensor([[torch.nan, 1.0, -1.0, 0.0], [2.0, -2.0, torch.nan, 3.0]], device=device)
    width = 2 if op.endswith("glu") else 4
    return torch.arange(1.0, 2 * width + 1, device=device).view(2, width), x

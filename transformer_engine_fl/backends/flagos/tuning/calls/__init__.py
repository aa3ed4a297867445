"""What is measured for a choice: calls of an operator, by shape; a module for each family.

Shapes are those of the benchmarks: rows x columns for what works on rows, layers x width for
lists of tensors.
"""

from __future__ import annotations

from transformer_engine_fl.backends.flagos.tuning.calls import loss, optimizer
from transformer_engine_fl.backends.flagos.tuning.calls.call import Calls, Shape

__all__ = ["CALLS", "Calls", "Shape"]

CALLS: dict[str, Calls] = {it.op: it for family in (loss, optimizer) for it in family.CALLS}
"""By operator."""

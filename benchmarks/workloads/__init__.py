"""What is measured: a module for each family, whose WORKLOADS are gathered here."""

from __future__ import annotations

from transformer_engine_fl.core.errors import suggestion
from workloads import (
    activation,
    attention,
    attention_layout,
    context_parallel,
    dropout,
    epilogue,
    gemm,
    loss,
    moe,
    normalization,
    optimizer,
    padding,
    quantization,
    rope,
    router,
    softmax,
)
from workloads.workload import Shape, Workload

__all__ = ["WORKLOADS", "Shape", "Workload", "chosen"]

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for family in (
        normalization,
        softmax,
        activation,
        rope,
        dropout,
        loss,
        optimizer,
        quantization,
        epilogue,
        gemm,
        attention,
        attention_layout,
        context_parallel,
        moe,
        router,
        padding,
    )
    for workload in family.WORKLOADS
}
"""By name, in the order of a report."""


def chosen(operators: list[str], families: list[str]) -> list[Workload]:
    """The workloads of operators (or of a workload's own name) and of families.

    Without either, those of a standard run; of a family alone, its standard ones.

    Raises:
        LookupError: there is none of that operator or family.
    """
    found: list[Workload] = []
    for name in operators:
        own = [it for it in WORKLOADS.values() if name == it.name or name in it.operators]
        if not own:
            known = sorted({op for it in WORKLOADS.values() for op in it.operators})
            raise LookupError(
                f"no workload measures {name!r}; one is added in benchmarks/workloads/. "
                f"There are workloads of: {', '.join(known)}{suggestion(name, known)}"
            )
        found += own
    for name in families:
        own = [it for it in WORKLOADS.values() if it.family == name and it.standard]
        if not own:
            known = sorted({it.family for it in WORKLOADS.values()})
            raise LookupError(
                f"no workload is of the family {name!r}; there are {known}{suggestion(name, known)}"
            )
        found += own
    if not operators and not families:
        found = [it for it in WORKLOADS.values() if it.standard]
    return list(dict.fromkeys(found))

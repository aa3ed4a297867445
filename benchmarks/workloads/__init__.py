"""The workloads: a module for each family, whose WORKLOADS are collected here."""

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
"""The workloads by name, in the order of a report."""


def chosen(operators: list[str], families: list[str]) -> list[Workload]:
    """The workloads of operators, or with a workload's own name, and the standard ones of families.

    Without operators and families, the workloads of a standard run.

    Raises:
        LookupError: an operator or a family has no workload.
    """
    found: list[Workload] = []
    for name in operators:
        own = [it for it in WORKLOADS.values() if name == it.name or name in it.operators]
        if not own:
            known = sorted({op for it in WORKLOADS.values() for op in it.operators})
            raise LookupError(
                f"no workload measures {name!r}; add one in benchmarks/workloads/. "
                f"Measured operators: {', '.join(known)}{suggestion(name, known)}"
            )
        found += own
    for name in families:
        own = [it for it in WORKLOADS.values() if it.family == name and it.standard]
        if not own:
            known = sorted({it.family for it in WORKLOADS.values()})
            raise LookupError(
                f"no standard workload of family {name!r}; known: {known}{suggestion(name, known)}"
            )
        found += own
    if not operators and not families:
        found = [it for it in WORKLOADS.values() if it.standard]
    return list(dict.fromkeys(found))

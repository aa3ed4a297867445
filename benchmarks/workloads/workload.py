"""Workload: an operator, or several in a row, on given shapes: its call, and what is counted.

The inputs of a call are random and the same on every run. What an implementation must
give is what the contracts' oracles give, run in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import ops
from transformer_engine_fl.core.contract import Contract, Sample, Tolerance
from transformer_engine_fl.testing.arguments import as_tuple, by_name, tensors

__all__ = [
    "COLUMNS",
    "ROWS",
    "Functions",
    "Random",
    "Sample",
    "Shape",
    "Workload",
    "call",
    "fewer_rows",
    "reference",
]

Shape = tuple[int, ...]
Functions = Mapping[str, Callable[..., Any]]
"""By operator: an implementation, the oracle, the shape rule."""

ROWS: tuple[Shape, ...] = (
    (8192, 4096),
    (4096, 8192),
    (32768, 1024),
    (2048, 32768),
    (16, 4096),
    (32768, 4096),
    (16384, 8192),
)
"""Rows and columns for what works on rows: hidden sizes of models, and a decoding step."""

COLUMNS: tuple[Shape, ...] = ((1024, 65536), (512, 131072), (256, 262144))
"""Rows that no block of threads can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured under one name.

    Attributes:
        name: the operator, and what is special about the call if anything is.
        make: ``make(shape, dtype, device)``, the call.
        shapes: the shapes of a standard run; the first one is that of a quick run.
        tiny: a shape for which the call is small enough for any machine.
        axes: what the numbers of a shape are.
        ops: the operators; ``name`` alone unless given.
        run: ``run(functions, sample)`` does the work with a function for each operator, and
            returns the outputs; a call of the one operator unless given.
        dtype: the dtype of the call, where it is not the run's to choose.
        standard: whether a run without ``--op`` has it.
        wide: shapes that only ``--wide`` adds.
        flops: operations by shape, where these and not the bytes are counted.
        roof: what the rate stands beside: ``copy``, ``matmul`` or ``scaled_mm``.
        bytes: the fewest bytes by call, where they are not those of every tensor: each input
            read once, each output written once, and each argument that is written both.
        unread: arguments that are written without being read.
        twice: arguments that are read twice whoever does the work, being larger than a cache.
        counted: says what ``flops`` or ``bytes`` counts.
        check_shape: a smaller shape on which values are checked, where float64 is too large.
    """

    name: str
    make: Callable[[Shape, torch.dtype, str], Sample]
    shapes: tuple[Shape, ...]
    tiny: Shape
    axes: str
    ops: tuple[str, ...] = ()
    run: Callable[[Functions, Sample], Any] | None = None
    dtype: str | None = None
    standard: bool = True
    wide: tuple[Shape, ...] = ()
    flops: Callable[[Shape], float] | None = None
    roof: str = "copy"
    bytes: Callable[[Sample], int] | None = None
    unread: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()
    counted: str = ""
    check_shape: Callable[[Shape], Shape] | None = None

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that it calls."""
        return self.ops or (self.name,)

    @property
    def contracts(self) -> tuple[Contract[..., Any], ...]:
        """Theirs."""
        return tuple(ops.CATALOGUE[op] for op in self.operators)

    @property
    def family(self) -> str:
        """The family of the operators."""
        return self.contracts[0].family

    @property
    def unit(self) -> str:
        """Of its rate."""
        return "TFLOP/s" if self.flops else "GB/s"

    @property
    def mutates(self) -> bool:
        """Whether a call changes its arguments, so that each needs fresh ones."""
        return any(contract.mutates for contract in self.contracts)

    def sample(self, shape: Shape, dtype: torch.dtype, device: str) -> Sample:
        """The call on a shape."""
        own = getattr(torch, self.dtype) if self.dtype else dtype
        return self.make(shape, own, device)

    def perform(self, functions: Functions, sample: Sample) -> Any:
        """Do the work."""
        if self.run is not None:
            return self.run(functions, sample)
        return functions[self.operators[0]](*sample.args, **sample.kwargs)

    def expected(self, sample: Sample) -> tuple[Any, ...]:
        """The values in float64: of the outputs, then of the arguments that are written."""
        return as_tuple(self.perform({it.name: it.oracle for it in self.contracts}, sample))

    def written(self, sample: Sample) -> tuple[Any, ...]:
        """The arguments that are written, as they stand, for a comparison with the oracle."""
        contract = self.contracts[0]
        given = by_name(contract, sample)
        held = tuple(given.get(name) for name in contract.mutates)
        return contract.decode(*held) if contract.decode is not None else held

    def shapes_of(self, sample: Sample) -> tuple[Any, ...]:
        """Empty outputs; checks the call."""
        return as_tuple(self.perform({it.name: it.shapes for it in self.contracts}, sample))

    def work(self, shape: Shape, sample: Sample) -> float:
        """The operations, or the fewest bytes."""
        if self.flops is not None:
            return float(self.flops(shape))
        if self.bytes is not None:
            return self.bytes(sample)
        given = by_name(self.contracts[0], sample)
        mutated = {name for it in self.contracts for name in it.mutates}
        read = [it for name, it in given.items() if name not in self.unread]
        read += [given[name] for name in self.twice]
        written = [it for name, it in given.items() if name in mutated]
        return size(read) + size(written) + size(self.shapes_of(sample))

    def dispatch_dtype(self, sample: Sample) -> str:
        """The dtype that the call is dispatched on, by name."""
        contract = self.contracts[0]
        found = next(tensors(by_name(contract, sample)[contract.dispatch_on]))
        return str(found.dtype).removeprefix("torch.")

    def tolerance(self, *dtypes: str) -> Tolerance:
        """The error that the coarsest of the contracts allows."""
        return Tolerance.coarsest(it.tolerance_for(*dtypes) for it in self.contracts)


def size(value: Any) -> int:
    """Bytes of the tensors in a value."""
    return sum(it.numel() * it.element_size() for it in tensors(value))


def call(*args: Any, **kwargs: Any) -> Sample:
    """The call with these arguments."""
    return Sample("benchmark", args, kwargs)


def fewer_rows(most: int) -> Callable[[Shape], Shape]:
    """The same shape with at most so many rows (its first number)."""
    return lambda shape: (min(shape[0], most), *shape[1:])


def reference(op: str, *args: Any, **kwargs: Any) -> Any:
    """What the forward saves for a backward, by the reference set."""
    with te.with_preference("reference"):
        return te.get_default_manager().call(op, *args, **kwargs)


class Random:
    """Random tensors on a device, the same ones on every run."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator(device).manual_seed(1)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Of the standard normal distribution."""
        values = torch.randn(*shape, generator=self._generator, device=self.device)
        return values.to(dtype or self.dtype)

    def integers(self, end: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """From 0 to ``end - 1``."""
        return torch.randint(end, shape, generator=self._generator, device=self.device, dtype=dtype)

    def choices(self, end: int, rows: int, count: int) -> Tensor:
        """``[rows, count]``: different integers in each row, from 0 to ``end - 1``; int32."""
        keys = torch.rand(rows, end, generator=self._generator, device=self.device)
        return keys.argsort(-1)[:, :count].to(torch.int32)

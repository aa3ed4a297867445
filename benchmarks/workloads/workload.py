"""Workload: calls of an operator, or of several in sequence, on given shapes, and their cost.

The inputs of a call are random, and the same in every run. The expected values are those of the
contracts' oracles, run in the same sequence.
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
"""A function for each operator: an implementation, the oracle, or the shape rule."""

ROWS: tuple[Shape, ...] = (
    (8192, 4096),
    (4096, 8192),
    (32768, 1024),
    (2048, 32768),
    (16, 4096),
    (32768, 4096),
    (16384, 8192),
)
"""Rows and columns for operators on rows: hidden sizes of models, and a decoding step."""

COLUMNS: tuple[Shape, ...] = ((1024, 65536), (512, 131072), (256, 262144))
"""Rows that are too wide for one block of threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured under one name.

    Attributes:
        name: the operator, followed by what distinguishes this call of it, if anything.
        make: ``make(shape, dtype, device)`` returns the call.
        shapes: the shapes of a standard run; a quick run takes the first.
        tiny: a shape that is small enough for any machine.
        axes: the meaning of the numbers of a shape.
        ops: the operators; by default ``name`` alone.
        run: ``run(functions, sample)`` does the work with a function for each operator and
            returns the outputs; by default it calls the one operator.
        dtype: the dtype of the call, if ``--dtype`` does not choose it.
        standard: whether a run without ``--op`` includes the workload.
        wide: shapes that only ``--wide`` adds.
        flops: the operations by shape, if operations are counted and not bytes.
        roof: the roof of the rate: ``copy``, ``matmul`` or ``scaled_mm``.
        bytes: the fewest bytes of a call. By default each input is read once, each output is
            written once, and each argument that is written in place is read and written.
        unread: arguments that are written without being read.
        twice: arguments that every implementation must read twice, as no cache holds them.
        counted: a description of what ``flops`` or ``bytes`` counts.
        check_shape: a smaller shape on which values are checked, where float64 needs too much
            memory.
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
        """The contracts of the operators."""
        return tuple(ops.CATALOGUE[op] for op in self.operators)

    @property
    def family(self) -> str:
        """The family of the operators."""
        return self.contracts[0].family

    @property
    def unit(self) -> str:
        """The unit of the rate."""
        return "TFLOP/s" if self.flops else "GB/s"

    @property
    def mutates(self) -> bool:
        """Whether a call writes its arguments, so that each candidate needs fresh ones."""
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
        """The float64 values of the outputs, then of the arguments that are written."""
        return as_tuple(self.perform({it.name: it.oracle for it in self.contracts}, sample))

    def written(self, sample: Sample) -> tuple[Any, ...]:
        """The arguments that the operator writes, with their present values."""
        contract = self.contracts[0]
        given = by_name(contract, sample)
        held = tuple(given.get(name) for name in contract.mutates)
        return contract.decode(*held) if contract.decode is not None else held

    def shapes_of(self, sample: Sample) -> tuple[Any, ...]:
        """Empty outputs of the call; raises if the call is invalid."""
        return as_tuple(self.perform({it.name: it.shapes for it in self.contracts}, sample))

    def work(self, shape: Shape, sample: Sample) -> float:
        """The operations of a call or, for a rate in GB/s, the fewest bytes."""
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
        """The name of the dtype that the call is dispatched on."""
        contract = self.contracts[0]
        found = next(tensors(by_name(contract, sample)[contract.dispatch_on]))
        return str(found.dtype).removeprefix("torch.")

    def tolerance(self, *dtypes: str) -> Tolerance:
        """The coarsest of the contracts' tolerances."""
        return Tolerance.coarsest(it.tolerance_for(*dtypes) for it in self.contracts)


def size(value: Any) -> int:
    """Bytes of the tensors in a value."""
    return sum(it.numel() * it.element_size() for it in tensors(value))


def call(*args: Any, **kwargs: Any) -> Sample:
    """A call with these arguments."""
    return Sample("benchmark", args, kwargs)


def fewer_rows(most: int) -> Callable[[Shape], Shape]:
    """The same shape with at most ``most`` rows, its first number."""
    return lambda shape: (min(shape[0], most), *shape[1:])


def reference(op: str, *args: Any, **kwargs: Any) -> Any:
    """A call by the reference set, for what a forward saves for its backward."""
    with te.with_preference("reference"):
        return te.get_default_manager().call(op, *args, **kwargs)


class Random:
    """Random tensors on a device, the same in every run."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator(device).manual_seed(1)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Values of the standard normal distribution."""
        values = torch.randn(*shape, generator=self._generator, device=self.device)
        return values.to(dtype or self.dtype)

    def integers(self, end: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers from 0 to ``end - 1``."""
        return torch.randint(end, shape, generator=self._generator, device=self.device, dtype=dtype)

    def choices(self, end: int, rows: int, count: int) -> Tensor:
        """``[rows, count]``: different integers in each row, from 0 to ``end - 1``; int32."""
        keys = torch.rand(rows, end, generator=self._generator, device=self.device)
        return keys.argsort(-1)[:, :count].to(torch.int32)

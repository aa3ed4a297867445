"""Activations in CUDA C++ (``activation.cu``): elementwise and gated, and their gradients.

``include/activations.cuh`` defines each activation once. One kernel computes all forwards and
backwards, a second one the backwards that also sum over the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from transformer_engine_fl.backends._allocation import allocator
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    MOST_COLUMNS,
    NAMES,
    PLAIN,
    SIZES,
    Plans,
    access_width,
    check_fresh,
    check_size,
    decline,
    dense_rows,
    fresh,
    is_number,
    is_plain,
    on_device,
    vector_width,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda._sums import SumOfGroups, sum_source
from transformer_engine_fl.ops import activation as contracts
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops._rounding import LARGEST_FLOAT32

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = [
    "clamped_dswiglu",
    "clamped_swiglu",
    "dbias_dgelu",
    "dbias_dqgelu",
    "dbias_drelu",
    "dbias_dsilu",
    "dbias_dsrelu",
    "dgeglu",
    "dgelu",
    "dglu",
    "dqgeglu",
    "dqgelu",
    "dreglu",
    "drelu",
    "dsilu",
    "dsreglu",
    "dsrelu",
    "dswiglu",
    "geglu",
    "gelu",
    "glu",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "silu",
    "sreglu",
    "srelu",
    "swiglu",
]

CLAMPED: Final = "SteepSilu"
"""The kind whose two halves are clamped, and that has options."""
KINDS: Final = ("Gelu", "QuickGelu", "Relu", "SquaredRelu", "Silu", "Sigmoid", CLAMPED)
THREADS: Final = 128
BIAS_BYTES: Final = 48 * 1024
"""Bytes in flight on a multiprocessor for a bias gradient: more took longer."""
MOST_VECTORS: Final = 2**32 - 2**20
"""Kernels that distinguish rows count vectors in 32 bits, with room for an incomplete block."""


# -------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class Key:
    """What a kernel depends on, besides the device.

    Attributes:
        kind: the activation's type in ``activations.cuh``.
        gated: whether a row has two halves.
        backward: whether it is the gradient.
        x, grad: dtypes of the input, and of the output's gradient if there is one.
        flat: whether all elements may be treated as one row.
        vec, access: elements of a vector, and elements that one access may cover.
    """

    kind: str
    gated: bool
    backward: bool
    x: torch.dtype
    grad: torch.dtype
    flat: bool
    vec: int
    access: int

    def defines(self) -> dict[str, str | int]:
        """The macros that both kernels need."""
        return {
            "TX": NAMES[self.x],
            "TDY": NAMES[self.grad],
            "KIND": self.kind,
            "VEC": self.vec,
            "ACCESS": self.access,
        }


def source(key: Key) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel of an activation, or of its gradient."""
    defines = {
        **key.defines(),
        "GATED": int(key.gated),
        "CLAMPED": int(key.kind == CLAMPED),
        "BACKWARD": int(key.backward),
        "FLAT": int(key.flat),
        "LANES": THREADS,
    }
    geometry = _launch.Geometry(THREADS, "PPPqiiqqdd")
    return Specialisation("activation", "elementwise", tuple(defines.items())), geometry


def bias_width(columns: int, x: torch.dtype, grad: torch.dtype) -> int:
    """Elements per vector of both tensors: 16 bytes of the wider dtype, the most a copy moves."""
    return vector_width(columns, max(SIZES[x], SIZES[grad]))


class _BiasShape(NamedTuple):
    """How the columns and rows of a block are distributed over its threads.

    Attributes:
        lanes: threads along the columns.
        rows: rows that the block works on at once.
        depth: rows that a thread has in flight.
    """

    lanes: int
    rows: int
    depth: int

    @classmethod
    def of(cls, key: Key, columns: int) -> _BiasShape:
        """If rows are wide, few blocks share the rows of a column, so blocks cover more columns.
        A 2-byte access cannot be an asynchronous copy: as many threads as possible wait for them.
        """
        if key.access * min(SIZES[key.x], SIZES[key.grad]) == 2:
            lanes, threads, depth = 512, 1024, 1
        elif columns > 16384 or SIZES[key.grad] > SIZES[key.x]:
            lanes, threads, depth = 256, 512, 3
        else:
            lanes, threads, depth = 128, 384, 4
        lanes = min(lanes, 1 << (columns // key.vec - 1).bit_length())
        # Bounded, because with few lanes the first team would add up the sums of many teams.
        return cls(lanes, min(threads // lanes, 16), depth)


def bias_source(key: Key, columns: int) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that computes a gradient and its sums over groups of rows."""
    lanes, rows, depth = _BiasShape.of(key, columns)
    defines = {**key.defines(), "LANES": lanes, "ROWS": rows, "DEPTH": depth}
    geometry = _launch.Geometry(lanes * rows, "PPPPqqqi")
    return Specialisation("activation", "with_bias", tuple(defines.items())), geometry


class WithBias:
    """The kernels of a gradient and of its sum over the rows, on a device."""

    __slots__ = ("_blocks", "_kernel", "_resident", "_rows", "_total")

    def __init__(self, key: Key, columns: int, device: int) -> None:
        found, geometry = bias_source(key, columns)
        lanes, self._rows, depth = _BiasShape.of(key, columns)
        self._kernel = _launch.load(found, geometry, device)
        self._total = SumOfGroups(columns, math_dtype(key.x), key.grad, device)
        self._blocks = -(-columns // (lanes * key.vec))
        bytes_in_flight = geometry.threads * depth * key.vec * (SIZES[key.x] + SIZES[key.grad])
        wanted = max(1, BIAS_BYTES // bytes_in_flight) * _launch.limits(device).multiprocessors
        self._resident = max(1, min(self._kernel.resident_groups(), wanted) // self._blocks)

    def groups(self, rows: int) -> int:
        """How many groups of rows get a partial sum each: at most as many as run at once."""
        teams = -(-rows // self._rows)
        rounds = -(-teams // self._resident)
        return min(65535, -(-teams // rounds))

    def __call__(self, groups: int, partial: int, dbias: int, *values: Any) -> None:
        """Launch; ``values`` are the addresses of grad, x and output, then the numbers."""
        self._kernel.launch(self._blocks, groups, *values[:3], partial, *values[3:])
        self._total(partial, dbias, 0, groups)


_kernels: Plans[_launch.Kernel] = Plans()
_bias_kernels: Plans[WithBias] = Plans()


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """A selection of the operators' kernels for a device: every kind, type and shape."""
    low, full, double, half = torch.bfloat16, torch.float32, torch.float64, torch.float16
    for kind in KINDS:
        for gated in (False, True):
            for backward in (False, True):
                yield source(Key(kind, gated, backward, low, low, not gated, 8, 8))
        yield bias_source(Key(kind, False, True, low, low, False, 8, 8), 4096)
    for x, grad, vec in ((half, full, 8), (full, low, 4), (double, half, 2), (full, full, 1)):
        for kind, gated in (("Gelu", False), (CLAMPED, True)):
            for access in {1, vec}:
                yield source(Key(kind, gated, False, x, x, False, vec, access))
                yield source(Key(kind, gated, True, x, grad, False, vec, access))
        for columns in (8, 96, 65536):
            vec = min(vec, bias_width(columns, x, grad))
            yield bias_source(Key("Gelu", False, True, x, grad, False, vec, vec), columns)
            yield sum_source(columns, math_dtype(x), grad, device)


# ---------------------------------------------------------------------------- operators


class Of(NamedTuple):
    """An operator.

    Attributes:
        contract: its contract.
        kind, gated, backward: see :class:`Key`.
    """

    contract: Contract[..., Any]
    kind: str
    gated: bool
    backward: bool


OPERATORS: Final[dict[str, Of]] = {}
"""The operators by name; the operators that also quantise look up their activation here."""


def _of(contract: Contract[..., Any], kind: str, gated: bool, backward: bool) -> Of:
    return OPERATORS.setdefault(contract.name, Of(contract, kind, gated, backward))


def _accepts(of: Of, grad: Tensor | None, x: Tensor) -> bool:
    """Whether the tensors are valid, and this set supports them."""
    if not ((type(x) in PLAIN or is_plain(x)) and on_device(x) and x.dtype in NAMES):
        return False
    if of.gated and (x.dim() == 0 or x.shape[-1] % 2):
        return False
    if not of.backward:
        return True
    return (
        (type(grad) in PLAIN or is_plain(grad))
        and grad is not None
        and grad.dtype in NAMES
        and grad.get_device() == x.get_device()
        and grad.dim() == x.dim()
        and grad.shape[:-1] == x.shape[:-1]
        and (x.dim() == 0 or grad.shape[-1] << of.gated == x.shape[-1])
    )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg()


def _access(vec: int, *parts: tuple[int, int, torch.dtype]) -> int:
    """Elements that one access may cover, from (address, row stride in elements, dtype)."""
    numbers = []
    for address, step, dtype in parts:
        size = SIZES[dtype]
        numbers += [(address, size), (step * size, size)]
    return access_width(vec, *numbers)


def _run(of: Of, grad: Tensor | None, x: Tensor, limit: float = 0.0, alpha: float = 0.0) -> Tensor:
    """The activation of ``x``, or its gradient."""
    accepted = _accepts(of, grad, x)
    if of.kind == CLAMPED:
        bounded = is_number(limit) and (0 <= limit <= LARGEST_FLOAT32 or limit == math.inf)
        if not (accepted and bounded and is_number(alpha)):
            decline(of.contract, *((grad, x) if of.backward else (x,)), limit=limit, alpha=alpha)
    elif not accepted:
        decline(of.contract, *((grad, x) if of.backward else (x,)))
    op, dtype, shape = of.contract.name, x.dtype, tuple(x.shape)
    columns = shape[-1] >> of.gated if shape else 1
    flat = not of.gated and _is_dense(x) and (grad is None or _is_dense(grad))
    if flat:  # one row, whatever the shape
        output = allocator(x.device)(shape, x.stride(), dtype)
        check_fresh(op, output)
    else:
        output = fresh(op, x, shape if of.backward or not of.gated else (*shape[:-1], columns))
    size = x.numel() >> of.gated
    if not size:
        return output
    x_step = grad_step = 0
    vec = 16 // SIZES[dtype]
    if not flat:
        vec = vector_width(columns, SIZES[dtype])
        if not shape:  # a lazily negated scalar, since other scalars are flat
            x, grad = x.reshape(1), None if grad is None else grad.reshape(1)
        x, x_step = dense_rows(x)
        if grad is not None:
            grad, grad_step = dense_rows(grad)
        check_size(op, "vectors", size // vec, MOST_VECTORS)
        check_size(op, "columns", columns, MOST_COLUMNS)
    address, grad_address, grad_dtype = x.data_ptr(), 0, dtype
    if grad is not None:
        grad_address, grad_dtype = grad.data_ptr(), grad.dtype
    access = vec
    if not flat or (address | grad_address) & 15:
        access = _access(vec, (address, x_step, dtype), (grad_address, grad_step, grad_dtype))
    device = x.get_device()
    key = (device, of.kind, of.gated, of.backward, dtype, grad_dtype, flat, vec, access)
    kernel = _kernels.get(key) or _kernels.get_or_create(
        key, lambda: _launch.load(*source(Key(*key[1:])), device)
    )
    vectors = size // vec
    kernel.launch(
        max(1, -(-vectors // THREADS)),
        1,
        grad_address,
        address,
        output.data_ptr(),
        vectors,
        size % vec,
        0 if flat else columns,
        grad_step,
        x_step,
        limit,
        alpha,
    )
    return output


def _run_with_bias(of: Of, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the rows of the activation's gradient, and that gradient."""
    if not (_accepts(of, grad, x) and x.dim()):
        decline(of.contract, grad, x)
    op, dtype, columns = of.contract.name, x.dtype, x.shape[-1]
    output = fresh(op, x, x.shape)
    dbias = fresh(op, grad, (columns,))
    if not x.numel():
        return dbias.zero_(), output
    check_size(op, "columns", columns, MOST_COLUMNS)
    rows = x.numel() // columns
    x, x_step = dense_rows(x)
    grad, grad_step = dense_rows(grad)
    address, grad_address, grad_dtype = x.data_ptr(), grad.data_ptr(), grad.dtype
    vec = bias_width(columns, dtype, grad_dtype)
    access = _access(vec, (address, x_step, dtype), (grad_address, grad_step, grad_dtype))
    device = x.get_device()
    key = (device, columns, of.kind, False, True, dtype, grad_dtype, False, vec, access)
    plan = _bias_kernels.get(key) or _bias_kernels.get_or_create(
        key, lambda: WithBias(Key(*key[2:]), columns, device)
    )
    groups = plan.groups(rows)
    partial = allocator(x.device)((groups * columns,), (1,), math_dtype(dtype))
    plan(
        groups,
        partial.data_ptr(),
        dbias.data_ptr(),
        grad_address,
        address,
        output.data_ptr(),
        rows,
        grad_step,
        x_step,
        columns,
    )
    return dbias, output


F = TypeVar("F", bound=Callable[..., Any])


def _named(contract: Contract[..., Any], function: F) -> F:
    function.__name__ = function.__qualname__ = contract.name
    function.__doc__ = f"``{contract.name}`` of the contract."
    return repeating(function)


def _forward(
    contract: Contract[..., Any], kind: str, gated: bool = False
) -> Callable[[Tensor], Tensor]:
    of = _of(contract, kind, gated, False)

    def run(input: Tensor) -> Tensor:
        return _run(of, None, input)

    return _named(contract, run)


def _backward(
    contract: Contract[..., Any], kind: str, gated: bool = False
) -> Callable[[Tensor, Tensor], Tensor]:
    of = _of(contract, kind, gated, True)

    def run(grad: Tensor, fwd_input: Tensor) -> Tensor:
        return _run(of, grad, fwd_input)

    return _named(contract, run)


def _bias_backward(
    contract: Contract[..., Any], kind: str
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    of = _of(contract, kind, False, True)

    def run(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
        return _run_with_bias(of, grad, fwd_input)

    return _named(contract, run)


gelu = _forward(contracts.gelu, "Gelu")
dgelu = _backward(contracts.dgelu, "Gelu")
dbias_dgelu = _bias_backward(contracts.dbias_dgelu, "Gelu")
qgelu = _forward(contracts.qgelu, "QuickGelu")
dqgelu = _backward(contracts.dqgelu, "QuickGelu")
dbias_dqgelu = _bias_backward(contracts.dbias_dqgelu, "QuickGelu")
relu = _forward(contracts.relu, "Relu")
drelu = _backward(contracts.drelu, "Relu")
dbias_drelu = _bias_backward(contracts.dbias_drelu, "Relu")
srelu = _forward(contracts.srelu, "SquaredRelu")
dsrelu = _backward(contracts.dsrelu, "SquaredRelu")
dbias_dsrelu = _bias_backward(contracts.dbias_dsrelu, "SquaredRelu")
silu = _forward(contracts.silu, "Silu")
dsilu = _backward(contracts.dsilu, "Silu")
dbias_dsilu = _bias_backward(contracts.dbias_dsilu, "Silu")
glu = _forward(contracts.glu, "Sigmoid", gated=True)
dglu = _backward(contracts.dglu, "Sigmoid", gated=True)
geglu = _forward(contracts.geglu, "Gelu", gated=True)
dgeglu = _backward(contracts.dgeglu, "Gelu", gated=True)
qgeglu = _forward(contracts.qgeglu, "QuickGelu", gated=True)
dqgeglu = _backward(contracts.dqgeglu, "QuickGelu", gated=True)
reglu = _forward(contracts.reglu, "Relu", gated=True)
dreglu = _backward(contracts.dreglu, "Relu", gated=True)
sreglu = _forward(contracts.sreglu, "SquaredRelu", gated=True)
dsreglu = _backward(contracts.dsreglu, "SquaredRelu", gated=True)
swiglu = _forward(contracts.swiglu, "Silu", gated=True)
dswiglu = _backward(contracts.dswiglu, "Silu", gated=True)

_CLAMPED_SWIGLU = _of(contracts.clamped_swiglu, CLAMPED, True, False)
_CLAMPED_DSWIGLU = _of(contracts.clamped_dswiglu, CLAMPED, True, True)


@repeating
def clamped_swiglu(input: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """``clamped_swiglu`` of the contract."""
    return _run(_CLAMPED_SWIGLU, None, input, limit, alpha)


@repeating
def clamped_dswiglu(
    grad: Tensor, fwd_input: Tensor, limit: float = 7.0, alpha: float = 1.702
) -> Tensor:
    """``clamped_dswiglu`` of the contract."""
    return _run(_CLAMPED_DSWIGLU, grad, fwd_input, limit, alpha)

"""Cross entropy in CUDA C++ (``loss.cu``): of logits, shards of a vocabulary, linear layers.

The forward reads a row once, by a warp or a block; each thread keeps the highest score and the
sum of the exponentials of the logits that it has read. The backward reads each tile of the logits
once and computes its gradient from lse. Forward and backward in one operator are a softmax with 1
subtracted at the target (``softmax.cu``), which reads the logits once for both.
The linear forms (``backends/_cross_entropy.py``) compute the logits of some words at a time by
torch's matrix products; the kernels are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from transformer_engine_fl.backends._cross_entropy import (
    LinearCrossEntropy,
    Options,
    Rows,
    run_both,
    vector_of,
)
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    MOST_COLUMNS,
    NAMES,
    PLAIN,
    SIZES,
    Plans,
    access_width,
    address_of,
    addressed,
    check_size,
    decline,
    dense_rows,
    fresh,
    is_number,
    is_plain,
    on_device,
    plain,
    pointer,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda.gemm import products
from transformer_engine_fl.backends.vendor.cuda.softmax import run_with_losses
from transformer_engine_fl.ops import loss as contracts
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops._rounding import LARGEST_FLOAT32

__all__ = [
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "cross_entropy_fwd_bwd",
    "cross_entropy_merge",
    "cross_entropy_partial_fwd",
    "fused_linear_cross_entropy_bwd",
    "fused_linear_cross_entropy_fwd",
    "fused_linear_cross_entropy_fwd_bwd",
]

# ------------------------------------------------------------------------------- tiles

DEPTH: Final = 4
"""Vectors that a thread has in flight at once, forward and backward."""
FEWEST_LANES: Final = 8
"""The most elements of a vector: a lane has at most one column behind the last whole vector."""
TEAMS: Final = {2**9: 128, 2**31: 256}
"""Threads that share a row, by the most vectors that it has."""
ROW_THREADS: Final = 256
"""Threads of a forward block that has several rows, and of any backward block."""
RESIDENT: Final = {4: 1024, 8: 512}
"""Threads that must fit on a multiprocessor, by the math dtype's itemsize; bounds registers."""
MERGE_THREADS: Final = 128
MOST_BLOCKS: Final = 2**31 - 1
LAST: Final = 2**63 - 1


def row_lanes(vectors: int) -> int:
    """Threads that share a row of ``vectors`` vectors."""
    if vectors <= 64 * DEPTH:
        lanes = 1 << (-(-vectors // DEPTH) - 1).bit_length() if vectors else 1
        return max(FEWEST_LANES, min(32, lanes))
    return next(lanes for most, lanes in TEAMS.items() if vectors <= most)


# -------------------------------------------------------------------------------- plans


@dataclass(frozen=True, slots=True)
class ForwardKey:
    """What a forward kernel depends on, besides the device.

    Attributes:
        vectors: whole vectors of a row.
        access: elements that one access may cover.
        x: dtype of the logits.
        bias: dtype of the bias that is added to every row; None without one.
        capped: whether scores are soft-capped.
        summed: whether the sum of the scores is needed.
        statistics: whether to write the four statistics instead of loss and lse.
    """

    vectors: int
    access: int
    x: torch.dtype
    bias: torch.dtype | None = None
    capped: bool = False
    summed: bool = False
    statistics: bool = False


@dataclass(frozen=True, slots=True)
class BackwardKey:
    """What a backward kernel depends on, besides the device.

    Attributes:
        vectors: vectors of a row, including those that are partly outside of it.
        access: elements that one access of the logits may cover.
        x, out: dtypes of the logits and of their gradients.
        bias: dtype of the bias that is added to every row; None without one.
        capped: whether scores are soft-capped.
        edges: whether rows of gradients may start inside a vector.
        owned: whether the gradients may overwrite the logits.
    """

    vectors: int
    access: int
    x: torch.dtype
    out: torch.dtype
    bias: torch.dtype | None = None
    capped: bool = False
    edges: bool = False
    owned: bool = False

    @property
    def lanes(self) -> int:
        """Threads of a block that share a row."""
        wanted = -(-self.vectors // DEPTH)
        return min(ROW_THREADS, 1 << (wanted - 1).bit_length())


def forward_source(key: ForwardKey) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel of a forward."""
    lanes = row_lanes(key.vectors)
    rows = max(1, ROW_THREADS // lanes) if lanes <= 32 else 1
    threads = lanes * rows
    defines: dict[str, str | int] = {
        "TX": NAMES[key.x],
        "TB": NAMES[key.bias or key.x],
        "BIASED": int(key.bias is not None),
        "CAPPED": int(key.capped),
        "SUMMED": int(key.summed),
        "STATISTICS": int(key.statistics),
        "VEC": 16 // SIZES[key.x],
        "ACCESS": key.access,
        "DEPTH": max(1, min(DEPTH, -(-key.vectors // lanes))),
        "LANES": lanes,
        "ROWS": rows,
        "BLOCKS": RESIDENT[math_dtype(key.x).itemsize] // threads,
    }
    geometry = _launch.Geometry(threads, "PPPPPqqiqqqdddd")
    return Specialisation("loss", "forward", tuple(defines.items())), geometry


def merge_source(
    dtype: torch.dtype, access: int, summed: bool
) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel that computes loss and lse from statistics."""
    defines: dict[str, str | int] = {
        "TS": NAMES[dtype],
        "SUMMED": int(summed),
        "ACCESS": access,
        "LANES": MERGE_THREADS,
    }
    geometry = _launch.Geometry(MERGE_THREADS, "PPPPqiqqddd")
    return Specialisation("loss", "merge", tuple(defines.items())), geometry


def backward_source(key: BackwardKey) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel of a backward."""
    defines: dict[str, str | int] = {
        "TX": NAMES[key.x],
        "TO": NAMES[key.out],
        "TB": NAMES[key.bias or key.x],
        "BIASED": int(key.bias is not None),
        "CAPPED": int(key.capped),
        "OWNED": int(key.owned),
        "EDGES": int(key.edges),
        "VEC": 16 // min(SIZES[key.x], SIZES[key.out]),
        "ACCESS": key.access,
        "DEPTH": min(DEPTH, -(-key.vectors // key.lanes)),
        "LANES": key.lanes,
        "ROWS": ROW_THREADS // key.lanes,
    }
    geometry = _launch.Geometry(ROW_THREADS, "PPPPPPPPqiqqiqqqdddd")
    return Specialisation("loss", "backward", tuple(defines.items())), geometry


class Forward:
    """A forward kernel on a device."""

    __slots__ = ("_kernel", "_rows")

    def __init__(self, key: ForwardKey, device: int) -> None:
        source, geometry = forward_source(key)
        self._kernel = _launch.load(source, geometry, device)
        self._rows = int(dict(source.defines)["ROWS"])

    def __call__(self, op: str, rows: int, *values: Any) -> None:
        """Launch; ``values`` are the kernel's arguments."""
        blocks = -(-rows // self._rows)
        check_size(op, "blocks", blocks, MOST_BLOCKS)
        self._kernel.launch(blocks, 1, *values)


class Backward:
    """A backward kernel on a device."""

    __slots__ = ("_kernel", "_rows", "tiles")

    def __init__(self, key: BackwardKey, device: int) -> None:
        source, geometry = backward_source(key)
        self._kernel = _launch.load(source, geometry, device)
        defines = dict(source.defines)
        self._rows = int(defines["ROWS"])
        self.tiles = -(-key.vectors // (key.lanes * int(defines["DEPTH"])))

    def __call__(self, op: str, rows: int, *values: Any) -> None:
        """Launch; ``values`` are the kernel's arguments."""
        blocks = -(-rows // self._rows) * self.tiles
        check_size(op, "blocks", blocks, MOST_BLOCKS)
        self._kernel.launch(blocks, 1, *values)


_forwards: Plans[Forward] = Plans()
_merges: Plans[_launch.Kernel] = Plans()
_backwards: Plans[Backward] = Plans()


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """A selection of the operators' kernels for a device: every kind, type and shape."""
    low, full, double, half = torch.bfloat16, torch.float32, torch.float64, torch.float16
    for vectors in (0, 8, 129, 512, 8192, 16032, 32768, 2**20):
        yield forward_source(ForwardKey(vectors, 8, low))
    for vectors in (1, 64, 16032):
        yield backward_source(BackwardKey(vectors, 8, low, low))
    for x in (low, half, full, double):
        wide = math_dtype(x)
        vec = 16 // SIZES[x]
        for capped in (False, True):
            for access in {1, vec}:
                yield forward_source(ForwardKey(100, access, x, None, capped, True))
                yield forward_source(ForwardKey(2**15, access, x, None, capped, True, True))
                yield backward_source(BackwardKey(1000, access, x, x, None, capped, True))
            yield forward_source(ForwardKey(1000, 16 // SIZES[wide], wide, x, capped, True, True))
            yield backward_source(
                BackwardKey(1000, 16 // SIZES[wide], wide, x, x, capped, False, True)
            )
    for dtype in (full, double):
        for access in (1, 16 // SIZES[dtype]):
            yield merge_source(dtype, access, True)
            yield merge_source(dtype, access, False)


# --------------------------------------------------------------------------- on logits


def _run_forward(
    op: str,
    logits: Tensor,
    step: int,
    bias: Tensor | None,
    target: Tensor,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    start: int,
    options: Options,
) -> None:
    """Write (statistics, None, None) or (None, loss, lse) for rows ``step`` elements apart."""
    columns, rows, dtype = logits.shape[-1], target.numel(), logits.dtype
    check_size(op, "columns", columns, MOST_COLUMNS)
    size = SIZES[dtype]
    stats, loss, lse = outputs
    statistics = stats is not None
    parts = [(address_of(op, logits), size), (step * size if rows > 1 else 0, size)]
    if bias is not None:
        parts.append((bias.data_ptr(), SIZES[bias.dtype]))
    key = (
        logits.get_device(),
        columns // (16 // size),
        access_width(16 // size, *parts),
        dtype,
        None if bias is None else bias.dtype,
        options.softcap is not None,
        statistics or bool(options.smoothing),
        statistics,
    )
    run = _forwards.get(key) or _forwards.get_or_create(
        key, lambda: Forward(ForwardKey(*key[1:]), key[0])
    )
    run(
        op,
        rows,
        parts[0][0],
        pointer(bias),
        target.data_ptr(),
        pointer(stats if statistics else loss),
        pointer(lse),
        rows,
        step,
        columns,
        start,
        options.ignore,
        start + columns,
        columns,
        options.smoothing,
        options.z,
        options.cap,
    )


def _run_merge(
    op: str, stats: Tensor, target: Tensor, loss: Tensor, lse: Tensor, words: int, options: Options
) -> None:
    """Write loss and lse from dense statistics."""
    rows, dtype, address = target.numel(), stats.dtype, address_of(op, stats)
    check_size(op, "rows", rows, MOST_BLOCKS)
    check_size(op, "shards", stats.shape[0], MOST_BLOCKS)
    size = SIZES[dtype]
    access = access_width(16 // size, (address, size))
    key = (stats.get_device(), dtype, access, bool(options.smoothing))
    kernel = _merges.get(key) or _merges.get_or_create(
        key, lambda: _launch.load(*merge_source(*key[1:]), key[0])
    )
    kernel.launch(
        -(-rows // MERGE_THREADS),
        1,
        address,
        target.data_ptr(),
        loss.data_ptr(),
        lse.data_ptr(),
        rows,
        stats.shape[0],
        options.ignore,
        words,
        words,
        options.smoothing,
        options.z,
    )


def _run_backward(
    op: str,
    logits: Tensor,
    step: int,
    bias: Tensor | None,
    rows: Rows,
    out: Tensor,
    out_step: int,
    start: int,
    words: int,
    options: Options,
    owned: bool = False,
) -> None:
    """Write the gradients of logits; ``step`` and ``out_step`` are the row strides of both."""
    columns, count = logits.shape[-1], rows.target.numel()
    check_size(op, "columns", columns, MOST_COLUMNS)
    size = SIZES[logits.dtype]
    vec = 16 // min(size, SIZES[out.dtype])
    edges = count > 1 and out_step % vec != 0
    parts = [(address_of(op, logits), size), (abs(step - out_step) * size, size)]
    if count == 1:
        del parts[1]
    if bias is not None:
        parts.append((bias.data_ptr(), SIZES[bias.dtype]))
    key = (
        logits.get_device(),
        -(-(columns + edges * (vec - 1)) // vec),
        access_width(vec, *parts),
        logits.dtype,
        out.dtype,
        None if bias is None else bias.dtype,
        options.softcap is not None,
        edges,
        owned,
    )
    run = _backwards.get(key) or _backwards.get_or_create(
        key, lambda: Backward(BackwardKey(*key[1:]), key[0])
    )
    run(
        op,
        count,
        parts[0][0],
        pointer(bias),
        *map(pointer, rows),
        out.data_ptr(),
        count,
        columns,
        step,
        out_step,
        run.tiles,
        start,
        options.ignore,
        words,
        options.smoothing,
        options.smoothing / words,
        options.z,
        options.cap,
    )


# ---------------------------------------------------------------------------- operators


def _fits(input: Tensor, target: Tensor) -> bool:
    """Whether these are valid logits and targets that this set supports."""
    return (
        (type(input) in PLAIN or is_plain(input))
        and (type(target) in PLAIN or is_plain(target))
        and on_device(input)
        and input.dtype in NAMES
        and target.dtype == torch.int64
        and target.get_device() == input.get_device()
        and input.dim() > 0
        and input.shape[-1] > 0
        and target.shape == input.shape[:-1]
    )


def _belong(like: Tensor, dtype: torch.dtype, *others: Tensor) -> bool:
    """Whether all others have the shape and device of ``like``, and that dtype."""
    return all(
        (type(other) in PLAIN or is_plain(other))
        and other.dtype == dtype
        and other.get_device() == like.get_device()
        and other.shape == like.shape
        for other in others
    )


def _is_shard(input: Tensor, start: object, size: object = None) -> bool:
    """Whether ``start`` and ``size`` are valid for a shard: words from ``start`` on, of ``size``.

    Kernels count words, and one behind the last, in 64 bits.
    """
    columns = input.shape[-1]
    return (
        type(start) is int
        and 0 <= start <= LAST - columns
        and (size is None or (type(size) is int and start + columns <= size <= LAST))
    )


def _options(
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Options | None:
    """The options, or None if one is invalid or symbolic."""
    if (
        is_number(label_smoothing)
        and 0 <= label_smoothing <= 1
        and type(ignore_index) is int
        and -LAST <= ignore_index <= LAST
        and is_number(z_loss)
        and 0 <= z_loss <= LARGEST_FLOAT32
        and (softcap is None or (is_number(softcap) and 2**-126 <= softcap <= LARGEST_FLOAT32))
    ):
        return Options(label_smoothing, ignore_index, z_loss, softcap)
    return None


def _vector(op: str, name: str, tensor: Tensor) -> Tensor:
    """The tensor, one number for each row, as a dense vector."""
    if type(tensor) in PLAIN and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return vector_of(plain(op, name, tensor))


@repeating
def cross_entropy_fwd(
    input: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``cross_entropy_fwd`` of the contract."""
    options = _options(label_smoothing, ignore_index, z_loss, softcap)
    if options is None or not _fits(input, target):
        decline(
            contracts.cross_entropy_fwd,
            input,
            target,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            z_loss=z_loss,
            softcap=softcap,
        )
    op, shape, dtype = "cross_entropy_fwd", target.shape, math_dtype(input.dtype)
    loss, lse = fresh(op, input, shape, dtype), fresh(op, input, shape, dtype)
    if loss.numel():
        logits, step = dense_rows(input)
        _run_forward(
            op, logits, step, None, _vector(op, "target", target), (None, loss, lse), 0, options
        )
    return loss, lse


@repeating
def cross_entropy_partial_fwd(
    input: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """``cross_entropy_partial_fwd`` of the contract."""
    options = _options(ignore_index=ignore_index, softcap=softcap)
    if options is None or not (_fits(input, target) and _is_shard(input, vocab_start)):
        decline(
            contracts.cross_entropy_partial_fwd,
            input,
            target,
            vocab_start=vocab_start,
            ignore_index=ignore_index,
            softcap=softcap,
        )
    op = "cross_entropy_partial_fwd"
    stats = fresh(op, input, (*target.shape, 4), math_dtype(input.dtype))
    if stats.numel():
        logits, step = dense_rows(input)
        targets = _vector(op, "target", target)
        _run_forward(op, logits, step, None, targets, (stats, None, None), vocab_start, options)
    return stats


def _fit_to_merge(stats: Tensor, target: Tensor, vocab_size: int) -> bool:
    return (
        (type(stats) in PLAIN or is_plain(stats))
        and (type(target) in PLAIN or is_plain(target))
        and on_device(stats)
        and stats.dtype in (torch.float32, torch.float64)
        and target.dtype == torch.int64
        and target.get_device() == stats.get_device()
        and stats.dim() > 1
        and stats.shape[-1] == 4
        and stats.shape[0] > 0
        and target.shape == stats.shape[1:-1]
        and type(vocab_size) is int
        and 0 < vocab_size <= LAST
    )


@repeating
def cross_entropy_merge(
    stats: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``cross_entropy_merge`` of the contract."""
    options = _options(label_smoothing, ignore_index, z_loss)
    if options is None or not _fit_to_merge(stats, target, vocab_size):
        decline(
            contracts.cross_entropy_merge,
            stats,
            target,
            vocab_size=vocab_size,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            z_loss=z_loss,
        )
    op = "cross_entropy_merge"
    loss, lse = fresh(op, stats, target.shape), fresh(op, stats, target.shape)
    if loss.numel():
        dense = plain(op, "stats", stats).contiguous()
        _run_merge(op, dense, _vector(op, "target", target), loss, lse, vocab_size, options)
    return loss, lse


@repeating
def cross_entropy_bwd(
    grad_loss: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """``cross_entropy_bwd`` of the contract."""
    options = _options(label_smoothing, ignore_index, z_loss, softcap)
    given = () if grad_lse is None else (grad_lse,)
    if (
        options is None
        or not (_fits(input, target) and _is_shard(input, vocab_start, vocab_size))
        or not _belong(target, math_dtype(input.dtype), grad_loss, lse, *given)
    ):
        decline(
            contracts.cross_entropy_bwd,
            grad_loss,
            input,
            target,
            lse,
            grad_lse,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            z_loss=z_loss,
            softcap=softcap,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
        )
    op, columns = "cross_entropy_bwd", input.shape[-1]
    words = vocab_start + columns if vocab_size is None else vocab_size
    grad_input = fresh(op, input, input.shape)
    if grad_input.numel():
        logits, step = dense_rows(input)
        rows = _rows(op, target, grad_loss, lse, grad_lse)
        _run_backward(
            op, logits, step, None, rows, grad_input, columns, vocab_start, words, options
        )
    return grad_input


@repeating
def cross_entropy_fwd_bwd(
    input: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``cross_entropy_fwd_bwd`` of the contract."""
    options = _options(label_smoothing, ignore_index, z_loss, softcap)
    if (
        options is None
        or not _fits(input, target)
        or not _belong(target, math_dtype(input.dtype), grad_loss)
    ):
        decline(
            contracts.cross_entropy_fwd_bwd,
            input,
            target,
            grad_loss,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            z_loss=z_loss,
            softcap=softcap,
        )
    op, shape, dtype = "cross_entropy_fwd_bwd", target.shape, math_dtype(input.dtype)
    loss, lse = fresh(op, input, shape, dtype), fresh(op, input, shape, dtype)
    grad_input = fresh(op, input, input.shape)
    if not loss.numel():
        return loss, lse, grad_input
    logits, step = dense_rows(input)
    rows = _rows(op, target, grad_loss, lse, None)
    kernels = (_run_forward, _run_backward, run_with_losses)
    run_both(*kernels, op, logits, step, None, rows, loss, grad_input, input.shape[-1], options)
    return loss, lse, grad_input


def _rows(op: str, target: Tensor, grad_loss: Tensor, lse: Tensor, grad_lse: Tensor | None) -> Rows:
    return Rows(
        _vector(op, "target", target),
        _vector(op, "grad_loss", grad_loss),
        _vector(op, "lse", lse),
        None if grad_lse is None else _vector(op, "grad_lse", grad_lse),
    )


# ---------------------------------------------------------------------- of linear layers


def _product(op: str, left: Tensor, right: Tensor, out: Tensor) -> None:
    with products(op, left.dtype):
        torch.mm(left, right, out=out)


_linear = LinearCrossEntropy(
    addressed,
    _run_forward,
    _run_merge,
    partial(_run_backward, owned=True),
    run_with_losses,
    _product,
)
fused_linear_cross_entropy_fwd = _linear.fused_linear_cross_entropy_fwd
fused_linear_cross_entropy_bwd = _linear.fused_linear_cross_entropy_bwd
fused_linear_cross_entropy_fwd_bwd = _linear.fused_linear_cross_entropy_fwd_bwd

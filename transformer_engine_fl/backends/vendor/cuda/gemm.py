"""Matrix products by NVIDIA's libraries: cuBLAS and cuBLASLt, called through torch.

This module has no kernel of its own, and uses only what the library does in one call: a bias is
cuBLASLt's epilogue, accumulation its ``beta``. A call that would need a second kernel or a copy,
or that the library would round twice, is declined with the reason; another set fuses it. Many
groups are one call, torch's grouped product, if their matrices have the layout that it reads.

Sums are in float32, whatever torch's switches allow: products of float32 are declined if TF32
is on, and reduced-precision reductions are switched off while a product is queued.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends._allocation import allocator
from transformer_engine_fl.backends._groups import GroupedCall, KnownGroups
from transformer_engine_fl.backends._tf32 import AS_TF32, uses_tf32
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    KnownCalls,
    as_plain,
    check_fresh,
    fresh,
    plain,
    refuse,
)
from transformer_engine_fl.backends.vendor.cuda._numbers import numbers_on_device
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.core.locks import ForkSafeLock
from transformer_engine_fl.ops._checks import is_frozen

__all__ = ["generic_gemm", "products", "te_general_grouped_gemm"]

_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_NARROW: Final = (torch.bfloat16, torch.float16)
_ALIGNMENT: Final = 16
"""Bytes to which cuBLASLt requires addresses and rows of float8 to be aligned."""
_MOST: Final = torch.finfo(torch.float32).max

# Products of narrow dtypes with a float32 result, which torch has only for CUDA, from 2.8 on.
# Before 2.10 the tensor that such a product is added to had to have the dtype of the factors.
_mm_wide: Any = getattr(torch.ops.aten.mm, "dtype_out", None)
_addmm_wide: Any = (
    getattr(torch.ops.aten.addmm, "dtype_out", None)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
    else None
)


# ------------------------------------------------------------------- torch's switches

_switching = ForkSafeLock()


class _WholeSums:
    """A context in which partial sums of products are not rounded to their narrow dtype.

    torch's public properties for these switches take longer than a small product.
    """

    __slots__ = ("_before", "_get", "_set")

    def __init__(self, dtype: str) -> None:
        name = f"cublas_allow_{dtype}_reduced_precision_reduction"
        self._get: Callable[[], Any] = getattr(torch._C, f"_get_{name}")
        self._set: Callable[..., None] = getattr(torch._C, f"_set_{name}")

    def __enter__(self) -> None:
        _switching.acquire(timeout=-1)
        self._before = self._get()  # the second item is whether split-K is allowed at all
        if self._before[0]:
            self._set(False, *self._before[1:])

    def __exit__(self, *error: object) -> None:
        if self._before[0]:
            self._set(*self._before)
        _switching.release()


_WHOLE_SUMS: Final = {torch.bfloat16: _WholeSums("bf16"), torch.float16: _WholeSums("fp16")}
_AS_THEY_ARE: Final = contextlib.nullcontext()
_sums_in_float16: Any = getattr(torch._C, "_get_cublas_allow_fp16_accumulation", bool)


def products(op: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """The context in which to queue products of ``dtype``; may decline for torch's switches."""
    if dtype == torch.float32 and uses_tf32():
        refuse(op, AS_TF32)
    if dtype == torch.float16 and _sums_in_float16():
        refuse(op, "torch accumulates in float16 (torch.backends.cuda.matmul)")
    return _WHOLE_SUMS.get(dtype, _AS_THEY_ARE)


# ------------------------------------------------------------------- what is declined


def _declined(
    A: Tensor,
    B: Tensor,
    transa: bool,
    transb: bool,
    *,
    bias: Tensor | None,
    gelu: bool,
    bias_grad: bool,
    alpha: float,
    beta: float | None,
    result: torch.dtype,
    out_dtype: torch.dtype,
    scales: tuple[Tensor | None, Tensor | None],
) -> str | None:
    """Why the library does not serve a call in one call of its own; None if it does.

    Args:
        beta: the contract's; None if nothing is accumulated.
        result: the dtype in which the product is stored.
        out_dtype: the dtype of the other outputs.
        scales: the scales of A and of B.
        A, B, transa, transb, bias, gelu, bias_grad, alpha: the contract's.
    """
    accumulated = beta is not None
    if gelu:
        return "torch's GEMM neither returns GELU's input nor computes its gradient"
    if (
        bias_grad
        and out_dtype != B.dtype
        and not (out_dtype == torch.float32 and B.dtype in _NARROW)
    ):
        return f"torch cannot sum {B.dtype} with a single rounding to {out_dtype}"
    if bias is not None and (not bias.is_contiguous() or 1 in A.shape):
        # torch expands such a bias into D, and cuBLAS rounds a product before adding it to D.
        return "torch uses cuBLASLt's epilogue for a contiguous bias only, with N > 1 and K > 1"
    for factor in (alpha, beta or 0.0):
        if B.dtype != torch.float64 and _MOST < abs(factor) < math.inf:
            return f"alpha and beta must fit in float32 for {B.dtype}, got {factor}"
    if B.dtype in _FLOAT8:
        return _float8_declined(
            A, B, transa, transb, bias, alpha, result, accumulated or bias_grad, scales
        )
    if result != B.dtype:
        if result != torch.float32 or B.dtype not in _NARROW:
            return f"cuBLAS does not store products of {B.dtype} as {result}"
        if (_addmm_wide if accumulated or alpha != 1 else _mm_wide) is None:
            return f"this torch has no such products of {B.dtype} with float32 output"
    if accumulated and bias is not None:
        return "torch cannot add a bias and accumulate in one call"
    if accumulated and result in _NARROW:
        return f"cuBLAS rounds a product to {result} before it accumulates it"
    if bias is None:
        return None
    if bias.dtype != B.dtype or result != B.dtype:
        return f"the bias must have the dtype of B and of D, not {bias.dtype}"
    return None


def _float8_declined(
    A: Tensor,
    B: Tensor,
    transa: bool,
    transb: bool,
    bias: Tensor | None,
    alpha: float,
    result: torch.dtype,
    more: bool,
    scales: tuple[Tensor | None, Tensor | None],
) -> str | None:
    limits = _launch.limits(B.get_device())
    if (limits.major, limits.minor) < (8, 9):
        return f"float8 needs sm_89, this is sm_{limits.major}{limits.minor}"
    if more or alpha != 1:
        return "torch's float8 GEMM has no alpha, no accumulation and no bias gradient"
    if any(scale is None or scale.dtype != torch.float32 or scale.ndim != 1 for scale in scales):
        return "block scales are not in the memory layout that cuBLASLt reads"
    if not transa or transb:
        return "cuBLASLt's float8 GEMM needs transa=True, transb=False"
    if A.dtype == B.dtype == torch.float8_e5m2:
        return "cuBLASLt does not multiply float8_e5m2 by float8_e5m2"
    columns, terms = A.shape
    if columns % _ALIGNMENT or terms % _ALIGNMENT or not terms:
        return f"K={terms} and N={columns} must be multiples of {_ALIGNMENT} for float8"
    if result == torch.float64:
        return "cuBLASLt's float8 GEMM has no float64 output"
    if bias is not None and (result == torch.float32 or bias.dtype != result):
        return f"the bias of a float8 GEMM with {result} output cannot be {bias.dtype}"
    return None


# --------------------------------------------------------------------------- one product


def _matrix(tensor: Tensor) -> Tensor:
    """The tensor as a matrix, all dimensions but the last as rows."""
    return tensor if tensor.ndim == 2 else tensor.unsqueeze(0).flatten(0, -2)


def _place(op: str, tensor: Tensor) -> Tensor:
    """A tensor that is accumulated into, as a matrix in the same memory."""
    if tensor.is_neg() or tensor.is_conj():
        reason = "accumulate_into has its negative or conjugate bit set"
        raise NotSupportedError(f"vendor.cuda: {op}: {reason}")
    written = plain(op, "accumulate_into", tensor)
    try:
        return written if written.ndim == 2 else written.view(-1, written.shape[-1])
    except RuntimeError:
        reason = "accumulate_into cannot be viewed as a matrix"
        raise NotSupportedError(f"vendor.cuda: {op}: {reason}") from None


def _multiply(
    op: str,
    out: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    alpha: float,
    beta: float | None,
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    """``out = alpha * left @ right``, plus the bias or ``beta * out`` if given."""
    if left.dtype in _FLOAT8:
        _check_memory(op, left, right.t())
        scale_right, scale_left = scales
        assert scale_left is not None
        assert scale_right is not None
        torch._scaled_mm(
            left, right, scale_left, scale_right, bias=bias, out_dtype=out.dtype, out=out
        )
    elif bias is not None:
        torch.addmm(bias, left, right, alpha=alpha, out=out)
    elif beta is None and alpha == 1:
        if out.dtype == left.dtype:
            torch.mm(left, right, out=out)
        else:
            _mm_wide(left, right, out.dtype, out=out)
    elif out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=beta or 0, alpha=alpha, out=out)
    else:
        _addmm_wide(out, left, right, out.dtype, beta=beta or 0, alpha=alpha, out=out)


def _check_memory(op: str, *operands: Tensor) -> None:
    """Decline float8 in a layout that cuBLASLt cannot read."""
    for it in operands:
        if it.dtype in _FLOAT8 and (
            it.stride(-1) != 1 or it.stride(0) % _ALIGNMENT or it.data_ptr() % _ALIGNMENT
        ):
            raise NotSupportedError(
                f"vendor.cuda: {op}: float8 rows must be dense and aligned to {_ALIGNMENT} bytes"
            )


def _column_sum(op: str, B: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of ``B`` over its rows."""
    result = fresh(op, B, (B.shape[-1],), dtype)
    torch.sum(B, 0, dtype=dtype, out=result)
    return result


_known = KnownCalls()


def generic_gemm(
    A: Tensor,
    B: Tensor,
    *,
    transa: bool = True,
    transb: bool = False,
    bias: Tensor | None = None,
    gelu: bool = False,
    gelu_input: Tensor | None = None,
    grad: bool = False,
    bias_grad: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    accumulate_into: Tensor | None = None,
    A_scale_inv: Tensor | None = None,
    B_scale_inv: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``generic_gemm`` of the contract."""
    name, into = "generic_gemm", accumulate_into
    tensors = (A, B, bias, gelu_input, into, A_scale_inv, B_scale_inv)
    frozen = is_frozen(into)
    options = (transa, transb, gelu, grad, bias_grad, alpha, beta, out_dtype, frozen)
    call = _known.like(tensors, options)
    known = call in _known
    if not known:
        ops.generic_gemm.check(
            A,
            B,
            transa=transa,
            transb=transb,
            bias=bias,
            gelu=gelu,
            gelu_input=gelu_input,
            grad=grad,
            bias_grad=bias_grad,
            alpha=alpha,
            beta=beta,
            accumulate_into=accumulate_into,
            A_scale_inv=A_scale_inv,
            B_scale_inv=B_scale_inv,
            out_dtype=out_dtype,
        )
    a, b = as_plain(name, "A", A, known), as_plain(name, "B", B, known)
    dtype = out_dtype or (torch.bfloat16 if b.dtype in _FLOAT8 else b.dtype)
    scales = (
        None if A_scale_inv is None else as_plain(name, "A_scale_inv", A_scale_inv, known),
        None if B_scale_inv is None else as_plain(name, "B_scale_inv", B_scale_inv, known),
    )
    if not known:
        reason = _declined(
            _matrix(a),
            b,
            transa,
            transb,
            bias=bias,
            gelu=gelu,
            bias_grad=bias_grad,
            alpha=alpha,
            beta=None if into is None else beta,
            result=dtype if into is None else into.dtype,
            out_dtype=dtype,
            scales=scales,
        )
        refuse(name, reason)
        _known.add(call)
    rows_of_a, rows_of_b = _matrix(a), _matrix(b)
    left = rows_of_b.t() if transb else rows_of_b
    right = rows_of_a.t() if transa else rows_of_a
    columns = right.shape[1]
    D = None
    if into is None:
        out = D = allocator(b.device)((left.shape[0], columns), (columns, 1), dtype)
        check_fresh(name, D)
    else:
        out = _place(name, into)
    with products(name, b.dtype):
        _multiply(
            name,
            out,
            left,
            right,
            None if bias is None else as_plain(name, "bias", bias, known),
            alpha,
            None if D is not None else beta,
            scales,
        )
        dbias = _column_sum(name, rows_of_b, dtype) if bias_grad else None
    if D is not None and not transb and b.ndim != 2:
        D = D.view(*b.shape[:-1], columns)
    return D, dbias, None


# ------------------------------------------------------------------------------- groups


_MANY: Final = range(16, 1024)
"""Numbers of groups for which one call is mostly faster than a call for each group
(docs/measured/cuda.md), and that torch accepts."""
_GROUPED_ON: Final = (9, 10)
"""Major compute capabilities that torch has a grouped kernel for; on others it synchronises."""
_MOST_ROWS: Final = 2**31 - 1
"""The most rows of all groups together: torch counts them in 32 bits."""

_known_groups: KnownGroups[bool] = KnownGroups()


def _lies_as_read(matrix: Tensor) -> bool:
    """Whether the rows of a matrix are aligned as bulk copies require."""
    rows, columns = matrix.stride()
    if columns != 1 or rows < matrix.shape[1] or rows % (_ALIGNMENT // matrix.element_size()):
        return False  # torch refuses rows that overlap
    return matrix.data_ptr() % _ALIGNMENT == 0


def _as_one(matrices: list[Tensor]) -> Tensor | None:
    """``[groups, rows, columns]`` from matrices that are equally spaced parts of one tensor."""
    first = matrices[0]
    start = first.data_ptr()
    apart = matrices[1].data_ptr() - start
    if apart <= 0 or apart % _ALIGNMENT or not _lies_as_read(first):
        return None
    memory, other = first.untyped_storage(), matrices[-1].untyped_storage()
    if (memory.data_ptr(), memory.nbytes()) != (other.data_ptr(), other.nbytes()):
        return None
    like = first.shape, first.stride()
    for i, it in enumerate(matrices):
        if it.data_ptr() != start + i * apart or (it.shape, it.stride()) != like:
            return None
    shape = (len(matrices), *first.shape)
    return first.as_strided(shape, (apart // first.element_size(), *first.stride()))


def _at_once(
    A: list[Tensor], B: list[Tensor], splits: list[int], transa: bool, transb: bool
) -> Tensor | None:
    """The products of all groups, in order, by one call of torch's grouped product.

    None if torch has no kernel for their dtypes, sizes or layout. It has none for float16, and on
    some devices its result for a group without terms is not zero (pytorch issue 172439).
    """
    x, many = B[0], len(splits)
    if many not in _MANY or len(B) != 1 or {A[0].dtype, x.dtype} != {torch.bfloat16}:
        return None
    if _launch.limits(x.get_device()).major not in _GROUPED_ON or not x.numel():
        return None
    if x.shape[0] > _MOST_ROWS:
        return None
    columns = A[0].shape[0 if transa else 1]
    if not columns or columns % (_ALIGNMENT // x.element_size()) or not _lies_as_read(x):
        return None  # for other numbers of columns torch pads the rows of D
    if not transb:
        weights = _as_one(A) if len(A) == many else None
        if weights is None:
            return None
        factors = x, weights.transpose(1, 2) if transa else weights
    elif transa or len(A) != 1 or min(splits) == 0 or not _lies_as_read(A[0]):
        return None
    else:
        factors = x.t(), A[0]
    ends = [*itertools.accumulate(splits), *[0] * (many % 2)]
    pairs = [low | high << 32 for low, high in zip(ends[::2], ends[1::2], strict=True)]
    offsets = numbers_on_device(pairs, x.device).view(torch.int32)[:many]
    D = torch.nn.functional.grouped_mm(*factors, offs=offsets)
    return D.view(-1, D.shape[-1])


def _groups(tensors: list[Tensor], m_splits: list[int] | None) -> list[Tensor]:
    """Each group's matrix."""
    if m_splits is None or len(tensors) == len(m_splits):
        return tensors
    return list(torch.split(tensors[0], m_splits))


def _scales_of(
    scales: list[Tensor] | None, tensors: list[Tensor], groups: int
) -> list[Tensor | None]:
    """Each group's scale; groups in one matrix share the matrix's scale."""
    if scales is None:
        return [None] * groups
    found: list[Tensor | None] = [
        plain("te_general_grouped_gemm", "scale_inv", it) for it in scales
    ]
    return found if len(tensors) == groups else found * groups


def _one_by_one(
    name: str,
    a: list[Tensor],
    b: list[Tensor],
    transa: bool,
    transb: bool,
    *,
    bias: list[Tensor] | None,
    gelu: bool,
    bias_grad: bool,
    alpha: float,
    beta: float,
    into: list[Tensor] | None,
    scales: list[tuple[Tensor | None, Tensor | None]],
    dtype: torch.dtype,
    known: bool,
) -> Tensor | None:
    """The products of all groups, by a call of the library for each; returns D unless accumulated.

    Args:
        a, b: the matrices of each group.
        scales: the scales of A and of B, for each group.
        into: the tensors to accumulate into.
        known: whether a call like this one is known not to be declined.
        name, transa, transb, bias, gelu, bias_grad, alpha, beta, dtype: the contract's.
    """
    count = len(b)
    biases: list[Tensor | None] = [None] * count
    if bias is not None:
        biases = [plain(name, "bias", it) for it in bias]
    lefts = [it.t() if transb else it for it in b]
    rights = [it.t() if transa else it for it in a]
    rows = [it.shape[0] for it in lefts]
    D = None
    if into is None:
        D = fresh(name, b[0], (sum(rows), rights[0].shape[1]), dtype)
        places = list(torch.split(D, rows))
    else:
        places = [_place(name, it) for it in into]
        places = places if len(places) == count else list(torch.split(places[0], rows))
    for i in range(0 if known else count):
        reason = _declined(
            a[i],
            b[i],
            transa,
            transb,
            bias=biases[i],
            gelu=gelu,
            bias_grad=bias_grad,
            alpha=alpha,
            beta=None if into is None else beta,
            result=places[i].dtype,
            out_dtype=dtype,
            scales=scales[i],
        )
        refuse(name, reason)
        _check_memory(name, lefts[i], rights[i].t())  # before anything is written
    with products(name, b[0].dtype):
        for place, left, right, added, scale in zip(
            places, lefts, rights, biases, scales, strict=True
        ):
            _multiply(
                name, place, left, right, added, alpha, None if D is not None else beta, scale
            )
    return D


def te_general_grouped_gemm(
    A: list[Tensor],
    B: list[Tensor],
    m_splits: list[int] | None = None,
    *,
    transa: bool = True,
    transb: bool = False,
    bias: list[Tensor] | None = None,
    gelu: bool = False,
    gelu_input: Tensor | None = None,
    grad: bool = False,
    bias_grad: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    accumulate_into: list[Tensor] | None = None,
    A_scale_inv: list[Tensor] | None = None,
    B_scale_inv: list[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``te_general_grouped_gemm`` of the contract: one call of the library for each group.

    It is one call for all, torch's grouped product, for many groups whose weights are parts of one
    tensor, and for a wgrad that accumulates nothing and whose operands are one tensor each.
    """
    name = "te_general_grouped_gemm"
    others = (bias, A_scale_inv, B_scale_inv)
    flags, numbers = (transa, transb, gelu, grad, bias_grad), (alpha, beta)
    call = GroupedCall.of(
        A, B, m_splits, gelu_input, accumulate_into, others, flags, numbers, out_dtype
    )
    known = _known_groups.get(call) is not None
    if not known:
        ops.te_general_grouped_gemm.check(
            A,
            B,
            m_splits,
            transa=transa,
            transb=transb,
            bias=bias,
            gelu=gelu,
            gelu_input=gelu_input,
            grad=grad,
            bias_grad=bias_grad,
            alpha=alpha,
            beta=beta,
            accumulate_into=accumulate_into,
            A_scale_inv=A_scale_inv,
            B_scale_inv=B_scale_inv,
            out_dtype=out_dtype,
        )
    A = [as_plain(name, "A", it, known) for it in A]
    B = [as_plain(name, "B", it, known) for it in B]
    dtype = out_dtype or (torch.bfloat16 if B[0].dtype in _FLOAT8 else B[0].dtype)
    D = None
    if (
        m_splits is not None
        and accumulate_into is None
        and bias is None
        and not gelu
        and alpha == 1
        and dtype == torch.bfloat16
    ):
        D = _at_once(A, B, m_splits, transa, transb)
    b = [] if D is not None and not bias_grad else _groups(B, m_splits)
    if D is None:
        scales = _scales_of(A_scale_inv, A, len(b)), _scales_of(B_scale_inv, B, len(b))
        D = _one_by_one(
            name,
            _groups(A, m_splits),
            b,
            transa,
            transb,
            bias=bias,
            gelu=gelu,
            bias_grad=bias_grad,
            alpha=alpha,
            beta=beta,
            into=accumulate_into,
            scales=[*zip(*scales, strict=True)],
            dtype=dtype,
            known=known,
        )
    if call is not None and not known:
        _known_groups.add(call, True)
    dbias = None
    if bias_grad:
        dbias = fresh(name, b[0], (len(b), b[0].shape[1]), dtype)
        for i, it in enumerate(b):
            torch.sum(it, 0, dtype=dtype, out=dbias[i])
    return D, dbias, None

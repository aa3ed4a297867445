"""Matrix products with fused epilogues: bias, GELU, their gradients, accumulation.

``D = alpha * op(B) @ op(A)``, in Transformer Engine's order: A is the weight, stored
``[out, in]`` as in ``torch.nn.Linear``, and B the activations. One operator multiplies two
matrices, the other a list of pairs. The forward of a linear layer and both of its
gradients are such products:

=========  ====  ====  =========  =========  ===============
           A     B     transa     transb     D
=========  ====  ====  =========  =========  ===============
forward    W     x     True       False      x W^T
dgrad      W     dy    False      False      dy W
wgrad      x     dy    False      True       dy^T x
=========  ====  ====  =========  =========  ===============
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops import activation
from transformer_engine_fl.ops._dtypes import FLOATS
from transformer_engine_fl.ops._samples import layouts, normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["generic_gemm", "te_general_grouped_gemm"]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
BLOCK = 128
MX_BLOCK = 32

# A sequential float32 sum of K terms of mixed sign has an error of about 2e-8 * sqrt(K), relative
# to the output's root mean square, and the worst of many elements five times that: 1e-5 suffices
# for K up to 2**13. The narrow dtypes add half a unit in the last place. Tensor cores first
# accumulate float8 products with 14 bits: on an H200 with block scales, this error reached 2**-9.2
# relative to the root mean square. A row whose block has a large scale has an error as large.
TOLERANCE = {
    "float32": Tolerance(rtol=4e-6, atol=1e-5),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-14),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-12),
    "float64": Tolerance(rtol=1e-13, atol=2e-14),
    "float8_e4m3fn": Tolerance(rtol=4e-6, atol=2**-9, by_row=True),
    "float8_e5m2": Tolerance(rtol=4e-6, atol=2**-9, by_row=True),
}


# ------------------------------------------------------------------------------ checks


def _rows_and_columns(tensor: Tensor) -> tuple[int, int]:
    """The shape as a matrix: all dimensions but the last are flattened to rows."""
    return math.prod(tensor.shape[:-1]), tensor.shape[-1]


def _is_float8(tensor: Tensor) -> bool:
    return check.dtype_name(tensor.dtype) in FLOAT8


def _default_dtype(B: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    import torch

    return out_dtype or (torch.bfloat16 if _is_float8(B) else B.dtype)


def _check_pair(op: str, name: str, tensor: Tensor, B: Tensor) -> None:
    """Check that the dtypes of ``tensor`` and ``B`` can be multiplied."""
    if _is_float8(B):
        check.is_tensor(op, name, tensor, dtypes=FLOAT8)
    elif tensor.dtype != B.dtype:
        expected = f"{check.dtype_name(B.dtype)}, the dtype of 'B'"
        raise ArgumentError(op, name, check.describe(tensor), expected)


def _check_scale(op: str, name: str, scale_inv: Any, data: Tensor) -> None:
    if not _is_float8(data):
        if scale_inv is not None:
            expected = "None: only float8 has a scale"
            raise ArgumentError(op, name, check.describe(scale_inv), expected)
        return
    scale = check.is_tensor(op, name, scale_inv, dtypes=("float32", "float8_e8m0fnu"))
    rows, columns = _rows_and_columns(data)
    allowed: list[tuple[int, ...]]
    if check.dtype_name(scale.dtype) == "float8_e8m0fnu":
        allowed = [(rows, _blocks(columns, MX_BLOCK))]
    else:
        wide = _blocks(columns, BLOCK)
        allowed = [(1,), (rows, wide), (_blocks(rows, BLOCK), wide)]
    if tuple(scale.shape) not in allowed:
        expected = f"shape {' or '.join(map(str, allowed))} for data of {(rows, columns)}"
        raise ArgumentError(op, name, check.describe(scale), expected)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _product(
    op: str, A: tuple[int, int], B: tuple[int, int], transa: bool, transb: bool
) -> tuple[int, int]:
    """Rows and columns of D; K must be the same in both."""
    k, n = A[::-1] if transa else A
    m, expected = B[::-1] if transb else B
    if k != expected:
        given = f"{A[0]} rows of {A[1]} with transa={transa}"
        other = f"{B[0]} rows of {B[1]} with transb={transb}"
        raise ArgumentError(op, "A", given, f"K={expected}, as 'B' has: {other}")
    return m, n


def _check_epilogue(
    op: str,
    shape: Sequence[int],
    *,
    bias: Any,
    gelu: Any,
    gelu_input: Any,
    grad: Any,
    bias_grad: Any,
    alpha: Any,
    beta: Any,
    out_dtype: Any,
) -> None:
    """Check the epilogue's options for D of ``shape``; of ``bias`` only whether it is allowed."""
    for name, flag in (("gelu", gelu), ("grad", grad), ("bias_grad", bias_grad)):
        check.is_flag(op, name, flag)
    if grad and bias is not None:
        expected = "None with grad=True; bias_grad=True asks for its gradient"
        raise ArgumentError(op, "bias", check.describe(bias), expected)
    if bias_grad and not grad:
        raise ArgumentError(op, "bias_grad", "True", "False without grad=True")
    if grad and gelu:
        it = check.is_tensor(op, "gelu_input", gelu_input, dtypes=FLOATS)
        check.has_shape(op, "gelu_input", it, shape, "that of D")
    elif gelu_input is not None:
        expected = "None without grad=True and gelu=True"
        raise ArgumentError(op, "gelu_input", check.describe(gelu_input), expected)
    check.is_number(op, "alpha", alpha)
    check.is_number(op, "beta", beta)
    check.is_dtype(op, "out_dtype", out_dtype, dtypes=FLOATS)


def _check_bias(op: str, bias: Any, columns: int) -> None:
    it = check.is_tensor(op, "bias", bias, dtypes=FLOATS)
    check.has_shape(op, "bias", it, (columns,), "one for each column of D")


def _check_accumulated(op: str, value: Any, shape: Sequence[int]) -> None:
    it = check.is_tensor(op, "accumulate_into", value, dtypes=FLOATS)
    check.has_shape(op, "accumulate_into", it, shape, "that of D")
    check.is_writable(op, "accumulate_into", it)


def _check_gemm(
    op: str,
    A: Any,
    B: Any,
    *,
    transa: Any,
    transb: Any,
    bias: Any,
    gelu_input: Any,
    accumulate_into: Any,
    A_scale_inv: Any,
    B_scale_inv: Any,
    **options: Any,
) -> None:
    B = check.is_tensor(op, "B", B, dtypes=tuple(TOLERANCE), min_ndim=1)
    A = check.is_tensor(op, "A", A, dtypes=tuple(TOLERANCE), min_ndim=1)
    _check_pair(op, "A", A, B)
    check.is_flag(op, "transa", transa)
    check.is_flag(op, "transb", transb)
    _check_scale(op, "A_scale_inv", A_scale_inv, A)
    _check_scale(op, "B_scale_inv", B_scale_inv, B)
    shape = _gemm_shape(op, A, B, transa, transb)
    _check_epilogue(op, shape, bias=bias, gelu_input=gelu_input, **options)
    if bias is not None:
        _check_bias(op, bias, shape[-1])
    if accumulate_into is not None:
        _check_accumulated(op, accumulate_into, shape)
    given = {"B": B, "A": A, "A_scale_inv": A_scale_inv, "B_scale_inv": B_scale_inv}
    given |= {"bias": bias, "gelu_input": gelu_input, "accumulate_into": accumulate_into}
    check.same_device(op, "B", given)


def _gemm_shape(op: str, A: Tensor, B: Tensor, transa: bool, transb: bool) -> tuple[int, ...]:
    m, n = _product(op, _rows_and_columns(A), _rows_and_columns(B), transa, transb)
    return (m, n) if transb else (*B.shape[:-1], n)


def _check_grouped(
    op: str,
    A: Any,
    B: Any,
    m_splits: Any,
    *,
    transa: Any,
    transb: Any,
    bias: Any,
    gelu_input: Any,
    bias_grad: Any,
    accumulate_into: Any,
    A_scale_inv: Any,
    B_scale_inv: Any,
    **options: Any,
) -> None:
    for name, value in (("B", B), ("A", A)):
        for it in check.is_list(op, name, value):
            it = check.is_tensor(op, name, it, dtypes=tuple(TOLERANCE))
            if it.ndim != 2:
                raise ArgumentError(op, name, check.describe(it), "matrices")
            _check_pair(op, name, it, B[0])
    check.is_flag(op, "transa", transa)
    check.is_flag(op, "transb", transb)
    for name, scales, value in (("A_scale_inv", A_scale_inv, A), ("B_scale_inv", B_scale_inv, B)):
        if scales is not None:
            check.is_list(op, name, scales, length=len(value), why="one for each tensor")
            if any(it is None for it in scales):
                expected = "a tensor for each, or None in place of the list"
                raise ArgumentError(op, name, check.describe(scales), expected)
        for scale, it in zip(scales or [None] * len(value), value, strict=True):
            _check_scale(op, name, scale, it)
    _check_splits(op, A, B, m_splits)
    rows, columns = _grouped_shape(op, A, B, m_splits, transa, transb)
    options |= {"bias": bias, "gelu_input": gelu_input, "bias_grad": bias_grad}
    _check_epilogue(op, (sum(rows), columns), **options)
    if bias is not None:
        for it in check.is_list(op, "bias", bias, length=len(rows), why="one for each group"):
            _check_bias(op, it, columns)
    if bias_grad and any(it.shape[1] != B[0].shape[1] for it in B):
        expected = "as many columns in each, for the bias gradients to be rows of one tensor"
        raise ArgumentError(op, "B", ", ".join(map(check.describe, B)), expected)
    for it, shape in _accumulated(op, accumulate_into, rows, columns):
        _check_accumulated(op, it, shape)
    for name, value in (
        ("A", A),
        ("B", B),
        ("A_scale_inv", A_scale_inv),
        ("B_scale_inv", B_scale_inv),
        ("bias", bias),
        ("gelu_input", None if gelu_input is None else [gelu_input]),
        ("accumulate_into", accumulate_into),
    ):
        for it in value or ():
            check.same_device(op, "B", {"B": B[0], name: it})


def _check_splits(op: str, A: list[Tensor], B: list[Tensor], m_splits: Any) -> None:
    if m_splits is None:
        if len(A) != len(B):
            given, expected = f"{len(A)} tensors", f"{len(B)}, as many as in 'B', or m_splits"
            raise ArgumentError(op, "A", given, expected)
        return
    for rows in check.is_list(op, "m_splits", m_splits):
        check.is_integer(op, "m_splits", rows)
    groups = len(m_splits)
    rows = [it.shape[0] for it in B]
    if rows not in ([*m_splits], [sum(m_splits)]):
        expected = f"one tensor for each of m_splits={[*m_splits]} with that many rows, or one"
        given = f"tensors of {', '.join(map(str, rows))} rows"
        raise ArgumentError(op, "B", given, f"{expected} of {sum(m_splits)}")
    if len(A) != groups and [it.shape[0] for it in A] != [sum(m_splits)]:
        given = ", ".join(map(check.describe, A))
        expected = f"{groups} tensors, as in m_splits, or one of {sum(m_splits)} rows"
        raise ArgumentError(op, "A", given, expected)


def _pieces(tensors: list[Tensor], m_splits: Sequence[int] | None) -> list[tuple[int, int]]:
    """Rows and columns of each group's matrix."""
    if m_splits is None or len(tensors) == len(m_splits):
        return [_rows_and_columns(it) for it in tensors]
    return [(rows, tensors[0].shape[1]) for rows in m_splits]


def _grouped_shape(
    op: str,
    A: list[Tensor],
    B: list[Tensor],
    m_splits: Sequence[int] | None,
    transa: bool,
    transb: bool,
) -> tuple[list[int], int]:
    """The rows of each group's D, and the columns of all of them."""
    pairs = zip(_pieces(A, m_splits), _pieces(B, m_splits), strict=True)
    shapes = [_product(op, a, b, transa, transb) for a, b in pairs]
    columns = shapes[0][1]
    for _, n in shapes:
        if n != columns:
            given = f"matrices that give {columns} columns of D, and {n}"
            raise ArgumentError(op, "A", given, "as many columns of D for each group")
    return [m for m, _ in shapes], columns


def _accumulated(
    op: str, accumulate_into: Any, rows: list[int], columns: int
) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Each tensor that is accumulated into, and the shape that it must have."""
    import torch

    if accumulate_into is None:
        return
    given = check.is_list(op, "accumulate_into", accumulate_into)
    if len(given) == 1:
        rows = [sum(rows)]
    check.is_list(op, "accumulate_into", given, length=len(rows), why="one for each group, or one")
    if not torch.compiler.is_compiling() and len(set(map(id, given))) < len(given):
        expected = "a separate tensor for each group, as it is written"
        raise ArgumentError(op, "accumulate_into", "one tensor for several groups", expected)
    yield from ((it, (m, columns)) for it, m in zip(given, rows, strict=True))


# ------------------------------------------------------------------------------ oracles


def _value(data: Tensor, scale_inv: Tensor | None) -> Tensor:
    """The values that data and scales stand for, as a float64 matrix."""
    import torch

    rows, columns = _rows_and_columns(data)
    value = data.double().reshape(rows, columns)
    if scale_inv is None:
        return value
    scale = scale_inv.double()
    if scale.ndim == 2:
        width = MX_BLOCK if scale_inv.element_size() == 1 else BLOCK
        height = 1 if scale.shape[0] == rows else BLOCK
        row = torch.arange(rows, device=data.device) // height
        column = torch.arange(columns, device=data.device) // width
        scale = scale[row[:, None], column]
    return value * scale


def _one_oracle(
    A: Tensor,
    B: Tensor,
    transa: bool,
    transb: bool,
    bias: Tensor | None,
    gelu: bool,
    gelu_input: Tensor | None,
    alpha: float,
    beta: float,
    before: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """D, the column sums of B and the input of GELU, from float64 matrices."""
    pre_gelu = alpha * ((B.T if transb else B) @ (A.T if transa else A))
    if before is not None and beta:
        pre_gelu = pre_gelu + beta * before.double().reshape(pre_gelu.shape)
    if bias is not None:
        pre_gelu = pre_gelu + bias.double()
    D = pre_gelu
    if gelu_input is not None:
        D = activation.dgelu.oracle(pre_gelu, gelu_input.reshape(D.shape))
    elif gelu:
        D = activation.gelu.oracle(pre_gelu)
    return D, B.sum(0), pre_gelu


def _gemm_oracle(
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
) -> tuple[Tensor | None, ...]:
    a, b = _value(A, A_scale_inv), _value(B, B_scale_inv)
    D, sums, pre_gelu = _one_oracle(
        a, b, transa, transb, bias, gelu, gelu_input, alpha, beta, accumulate_into
    )
    if not transb:
        D, pre_gelu = (it.reshape(*B.shape[:-1], it.shape[-1]) for it in (D, pre_gelu))
    return (
        D if accumulate_into is None else None,
        sums if bias_grad else None,
        pre_gelu if gelu and not grad else None,
        D if accumulate_into is not None else None,
    )


def _grouped_oracle(
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
) -> tuple[Any, ...]:
    import torch

    def values(tensors: list[Tensor], scales: list[Tensor] | None) -> list[Tensor]:
        each = [_value(it, None if scales is None else scales[i]) for i, it in enumerate(tensors)]
        if m_splits is None or len(each) == len(m_splits):
            return each
        return list(torch.split(each[0], m_splits))

    a, b = values(A, A_scale_inv), values(B, B_scale_inv)
    rows = [it.shape[1] if transb else it.shape[0] for it in b]
    before = None if accumulate_into is None else torch.split(torch.cat(accumulate_into), rows)
    fwd_input = None if gelu_input is None else torch.split(gelu_input, rows)
    groups = [
        _one_oracle(
            a[i],
            b[i],
            transa,
            transb,
            None if bias is None else bias[i],
            gelu,
            None if fwd_input is None else fwd_input[i],
            alpha,
            beta,
            None if before is None else before[i],
        )
        for i in range(len(rows))
    ]
    D, pre_gelu = (torch.cat([it[place] for it in groups]) for place in (0, 2))
    after = None
    if accumulate_into is not None:
        after = list(torch.split(D, [it.shape[0] for it in accumulate_into]))
    return (
        D if after is None else None,
        torch.stack([it[1] for it in groups]) if bias_grad else None,
        pre_gelu if gelu and not grad else None,
        after,
    )


# ------------------------------------------------------------------------------ samples

_Options = dict[str, Any]
_Scaling = tuple[str, str]

_DGRAD: _Options = {"transa": False}
_WGRAD: _Options = {"transa": False, "transb": True}
_BIAS_GRAD: _Options = {"grad": True, "bias_grad": True}
_PER_TENSOR: _Scaling = ("tensor", "tensor")


class _Maker:
    """Makes matrices of a dtype, and the calls of both operators on them.

    Attributes:
        kind: the default dtype of the outputs.
        other: a different output dtype.
    """

    def __init__(self, dtype: str, device: str) -> None:
        import torch

        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.float8 = dtype in FLOAT8
        self.kind = torch.bfloat16 if self.float8 else self.dtype
        self.other = torch.float32 if dtype != "float32" else torch.bfloat16

    def matrices(self, *shapes: tuple[int, ...], seed: int = 51) -> list[Tensor]:
        """A matrix of each shape."""
        return [normal(it, self.dtype, self.device, seed + i) for i, it in enumerate(shapes)]

    def weights(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Matrices to multiply these with; float8_e4m3fn for float8, as only gradients are e5m2."""
        weights = _Maker(FLOAT8[0], self.device) if self.float8 else self
        return weights.matrices(*shapes)

    def values(self, *shape: int, seed: int = 61) -> Tensor:
        """Values in the default dtype of the outputs."""
        return normal(shape, self.kind, self.device, seed)

    def totals(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Tensors to accumulate into: float32, one of each shape."""
        import torch

        return [normal(it, torch.float32, self.device, 71 + i) for i, it in enumerate(shapes)]

    def scale(self, data: Tensor, scaling: str) -> Tensor:
        """Scales of a float8 matrix; ``scaling`` is "tensor", "1x128", "128x128" or "MX"."""
        import torch

        if scaling == "tensor":
            return torch.full((1,), 0.37, device=self.device)
        rows, columns = _rows_and_columns(data)
        height = BLOCK if scaling == "128x128" else 1
        width = MX_BLOCK if scaling == "MX" else BLOCK
        shape = (_blocks(rows, height), _blocks(columns, width))
        scales = normal(shape, torch.float32, "cpu", seed=sum(shape)).exp()
        if scaling == "MX":
            scales = scales.log2().round().exp2().to(torch.float8_e8m0fnu)
        return scales.to(self.device)

    def call(
        self,
        label: str,
        A: Tensor,
        B: Tensor,
        *,
        scaling: _Scaling = _PER_TENSOR,
        **options: Any,
    ) -> Sample:
        """A call of ``generic_gemm``."""
        if self.float8:
            options["A_scale_inv"] = self.scale(A, scaling[0])
            options["B_scale_inv"] = self.scale(B, scaling[1])
        return Sample(label, (A, B), options)

    def sized(self, label: str, m: int, n: int, k: int, **options: Any) -> Sample:
        """A call of ``generic_gemm`` for matrices of the given sizes."""
        a = (n, k) if options.get("transa", True) else (k, n)
        b = (k, m) if options.get("transb", False) else (m, k)
        return self.call(label, *self.matrices(a, b), **options)

    def grouped(
        self,
        label: str,
        A: list[Tensor],
        B: list[Tensor],
        *m_splits: list[int],
        scaling: _Scaling = _PER_TENSOR,
        **options: Any,
    ) -> Sample:
        """A call of ``te_general_grouped_gemm``."""
        if self.float8:
            options["A_scale_inv"] = [self.scale(it, scaling[0]) for it in A]
            options["B_scale_inv"] = [self.scale(it, scaling[1]) for it in B]
        return Sample(label, (A, B, *m_splits), options)


def _gemm_samples(dtype: str, device: str) -> Iterator[Sample]:
    make = _Maker(dtype, device)
    yield make.call("typical", *make.weights((48, 32)), *make.matrices((16, 32)))
    yield make.sized("dgrad", 16, 40, 32, **_DGRAD)
    yield make.sized("wgrad", 16, 40, 32, **_WGRAD)
    yield make.sized("both transposed", 16, 40, 32, transb=True)
    for label, shape in {"three dimensions of B": (2, 3, 32), "a vector as B": (32,)}.items():
        yield make.call(label, *make.matrices((40, 32), shape))
    x, dy = make.matrices((2, 9, 40), (2, 9, 16))
    yield make.call("wgrad of sequences", x, dy, **_WGRAD)
    yield make.call("wgrad of sequences, bias_grad", x, dy, **_WGRAD, **_BIAS_GRAD)
    for label, (m, n, k) in {
        "one row": (1, 40, 32),
        "one column": (16, 1, 32),
        "one term": (16, 40, 1),
        "odd sizes": (7, 13, 33),
        "many terms": (5, 9, 5003),
        "many rows": (257, 24, 16),
        "no rows": (0, 40, 32),
        "no columns": (16, 0, 32),
        "no terms": (16, 40, 0),
    }.items():
        yield make.sized(label, m, n, k)
    a, b = make.matrices((40, 24), (16, 24))
    for label, tensor in layouts({}, 24, 24, dtype, device):
        yield make.call(f"{label} B", a, tensor)
        yield make.call(f"{label} A", tensor, b)
    yield from _options(make)
    yield from _accumulating(make)
    yield from _scaled(make) if make.float8 else _extreme(make)


def _options(make: _Maker) -> Iterator[Sample]:
    bias, before, other = make.values(40), make.values(16, 40), make.other
    grad: _Options = {"grad": True, **_DGRAD}
    dgelu: _Options = {"gelu": True, "gelu_input": before, **grad}
    cases: dict[str, _Options] = {
        "bias": {"bias": bias},
        "gelu": {"gelu": True},
        "bias, gelu": {"bias": bias, "gelu": True},
        "bias of another dtype": {"bias": bias.to(other)},
        "strided bias": {"bias": make.values(80)[::2]},
        "expanded bias": {"bias": bias[:1].expand(40)},
        "grad": grad,
        "dgelu": dgelu,
        "dgelu, transposed input": {**dgelu, "gelu_input": before.t().contiguous().t()},
        "dgelu, input of another dtype": {**dgelu, "gelu_input": before.to(other)},
        "bias_grad": {**_DGRAD, **_BIAS_GRAD},
        "dgelu, bias_grad": {**dgelu, **_BIAS_GRAD},
        "alpha=-0.5": {"alpha": -0.5},
        "alpha=2, bias, gelu": {"alpha": 2, "bias": bias, "gelu": True},
        "out_dtype": {"out_dtype": other, "bias": bias, "gelu": True},
        "out_dtype, bias_grad": {"out_dtype": other, **_DGRAD, **_BIAS_GRAD},
    }
    for label, options in cases.items():
        yield make.sized(label, 16, 40, 32, **options)
    yield make.sized("bias of one column", 16, 1, 32, bias=bias[:1])
    yield make.sized("bias, one term", 16, 40, 1, bias=bias)
    yield make.sized("bias, one row", 1, 40, 32, bias=bias)


def _accumulating(make: _Maker) -> Iterator[Sample]:
    import torch

    (total,) = make.totals((16, 40))
    padded = make.totals((16, 48))[0][:, :40]
    into: _Options = {"accumulate_into": total}
    cases: dict[str, _Options] = {
        "accumulated": {**into, **_WGRAD},
        "accumulated, bias_grad": {**into, **_WGRAD, **_BIAS_GRAD},
        "accumulated in the dtype of outputs": {"accumulate_into": total.to(make.kind), **_WGRAD},
        "accumulated in padded rows": {"accumulate_into": padded},
        "accumulated transposed": {"accumulate_into": total.t().contiguous().t()},
        "accumulated, alpha and beta": {**into, "alpha": 0.5, "beta": -2.0},
        "accumulated, bias, gelu": {**into, "bias": make.values(40), "gelu": True},
        "written, not read": {"accumulate_into": torch.full_like(total, torch.nan), "beta": 0.0},
    }
    for label, options in cases.items():
        yield make.sized(label, 16, 40, 32, **options)
    yield make.sized("accumulated, no terms", 16, 40, 0, **into)
    yield make.sized("accumulated, no rows", 0, 40, 32, accumulate_into=total[:0])
    (sequences,) = make.totals((2, 8, 40))
    a, b = make.matrices((40, 32), (2, 8, 32))
    yield make.call("accumulated, three dimensions", a, b, accumulate_into=sequences)


def _extreme(make: _Maker) -> Iterator[Sample]:
    import torch

    a, b = (normal(shape, torch.float64, "cpu", 81) for shape in ((40, 32), (16, 32)))
    largest = min(torch.finfo(make.dtype).max, 1e200) / 1000
    small = 0.1 if make.dtype == torch.float16 else 1e-3
    for label, by_a, by_b in (
        ("large values", largest**0.5, largest**0.5),
        ("small values", small, small),
        ("small values times large ones", largest**-0.5, largest**0.5),
    ):
        pair = ((it * by).to(make.device, make.dtype) for it, by in ((a, by_a), (b, by_b)))
        yield make.call(label, *pair)
    b[3, 5] = torch.inf
    b[7, 1] = torch.nan
    yield make.call("infinity and NaN", *(it.to(make.device, make.dtype) for it in (a, b)))


def _scaled(make: _Maker) -> Iterator[Sample]:
    (b,) = make.matrices((16, 32))
    for dtype in FLOAT8:
        (a,) = _Maker(dtype, make.device).matrices((40, 32))
        yield make.call(f"A in {dtype}", a, b)
    for scaling in (
        ("1x128", "1x128"),
        ("128x128", "1x128"),
        ("1x128", "128x128"),
        ("128x128", "128x128"),
        ("tensor", "1x128"),
        ("MX", "MX"),
    ):
        label = f"A scaled {scaling[0]}, B {scaling[1]}"
        yield make.sized(label, 130, 140, 300, scaling=scaling)
        yield make.sized(f"{label}, small", 7, 5, 9, scaling=scaling)
    blocks: _Options = {"scaling": ("128x128", "1x128")}
    yield make.sized("blocks, dgrad", 140, 130, 132, **blocks, **_DGRAD)
    yield make.sized("blocks, wgrad, bias_grad", 140, 130, 132, **blocks, **_WGRAD, **_BIAS_GRAD)
    turned = make.sized("transposed scales", 140, 130, 132, **blocks, **_WGRAD, **_BIAS_GRAD)
    for name in ("A_scale_inv", "B_scale_inv"):
        turned.kwargs[name] = turned.kwargs[name].t().contiguous().t()
    yield turned
    yield make.sized("blocks, no rows", 0, 40, 256, **blocks)
    (total,) = make.totals((16, 40))
    yield make.sized("blocks, accumulated", 16, 40, 256, **blocks, accumulate_into=total)
    sequences = make.matrices((40, 256), (2, 70, 256))
    yield make.call("blocks, three dimensions of B", *sequences, **blocks)


def _grouped_samples(dtype: str, device: str) -> Iterator[Sample]:
    make, splits = _Maker(dtype, device), [7, 12, 5]
    weights, x, dy = (make.matrices(*shapes) for shapes in ([(40, 32)] * 3, [(24, 32)], [(24, 40)]))
    parts = make.matrices((7, 32), (12, 32), (5, 32))
    yield make.grouped("typical", make.weights(*[(48, 32)] * 3), x, splits)
    yield make.grouped("dgrad", weights, dy, splits, **_DGRAD)
    yield make.grouped("wgrad", x, dy, splits, **_WGRAD)
    yield make.grouped("lists", weights, parts)
    yield make.grouped("lists and splits", weights, parts, splits)
    yield make.grouped("lists, wgrad", parts, make.matrices((7, 40), (12, 40), (5, 40)), **_WGRAD)
    columns = make.matrices((32, 3), (32, 6), (32, 2))
    yield make.grouped("both transposed", weights, columns, transb=True)
    yield make.grouped("one group", weights[:1], x, [24])
    yield make.grouped(
        "odd sizes", make.matrices((13, 33), (13, 33)), make.matrices((24, 33)), [3, 21]
    )
    for label, some in {"an empty group": [19, 0, 5], "two empty groups": [0, 24, 0]}.items():
        yield make.grouped(label, weights, x, some)
        yield make.grouped(f"{label}, wgrad", x, dy, some, **_WGRAD)
    yield make.grouped("only empty groups", weights, [x[0][:0]], [0, 0, 0])
    yield make.grouped("only empty groups, wgrad", [x[0][:0]], [dy[0][:0]], [0, 0, 0], **_WGRAD)
    pair, (whole,) = make.matrices((40, 24), (40, 24)), make.matrices((24, 24))
    for label, tensor in layouts({}, 24, 24, dtype, device):
        yield make.grouped(f"{label} B", pair, [tensor], [10, 14])
        yield make.grouped(f"{label} A", [tensor, tensor], [whole], [10, 14])
    yield from _grouped_options(make, weights, x, splits)
    yield from _grouped_accumulating(make, x, dy, splits)
    if make.float8:
        yield from _grouped_scaled(make)


def _grouped_options(
    make: _Maker, A: list[Tensor], B: list[Tensor], splits: list[int]
) -> Iterator[Sample]:
    bias = [make.values(40, seed=91 + i) for i in range(3)]
    dgelu: _Options = {"grad": True, "gelu": True, "gelu_input": make.values(24, 40)}
    cases: dict[str, _Options] = {
        "bias": {"bias": bias},
        "gelu": {"gelu": True},
        "bias, gelu": {"bias": bias, "gelu": True},
        "biases of their own": {"bias": [bias[0].to(make.other), bias[1][:1].expand(40), bias[2]]},
        "dgelu": dgelu,
        "bias_grad": _BIAS_GRAD,
        "dgelu, bias_grad": {**dgelu, **_BIAS_GRAD},
        "alpha=-0.5": {"alpha": -0.5},
        "out_dtype": {"out_dtype": make.other, "bias": bias, "gelu": True},
        "accumulated, bias, gelu": {
            "bias": bias,
            "gelu": True,
            "accumulate_into": make.totals((24, 40)),
        },
    }
    for label, options in cases.items():
        yield make.grouped(label, A, B, splits, **options)


def _grouped_accumulating(
    make: _Maker, A: list[Tensor], B: list[Tensor], splits: list[int]
) -> Iterator[Sample]:
    import torch

    totals = make.totals((40, 32), (40, 32), (40, 32))
    padded = make.totals((40, 40))[0][:, :32]
    into: _Options = {"accumulate_into": totals}
    cases: dict[str, _Options] = {
        "accumulated": into,
        "accumulated in one": {"accumulate_into": make.totals((120, 32))},
        "accumulated, bias_grad": {**into, **_BIAS_GRAD},
        "accumulated in the dtype of outputs": {
            "accumulate_into": [it.to(make.kind) for it in totals]
        },
        "accumulated in padded rows": {"accumulate_into": [padded, *totals[1:]]},
        "accumulated, alpha and beta": {**into, "alpha": 0.5, "beta": -2.0},
        "written, not read": {
            "accumulate_into": [torch.full_like(it, torch.nan) for it in totals],
            "beta": 0.0,
        },
    }
    for label, options in cases.items():
        yield make.grouped(label, A, B, splits, **options, **_WGRAD)
    for label in ("accumulated", "accumulated, bias_grad", "written, not read"):
        yield make.grouped(f"{label}, empty groups", A, B, [24, 0, 0], **cases[label], **_WGRAD)


def _grouped_scaled(make: _Maker) -> Iterator[Sample]:
    wide, x = make.matrices((130, 260), (130, 260)), make.matrices((140, 260))
    dy, splits = make.matrices((140, 130)), [9, 131]
    for scaling in (("128x128", "1x128"), ("MX", "MX")):
        label = f"A scaled {scaling[0]}, B {scaling[1]}"
        yield make.grouped(label, wide, x, splits, scaling=scaling)
        yield make.grouped(f"{label}, wgrad", x, dy, splits, scaling=scaling, **_WGRAD)


# ---------------------------------------------------------------------------- contracts


@contract(
    family="gemm",
    check=_check_gemm,
    samples=_gemm_samples,
    tolerance=TOLERANCE,
    oracle=_gemm_oracle,
    mutates=("accumulate_into",),
    dispatch_on="B",
)
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
    """Product of two matrices, with bias and GELU or their gradients, or accumulated.

    ``z = alpha * op(B) @ op(A) + beta * accumulated + bias``, where op transposes if asked to and
    terms that are not given are left out. Then ``D = z``, or ``gelu(z)`` (tanh form), or under
    ``grad`` ``z * gelu'(gelu_input)``. The order is that of cuBLASLt's epilogues; A and B have
    the same meaning as in Transformer Engine.

    A tensor of more than two dimensions, ``[..., columns]``, is treated as a matrix: all
    dimensions but the last are flattened to rows. Below, A is ``[a0, a1]`` and B ``[b0, b1]``;
    op(A) is ``[K, N]`` and op(B) ``[M, K]``.

    float8 data stands for ``data * scale_inv``. Products are summed in float32 (float64 for
    float64) and rounded once, at the end.

    Args:
        A: the weight; dtype of B, or either float8 dtype if B is float8.
        B: the activations or their gradients; float32, bfloat16, float16, float64,
            float8_e4m3fn or float8_e5m2.
        transa: op(A) is the transpose of A, so that A is ``[N, K]``.
        transb: op(B) is the transpose of B, so that B is ``[K, M]``.
        bias: ``[N]``, float32, bfloat16, float16 or float64; not under ``grad``.
        gelu: apply GELU and return its input, or under ``grad`` multiply by its derivative.
        gelu_input: shape of D, any dtype of a bias; the input of the GELU whose gradient
            is wanted. Only with ``grad`` and ``gelu``.
        grad: the call is part of a backward.
        bias_grad: return the sum over the rows of B, whatever ``transb`` is; only under
            ``grad``.
        alpha: factor of the product.
        beta: factor of the values in ``accumulate_into``, which are not read if beta is 0.
        accumulate_into: shape of D, any dtype of a bias. No two of its elements share memory, and
            it overlaps no other argument. **Written:** D is stored there.
        A_scale_inv, B_scale_inv: scales of float8 data ``[rows, columns]``, None for other
            dtypes; on the same device. float32 ``[1]`` for the whole matrix,
            ``[rows, ceil(columns / 128)]`` for blocks of 1x128,
            ``[ceil(rows / 128), ceil(columns / 128)]`` for blocks of 128x128; or float8_e8m0fnu
            ``[rows, ceil(columns / 32)]`` (MXFP8).
        out_dtype: dtype of every output, float32, bfloat16, float16 or float64; the dtype of B
            unless given, or bfloat16 if that is float8.

    Returns:
        D: ``[*leading dimensions of B, N]``, with ``transb`` ``[M, N]``; None with
            ``accumulate_into``.
        bias gradient: ``[b1]``, not multiplied by ``alpha``; None without ``bias_grad``.
        pre_gelu: z in the shape of D, saved for the backward; only for ``gelu`` without
            ``grad``, otherwise None.

        All are contiguous.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    shape = _gemm_shape("generic_gemm", A, B, transa, transb)
    dtype = _default_dtype(B, out_dtype)
    return (
        None if accumulate_into is not None else B.new_empty(shape, dtype=dtype),
        B.new_empty(B.shape[-1:], dtype=dtype) if bias_grad else None,
        B.new_empty(shape, dtype=dtype) if gelu and not grad else None,
    )


@contract(
    family="gemm",
    check=_check_grouped,
    samples=_grouped_samples,
    tolerance=TOLERANCE,
    oracle=_grouped_oracle,
    mutates=("accumulate_into",),
    dispatch_on="B",
)
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
    """:func:`generic_gemm` for each of several groups, such as experts.

    Group i has ``z_i = alpha * op(B_i) @ op(A_i) + beta * accumulated_i + bias_i``, and D_i
    follows from z_i as in :func:`generic_gemm`. The outputs of all groups are one tensor, the rows
    of the first group, then those of the second, and so on. ``D.split(...)`` makes a list of it;
    ``accumulate_into`` with ``beta=0`` writes the caller's own tensors instead.

    A group may be empty. A group without rows has no rows in D. In a wgrad, the product of a
    group without terms is zero: D_i is zero, and an accumulated tensor stays as it is.

    Args:
        A: the weights: a matrix for each group, or one matrix whose rows ``m_splits`` divides
            among the groups. Dtypes as in :func:`generic_gemm`, the same for all
            matrices (if one is float8, each may have either float8 dtype).
        B: the activations or their gradients: a matrix for each group, or one as for A.
        m_splits: the number of rows of each group in B, on the host; needed where A or B is one
            matrix.
        transa, transb: for every group, as in :func:`generic_gemm`.
        bias: ``[N]`` for each group.
        gelu: as in :func:`generic_gemm`.
        gelu_input: shape of D, the rows of all groups.
        grad, bias_grad, alpha, beta: as in :func:`generic_gemm`.
        accumulate_into: a tensor ``[rows of the group, N]`` for each group, all different, or one
            tensor with the rows of all groups. **Written.**
        A_scale_inv, B_scale_inv: for float8, a list of the scales of each matrix in the list;
            otherwise None instead of a list. Shapes as in :func:`generic_gemm`.
        out_dtype: as in :func:`generic_gemm`.

    Returns:
        D: ``[rows of all groups, N]``; None with ``accumulate_into``.
        bias gradients: ``[groups, columns of B]``; None without ``bias_grad``.
        pre_gelu: shape of D; only for ``gelu`` without ``grad``, otherwise None.

        All are contiguous.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    rows, columns = _grouped_shape("te_general_grouped_gemm", A, B, m_splits, transa, transb)
    dtype = _default_dtype(B[0], out_dtype)
    shape = sum(rows), columns
    return (
        None if accumulate_into is not None else B[0].new_empty(shape, dtype=dtype),
        B[0].new_empty((len(rows), B[0].shape[1]), dtype=dtype) if bias_grad else None,
        B[0].new_empty(shape, dtype=dtype) if gelu and not grad else None,
    )

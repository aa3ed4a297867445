"""Normalization: root mean square and layer normalization over the last dimension.

H is the size of the last dimension and N the product of the leading ones. Statistics
are float32 (float64 for float64 inputs) and are saved flat, one per row, so that any
implementation of a forward can be combined with any implementation of its backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Backward, Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import FLOATS, math_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "layernorm_bwd",
    "layernorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_bwd_add",
    "rmsnorm_fwd",
    "rmsnorm_fwd_add",
]

DTYPES = FLOATS

FORWARD_TOLERANCE = {
    "float32": Tolerance(rtol=2e-6, atol=2e-6),
    "bfloat16": Tolerance(rtol=2**-8, atol=2**-9),
    "float16": Tolerance(rtol=2**-10, atol=2**-11),
    "float64": Tolerance(rtol=1e-13, atol=1e-13),
}
BACKWARD_TOLERANCE = {
    "float32": Tolerance(rtol=1e-5, atol=1e-5),
    "bfloat16": Tolerance(rtol=2**-8, atol=2**-8),
    "float16": Tolerance(rtol=2**-10, atol=2**-10),
    "float64": Tolerance(rtol=1e-12, atol=1e-12),
}


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of mu, rsigma and every sum for an input of ``dtype``."""
    return math_dtype(dtype)


def _rows(input: Tensor) -> int:
    return math.prod(input.shape[:-1])


# ------------------------------------------------------------------------------ checks


def _check_input(op: str, name: str, value: Any) -> int:
    """Check a normalized tensor; returns its H."""
    tensor = check.is_tensor(op, name, value, dtypes=DTYPES, min_ndim=1)
    if tensor.shape[-1] == 0:
        expected = "a last dimension of at least 1"
        raise ArgumentError(op, name, check.describe(value), expected)
    return tensor.shape[-1]


def _check_parameter(op: str, name: str, value: Any, columns: int, of: str) -> None:
    tensor = check.is_tensor(op, name, value, dtypes=DTYPES)
    check.has_shape(op, name, tensor, (columns,), f"one value per column of {of!r}")


def _check_forward(
    op: str,
    input: Any,
    weight: Any,
    eps: Any,
    zero_centered_gamma: Any,
    out_dtype: Any,
    bias: Any = None,
) -> None:
    columns = _check_input(op, "input", input)
    _check_parameter(op, "weight", weight, columns, "input")
    if bias is not None:
        _check_parameter(op, "bias", bias, columns, "input")
    check.is_number(op, "eps", eps, at_least=0)
    check.is_flag(op, "zero_centered_gamma", zero_centered_gamma)
    check.is_dtype(op, "out_dtype", out_dtype, dtypes=DTYPES)
    check.same_device(op, "input", {"input": input, "weight": weight, "bias": bias})


def _check_backward(
    op: str, dy: Any, x: Any, rsigma: Any, gamma: Any, zero_centered_gamma: Any, **mu: Any
) -> None:
    columns = _check_input(op, "x", x)
    dy = check.is_tensor(op, "dy", dy, dtypes=DTYPES)
    check.has_shape(op, "dy", dy, x.shape, "the shape of 'x'")
    statistics = {**mu, "rsigma": rsigma}
    for name, value in statistics.items():
        dtype = check.dtype_name(statistics_dtype(x.dtype))
        tensor = check.is_tensor(op, name, value, dtypes=(dtype,))
        check.has_shape(op, name, tensor, (_rows(x),), "one value per row of 'x'")
    _check_parameter(op, "gamma", gamma, columns, "x")
    check.is_flag(op, "zero_centered_gamma", zero_centered_gamma)
    check.same_device(op, "x", {"x": x, "dy": dy, "gamma": gamma, **statistics})


def _check_forward_add(op: str, input: Any, residual: Any, **others: Any) -> None:
    _check_forward(op, input=input, **others)
    tensor = check.is_tensor(op, "residual", residual, dtypes=(check.dtype_name(input.dtype),))
    check.has_shape(op, "residual", tensor, input.shape, "the shape of 'input'")
    check.same_device(op, "input", {"input": input, "residual": residual})


def _check_backward_add(op: str, dz: Any, x: Any, add: Any, **others: Any) -> None:
    _check_input(op, "x", x)
    for name, value in {"dz": dz, "add": add}.items():
        tensor = check.is_tensor(op, name, value, dtypes=DTYPES)
        check.has_shape(op, name, tensor, x.shape, "the shape of 'x'")
        check.same_device(op, "x", {"x": x, name: tensor})
    _check_backward(op, dz, x, **others)


# ------------------------------------------------------------------------------ oracles


def _normalize(
    input: Tensor, weight: Tensor, bias: Tensor | None, eps: Any, offset: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition in float64: (output, mu, rsigma)."""
    x = input.double()
    mu = x.mean(-1, keepdim=True) if centred else x.new_zeros((*x.shape[:-1], 1))
    rsigma = ((x - mu).square().mean(-1, keepdim=True) + eps).rsqrt()
    output = (x - mu) * rsigma * (weight.double() + offset)
    if bias is not None:
        output = output + bias.double()
    return output, mu.flatten(), rsigma.flatten()


def _gradients(
    dy: Tensor, x: Tensor, mu: Tensor | None, rsigma: Tensor, gamma: Tensor, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dgamma, dbeta in float64, by differentiating the definition.

    The eps of the forward is recovered from the saved rsigma, so that the statistics
    of the differentiated function are the ones that were saved.
    """
    import torch

    with torch.enable_grad():
        leaf = x.detach().double().requires_grad_()
        weight = gamma.detach().double().requires_grad_()
        bias = torch.zeros_like(weight).requires_grad_()
        centre = x.double().mean(-1, keepdim=True) if mu is not None else 0.0
        variance = (x.double() - centre).square().mean(-1)
        eps = (rsigma.double().square().reciprocal().view(variance.shape) - variance).unsqueeze(-1)
        output = _normalize(leaf, weight, bias, eps, offset, mu is not None)[0]
        dx, dgamma, dbeta = torch.autograd.grad(output, (leaf, weight, bias), dy.double())
    return dx, dgamma, dbeta


def _rmsnorm_fwd_oracle(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    output, _, rsigma = _normalize(input, weight, None, eps, float(zero_centered_gamma), False)
    return output, rsigma


def _rmsnorm_bwd_oracle(
    dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    return _gradients(dy, x, None, rsigma, gamma, float(zero_centered_gamma))[:2]


def _rmsnorm_fwd_add_oracle(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    exact = input.double() + residual.double()
    offset = float(zero_centered_gamma)
    output, _, rsigma = _normalize(exact.to(input.dtype), weight, None, eps, offset, False)
    return output, exact, rsigma


def _rmsnorm_bwd_add_oracle(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    dx, dgamma, _ = _gradients(dz, x, None, rsigma, gamma, float(zero_centered_gamma))
    return dx + add.double(), dgamma


def _layernorm_fwd_oracle(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _normalize(input, weight, bias, eps, float(zero_centered_gamma), True)


def _layernorm_bwd_oracle(
    dy: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(dy, x, mu, rsigma, gamma, float(zero_centered_gamma))


# ------------------------------------------------------------------------------ samples

_SHAPES = {
    "typical": (16, 64),
    "three dimensions": (2, 3, 96),
    "one dimension": (48,),
    "one row": (1, 256),
    "odd width": (5, 129),
    "wide odd row": (3, 5003),
    "many rows": (257, 40),
    "no rows": (0, 64),
}


def _inputs(dtype: str, device: str) -> Iterator[tuple[str, Tensor, torch.dtype]]:
    """(label, input, dtype of the parameters) of every kind that must work."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(20)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for label, shape in _SHAPES.items():
        yield label, normal(*shape).to(device, kind), kind
    yield "transposed", normal(64, 24).to(device, kind).t(), kind
    yield "strided columns", normal(8, 96).to(device, kind)[:, ::2], kind
    yield "padded rows", normal(8, 80).to(device, kind)[:, :72], kind
    yield "unaligned start", normal(8 * 64 + 1).to(device, kind)[1:].view(8, 64), kind
    yield "expanded", normal(1, 64).to(device, kind).expand(6, 64), kind
    yield "offset mean", (normal(8, 128) + 3).to(device, kind), kind
    large = 3e4 if dtype == "float16" else 1e15
    yield "large values", (normal(4, 64).clamp(-2, 2) * (large / 2)).to(device, kind), kind
    yield "small values", (normal(4, 64) * 1e-3).to(device, kind), kind
    yield "float32 parameters", normal(6, 64).to(device, kind), torch.float32
    yield "bfloat16 parameters", normal(6, 64).to(device, kind), torch.bfloat16


def _parameter(columns: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(columns, generator=generator) * 0.5 + 1).to(device, dtype)


_OPTIONS: tuple[dict[str, Any], ...] = (
    {"eps": 1e-2},
    {"zero_centered_gamma": True},
    {"out_dtype": "float32"},
    {"out_dtype": "bfloat16"},
    {"out_dtype": "float16"},
)


def _forward_samples(dtype: str, device: str, bias: bool) -> Iterator[Sample]:
    import torch

    def call(input: Tensor, kind: torch.dtype) -> tuple[Tensor, ...]:
        columns = input.shape[-1]
        weight = _parameter(columns, kind, input.device, 21)
        return (
            (input, weight, _parameter(columns, kind, input.device, 22))
            if bias
            else (input, weight)
        )

    for label, input, kind in _inputs(dtype, device):
        yield Sample(label, call(input, kind))
        if label == "typical":
            for option in _OPTIONS:
                name, value = next(iter(option.items()))
                given = getattr(torch, value) if name == "out_dtype" else value
                yield Sample(f"{name}={value}", call(input, kind), {name: given})
            if bias:
                yield Sample("no bias", call(input, kind)[:2])


def _rmsnorm_fwd_samples(dtype: str, device: str) -> Iterator[Sample]:
    return _forward_samples(dtype, device, bias=False)


def _layernorm_fwd_samples(dtype: str, device: str) -> Iterator[Sample]:
    return _forward_samples(dtype, device, bias=True)


def _rmsnorm_fwd_add_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    for sample in _forward_samples(dtype, device, bias=False):
        input, weight = sample.args
        generator = torch.Generator().manual_seed(25)
        residual = torch.randn(input.shape, generator=generator).to(device, input.dtype)
        yield Sample(sample.label, (input, residual, weight), sample.kwargs)
        if sample.label == "typical":
            strided = residual.t().contiguous().t()
            yield Sample("transposed residual", (input, strided, weight))
            yield Sample("a residual that cancels", (input, (residual / 64) - input, weight))


def _backward_samples(dtype: str, device: str, centred: bool) -> Iterator[Sample]:
    import torch

    for label, x, kind in _inputs(dtype, device):
        generator = torch.Generator().manual_seed(23)
        dy = torch.randn(x.shape, generator=generator).to(device, x.dtype)
        gamma = _parameter(x.shape[-1], kind, x.device, 24)
        _, mu, rsigma = _normalize(x, gamma, None, 1e-5, 0.0, centred)
        saved = [value.to(statistics_dtype(x.dtype)) for value in (mu, rsigma)]
        args = (dy, x, *saved[0 if centred else 1 :], gamma)
        yield Sample(label, args)
        if label == "typical":
            yield Sample("zero_centered_gamma=True", args, {"zero_centered_gamma": True})
            strided = dy.t().contiguous().t()
            yield Sample("transposed dy", (strided, *args[1:]))
            other = torch.float32 if x.dtype != torch.float32 else torch.bfloat16
            yield Sample("dy of another dtype", (dy.to(other), *args[1:]))


def _rmsnorm_bwd_samples(dtype: str, device: str) -> Iterator[Sample]:
    return _backward_samples(dtype, device, centred=False)


def _rmsnorm_bwd_add_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    for sample in _backward_samples(dtype, device, centred=False):
        dz, x, rsigma, gamma = sample.args
        generator = torch.Generator().manual_seed(26)
        add = torch.randn(x.shape, generator=generator).to(device, x.dtype)
        yield Sample(sample.label, (dz, x, add, rsigma, gamma), sample.kwargs)
        if sample.label == "typical":
            strided = add.t().contiguous().t()
            yield Sample("transposed add", (dz, x, strided, rsigma, gamma))
            other = torch.float32 if x.dtype != torch.float32 else torch.bfloat16
            yield Sample("add of another dtype", (dz, x, add.to(other), rsigma, gamma))


def _layernorm_bwd_samples(dtype: str, device: str) -> Iterator[Sample]:
    return _backward_samples(dtype, device, centred=True)


# ---------------------------------------------------------------------------- contracts


@contract(
    family="normalization",
    check=_check_forward,
    samples=_rmsnorm_fwd_samples,
    tolerance=FORWARD_TOLERANCE,
    oracle=_rmsnorm_fwd_oracle,
    backward=Backward(
        "rmsnorm_bwd",
        saves={"x": "input", "rsigma": "output[1]", "gamma": "weight"},
        gradients=("input", "weight"),
        options=("zero_centered_gamma",),
    ),
)
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Root mean square normalization (Zhang and Sennrich, 2019, arXiv:1910.07467).

    ``output = input * rsigma * g`` with ``rsigma = 1 / sqrt(mean(input ** 2) + eps)`` over
    the last dimension and ``g = weight``, or ``1 + weight`` if ``zero_centered_gamma``.

    Args:
        input: ``[..., H]``, H at least 1; float32, bfloat16, float16 or float64.
        weight: ``[H]``, any of those dtypes.
        eps: added to the mean of squares; not negative.
        zero_centered_gamma: the weight is stored as ``gamma - 1``.
        out_dtype: dtype of the output; the input's unless given.

    Returns:
        output: ``[..., H]``, contiguous, ``out_dtype``.
        rsigma: ``[N]``, float32 (float64 for a float64 input); saved for the backward.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    rsigma = input.new_empty((_rows(input),), dtype=statistics_dtype(input.dtype))
    return input.new_empty(input.shape, dtype=out_dtype or input.dtype), rsigma


@contract(
    family="normalization",
    check=_check_backward,
    samples=_rmsnorm_bwd_samples,
    tolerance=BACKWARD_TOLERANCE,
    oracle=_rmsnorm_bwd_oracle,
    dispatch_on="x",
)
def rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`rmsnorm_fwd`.

    With ``xhat = x * rsigma`` and ``u = dy * g``:
    ``dx = rsigma * (u - xhat * mean(u * xhat))`` and ``dgamma = sum over rows of dy * xhat``.

    Args:
        dy: ``[..., H]``, the gradient of the output; any dtype of the contract.
        x: ``[..., H]``, the forward's input.
        rsigma: ``[N]``, as the forward returned it.
        gamma: ``[H]``, the forward's weight.
        zero_centered_gamma: as in the forward.

    Returns:
        dx: ``[..., H]``, contiguous, dtype of ``x``.
        dgamma: ``[H]``, dtype of ``gamma``; summed in float32 (float64 for float64).

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape)


@contract(
    family="normalization",
    check=_check_forward_add,
    samples=_rmsnorm_fwd_add_samples,
    tolerance=FORWARD_TOLERANCE,
    oracle=_rmsnorm_fwd_add_oracle,
    backward=Backward(
        "rmsnorm_bwd_add",
        saves={"x": "output[1]", "rsigma": "output[2]", "gamma": "weight"},
        gradients=(("input", "residual"), "weight"),
        options=("zero_centered_gamma",),
        output_grads=("dz", "add"),
    ),
)
def rmsnorm_fwd_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a residual, then :func:`rmsnorm_fwd`; returns the sum as well.

    ``sum = input + residual``, rounded to the input's dtype, is the input of the norm and
    the residual of the next block: both see the same numbers.

    Args:
        input: ``[..., H]``, H at least 1; float32, bfloat16, float16 or float64.
        residual: ``[..., H]``, dtype of ``input``.
        weight: ``[H]``, any of those dtypes.
        eps: added to the mean of squares; not negative.
        zero_centered_gamma: the weight is stored as ``gamma - 1``.
        out_dtype: dtype of the output; the input's unless given.

    Returns:
        output: ``[..., H]``, contiguous, ``out_dtype``.
        sum: ``[..., H]``, contiguous, dtype of ``input``; saved for the backward, as its x.
        rsigma: ``[N]``, float32 (float64 for a float64 input); saved for the backward.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    rsigma = input.new_empty((_rows(input),), dtype=statistics_dtype(input.dtype))
    output = input.new_empty(input.shape, dtype=out_dtype or input.dtype)
    return output, input.new_empty(input.shape), rsigma


@contract(
    family="normalization",
    check=_check_backward_add,
    samples=_rmsnorm_bwd_add_samples,
    tolerance=BACKWARD_TOLERANCE,
    oracle=_rmsnorm_bwd_add_oracle,
    dispatch_on="x",
)
def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`rmsnorm_fwd_add`: those of the norm, plus the gradient of the sum.

    ``dx`` is that of :func:`rmsnorm_bwd` plus ``add``, rounded once. It is the gradient of both
    the forward's input and its residual.

    Args:
        dz: ``[..., H]``, the gradient of the output; any dtype of the contract.
        x: ``[..., H]``, the forward's sum.
        add: ``[..., H]``, the gradient of the sum; any dtype of the contract.
        rsigma: ``[N]``, as the forward returned it.
        gamma: ``[H]``, the forward's weight.
        zero_centered_gamma: as in the forward.

    Returns:
        dx: ``[..., H]``, contiguous, dtype of ``x``.
        dgamma: ``[H]``, dtype of ``gamma``; summed in float32 (float64 for float64).

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape)


@contract(
    family="normalization",
    check=_check_forward,
    samples=_layernorm_fwd_samples,
    tolerance=FORWARD_TOLERANCE,
    oracle=_layernorm_fwd_oracle,
    backward=Backward(
        "layernorm_bwd",
        saves={"x": "input", "mu": "output[1]", "rsigma": "output[2]", "gamma": "weight"},
        gradients=("input", "weight", "bias"),
        options=("zero_centered_gamma",),
    ),
)
def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalization (Ba, Kiros and Hinton, 2016, arXiv:1607.06450).

    ``output = (input - mu) * rsigma * g + bias`` with ``mu = mean(input)`` and
    ``rsigma = 1 / sqrt(mean((input - mu) ** 2) + eps)`` over the last dimension, and
    ``g = weight``, or ``1 + weight`` if ``zero_centered_gamma``.

    Args:
        input: ``[..., H]``, H at least 1; float32, bfloat16, float16 or float64.
        weight: ``[H]``, any of those dtypes.
        bias: ``[H]``, any of those dtypes, or None for none.
        eps: added to the variance; not negative.
        zero_centered_gamma: the weight is stored as ``gamma - 1``.
        out_dtype: dtype of the output; the input's unless given.

    Returns:
        output: ``[..., H]``, contiguous, ``out_dtype``.
        mu: ``[N]``, float32 (float64 for a float64 input); saved for the backward.
        rsigma: ``[N]``, dtype of ``mu``; saved for the backward.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    dtype = statistics_dtype(input.dtype)
    return (
        input.new_empty(input.shape, dtype=out_dtype or input.dtype),
        input.new_empty((_rows(input),), dtype=dtype),
        input.new_empty((_rows(input),), dtype=dtype),
    )


@contract(
    family="normalization",
    check=_check_backward,
    samples=_layernorm_bwd_samples,
    tolerance=BACKWARD_TOLERANCE,
    oracle=_layernorm_bwd_oracle,
    dispatch_on="x",
)
def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`layernorm_fwd`.

    With ``xhat = (x - mu) * rsigma`` and ``u = dy * g``:
    ``dx = rsigma * (u - mean(u) - xhat * mean(u * xhat))``,
    ``dgamma = sum over rows of dy * xhat`` and ``dbeta = sum over rows of dy``.

    Args:
        dy: ``[..., H]``, the gradient of the output; any dtype of the contract.
        x: ``[..., H]``, the forward's input.
        mu: ``[N]``, as the forward returned it.
        rsigma: ``[N]``, as the forward returned it.
        gamma: ``[H]``, the forward's weight.
        zero_centered_gamma: as in the forward.

    Returns:
        dx: ``[..., H]``, contiguous, dtype of ``x``.
        dgamma: ``[H]``, dtype of ``gamma``; summed in float32 (float64 for float64).
        dbeta: ``[H]``, dtype of ``gamma``; summed likewise.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape), gamma.new_empty(gamma.shape)

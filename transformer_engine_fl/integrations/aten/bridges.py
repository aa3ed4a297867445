"""Bridges from ATen's operators to contracts: how the arguments of each operator are converted.

A bridge inspects a call of an ATen operator. It declines, with the reason, what the contract's
operator cannot express; otherwise it returns a function that serves the call by means of a
function with the contract's signature. Nothing is computed until that is called. An operator
without a bridge has only the implementations that vendors register under its ATen name, and the
native kernel.

The operators in ``PARTS`` are below autograd: they take and return what ATen's derivatives save.
Those in ``WHOLE`` are torch's composites, which would reach a device in pieces: they are bridged
as a whole, and the function that serves them is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.integrations.aten.layout import in_memory_order, laid_out, order

__all__ = ["PARTS", "WHOLE", "Bridge", "autocast"]

Run = Callable[..., Any]
"""A function with the signature of the contract's operator."""

BoundCall = Callable[[Run], Any]


class Bridge(NamedTuple):
    """How an ATen operator is served by a contract's operator.

    Attributes:
        operator: the contract's operator.
        call: takes the ATen operator's arguments and returns a :data:`BoundCall`, which runs the
            contract's operator.
    """

    operator: str
    call: Callable[..., BoundCall]


def _need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotSupportedError(otherwise)


def _same_dtype(first: Tensor, *others: Tensor | None) -> None:
    for other in others:
        if other is not None and other.dtype != first.dtype:
            raise NotSupportedError(f"dtypes differ: {first.dtype} and {other.dtype}")


def _full(*tensors: Tensor) -> None:
    _need(all(tensor.numel() for tensor in tensors), "a tensor has no elements")


def _last(tensor: Tensor, dim: int) -> None:
    _full(tensor)
    _need(tensor.ndim > 0 and dim in (-1, tensor.ndim - 1), "dim is not the last dimension")


# --------------------------------------------------------------------------- activations


def _unary(self: Tensor) -> BoundCall:
    return lambda run: in_memory_order(run, self, by=order(self))


def _unary_backward(grad_output: Tensor, self: Tensor) -> BoundCall:
    _alike(grad_output, self)
    return lambda run: in_memory_order(run, grad_output, self, by=order(grad_output, self))


def _alike(grad_output: Tensor, self: Tensor) -> None:
    _same_dtype(self, grad_output)
    _need(grad_output.shape == self.shape, "the gradient's shape differs from the input's")


def _gelu(self: Tensor, *, approximate: str = "none") -> BoundCall:
    _need(approximate == "tanh", "the contract's GELU is the tanh approximation")
    return _unary(self)


def _gelu_backward(grad_output: Tensor, self: Tensor, *, approximate: str = "none") -> BoundCall:
    _need(approximate == "tanh", "the contract's GELU is the tanh approximation")
    return _unary_backward(grad_output, self)


def _threshold_backward(grad_output: Tensor, self: Tensor, threshold: float) -> BoundCall:
    _need(threshold == 0, f"the threshold of the contract's operator is 0, not {threshold}")
    _alike(grad_output, self)
    # For this operator ATen takes the memory layout of the input first.
    return lambda run: in_memory_order(run, grad_output, self, by=order(self, grad_output))


# ------------------------------------------------------------------------------- softmax


def _softmax(self: Tensor, dim: int, half_to_float: bool) -> BoundCall:
    _last(self, dim)
    _need(not half_to_float, "the output has another dtype than the input")
    return lambda run: run(self)


def _softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> BoundCall:
    _last(output, dim)
    _same_dtype(output, grad_output)
    _need(input_dtype == output.dtype, "the gradient has another dtype than the output")
    return lambda run: run(grad_output, output)


def _near_zero(logits: Tensor) -> Tensor:
    """The logits minus the largest of their row, unless they are narrower than lse.

    An lse far from zero has a rounding error that is too large for the probabilities, while
    torch's precision does not depend on a shift of the row. Logits of half precision stay as they
    are: the difference would be rounded to their dtype, and lse has 13 or 16 bits more.
    """
    if logits.dtype.itemsize < 4:
        return logits
    highest = logits.detach().amax(-1, keepdim=True)
    return logits - highest.where(highest.isfinite(), 0)


def _log_softmax(self: Tensor, dim: int, half_to_float: bool) -> BoundCall:
    _last(self, dim)
    _need(not half_to_float, "the output has another dtype than the input")

    def bound_call(run: Run) -> Tensor:
        # Cross entropy returns lse, the logarithm of the denominator, whatever the targets.
        rows = _near_zero(self).contiguous()  # the result must be contiguous
        lse: Tensor = run(rows, rows.new_zeros(rows.shape[:-1], dtype=torch.int64))[1]
        return (rows.to(lse.dtype) - lse.unsqueeze(-1)).to(self.dtype)

    return bound_call


# ----------------------------------------------------------------------------- products


def _laid_out(matrix: Tensor) -> tuple[Tensor, bool]:
    """The matrix as it is in memory, and whether that is the transpose."""
    transposed = matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0] > 1
    return (matrix.t(), True) if transposed else (matrix, False)


def _product(run: Run, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    A, transa = _laid_out(right)
    B, transb = _laid_out(left)
    product: Tensor = run(A, B, transa=transa, transb=transb, **options)[0]
    return product


def _matrices(left: Tensor, right: Tensor) -> None:
    _same_dtype(left, right)
    _full(left, right)
    fitting = left.ndim == right.ndim == 2 and left.shape[1] == right.shape[0]
    _need(fitting, "not two matrices with matching dimensions")


def _mm(self: Tensor, mat2: Tensor) -> BoundCall:
    _matrices(self, mat2)
    return lambda run: _product(run, self, mat2)


def _addmm(
    self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> BoundCall:
    _matrices(mat1, mat2)
    _same_dtype(mat1, self)
    _need(alpha != 0, "alpha is 0, which ignores the product even if it is NaN")
    factors = {"alpha": float(alpha)} if alpha != 1 else {}

    def bound_call(run: Run) -> Tensor:
        if beta == 0:
            return _product(run, mat1, mat2, **factors)
        if beta == 1 and self.shape == mat2.shape[1:]:
            return _product(run, mat1, mat2, bias=self, **factors)
        shape = (mat1.shape[0], mat2.shape[1])
        # Accumulates in place, so into a copy of the added tensor.
        total = self.expand(shape).clone(memory_format=torch.contiguous_format)
        _product(run, mat1, mat2, accumulate_into=total, beta=float(beta), **factors)
        return total

    return bound_call


def _bmm(self: Tensor, mat2: Tensor) -> BoundCall:
    _same_dtype(self, mat2)
    _full(self, mat2)
    fitting = (
        self.ndim == mat2.ndim == 3
        and self.shape[0] == mat2.shape[0]
        and self.shape[2] == mat2.shape[1]
    )
    _need(fitting, "not two batches of matrices with matching dimensions")

    def bound_call(run: Run) -> Tensor:
        output: Tensor = run(list(mat2.unbind()), list(self.unbind()), transa=False)[0]
        return output.view(self.shape[0], self.shape[1], mat2.shape[2])

    return bound_call


# -------------------------------------------------------------------------------- norms


def _one_dimension(input: Tensor, normalized_shape: Sequence[int], *others: Tensor | None) -> None:
    _full(input)
    _same_dtype(input, *others)
    last = len(normalized_shape) == 1 and input.shape[-1:] == tuple(normalized_shape)
    _need(last, "normalized_shape is not the last dimension alone")


def _or_ones(weight: Tensor | None, like: Tensor) -> Tensor:
    return like.new_ones(like.shape[-1]) if weight is None else weight


def _statistics_shape(input: Tensor) -> tuple[int, ...]:
    return (*input.shape[:-1], 1)


def _statistics_dtype(input: Tensor) -> torch.dtype:
    """The dtype in which ATen saves a layer norm's statistics; on a CPU that of the input."""
    if input.device.type == "cpu":
        return input.dtype
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _math_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> BoundCall:
    _one_dimension(input, normalized_shape, weight, bias)

    def bound_call(run: Run) -> tuple[Tensor, Tensor, Tensor]:
        output, mu, rsigma = run(input, _or_ones(weight, input), bias, eps)
        shape, dtype = _statistics_shape(input), _statistics_dtype(input)
        return output, mu.view(shape).to(dtype), rsigma.view(shape).to(dtype)

    return bound_call


def _layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> BoundCall:
    _one_dimension(input, normalized_shape, grad_out, weight, bias)

    def bound_call(run: Run) -> tuple[Tensor | None, ...]:
        mu, rsigma = (it.reshape(-1).to(_math_dtype(input)) for it in (mean, rstd))
        gradients = run(grad_out, input, mu, rsigma, _or_ones(weight, input))
        return _wanted(gradients, output_mask)

    return bound_call


def _wanted(gradients: Sequence[Tensor], output_mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(it if wanted else None for it, wanted in zip(gradients, output_mask, strict=True))


def _eps(input: Tensor, eps: float | None) -> float:
    return torch.finfo(_math_dtype(input)).eps if eps is None else eps


def _fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> BoundCall:
    _one_dimension(input, normalized_shape, weight)

    def bound_call(run: Run) -> tuple[Tensor, Tensor]:
        output, rsigma = run(input, _or_ones(weight, input), _eps(input, eps))
        return output, rsigma.view(_statistics_shape(input))

    return bound_call


def _fused_rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> BoundCall:
    _one_dimension(input, normalized_shape, grad_out, weight)

    def bound_call(run: Run) -> tuple[Tensor | None, ...]:
        rsigma = rstd.reshape(-1).to(_math_dtype(input))
        return _wanted(run(grad_out, input, rsigma, _or_ones(weight, input)), output_mask)

    return bound_call


PARTS: Final = {
    "gelu": Bridge("gelu", _gelu),
    "gelu_backward": Bridge("dgelu", _gelu_backward),
    "silu": Bridge("silu", _unary),
    "silu_backward": Bridge("dsilu", _unary_backward),
    "relu": Bridge("relu", _unary),
    "threshold_backward": Bridge("drelu", _threshold_backward),
    "_softmax": Bridge("scaled_softmax_forward", _softmax),
    "_softmax_backward_data": Bridge("scaled_softmax_backward", _softmax_backward),
    "_log_softmax": Bridge("cross_entropy_fwd", _log_softmax),
    "mm": Bridge("generic_gemm", _mm),
    "addmm": Bridge("generic_gemm", _addmm),
    "bmm": Bridge("te_general_grouped_gemm", _bmm),
    "native_layer_norm": Bridge("layernorm_fwd", _layer_norm),
    "native_layer_norm_backward": Bridge("layernorm_bwd", _layer_norm_backward),
    "_fused_rms_norm": Bridge("rmsnorm_fwd", _fused_rms_norm),
    "_fused_rms_norm_backward": Bridge("rmsnorm_bwd", _fused_rms_norm_backward),
}
"""Bridges by ATen operator, for operators that devices implement."""


# ------------------------------------------------------------------------------- wholes


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> BoundCall:
    _one_dimension(input, normalized_shape, weight)
    _need(order(input) not in _CHANNELS_LAST, "the result must be channels_last, like the input")
    return lambda run: run(input, _or_ones(weight, input), _eps(input, eps))[0]


_CHANNELS_LAST: Final = ((0, 2, 3, 1), (0, 2, 3, 4, 1))


_NONE, _MEAN, _SUM = 0, 1, 2
"""ATen's numbers for the reduction of the losses."""


def _cross_entropy(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> BoundCall:
    _full(self)
    _need(weight is None, "the contract's cross entropy has no class weights")
    _need(1 <= self.ndim <= 2, "the classes are not the last dimension")
    _need(target.dtype == torch.int64, "the targets are not class indices")
    _need(target.shape == self.shape[:-1], "the targets do not match the rows")
    if self.device.type == "cpu":  # torch checks targets here too, and no device is waited for
        wrong = (target < 0) | (target >= self.shape[-1])
        _need(
            not (wrong & (target != ignore_index)).any(), "a target is out of range: an IndexError"
        )

    def bound_call(run: Run) -> Tensor:
        options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
        losses: Tensor = run(_near_zero(self), target, **options)[0]
        if reduction == _NONE:
            return losses.to(self.dtype)
        total = losses.sum()
        if reduction == _MEAN:
            total = total / (target != ignore_index).sum()
        return total.to(self.dtype)

    return bound_call


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> BoundCall:
    _full(query, key, value)
    _same_dtype(query, key, value)
    _need(query.ndim == key.ndim == value.ndim == 4, "not [batch, heads, length, width]")
    _need(enable_gqa or query.shape[1] == key.shape[1], "query and key heads differ in number")
    _need(not (is_causal and attn_mask is not None), "attn_mask and is_causal are both given")
    _need(dropout_p == 0 or _can_draw(query), "no random numbers while a CUDA graph is captured")
    if attn_mask is not None:
        _need(
            attn_mask.dtype in (torch.bool, torch.float32, query.dtype),
            f"attn_mask is {attn_mask.dtype}, and query is {query.dtype}",
        )
        _need(attn_mask.ndim >= 2, "attn_mask has fewer than two dimensions")

    def bound_call(run: Run) -> Tensor:
        options: dict[str, Any] = {"attn_mask_type": "causal"} if is_causal else {}
        if scale is not None:
            options["scale"] = scale
        if dropout_p:
            options |= {"dropout_p": dropout_p, **_drawn()}
        heads_third = [it.transpose(1, 2) for it in (query, key, value)]
        bias = None if attn_mask is None else _as_bias(attn_mask, query)
        out: Tensor = run(*heads_third, bias, None, **options)[0]
        fused = _fused_in_torch(query, key, value, attn_mask, dropout_p)
        return laid_out(out.transpose(1, 2), order(query) if fused else None)

    return bound_call


def _fused_in_torch(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> bool:
    """Whether torch would run a fused kernel, whose output has the query's memory layout."""
    if any(it.stride(-1) != 1 for it in (query, key, value)):
        return False
    if query.device.type != "cpu":
        return True
    mask_needs_grad = attn_mask is not None and attn_mask.requires_grad
    return query.shape[-1] == value.shape[-1] and not (dropout_p or mask_needs_grad)


def _as_bias(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        mask = zeros.masked_fill(~mask, -math.inf)
    return mask[(None,) * (4 - mask.ndim)]


def _dropout(input: Tensor, p: float, train: bool) -> BoundCall:
    _full(input)
    _need(train and 0 < p < 1, "not random: train is false, or p is 0 or 1")
    _need(_can_draw(input), "no random numbers while a CUDA graph is captured")

    def bound_call(run: Run) -> Tensor:
        return in_memory_order(lambda it: run(it, p, **_drawn())[0], input, by=order(input))

    return bound_call


def _can_draw(tensor: Tensor) -> bool:
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _drawn() -> dict[str, int]:
    """A seed from torch's generator on the host, which ``torch.manual_seed`` sets."""
    return {"seed": int(torch.randint(2**62, (), device="cpu"))}


WHOLE: Final = {
    "rms_norm": Bridge("rmsnorm_fwd", _rms_norm),
    "cross_entropy_loss": Bridge("cross_entropy_fwd", _cross_entropy),
    "scaled_dot_product_attention": Bridge("fused_attn_fwd", _attention),
    "dropout": Bridge("dropout_fwd", _dropout),
}
"""Bridges of torch's composites."""

_LOWER: Final = frozenset({"scaled_dot_product_attention"})
"""The composites that are cast to autocast's dtype here; under autocast torch gets the others."""


def autocast(name: str, args: tuple[Any, ...], device: str) -> tuple[Any, ...] | None:
    """A composite's arguments cast as by autocast, which is on; None if that is left to torch."""
    if name not in _LOWER:
        return None
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        it.to(dtype)
        if isinstance(it, Tensor) and it.dtype.itemsize <= 4 and it.is_floating_point()
        else it
        for it in args
    )

"""Bridges from FlagGems' functions to contracts: how arguments are converted, for each operator.

A bridge states which of a folder's functions it needs. If a contract has several bridges, the
first whose functions the folder has is used. A contract without a bridge is not served;
:data:`UNBRIDGED` says why for functions that look as if they could serve one.

A function that serves a contract gets checked arguments, contiguous, and copies of those that it
writes in place. Options that it does not have are declined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from transformer_engine_fl import ops
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.vendors.packages.bridge import Bridge
from transformer_engine_fl.vendors.taking import (
    Taker,
    differentiating,
    normal_tensor,
    writable_copy,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BRIDGES", "UNBRIDGED"]

_TAKER: Final = Taker("FlagGems' kernels")


# --------------------------------------------------------------------------- activations


def _unit(contract: Any, **options: Any) -> Callable[[Any], Callable[..., Any]]:
    """A forward by a function of one tensor."""

    def make(unit: Any) -> Callable[..., Any]:
        def forward(input: Tensor) -> Tensor:
            import torch

            contract.check(input)
            (x,) = _TAKER.dense(contract.name, input=input)
            with torch.no_grad():
                output: Tensor = unit(x, **options)
            return output

        return forward

    return make


def _unit_backward(contract: Any, **options: Any) -> Callable[[Any], Callable[..., Any]]:
    """A backward by a function that takes, as in torch, the gradient and then the input."""

    def make(unit: Any) -> Callable[..., Any]:
        def backward(grad: Tensor, fwd_input: Tensor) -> Tensor:
            import torch

            contract.check(grad, fwd_input)
            dy, x = _TAKER.dense(contract.name, grad=grad, fwd_input=fwd_input)
            _TAKER.same_dtype(contract.name, grad=dy, fwd_input=x)
            with torch.no_grad():
                output: Tensor = unit(dy, x, **options)
            return output

        return backward

    return make


def _differentiated(
    contract: Any, parts: int, *given: Any, **options: Any
) -> Callable[[Any], Callable[..., Any]]:
    """A backward that differentiates a function of one tensor, or of its two halves."""

    def make(unit: Any) -> Callable[..., Any]:
        def backward(grad: Tensor, fwd_input: Tensor) -> Tensor:
            import torch

            contract.check(grad, fwd_input)
            dy, x = _TAKER.dense(contract.name, grad=grad, fwd_input=fwd_input)
            _TAKER.same_dtype(contract.name, grad=dy, fwd_input=x)
            with differentiating():
                halves = x.chunk(parts, -1) if parts > 1 else (x,)
                leaves = [writable_copy(half).requires_grad_() for half in halves]
                output = unit(*leaves, *given, **options)
                gradients = torch.autograd.grad(output, leaves, normal_tensor(dy))
            return torch.cat(gradients, -1).detach() if parts > 1 else gradients[0].detach()

        return backward

    return make


def _halves(contract: Any, *given: Any) -> Callable[[Any], Callable[..., Any]]:
    """A forward by a gated unit that takes the two halves as two tensors."""

    def make(unit: Any) -> Callable[..., Any]:
        def forward(input: Tensor) -> Tensor:
            import torch

            contract.check(input)
            (x,) = _TAKER.strided(contract.name, input=input)
            with torch.no_grad():
                output: Tensor = unit(*(half.contiguous() for half in x.chunk(2, -1)), *given)
            return output

        return forward

    return make


# ------------------------------------------------------------------------- normalization


def _rmsnorm_fwd(norm: Any) -> Callable[..., Any]:
    """A forward by a function that also returns the statistics."""

    def rmsnorm_fwd(input: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        import torch

        ops.rmsnorm_fwd.check(input, weight, eps)
        x, gamma = _TAKER.dense("rmsnorm_fwd", input=input, weight=weight)
        with torch.no_grad():
            output, rsigma = norm(x, gamma.shape, gamma, eps)
        return output, _statistic("rmsnorm_fwd", rsigma)

    return rmsnorm_fwd


def _rmsnorm_alone(norm: Any) -> Callable[..., Any]:
    """A forward by a function that does not return the statistics: they are computed here."""

    def rmsnorm_fwd(input: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
        import torch

        ops.rmsnorm_fwd.check(input, weight, eps)
        x, gamma = _TAKER.dense("rmsnorm_fwd", input=input, weight=weight)
        with torch.no_grad():
            output = norm(x, gamma.shape, gamma, eps)
            rsigma = x.float().square().mean(-1).add_(eps).rsqrt_()
        return output, rsigma.reshape(-1)

    return rmsnorm_fwd


def _rmsnorm_bwd(norm: Any) -> Callable[..., Any]:
    def rmsnorm_bwd(dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        ops.rmsnorm_bwd.check(dy, x, rsigma, gamma)
        # The function returns the gradient of the weight in the input's dtype.
        _TAKER.same_dtype("rmsnorm_bwd", dy=dy, x=x, gamma=gamma)
        g, rows, scale, weight = _TAKER.dense("rmsnorm_bwd", dy=dy, x=x, rsigma=rsigma, gamma=gamma)
        with torch.no_grad():
            dx, dgamma = norm(g, rows, scale, weight.shape, weight)
        return dx.view(x.shape), dgamma

    return rmsnorm_bwd


def _rmsnorm_fwd_add(norm: Any) -> Callable[..., Any]:
    def rmsnorm_fwd_add(
        input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        name = "rmsnorm_fwd_add"
        ops.rmsnorm_fwd_add.check(input, residual, weight, eps)
        _TAKER.same_dtype(name, input=input, residual=residual)
        x, added, gamma = _TAKER.strided(name, input=input, residual=residual, weight=weight)
        with torch.no_grad():
            x, added = writable_copy(x), writable_copy(added)  # both are written
            output, summed = norm(x, added, gamma.shape, gamma.contiguous(), eps)
            rsigma = summed.float().square().mean(-1).add_(eps).rsqrt_()
        return output, summed, rsigma.reshape(-1)

    return rmsnorm_fwd_add


def _layernorm_fwd(norm: Any) -> Callable[..., Any]:
    def layernorm_fwd(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        ops.layernorm_fwd.check(input, weight, bias, eps)
        x, gamma = _TAKER.dense("layernorm_fwd", input=input, weight=weight)
        beta = None if bias is None else _TAKER.dense("layernorm_fwd", bias=bias)[0]
        with torch.no_grad():
            output, mean, rstd = norm(x, gamma.shape, gamma, beta, eps)
            if mean.dtype is not torch.float32 or rstd.dtype is not torch.float32:
                # FlagGems rounds them to the input's dtype; the contract's are float32.
                variance, mean = torch.var_mean(x.float(), -1, correction=0)
                rstd = variance.add_(eps).rsqrt_()
        return output, mean.reshape(-1), rstd.reshape(-1)

    return layernorm_fwd


def _layernorm_bwd(norm: Any) -> Callable[..., Any]:
    def layernorm_bwd(
        dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        name = "layernorm_bwd"
        ops.layernorm_bwd.check(dy, x, mu, rsigma, gamma)
        _TAKER.same_dtype(name, dy=dy, x=x)
        g, rows, mean, rstd, weight = _TAKER.dense(
            name, dy=dy, x=x, mu=mu, rsigma=rsigma, gamma=gamma
        )
        with torch.no_grad():  # the function takes the first dimension as the rows
            g, rows = (it.view(-1, it.shape[-1]) for it in (g, rows))
            dx, dgamma, dbeta = norm(
                g, rows, weight.shape, mean, rstd, weight, torch.zeros_like(weight), [True] * 3
            )
        return dx.view(x.shape), dgamma, dbeta

    return layernorm_bwd


def _statistic(op: str, value: Tensor) -> Tensor:
    import torch

    if value.dtype is not torch.float32:
        raise NotSupportedError(f"{op}: it returns its statistics in {value.dtype}, not float32")
    return value.reshape(-1)


# ------------------------------------------------------------------------------- softmax


def _softmax(function: Any) -> Callable[..., Any]:
    def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
        import torch

        ops.scaled_softmax_forward.check(input, scale)
        _unscaled("scaled_softmax_forward", scale)
        (x,) = _TAKER.dense("scaled_softmax_forward", input=input)
        with torch.no_grad():
            output: Tensor = function(x, -1, False)
        return output

    return scaled_softmax_forward


def _softmax_backward(function: Any) -> Callable[..., Any]:
    def scaled_softmax_backward(
        output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
    ) -> Tensor:
        import torch

        name = "scaled_softmax_backward"
        ops.scaled_softmax_backward.check(output_grad, softmax_output, scale)
        _unscaled(name, scale)
        _TAKER.same_dtype(name, output_grad=output_grad, softmax_output=softmax_output)
        dy, y = _TAKER.dense(name, output_grad=output_grad, softmax_output=softmax_output)
        with torch.no_grad():
            output: Tensor = function(dy, y, -1, y.dtype)
        return output

    return scaled_softmax_backward


def _unscaled(op: str, scale: float) -> None:
    if scale != 1.0:
        raise NotSupportedError(f"{op}: FlagGems' softmax has no scale")


# ------------------------------------------------------------------------------ products


def _generic_gemm(mm: Any) -> Callable[..., Any]:
    def generic_gemm(
        A: Tensor, B: Tensor, *, transa: bool = True, transb: bool = False
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        import torch

        name = "generic_gemm"
        ops.generic_gemm.check(A, B, transa=transa, transb=transb)
        _TAKER.same_dtype(name, A=A, B=B)
        weight, x = _TAKER.dense(name, A=A, B=B)
        weight, x = (it.view(-1, it.shape[-1]) for it in (weight, x))
        shape: Any = ops.generic_gemm.shapes(A, B, transa=transa, transb=transb)[0]
        with torch.no_grad():
            product = mm(x.t() if transb else x, weight.t() if transa else weight)
        return product.view(shape.shape), None, None

    return generic_gemm


BRIDGES: Final[dict[str, tuple[Bridge, ...]]] = {
    "gelu": (Bridge(("gelu",), _unit(ops.gelu, approximate="tanh"), "A, approximate="),),
    "dgelu": (
        Bridge(
            ("gelu_backward",), _unit_backward(ops.dgelu, approximate="tanh"), "dy, x, approximate="
        ),
        Bridge(
            ("gelu",), _differentiated(ops.dgelu, 1, approximate="tanh"), "A, approximate=", True
        ),
    ),
    "silu": (Bridge(("silu",), _unit(ops.silu), "A"),),
    "dsilu": (
        Bridge(("silu_backward",), _unit_backward(ops.dsilu), "dy, x"),
        Bridge(("silu",), _differentiated(ops.dsilu, 1), "A", True),
    ),
    "relu": (Bridge(("relu",), _unit(ops.relu), "A"),),
    "swiglu": (
        Bridge(("swiglu",), _unit(ops.swiglu), "x"),
        Bridge(("silu_and_mul",), _halves(ops.swiglu), "A, B"),
    ),
    "dswiglu": (
        Bridge(("dswiglu",), _unit_backward(ops.dswiglu), "dy, x"),
        Bridge(("silu_and_mul",), _differentiated(ops.dswiglu, 2), "A, B", True),
    ),
    "geglu": (
        Bridge(("geglu",), _unit(ops.geglu), "x"),
        Bridge(("gelu_and_mul",), _halves(ops.geglu, "tanh"), "A, B, approximate"),
    ),
    "dgeglu": (
        Bridge(("dgeglu",), _unit_backward(ops.dgeglu), "dy, x"),
        Bridge(
            ("gelu_and_mul",), _differentiated(ops.dgeglu, 2, "tanh"), "A, B, approximate", True
        ),
    ),
    "reglu": (Bridge(("reglu",), _unit(ops.reglu), "x"),),
    "dreglu": (Bridge(("dreglu",), _unit_backward(ops.dreglu), "dy, x"),),
    "rmsnorm_fwd": (
        Bridge(("rms_norm_forward",), _rmsnorm_fwd, "x, normalized_shape, weight, eps"),
        Bridge(("rms_norm",), _rmsnorm_alone, "x, normalized_shape, weight, eps"),
    ),
    "rmsnorm_bwd": (
        Bridge(("rms_norm_backward",), _rmsnorm_bwd, "dy, x, inv_rms, normalized_shape, weight"),
    ),
    "rmsnorm_fwd_add": (
        Bridge(
            ("fused_add_rms_norm",), _rmsnorm_fwd_add, "x, residual, normalized_shape, weight, eps"
        ),
    ),
    "layernorm_fwd": (
        Bridge(("layer_norm",), _layernorm_fwd, "input, normalized_shape, weight, bias, eps"),
    ),
    "layernorm_bwd": (
        Bridge(
            ("layer_norm_backward",),
            _layernorm_bwd,
            "grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask",
        ),
    ),
    "scaled_softmax_forward": (Bridge(("softmax",), _softmax, "self, dim, half_to_float"),),
    "scaled_softmax_backward": (
        Bridge(("softmax_backward",), _softmax_backward, "grad_output, output, dim, input_dtype"),
    ),
    "generic_gemm": (Bridge(("mm",), _generic_gemm, "a, b"),),
}
"""The bridges of each operator, the best first."""

UNBRIDGED: Final = {
    "apply_rotary_pos_emb": "has one angle for both features of a pair; fused_rope_forward has two",
    "dropout": "draws other random numbers than dropout_fwd; its mask has one byte per element",
    "cross_entropy_loss": "returns no log-sum-exp, which the loss does not determine where the "
    "target's logit is -inf",
    "topk_softmax": "returns weights and indices, not the probabilities of every expert",
    "scaled_dot_product_attention": "returns no log-sum-exp, which fused_attn_bwd needs",
}
"""Functions that serve no contract, or not the contract they seem to match, with the reasons."""

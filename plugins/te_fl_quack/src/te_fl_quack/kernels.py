"""quack's functions under the contracts' signatures.

Each function checks the arguments against the contract, converts them to what quack's kernels
expect (contiguous rows whose start is aligned for wide accesses), and calls it. Options that quack
does not have are declined, and so are rows for which it has no kernel: widths that are known here
to fail, and those for which compilation turns out to fail.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from te_fl_quack import OPERATORS
from transformer_engine_fl import NotSupportedError, ops
from transformer_engine_fl.vendors.taking import Taker

__all__ = list(OPERATORS)

ALIGNMENT = 16
"""Bytes of the widest access, which is the only one that the softmax uses."""

NARROWEST_COPY = 4
"""Bytes of the narrowest asynchronous copy from global to shared memory, past the registers."""

WIDEST_GRADIENT = 128 * 1024
"""The widest float32 row, in elements, for which a norm's backward has enough shared memory."""

NARROW = (torch.float32, torch.bfloat16, torch.float16)

TAKER = Taker("quack's kernels", {"cuda"})


def _module(name: str) -> Any:
    return importlib.import_module(f"quack.{name}")  # some are hidden by functions of their name


RMSNORM, SOFTMAX = _module("rmsnorm"), _module("softmax")
COMPILER = importlib.import_module("cutlass.base_dsl.common")  # has the compiler's errors

_uncompiled: set[tuple[Any, ...]] = set()
"""(operator, width, dtypes) that failed to compile; not tried again, as that takes seconds."""


def _prepared(op: str, **tensors: Tensor) -> list[Tensor]:
    """The tensors, contiguous and aligned; declines dtypes that quack does not have."""
    dense = TAKER.dense(op, **tensors)
    for name, tensor in zip(tensors, dense, strict=True):
        if tensor.dtype not in NARROW:
            raise NotSupportedError(
                f"{op}: {name!r} is {tensor.dtype}, which quack does not support"
            )
    return [it if it.data_ptr() % ALIGNMENT == 0 else it.clone() for it in dense]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


@contextlib.contextmanager
def _launching(op: str, first: Tensor, *others: Tensor | torch.dtype | None) -> Iterator[None]:
    """Launch on the tensors' device; declines calls whose kernel does not compile.

    Later calls with the same width and dtypes are declined at once. Other widths and dtypes have
    kernels of their own, so this must not count as a failure of the operator.
    """
    dtypes = (it.dtype if isinstance(it, Tensor) else it for it in (first, *others))
    kernel = (op, first.shape[-1], *dtypes)
    declined = NotSupportedError(
        f"{op}: quack does not compile for {first.dtype}, {first.shape[-1]} wide"
    )
    if kernel in _uncompiled:
        raise declined
    try:
        # Kernels are launched on the current device, so make it the tensors' device.
        with torch.cuda.device(first.get_device()):
            yield
    except COMPILER.DSLCudaRuntimeError:
        raise
    except COMPILER.DSLBaseError as error:
        _uncompiled.add(kernel)
        raise declined from error


def _copied_past_registers(op: str, **tensors: Tensor) -> None:
    """Decline rows whose width is not a multiple of the narrowest asynchronous copy."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] * tensor.element_size() % NARROWEST_COPY:
            raise NotSupportedError(
                f"{op}: quack copies at least {NARROWEST_COPY} bytes at a time; {name!r} has "
                f"rows of {tensor.shape[-1]} elements of {tensor.dtype}"
            )


def _gradient_fits(op: str, x: Tensor) -> None:
    if x.element_size() >= 4 and x.shape[-1] > WIDEST_GRADIENT:
        raise NotSupportedError(
            f"{op}: quack has shared memory for rows of at most {WIDEST_GRADIENT} elements of "
            f"{x.dtype}; got {x.shape[-1]}"
        )


def _whole_accesses(op: str, tensor: Tensor) -> None:
    """Decline rows whose width is not a multiple of the widest access."""
    if tensor.shape[-1] * tensor.element_size() % ALIGNMENT:
        raise NotSupportedError(
            f"{op}: quack's softmax needs rows of a multiple of {ALIGNMENT} bytes; got "
            f"{tensor.shape[-1]} elements of {tensor.dtype}"
        )


# ------------------------------------------------------------------------- normalization


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_fwd`` of the contract."""
    op = "rmsnorm_fwd"
    ops.rmsnorm_fwd.check(
        input, weight, eps, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )
    x, w = _prepared(op, input=input, weight=weight)
    if out_dtype not in (None, *NARROW):
        raise NotSupportedError(f"{op}: quack does not write {out_dtype}")
    _copied_past_registers(op, input=x)
    with _launching(op, x, w, out_dtype):
        output, _, rsigma = RMSNORM.rmsnorm_fwd(
            _rows(x),
            w,
            out_dtype=out_dtype,
            eps=eps,
            store_rstd=True,
            weight_offset=float(zero_centered_gamma),
        )
    return output.view(x.shape), rsigma


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_bwd`` of the contract."""
    op = "rmsnorm_bwd"
    ops.rmsnorm_bwd.check(dy, x, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    dy, x, rsigma, gamma = _prepared(op, dy=dy, x=x, rsigma=rsigma, gamma=gamma)
    _copied_past_registers(op, dy=dy, x=x)
    _gradient_fits(op, x)
    with _launching(op, x, dy, gamma):
        dx, dgamma, *_ = RMSNORM.rmsnorm_bwd(
            _rows(x), gamma, _rows(dy), rsigma, weight_offset=float(zero_centered_gamma)
        )
    return dx.view(x.shape), dgamma


def rmsnorm_fwd_add(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``rmsnorm_fwd_add`` of the contract."""
    op = "rmsnorm_fwd_add"
    ops.rmsnorm_fwd_add.check(
        input,
        residual,
        weight,
        eps,
        zero_centered_gamma=zero_centered_gamma,
        out_dtype=out_dtype,
    )
    x, add, w = _prepared(op, input=input, residual=residual, weight=weight)
    if out_dtype not in (None, *NARROW):
        raise NotSupportedError(f"{op}: quack does not write {out_dtype}")
    _copied_past_registers(op, input=x, residual=add)
    with _launching(op, x, add, w, out_dtype):
        output, total, rsigma = RMSNORM.rmsnorm_fwd(
            _rows(x),
            w,
            residual=_rows(add),
            out_dtype=out_dtype,
            eps=eps,
            store_rstd=True,
            weight_offset=float(zero_centered_gamma),
        )
    return output.view(x.shape), total.view(x.shape), rsigma


def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    *,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rmsnorm_bwd_add`` of the contract."""
    op = "rmsnorm_bwd_add"
    ops.rmsnorm_bwd_add.check(dz, x, add, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
    TAKER.same_dtype(op, x=x, add=add)  # with different dtypes quack returns two gradients
    dz, x, add, rsigma, gamma = _prepared(op, dz=dz, x=x, add=add, rsigma=rsigma, gamma=gamma)
    _copied_past_registers(op, dz=dz, x=x)
    _gradient_fits(op, x)
    with _launching(op, x, dz, gamma):
        dx, dgamma, *_ = RMSNORM.rmsnorm_bwd(
            _rows(x),
            gamma,
            _rows(dz),
            rsigma,
            dresidual_out=_rows(add),
            weight_offset=float(zero_centered_gamma),
        )
    return dx.view(x.shape), dgamma


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """``layernorm_fwd`` of the contract."""
    op = "layernorm_fwd"
    ops.layernorm_fwd.check(input, weight, bias, eps)
    x, w = _prepared(op, input=input, weight=weight)
    b = None if bias is None else _prepared(op, bias=bias)[0].float()
    _copied_past_registers(op, input=x)
    with _launching(op, x, b):
        output, rsigma, mu = RMSNORM.layernorm_fwd(
            _rows(x), w.float(), b, eps, return_rstd=True, return_mean=True
        )
    return output.view(x.shape), mu, rsigma


def layernorm_bwd(
    dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``layernorm_bwd`` of the contract."""
    op = "layernorm_bwd"
    ops.layernorm_bwd.check(dy, x, mu, rsigma, gamma)
    dy, x, mu, rsigma, gamma = _prepared(op, dy=dy, x=x, mu=mu, rsigma=rsigma, gamma=gamma)
    _copied_past_registers(op, dy=dy, x=x)
    _gradient_fits(op, x)
    with _launching(op, x, dy, gamma):
        dx, dgamma, dbeta = RMSNORM.layernorm_bwd(_rows(x), gamma, _rows(dy), rsigma, mu)
    return dx.view(x.shape), dgamma, dbeta


# ------------------------------------------------------------------------------- softmax


def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """``scaled_softmax_forward`` of the contract, with a scale of 1."""
    op = "scaled_softmax_forward"
    ops.scaled_softmax_forward.check(input, scale)
    _no_scale(op, scale)
    (x,) = _prepared(op, input=input)
    _whole_accesses(op, x)
    with _launching(op, x):
        output: Tensor = SOFTMAX.softmax_fwd(_rows(x))
    return output.view(x.shape)


def scaled_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """``scaled_softmax_backward`` of the contract, with a scale of 1."""
    op = "scaled_softmax_backward"
    ops.scaled_softmax_backward.check(output_grad, softmax_output, scale)
    _no_scale(op, scale)
    TAKER.same_dtype(op, output_grad=output_grad, softmax_output=softmax_output)
    dy, y = _prepared(op, output_grad=output_grad, softmax_output=softmax_output)
    _whole_accesses(op, y)
    with _launching(op, y):
        dx: Tensor = SOFTMAX.softmax_bwd(_rows(dy), _rows(y))
    return dx.view(y.shape)


def _no_scale(op: str, scale: float) -> None:
    if scale != 1.0:
        raise NotSupportedError(f"{op}: quack's softmax has no scale")

"""Optimizer steps in plain PyTorch, tensor by tensor: the definitions.

Nothing is read on the host: a flag chooses between old and new values on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.reference._values import as_written
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops._rounding import power_of_two
from transformer_engine_fl.ops.optimizer import MX_MAX

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

Number = float | Tensor
"""A number; on the device, a tensor without dimensions."""


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in its math dtype."""
    return tensor.to(math_dtype(tensor.dtype))


def _number(value: Number, like: Tensor) -> Number:
    """The number for arithmetic with ``like``, whose dtype it must not widen."""
    return value.reshape(()).to(like.dtype) if isinstance(value, Tensor) else value


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes values into tensors, unless a flag is set.

    Attributes:
        skip: bool tensor without dimensions; None if there is no flag.
    """

    skip: Tensor | None

    @classmethod
    def honouring(cls, noop_flag: Tensor | None) -> _Writer:
        """A writer that does nothing while the flag is not 0."""
        return cls(None if noop_flag is None else noop_flag.reshape(()) != 0)

    def write(self, place: Tensor, value: Tensor) -> None:
        """Write the value, rounded to the dtype of the place."""
        value = value.to(place.dtype)
        place.copy_(value if self.skip is None else torch.where(self.skip, place, value))


# ------------------------------------------------------------------- scaling and norms


def _raise_flag(noop_flag: Tensor | None, values: list[Tensor]) -> None:
    """Set the flag if a value is not finite."""
    if noop_flag is not None and values:
        finite = torch.stack([it.isfinite().all() for it in values]).all()
        noop_flag.masked_fill_(~finite, 1)


def _scale(
    inputs: list[Tensor], outputs: list[Tensor], scale: Number, noop_flag: Tensor | None
) -> None:
    _raise_flag(noop_flag, inputs)
    for tensor, output in zip(inputs, outputs, strict=True):
        x = _wide(tensor)
        output.copy_(x * _number(scale, x))


@as_written
def multi_tensor_scale(
    inputs: list[Tensor],
    outputs: list[Tensor],
    scale: float,
    *,
    noop_flag: Tensor | None = None,
) -> None:
    """Each output is its input times a number."""
    ops.multi_tensor_scale.check(inputs, outputs, scale, noop_flag=noop_flag)
    _scale(inputs, outputs, scale, noop_flag)


@as_written
def multi_tensor_scale_tensor(
    inputs: list[Tensor],
    outputs: list[Tensor],
    scale: Tensor,
    *,
    noop_flag: Tensor | None = None,
) -> None:
    """Each output is its input times a number on the device."""
    ops.multi_tensor_scale_tensor.check(inputs, outputs, scale, noop_flag=noop_flag)
    _scale(inputs, outputs, scale, noop_flag)


def _norms(
    inputs: list[Tensor],
    factor: Number,
    per_tensor: bool,
    noop_flag: Tensor | None,
    device: torch.device | None,
) -> tuple[Tensor, Tensor | None]:
    """The norm of all inputs times the factor, and of each; on ``device`` without inputs."""
    dtype = torch.float64 if any(it.dtype == torch.float64 for it in inputs) else torch.float32
    sums = torch.empty(0, dtype=dtype, device=device)
    if inputs:
        wide = [it.to(dtype) for it in inputs]
        # torch sums pairwise; its norm adds one element after another, which loses digits.
        sums = torch.stack([(x * _number(factor, x)).square().sum() for x in wide])
    norm = sums.sum(0, keepdim=True).sqrt()
    _raise_flag(noop_flag, [norm])
    return norm, sums.sqrt() if per_tensor else None


@as_written
def multi_tensor_l2norm(
    inputs: list[Tensor], *, per_tensor: bool = False, noop_flag: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The Euclidean norm of all inputs."""
    ops.multi_tensor_l2norm.check(inputs, per_tensor=per_tensor, noop_flag=noop_flag)
    device = None if noop_flag is None else noop_flag.device
    return _norms(inputs, 1.0, per_tensor, noop_flag, device)


@as_written
def multi_tensor_unscale_l2norm(
    inputs: list[Tensor],
    inv_scale: Tensor,
    *,
    per_tensor: bool = False,
    noop_flag: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The Euclidean norm of all inputs times a number on the device."""
    ops.multi_tensor_unscale_l2norm.check(
        inputs, inv_scale, per_tensor=per_tensor, noop_flag=noop_flag
    )
    return _norms(inputs, inv_scale, per_tensor, noop_flag, inv_scale.device)


# --------------------------------------------------------------------------------- Adam


@dataclass(frozen=True, slots=True)
class _Adam:
    """The parameters of a step of Adam.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: the numbers of the formula.
        decoupled: AdamW's weight decay.
        step: the step of the bias correction; None for no correction.
        inv_scale: the gradients are multiplied by it first.
    """

    lr: Number
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int | Tensor | None
    inv_scale: Number = 1.0

    def correction(self, beta: float, like: Tensor) -> Number:
        """``1 - beta**step``."""
        if self.step is None:
            return 1.0
        if not isinstance(self.step, Tensor):
            return 1 - beta**self.step
        # Precise in float32 too; 1 - beta**step would lose digits for a beta near 1.
        step = self.step.reshape(()).to(like.dtype)
        return -torch.expm1(step * (math.log(beta) if beta else -math.inf))

    def after(self, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Parameter and moments after the step, all in the dtype of ``p``."""
        g, m, v = g.to(p.dtype) * _number(self.inv_scale, p), m.to(p.dtype), v.to(p.dtype)
        if not self.decoupled:
            g = g + self.weight_decay * p
        m = torch.lerp(m, g, 1 - self.beta1)  # loses less where m and g cancel
        v = self.beta2 * v + (1 - self.beta2) * g * g
        spread = (v / self.correction(self.beta2, p)).sqrt()
        update = m / self.correction(self.beta1, p) / (spread + self.eps)
        if self.decoupled:
            update = update + self.weight_decay * p
        return p - _number(self.lr, p) * update, m, v

    def steps(self, writer: _Writer, full: list[Tensor], *lists: list[Tensor]) -> Iterator[Tensor]:
        """Write the moments; yields each parameter after the step, in full.

        Args:
            writer: writes the moments.
            full: the parameters in full precision.
            lists: gradients, first and second moments.
        """
        for whole, grad, exp_avg, exp_avg_sq in zip(full, *lists, strict=True):
            after, m, v = self.after(grad, _wide(whole), exp_avg, exp_avg_sq)
            writer.write(exp_avg, m)
            writer.write(exp_avg_sq, v)
            yield after

    def step_all(
        self,
        writer: _Writer,
        params: list[Tensor],
        master_params: list[Tensor] | None,
        *lists: list[Tensor],
    ) -> None:
        """The step on parameters, or on masters, which are then rounded to the parameters."""
        full = params if master_params is None else master_params
        after = self.steps(writer, full, *lists)
        for param, whole, value in zip(params, full, after, strict=True):
            writer.write(whole, value)
            if whole is not param:
                writer.write(param, value)


@as_written
def multi_tensor_adam(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    lr: float,
    step: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    bias_correction: bool = True,
    master_params: list[Tensor] | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """A step of Adam."""
    ops.multi_tensor_adam.check(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr,
        step,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        bias_correction=bias_correction,
        master_params=master_params,
        noop_flag=noop_flag,
    )
    adam = _Adam(
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay,
        step if bias_correction else None,
    )
    writer = _Writer.honouring(noop_flag)
    adam.step_all(writer, params, master_params, grads, exp_avgs, exp_avg_sqs)


@as_written
def multi_tensor_adam_capturable(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    lr: Tensor,
    step: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    bias_correction: bool = True,
    inv_scale: Tensor | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """A step of Adam with its changing numbers on the device."""
    ops.multi_tensor_adam_capturable.check(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr,
        step,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        bias_correction=bias_correction,
        inv_scale=inv_scale,
        noop_flag=noop_flag,
    )
    adam = _Adam(
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay,
        step if bias_correction else None,
        1.0 if inv_scale is None else inv_scale,
    )
    writer = _Writer.honouring(noop_flag)
    adam.step_all(writer, params, None, grads, exp_avgs, exp_avg_sqs)


@as_written
def multi_tensor_adam_capturable_master(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_params: list[Tensor],
    lr: Tensor,
    step: Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    bias_correction: bool = True,
    inv_scale: Tensor | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """A step of Adam with its changing numbers on the device, on master parameters."""
    ops.multi_tensor_adam_capturable_master.check(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        master_params,
        lr,
        step,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        bias_correction=bias_correction,
        inv_scale=inv_scale,
        noop_flag=noop_flag,
    )
    adam = _Adam(
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay,
        step if bias_correction else None,
        1.0 if inv_scale is None else inv_scale,
    )
    writer = _Writer.honouring(noop_flag)
    adam.step_all(writer, params, master_params, grads, exp_avgs, exp_avg_sqs)


def _join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 from its bfloat16 rounding and its lower half."""
    low = remainder.to(torch.int32)
    high = param.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return (high << 16 | low & 0xFFFF).view(torch.float32)


def _split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32's rounding, as bfloat16, and its lower half, as int16."""
    # One NaN for all: the bits of others could become a number when rounded up.
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)
    low = bits << 16 >> 16  # with its sign
    high = (bits >> 16) + (low < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


@as_written
def multi_tensor_adam_param_remainder(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    param_remainders: list[Tensor],
    lr: float,
    step: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    bias_correction: bool = True,
    noop_flag: Tensor | None = None,
) -> None:
    """A step of Adam on masters in two halves."""
    ops.multi_tensor_adam_param_remainder.check(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        param_remainders,
        lr,
        step,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        bias_correction=bias_correction,
        noop_flag=noop_flag,
    )
    adam = _Adam(
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay,
        step if bias_correction else None,
    )
    writer = _Writer.honouring(noop_flag)
    masters = [_join(*halves) for halves in zip(params, param_remainders, strict=True)]
    after = adam.steps(writer, masters, grads, exp_avgs, exp_avg_sqs)
    for param, remainder, master in zip(params, param_remainders, after, strict=True):
        rounded, rest = _split(master)
        writer.write(param, rounded)
        writer.write(remainder, rest)


@as_written
def multi_tensor_adam_fp8(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_params: list[Tensor],
    scales: list[Tensor],
    amaxes: list[Tensor],
    scale_invs: list[Tensor],
    lr: float,
    step: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    bias_correction: bool = True,
    noop_flag: Tensor | None = None,
) -> None:
    """A step of Adam with float8 parameters."""
    ops.multi_tensor_adam_fp8.check(
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        master_params,
        scales,
        amaxes,
        scale_invs,
        lr,
        step,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        bias_correction=bias_correction,
        noop_flag=noop_flag,
    )
    adam = _Adam(
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled_weight_decay,
        step if bias_correction else None,
    )
    writer = _Writer.honouring(noop_flag)
    after = adam.steps(writer, master_params, grads, exp_avgs, exp_avg_sqs)
    places = zip(params, master_params, scales, amaxes, scale_invs, after, strict=True)
    for param, master, scale, amax, scale_inv, value in places:
        largest = torch.finfo(param.dtype).max
        writer.write(master, value)
        writer.write(param, (value * scale.reshape(())).clamp(-largest, largest))
        sizes = torch.where(value.isnan(), 0.0, value.abs()).flatten()
        writer.write(amax, torch.cat([amax, sizes]).amax(0, keepdim=True))
        writer.write(scale_inv, scale.reciprocal())


# ---------------------------------------------------------------------------------- SGD


@as_written
def multi_tensor_sgd(
    grads: list[Tensor],
    params: list[Tensor],
    momentum_buffers: list[Tensor],
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    *,
    nesterov: bool = False,
    first_run: bool = False,
    wd_after_momentum: bool = False,
    scale: float = 1.0,
    model_params: list[Tensor] | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """A step of stochastic gradient descent."""
    ops.multi_tensor_sgd.check(
        grads,
        params,
        momentum_buffers,
        lr,
        weight_decay,
        momentum,
        dampening,
        nesterov=nesterov,
        first_run=first_run,
        wd_after_momentum=wd_after_momentum,
        scale=scale,
        model_params=model_params,
        noop_flag=noop_flag,
    )
    writer = _Writer.honouring(noop_flag)
    for param, grad, buffer in zip(params, grads, momentum_buffers, strict=True):
        p = _wide(param)
        g = grad.to(p.dtype) * scale
        if not wd_after_momentum:
            g = g + weight_decay * p
        if momentum:
            b = g if first_run else momentum * buffer.to(p.dtype) + (1 - dampening) * g
            g = g + momentum * b if nesterov else b
            writer.write(buffer, b)
        if wd_after_momentum:
            g = g + weight_decay * p
        writer.write(param, p - lr * g)
    for param, copy in zip(params, model_params or [], strict=model_params is not None):
        writer.write(copy, param)


# ------------------------------------------------------------------------------- scales


@as_written
def multi_tensor_compute_scale_and_scale_inv(
    amaxes: list[Tensor],
    scales: list[Tensor],
    scale_invs: list[Tensor],
    max_fp8: float,
    *,
    force_pow_2_scales: bool = False,
    epsilon: float = 0.0,
    noop_flag: Tensor | None = None,
) -> None:
    """Scales of a float8 format."""
    ops.multi_tensor_compute_scale_and_scale_inv.check(
        amaxes,
        scales,
        scale_invs,
        max_fp8,
        force_pow_2_scales=force_pow_2_scales,
        epsilon=epsilon,
        noop_flag=noop_flag,
    )
    writer = _Writer.honouring(noop_flag)
    for amax, scale, scale_inv in zip(amaxes, scales, scale_invs, strict=True):
        raised = torch.where(amax < epsilon, epsilon, amax)
        usable = (raised != 0) & raised.isfinite()
        # torch divides a number by a tensor by way of the reciprocal, which rounds twice.
        factor = torch.where(usable, torch.full_like(raised, max_fp8) / raised, 1.0)
        factor = factor.clamp(max=torch.finfo(torch.float32).max)
        if force_pow_2_scales:
            _, exponent = torch.frexp(factor)
            factor = power_of_two(exponent - 1, factor.dtype)
        writer.write(scale, factor)
        writer.write(scale_inv, factor.reciprocal())


@as_written
def multi_tensor_compute_scale_inv_e8m0(
    amaxes: list[Tensor], scale_invs: list[Tensor], *, noop_flag: Tensor | None = None
) -> None:
    """The E8M0 scales of MXFP8 blocks."""
    ops.multi_tensor_compute_scale_inv_e8m0.check(amaxes, scale_invs, noop_flag=noop_flag)
    writer = _Writer.honouring(noop_flag)
    for amax, scale_inv in zip(amaxes, scale_invs, strict=True):
        fraction, exponent = torch.frexp(amax.float() / MX_MAX)
        exponent = exponent - (fraction == 0.5).to(exponent.dtype)  # the next power of two
        byte = (exponent + 127).clamp(0, 254)
        byte = torch.where(amax == 0, 0, torch.where(amax.isinf(), 254, byte))
        byte = torch.where(amax.isnan(), 255, byte)
        writer.write(scale_inv.view(torch.uint8), byte)

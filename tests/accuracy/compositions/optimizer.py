"""Optimizer steps by torch's own functions.

torch needs one dtype for a parameter and its state: the one to which both promote. Nothing is
mutated: what the operator writes is returned, after its outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from transformer_engine_fl.ops.optimizer import joined

__all__ = ["COMPOSITIONS"]

Lists = list[Tensor]


def multi_tensor_scale(
    inputs: Lists, outputs: Lists, scale: float | Tensor, *, noop_flag: Tensor | None = None
) -> tuple[Lists | None, None]:
    pairs = [*zip(inputs, outputs, strict=True)]
    if any(output.element_size() > x.element_size() for x, output in pairs):
        return None, None  # in a narrow dtype the product itself has large errors
    return [(x * scale).view(x.shape).to(output.dtype) for x, output in pairs], None


def _wide(inputs: Lists) -> torch.dtype:
    wide = any(it.dtype == torch.float64 for it in inputs)
    return torch.float64 if wide else torch.float32


def multi_tensor_l2norm(
    inputs: Lists, *, per_tensor: bool = False, noop_flag: Tensor | None = None
) -> tuple[Tensor, Tensor | None, None]:
    if not inputs:
        return torch.zeros(1), torch.zeros(0) if per_tensor else None, None
    dtype = _wide(inputs)
    norms = torch.stack([torch.linalg.vector_norm(it, dtype=dtype) for it in inputs])
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else None, None


def multi_tensor_unscale_l2norm(
    inputs: Lists, inv_scale: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None, None]:
    dtype = _wide(inputs)
    return multi_tensor_l2norm([it.to(dtype) * inv_scale.to(dtype) for it in inputs], **options)


def _of_one_dtype(params: Lists, states: Lists, *lists: Lists) -> list[Lists]:
    """Copies of the lists, with each tensor in the dtype to which parameter and state promote."""
    pairs = zip(params, states, strict=True)
    kinds = [torch.promote_types(param.dtype, state.dtype) for param, state in pairs]
    return [[it.to(to, copy=True) for it, to in zip(each, kinds, strict=True)] for each in lists]


def multi_tensor_adam(
    grads: Lists,
    params: Lists,
    exp_avgs: Lists,
    exp_avg_sqs: Lists,
    lr: float,
    step: int,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    decoupled_weight_decay: bool = True,
    bias_correction: bool = True,
    master_params: Lists | None = None,
    inv_scale: Tensor | None = None,
    noop_flag: Tensor | None = None,
) -> tuple[Lists | None, ...]:
    full = params if master_params is None else master_params
    if not bias_correction:  # torch always corrects the bias
        return None, None, None, None

    after, g, m, v = _of_one_dtype(full, exp_avgs, full, grads, exp_avgs, exp_avg_sqs)
    if inv_scale is not None:
        g = [it * inv_scale.to(it.dtype).reshape(()) for it in g]
    skip = noop_flag is not None and bool(noop_flag.item())
    if not skip:
        adam(
            after,
            g,
            m,
            v,
            [],
            [torch.tensor(float(step - 1)) for _ in after],
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
            decoupled_weight_decay=decoupled_weight_decay,
        )
    return params if skip else after, m, v, None if master_params is None else after


def multi_tensor_adam_capturable(
    grads: Lists,
    params: Lists,
    exp_avgs: Lists,
    exp_avg_sqs: Lists,
    lr: Tensor,
    step: Tensor,
    *numbers: float,
    **options: Any,
) -> tuple[Lists | None, ...]:
    lists = (grads, params, exp_avgs, exp_avg_sqs)
    return multi_tensor_adam(*lists, lr.item(), int(step.item()), *numbers, **options)[:3]


def multi_tensor_adam_capturable_master(
    grads: Lists,
    params: Lists,
    exp_avgs: Lists,
    exp_avg_sqs: Lists,
    master_params: Lists,
    lr: Tensor,
    step: Tensor,
    *numbers: float,
    **options: Any,
) -> tuple[Lists | None, ...]:
    lists = (grads, params, exp_avgs, exp_avg_sqs)
    options["master_params"] = master_params
    return multi_tensor_adam(*lists, lr.item(), int(step.item()), *numbers, **options)


def multi_tensor_adam_param_remainder(
    grads: Lists,
    params: Lists,
    exp_avgs: Lists,
    exp_avg_sqs: Lists,
    param_remainders: Lists,
    *numbers: Any,
    **options: Any,
) -> tuple[Lists | None, ...]:
    halves = zip(params, param_remainders, strict=True)
    options["master_params"] = [joined(*both) for both in halves]
    return multi_tensor_adam(grads, params, exp_avgs, exp_avg_sqs, *numbers, **options)


def multi_tensor_adam_fp8(
    grads: Lists,
    params: Lists,
    exp_avgs: Lists,
    exp_avg_sqs: Lists,
    master_params: Lists,
    scales: Lists,
    amaxes: Lists,
    scale_invs: Lists,
    *numbers: Any,
    **options: Any,
) -> tuple[Lists | None, ...]:
    step = multi_tensor_adam(grads, master_params, exp_avgs, exp_avg_sqs, *numbers, **options)
    after, m, v, _ = step
    return None, m, v, after, None, None


def multi_tensor_sgd(
    grads: Lists,
    params: Lists,
    momentum_buffers: Lists,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    *,
    nesterov: bool = False,
    first_run: bool = False,
    wd_after_momentum: bool = False,
    scale: float = 1.0,
    model_params: Lists | None = None,
    noop_flag: Tensor | None = None,
) -> tuple[Lists | None, ...]:
    if wd_after_momentum:  # torch cannot do that
        return None, None, None

    lists = (params, grads, momentum_buffers)
    after, g, buffers = _of_one_dtype(params, momentum_buffers, *lists)
    given: list[Tensor | None] = [None if first_run else it for it in buffers]
    if noop_flag is None or not noop_flag.item():
        sgd(
            after,
            [it * scale for it in g],
            given,
            foreach=False,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
        )
    held = [new if new is not None else old for new, old in zip(given, buffers, strict=True)]
    return after, held, None


def multi_tensor_compute_scale_and_scale_inv(
    amaxes: Lists,
    scales: Lists,
    scale_invs: Lists,
    max_fp8: float,
    *,
    force_pow_2_scales: bool = False,
    epsilon: float = 0.0,
    noop_flag: Tensor | None = None,
) -> tuple[Lists | None, ...]:
    if force_pow_2_scales or noop_flag is not None:
        return None, None
    raised = [it.clamp(min=epsilon) for it in amaxes]
    found = [torch.where(it.isfinite() & (it > 0), max_fp8 / it, 1.0) for it in raised]
    found = [it.clamp(max=torch.finfo(torch.float32).max) for it in found]
    return found, [1 / it for it in found]


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "multi_tensor_adam": multi_tensor_adam,
    "multi_tensor_adam_capturable": multi_tensor_adam_capturable,
    "multi_tensor_adam_capturable_master": multi_tensor_adam_capturable_master,
    "multi_tensor_adam_fp8": multi_tensor_adam_fp8,
    "multi_tensor_adam_param_remainder": multi_tensor_adam_param_remainder,
    "multi_tensor_compute_scale_and_scale_inv": multi_tensor_compute_scale_and_scale_inv,
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_scale": multi_tensor_scale,
    "multi_tensor_scale_tensor": multi_tensor_scale,
    "multi_tensor_sgd": multi_tensor_sgd,
    "multi_tensor_unscale_l2norm": multi_tensor_unscale_l2norm,
}

"""Optimizer steps and the bookkeeping around them, over many tensors in one call.

Each operator takes lists: the i-th tensors of its lists belong together and have one shape.
A list may be empty, tensors may have no elements, and their dtypes may differ from one
tensor to the next. All tensors of a call are on one device.

**Arithmetic.** It is float32 whatever the dtype of a tensor, or float64 where
the parameter (or, without parameters, the input) is float64. Each result is rounded
once, to the dtype of the tensor that it is written to. Hyperparameters are float64 until they are
combined with a tensor, so ``1 - beta2`` loses no digits.

**noop_flag.** An int32 tensor of one element that stands for "something is not finite, skip
this step". It is never read on the host. Operators that inspect gradients *set* it:
:func:`multi_tensor_scale`, :func:`multi_tensor_scale_tensor`, :func:`multi_tensor_l2norm` and
:func:`multi_tensor_unscale_l2norm` write 1 if a value is not finite and leave the flag unchanged
otherwise, so one flag serves several calls; they do their work whatever its value.
Operators that update *honour* it: all the others write nothing while it is not 0.
(Transformer Engine's kernels honour it in the capturable Adam and in SGD only.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import FLOATS, math_dtype
from transformer_engine_fl.ops._rounding import LARGEST_FLOAT32, power_of_two, single
from transformer_engine_fl.ops._samples import normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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

NARROW = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
WIDE = ("float32", "float64")
COUNTS = ("int32", "int64", "float32")

MX_MAX = 448.0
"""The largest value of float8_e4m3fn, the dtype of blocks that have an e8m0 scale."""

# For the narrow dtypes: half a unit in the last place, plus the error of float32 arithmetic;
# small values are subnormal in float16.
TOLERANCE = {
    "float32": Tolerance(rtol=5e-7, atol=5e-7),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-14),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-14),
    "float64": Tolerance(rtol=1e-14, atol=1e-14),
}
# A norm is a float32 sum whatever the dtype of the inputs, but float64 for float64.
NORM_TOLERANCE = {dtype: Tolerance(rtol=1e-6, atol=0.0) for dtype in FLOATS} | {
    "float64": Tolerance(rtol=1e-14, atol=0.0)
}
# Correctly rounded; the inverses of the largest scales are subnormal.
SCALE_TOLERANCE = {"float32": Tolerance(rtol=2.0**-24, atol=2.0**-100)}
E8M0_TOLERANCE = {"bfloat16": Tolerance(rtol=0.0, atol=0.0)}


# ------------------------------------------------------------------------------ checks


def _check_flag(op: str, noop_flag: Any, anchor: str, tensors: Sequence[Tensor]) -> None:
    if noop_flag is not None:
        _check_number(op, "noop_flag", noop_flag, ("int32",), anchor, tensors)


def _check_number(
    op: str,
    name: str,
    value: Any,
    dtypes: Collection[str],
    anchor: str,
    tensors: Sequence[Tensor],
) -> None:
    """Check a tensor of one element, on the device of the list's tensors if there are any."""
    tensor = check.is_tensor(op, name, value, dtypes=dtypes)
    if tensor.numel() != 1 or tensor.ndim > 1:
        raise ArgumentError(op, name, check.describe(value), "a tensor of one element")
    if tensors:
        first = f"{anchor}[0]"
        check.same_device(op, first, {first: tensors[0], name: tensor})


def _check_like(
    op: str,
    name: str,
    values: Any,
    dtypes: Collection[str],
    anchor: str,
    others: Sequence[Tensor],
    *,
    written: bool = True,
) -> Sequence[Tensor]:
    """Check a list that has a tensor for each of ``others``, of the same shape and device."""
    tensors = check.are_tensors(op, name, values, dtypes=dtypes, written=written)
    check.are_like(op, name, tensors, anchor, others)
    return tensors


def _check_scale(op: str, inputs: Any, outputs: Any, scale: Any, noop_flag: Any) -> None:
    tensors = check.are_tensors(op, "inputs", inputs, dtypes=FLOATS)
    _check_like(op, "outputs", outputs, FLOATS, "inputs", tensors)
    check.is_number(op, "scale", scale)
    _check_flag(op, noop_flag, "inputs", tensors)


def _check_scale_tensor(op: str, inputs: Any, outputs: Any, scale: Any, noop_flag: Any) -> None:
    _check_scale(op, inputs, outputs, 1.0, noop_flag)
    _check_number(op, "scale", scale, WIDE, "inputs", inputs)


def _check_norm(op: str, inputs: Any, per_tensor: Any, noop_flag: Any) -> None:
    tensors = check.are_tensors(op, "inputs", inputs, dtypes=FLOATS)
    check.is_flag(op, "per_tensor", per_tensor)
    _check_flag(op, noop_flag, "inputs", tensors)


def _check_unscale_norm(
    op: str, inputs: Any, inv_scale: Any, per_tensor: Any, noop_flag: Any
) -> None:
    _check_norm(op, inputs, per_tensor, noop_flag)
    _check_number(op, "inv_scale", inv_scale, WIDE, "inputs", inputs)


def _check_of_param(
    op: str, name: str, values: Sequence[Tensor], params: Sequence[Tensor], *narrow: str
) -> None:
    """Check that each tensor has its parameter's math dtype, or one of ``narrow``."""
    for place, (value, param) in enumerate(zip(values, params, strict=True)):
        wide = check.dtype_name(math_dtype(param.dtype))
        allowed = (wide, *narrow) if wide == "float32" else (wide,)
        if check.dtype_name(value.dtype) not in allowed:
            expected = f"{' or '.join(allowed)}: 'params[{place}]' is {param.dtype}"
            raise ArgumentError(op, f"{name}[{place}]", check.describe(value), expected)


def _check_moments(
    op: str, params: Sequence[Tensor], exp_avgs: Any, exp_avg_sqs: Any, *narrow: str
) -> None:
    for name, moments in (("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)):
        tensors = _check_like(op, name, moments, (*WIDE, *narrow), "params", params)
        _check_of_param(op, name, tensors, params, *narrow)
    for place, (first, second) in enumerate(zip(exp_avgs, exp_avg_sqs, strict=True)):
        if first.dtype != second.dtype:
            expected = f"{first.dtype}, as 'exp_avgs[{place}]' has"
            raise ArgumentError(op, f"exp_avg_sqs[{place}]", check.describe(second), expected)


def _check_adam_numbers(
    op: str,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
    decoupled_weight_decay: Any,
    bias_correction: Any,
) -> None:
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        check.is_number(op, name, beta, at_least=0)
        if isinstance(beta, int | float) and beta >= 1:
            raise ArgumentError(op, name, check.describe(beta), "a number below 1")
    check.is_number(op, "eps", eps, at_least=0)
    check.is_number(op, "weight_decay", weight_decay, at_least=0)
    check.is_flag(op, "decoupled_weight_decay", decoupled_weight_decay)
    check.is_flag(op, "bias_correction", bias_correction)


def _check_step(op: str, lr: Any, step: Any) -> None:
    check.is_number(op, "lr", lr, at_least=0)
    check.is_integer(op, "step", step, at_least=1)


def _check_lists(
    op: str, grads: Any, params: Any, dtypes: Collection[str], grad_dtypes: Collection[str] = FLOATS
) -> Sequence[Tensor]:
    tensors = check.are_tensors(op, "params", params, dtypes=dtypes, written=True)
    _check_like(op, "grads", grads, grad_dtypes, "params", tensors, written=False)
    return tensors


def _check_adam(
    op: str,
    grads: Any,
    params: Any,
    exp_avgs: Any,
    exp_avg_sqs: Any,
    lr: Any,
    step: Any,
    master_params: Any,
    noop_flag: Any,
    **numbers: Any,
) -> None:
    tensors = _check_lists(op, grads, params, FLOATS)
    _check_moments(op, tensors, exp_avgs, exp_avg_sqs, "bfloat16")
    if master_params is not None:
        masters = _check_like(op, "master_params", master_params, WIDE, "params", tensors)
        _check_of_param(op, "master_params", masters, tensors)
    _check_step(op, lr, step)
    _check_adam_numbers(op, **numbers)
    _check_flag(op, noop_flag, "params", tensors)


def _check_capturable(
    op: str,
    grads: Any,
    params: Any,
    exp_avgs: Any,
    exp_avg_sqs: Any,
    lr: Any,
    step: Any,
    inv_scale: Any,
    noop_flag: Any,
    master_params: Any = None,
    **numbers: Any,
) -> None:
    _check_adam(
        op,
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        lr=0.0,
        step=1,
        master_params=master_params,
        noop_flag=noop_flag,
        **numbers,
    )
    _check_number(op, "lr", lr, WIDE, "params", params)
    _check_number(op, "step", step, COUNTS, "params", params)
    if inv_scale is not None:
        _check_number(op, "inv_scale", inv_scale, WIDE, "params", params)


def _check_capturable_master(op: str, *, master_params: Any, **arguments: Any) -> None:
    # Here any list of tensors will do; ``_check_capturable`` compares it with the parameters.
    check.are_tensors(op, "master_params", master_params, dtypes=WIDE)
    _check_capturable(op, master_params=master_params, **arguments)


def _check_remainder(
    op: str,
    grads: Any,
    params: Any,
    exp_avgs: Any,
    exp_avg_sqs: Any,
    param_remainders: Any,
    lr: Any,
    step: Any,
    noop_flag: Any,
    **numbers: Any,
) -> None:
    tensors = _check_lists(op, grads, params, ("bfloat16",), NARROW)
    _check_moments(op, tensors, exp_avgs, exp_avg_sqs, "bfloat16")
    _check_like(op, "param_remainders", param_remainders, ("int16",), "params", tensors)
    _check_step(op, lr, step)
    _check_adam_numbers(op, **numbers)
    _check_flag(op, noop_flag, "params", tensors)


def _check_fp8(
    op: str,
    grads: Any,
    params: Any,
    exp_avgs: Any,
    exp_avg_sqs: Any,
    master_params: Any,
    scales: Any,
    amaxes: Any,
    scale_invs: Any,
    lr: Any,
    step: Any,
    noop_flag: Any,
    **numbers: Any,
) -> None:
    tensors = _check_lists(op, grads, params, FP8, NARROW)
    _check_moments(op, tensors, exp_avgs, exp_avg_sqs)
    _check_like(op, "master_params", master_params, ("float32",), "params", tensors)
    for name, values in (("scales", scales), ("amaxes", amaxes), ("scale_invs", scale_invs)):
        numbers_of = check.are_tensors(op, name, values, dtypes=("float32",))
        if len(numbers_of) != len(tensors):
            expected = f"{len(tensors)} tensors, as many as in 'params'"
            raise ArgumentError(op, name, f"{len(numbers_of)} tensors", expected)
        for place, value in enumerate(numbers_of):
            item = f"{name}[{place}]"
            check.has_shape(op, item, value, (1,), "a number for each parameter")
            check.same_device(op, "params[0]", {"params[0]": tensors[0], item: value})
    _check_step(op, lr, step)
    _check_adam_numbers(op, **numbers)
    _check_flag(op, noop_flag, "params", tensors)


def _check_sgd(
    op: str,
    grads: Any,
    params: Any,
    momentum_buffers: Any,
    lr: Any,
    weight_decay: Any,
    momentum: Any,
    dampening: Any,
    nesterov: Any,
    first_run: Any,
    wd_after_momentum: Any,
    scale: Any,
    model_params: Any,
    noop_flag: Any,
) -> None:
    tensors = _check_lists(op, grads, params, FLOATS)
    buffers = _check_like(op, "momentum_buffers", momentum_buffers, FLOATS, "params", tensors)
    for place, (buffer, param) in enumerate(zip(buffers, tensors, strict=True)):
        if buffer.dtype not in (param.dtype, math_dtype(param.dtype)):
            expected = f"{param.dtype}, as 'params[{place}]' has, or float32"
            item = f"momentum_buffers[{place}]"
            raise ArgumentError(op, item, check.describe(buffer), expected)
    check.is_number(op, "lr", lr, at_least=0)
    check.is_number(op, "weight_decay", weight_decay, at_least=0)
    check.is_number(op, "momentum", momentum, at_least=0)
    check.is_number(op, "dampening", dampening)
    check.is_flag(op, "nesterov", nesterov)
    check.is_flag(op, "first_run", first_run)
    check.is_flag(op, "wd_after_momentum", wd_after_momentum)
    check.is_number(op, "scale", scale)
    if model_params is not None:
        _check_like(op, "model_params", model_params, ("float16", "bfloat16"), "params", tensors)
    _check_flag(op, noop_flag, "params", tensors)


def _check_compute_scale(
    op: str,
    amaxes: Any,
    scales: Any,
    scale_invs: Any,
    max_fp8: Any,
    force_pow_2_scales: Any,
    epsilon: Any,
    noop_flag: Any,
) -> None:
    tensors = check.are_tensors(op, "amaxes", amaxes, dtypes=("float32",))
    _check_like(op, "scales", scales, ("float32",), "amaxes", tensors)
    _check_like(op, "scale_invs", scale_invs, ("float32",), "amaxes", tensors)
    check.is_number(op, "max_fp8", max_fp8, at_least=1, at_most=LARGEST_FLOAT32)
    check.is_flag(op, "force_pow_2_scales", force_pow_2_scales)
    check.is_number(op, "epsilon", epsilon, at_least=0, at_most=LARGEST_FLOAT32)
    _check_flag(op, noop_flag, "amaxes", tensors)


def _check_e8m0(op: str, amaxes: Any, scale_invs: Any, noop_flag: Any) -> None:
    tensors = check.are_tensors(op, "amaxes", amaxes, dtypes=("bfloat16",))
    _check_like(op, "scale_invs", scale_invs, ("float8_e8m0fnu", "uint8"), "amaxes", tensors)
    _check_flag(op, noop_flag, "amaxes", tensors)


# ------------------------------------------------------------------------------ oracles

Lists = Sequence[Any]


def _doubles(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [it.double() for it in tensors]


def _skips(noop_flag: Tensor | None) -> bool:
    return noop_flag is not None and bool(noop_flag.item() != 0)


def _raised(noop_flag: Tensor | None, finite: bool) -> Tensor | None:
    """The flag after an operator has inspected values that are all ``finite``, or not."""
    import torch

    if noop_flag is None:
        return None
    return noop_flag.double() if finite else torch.ones_like(noop_flag).double()


def _scale_oracle(
    inputs: list[Tensor],
    outputs: list[Tensor],
    scale: float | Tensor,
    *,
    noop_flag: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    finite = all(bool(it.isfinite().all()) for it in inputs)
    return [it * float(scale) for it in _doubles(inputs)], _raised(noop_flag, finite)


def _norm_oracle(
    inputs: list[Tensor], *, per_tensor: bool = False, noop_flag: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    import torch

    squares = [it.square().sum().item() for it in _doubles(inputs)]
    sums = torch.tensor(squares, dtype=torch.float64)
    norm = sums.sum().sqrt().reshape(1)
    flag = _raised(noop_flag, bool(norm.isfinite().all()))
    return norm, sums.sqrt() if per_tensor else None, flag


def _unscale_norm_oracle(
    inputs: list[Tensor],
    inv_scale: Tensor,
    *,
    per_tensor: bool = False,
    noop_flag: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    scaled = [it * inv_scale.double().reshape(()) for it in _doubles(inputs)]
    return _norm_oracle(scaled, per_tensor=per_tensor, noop_flag=noop_flag)


@dataclass(frozen=True, slots=True)
class _Adam:
    """The definition of a step of Adam, in float64."""

    lr: float
    step: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = True
    bias_correction: bool = True

    def one(self, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Parameter and moments after the step."""
        if not self.decoupled_weight_decay:
            g = g + self.weight_decay * p
        m = self.beta1 * m + (1 - self.beta1) * g
        v = self.beta2 * v + (1 - self.beta2) * g.square()
        correct = int(self.bias_correction)
        mean = m / (1 - correct * self.beta1**self.step)
        spread = (v / (1 - correct * self.beta2**self.step)).sqrt()
        kept = 1 - self.lr * self.weight_decay * int(self.decoupled_weight_decay)
        return kept * p - self.lr * mean / (spread + self.eps), m, v

    def all(self, g: Lists, p: Lists, m: Lists, v: Lists, skip: bool) -> list[list[Tensor]]:
        """Lists of parameters and moments after the step."""
        states = [_doubles(it) for it in (p, m, v)]
        if skip:
            return states
        steps = [self.one(*one) for one in zip(_doubles(g), *states, strict=True)]
        return [list(it) for it in zip(*steps, strict=True)] if steps else [[], [], []]


def _adam_oracle(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    lr: float,
    step: int,
    *numbers: Any,
    master_params: list[Tensor] | None = None,
    noop_flag: Tensor | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
    adam = _Adam(lr, step, *numbers, **options)
    skip = _skips(noop_flag)
    full = params if master_params is None else master_params
    after, m, v = adam.all(grads, full, exp_avgs, exp_avg_sqs, skip)
    written = _doubles(params) if skip else after
    return written, m, v, None if master_params is None else after


def _capturable_oracle(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    lr: Tensor,
    step: Tensor,
    *numbers: float,
    inv_scale: Tensor | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    if inv_scale is not None:
        grads = [it * inv_scale.double().reshape(()) for it in _doubles(grads)]
    lists = (grads, params, exp_avgs, exp_avg_sqs)
    return _adam_oracle(*lists, float(lr), int(step), *numbers, **options)[:3]


def _capturable_master_oracle(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_params: list[Tensor],
    lr: Tensor,
    step: Tensor,
    *numbers: float,
    inv_scale: Tensor | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    if inv_scale is not None:
        grads = [it * inv_scale.double().reshape(()) for it in _doubles(grads)]
    lists = (grads, params, exp_avgs, exp_avg_sqs)
    options["master_params"] = master_params
    return _adam_oracle(*lists, float(lr), int(step), *numbers, **options)


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 whose halves are a bfloat16 parameter and its int16 remainder."""
    import torch

    high, low = param.view(torch.int16).int(), remainder.int()
    return ((high - (low < 0).int() << 16) + (low & 0xFFFF)).view(torch.float32)


def _decode_remainder(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    param_remainders: list[Tensor],
) -> tuple[list[Tensor], ...]:
    """The written lists, with the masters in place of the remainders."""
    masters = [joined(*both) for both in zip(params, param_remainders, strict=True)]
    return params, exp_avgs, exp_avg_sqs, masters


def _remainder_oracle(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    param_remainders: list[Tensor],
    *numbers: Any,
    **options: Any,
) -> tuple[Any, ...]:
    masters = [joined(*both) for both in zip(params, param_remainders, strict=True)]
    lists = (grads, params, exp_avgs, exp_avg_sqs)
    return _adam_oracle(*lists, *numbers, master_params=masters, **options)


def _fp8_oracle(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_params: list[Tensor],
    scales: list[Tensor],
    amaxes: list[Tensor],
    scale_invs: list[Tensor],
    *numbers: Any,
    noop_flag: Tensor | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    import torch

    if _skips(noop_flag):
        written = (params, exp_avgs, exp_avg_sqs, master_params, amaxes, scale_invs)
        return tuple(_doubles(it) for it in written)
    lists = (grads, params, exp_avgs, exp_avg_sqs)
    _, m, v, full = _adam_oracle(*lists, *numbers, master_params=master_params, **options)
    masters = full or []
    data, largest = [], []
    for param, master, scale, amax in zip(params, masters, scales, amaxes, strict=True):
        limit = torch.finfo(param.dtype).max
        data.append((master * scale.double().reshape(())).clamp(-limit, limit))
        sizes = [abs(it) for it in master.flatten().tolist() if it == it]  # no NaN
        largest.append(torch.tensor([max([amax.item(), *sizes])], device=amax.device).double())
    return data, m, v, masters, largest, [1 / it.double() for it in scales]


def _sgd_oracle(
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
) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
    after, buffers = _doubles(params), _doubles(momentum_buffers)
    if _skips(noop_flag):
        return after, buffers, None if model_params is None else _doubles(model_params)
    for place, grad in enumerate(_doubles(grads)):
        p, g = after[place], grad * scale
        decay = weight_decay * p
        if not wd_after_momentum:
            g = g + decay
        if momentum:
            b = buffers[place] * momentum + (1 - dampening) * g
            b = buffers[place] = g if first_run else b
            g = g + momentum * b if nesterov else b
        if wd_after_momentum:
            g = g + decay
        after[place] = p - lr * g
    copies = None
    if model_params is not None:  # rounded from the written values, not from exact ones
        copies = [it.to(param.dtype).double() for it, param in zip(after, params, strict=True)]
    return after, buffers, copies


def _compute_scale_oracle(
    amaxes: list[Tensor],
    scales: list[Tensor],
    scale_invs: list[Tensor],
    max_fp8: float,
    *,
    force_pow_2_scales: bool = False,
    epsilon: float = 0.0,
    noop_flag: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    import torch

    if _skips(noop_flag):
        return _doubles(scales), _doubles(scale_invs)
    largest = torch.finfo(torch.float32).max
    max_fp8, epsilon = single(max_fp8), single(epsilon)
    found = []
    for amax in _doubles(amaxes):
        raised = torch.where(amax < epsilon, epsilon, amax)
        usable = (raised != 0) & raised.isfinite()
        scale = torch.where(usable, max_fp8 / raised, 1.0).float().double().clamp(max=largest)
        if force_pow_2_scales:
            scale = power_of_two(scale.frexp().exponent - 1)
        found.append(scale)
    return found, [1 / it for it in found]


def _e8m0_oracle(
    amaxes: list[Tensor], scale_invs: list[Tensor], *, noop_flag: Tensor | None = None
) -> tuple[list[Tensor]]:
    import torch

    if _skips(noop_flag):
        return (_doubles(scale_invs),)
    found = []
    powers = [MX_MAX * 2.0 ** (byte - 127) for byte in range(255)]
    for amax, place in zip(amaxes, scale_invs, strict=True):
        steps = torch.tensor(powers, dtype=torch.float64, device=amax.device)
        bytes_ = torch.searchsorted(steps, amax.double().contiguous()).clamp(max=254)
        bytes_ = torch.where(amax.isnan(), 255, bytes_).to(torch.uint8)
        as_scale = bytes_.view(torch.float8_e8m0fnu)
        found.append((bytes_ if place.dtype == torch.uint8 else as_scale).double())
    return (found,)


# ------------------------------------------------------------------------------ samples

_SHAPES = [(4, 16), (33,), (3, 5, 7)]
_SMALL = [(2, 9), (5,)]


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes tensors for one sample.

    Attributes:
        dtype: the default.
        device: of all tensors.
        lay: gives a tensor's values a memory layout.
    """

    dtype: str
    device: str
    lay: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def many(
        self,
        shapes: Sequence[tuple[int, ...]],
        seed: int,
        *,
        scale: float = 1.0,
        dtypes: Sequence[str] = (),
    ) -> list[Tensor]:
        """Tensors of normally distributed values that take the dtypes in turn."""
        import torch

        names = dtypes or (self.dtype,)
        kinds: list[torch.dtype] = [getattr(torch, it) for it in names]
        return [
            self.lay((normal(shape, torch.float64, self.device, seed + place) * scale).to(kind))
            for place, (shape, kind) in enumerate(
                zip(shapes, kinds * (len(shapes) // len(kinds) + 1), strict=False)
            )
        ]

    def number(self, value: float, dtype: str) -> Tensor:
        """A tensor of one element."""
        import torch

        return torch.tensor([value], dtype=getattr(torch, dtype), device=self.device)

    def flag(self, value: int) -> Tensor:
        """A noop_flag."""
        return self.number(value, "int32")


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor


def _padded(tensor: Tensor) -> Tensor:
    """A view of a tensor with longer rows, without their first element: rows are unaligned."""
    if not tensor.ndim:
        return tensor
    wider = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 3))
    inside = wider[..., 1:-2]
    return inside.copy_(tensor)


def _every_other(tensor: Tensor) -> Tensor:
    """Every other element of a larger tensor."""
    return tensor.repeat_interleave(2).view(-1)[::2].view(tensor.shape) if tensor.ndim else tensor


def _kinds(dtype: str, device: str) -> Iterator[tuple[str, _Maker, list[tuple[int, ...]]]]:
    """(label, maker, shapes) of lists of tensors; the typical ones first."""
    plain = _Maker(dtype, device)
    yield "typical", plain, _SHAPES
    yield "one tensor", plain, [(7, 3)]
    yield "no tensors", plain, []
    yield "no elements, a scalar, one element", plain, [(0, 4), (), (1,)]
    yield "many tensors", plain, [(1 + place % 5,) for place in range(80)]
    yield "a larger one", plain, [(3, 1025)]
    for label, lay in (
        ("transposed", _transposed),
        ("padded rows", _padded),
        ("strided", _every_other),
    ):
        yield label, dataclasses.replace(plain, lay=lay), [(4, 6), (5, 3)]


def _flags(maker: _Maker) -> Iterator[tuple[str, Tensor]]:
    """Flags that are zero and not zero."""
    for value in (0, 1, -7):
        yield f"noop_flag={value}", maker.flag(value)


def _looks(dtype: str, device: str) -> Iterator[tuple[str, list[Tensor], dict[str, Any]]]:
    """(label, inputs, options) for operators that inspect tensors and set the flag."""
    for label, maker, shapes in _kinds(dtype, device):
        yield label, maker.many(shapes, 30), {}
    plain = _Maker(dtype, device)
    others = [dtype, *(it for it in FLOATS if it != "float64")]
    yield "mixed dtypes", plain.many([(5,)] * 7, 31, dtypes=others), {}
    yield "expanded", [plain.many([(1, 5)], 32)[0].expand(3, 5)], {}
    yield "large values", plain.many(_SMALL, 33, scale=1e3 if dtype == "float16" else 1e15), {}
    for label, flag in _flags(plain):
        yield f"finite, {label}", plain.many(_SMALL, 34), {"noop_flag": flag}
    yield "no tensors, a flag", [], {"noop_flag": plain.flag(0)}
    for value in ("inf", "-inf", "nan"):
        inputs = plain.many(_SHAPES, 35)
        inputs[1][7] = float(value)
        yield f"{value}, noop_flag=0", inputs, {"noop_flag": plain.flag(0)}
        yield f"{value}, no flag", inputs, {}


def _scale_samples(dtype: str, device: str, as_tensor: bool = False) -> Iterator[Sample]:
    import torch

    def sample(label: str, inputs: list[Tensor], outputs: list[Tensor], **options: Any) -> Sample:
        factor = options.pop("factor", -0.37)
        scale = torch.tensor([factor], device=device) if as_tensor else factor
        return Sample(label, (inputs, outputs, scale), options)

    for label, inputs, options in _looks(dtype, device):
        outputs = [torch.full_like(it, 3.0) for it in inputs]
        yield sample(label, inputs, outputs, **options)
    maker = _Maker(dtype, device)
    for other in FLOATS:
        inputs = maker.many(_SMALL, 36)
        outputs = [_padded(it.to(getattr(torch, other))) for it in inputs]
        yield sample(f"into {other}, padded", inputs, outputs)
    for factor in (0.0, 1.0, 3e4):
        inputs = maker.many(_SMALL, 37, scale=0.1)
        yield sample(f"scale={factor}", inputs, maker.many(_SMALL, 38), factor=factor)


def _scale_tensor_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    yield from _scale_samples(dtype, device, as_tensor=True)
    maker = _Maker(dtype, device)
    inputs, outputs = maker.many(_SMALL, 39), maker.many(_SMALL, 40)
    for scale in (torch.tensor(0.3, device=device), maker.number(0.3, "float64")):
        yield Sample(f"a {scale.ndim}-dimensional {scale.dtype} scale", (inputs, outputs, scale))


def _norm_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, inputs, options in _looks(dtype, device):
        yield Sample(label, (inputs,), options)
        if label in ("typical", "no tensors", "inf, noop_flag=0", "mixed dtypes"):
            yield Sample(f"{label}, per tensor", (inputs,), {"per_tensor": True, **options})
    mixed = _Maker(dtype, device).many([(3, 5)] * 4, 41, dtypes=["float16", "float64", dtype])
    yield Sample("float64 among others", (mixed,), {"per_tensor": True})
    long = _Maker(dtype, device).many([(100_000,), (2, 50_000)], 44)
    yield Sample("many elements", (long,), {"per_tensor": True})


def _unscale_norm_samples(dtype: str, device: str) -> Iterator[Sample]:
    maker = _Maker(dtype, device)
    inv_scale = maker.number(2.0**-9 / 3, "float32")
    for sample in _norm_samples(dtype, device):
        yield Sample(sample.label, (*sample.args, inv_scale), sample.kwargs)
    inputs = maker.many(_SMALL, 42)
    for value in ("inf", "nan", "0"):
        options = {"noop_flag": maker.flag(0)}
        yield Sample(f"inv_scale={value}", (inputs, maker.number(float(value), "float32")), options)
    yield Sample("a float64 scale", (inputs, maker.number(0.3, "float64")))


_ADAM_OPTIONS: dict[str, dict[str, Any]] = {
    "L2": {"decoupled_weight_decay": False, "weight_decay": 0.3},
    "decoupled weight decay": {"weight_decay": 0.3},
    "no bias correction": {"bias_correction": False, "weight_decay": 0.1},
    "L2, no bias correction": {"bias_correction": False, "decoupled_weight_decay": False},
    "first step": {"step": 1},
    "a late step": {"step": 300_000},
    "beta1=0": {"beta1": 0.0},
    "beta2=0": {"beta2": 0.0},
    "other betas": {"beta1": 0.5, "beta2": 0.75},
    "eps=0.5": {"eps": 0.5},
    "eps=0": {"eps": 0.0},
    "lr=0": {"lr": 0.0, "weight_decay": 0.1},
}


@dataclass(frozen=True, slots=True)
class _States:
    """The lists that every Adam has."""

    grads: list[Tensor]
    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]

    @property
    def lists(self) -> tuple[list[Tensor], ...]:
        """The lists in the order of the operators' arguments."""
        return self.grads, self.params, self.exp_avgs, self.exp_avg_sqs


def _states(
    maker: _Maker,
    shapes: Sequence[tuple[int, ...]],
    *,
    params: Sequence[str] = (),
    grads: Sequence[str] = (),
    moments: Sequence[str] = (),
    scale: float = 1.0,
) -> _States:
    """Random states; unless given, the moments have the parameter's math dtype."""
    import torch

    weights = maker.many(shapes, 20, dtypes=params)
    wide = [check.dtype_name(math_dtype(it.dtype)) for it in weights]
    kept: Sequence[str] = moments or wide
    squares = maker.many(shapes, 23, scale=0.3 * scale, dtypes=["float64"])
    kinds = [getattr(torch, kept[place % len(kept)]) for place in range(len(weights))]
    return _States(
        maker.many(shapes, 21, scale=scale, dtypes=grads),
        weights,
        maker.many(shapes, 22, scale=0.3 * scale, dtypes=kept),
        [maker.lay(it.square().to(kind)) for it, kind in zip(squares, kinds, strict=True)],
    )


def _adam_states(
    dtype: str, device: str, params: tuple[str, ...], moments: tuple[str, ...]
) -> Iterator[tuple[str, _States, dict[str, Any]]]:
    """(label, lists, options) for every Adam.

    Args:
        dtype: of the gradients.
        params: dtypes of the parameters; most samples have the first.
        moments: narrow dtypes that moments may have.
    """
    usual: dict[str, Any] = {"weight_decay": 0.1}
    plain = _Maker(dtype, device)

    def made(maker: _Maker, shapes: Sequence[tuple[int, ...]], **kinds: Any) -> _States:
        return _states(maker, shapes, **{"params": params[:1], **kinds})

    for label, maker, shapes in _kinds(dtype, device):
        yield label, made(maker, shapes), usual
    five = [(5,)] * 5
    yield "mixed dtypes", made(plain, five, params=params, grads=[dtype, *FLOATS[:3]]), usual
    for kind in moments:
        yield f"{kind} moments", made(plain, _SMALL, moments=[kind]), usual
    for label, scale in (("large gradients", 1e4), ("small gradients", 1e-3)):
        yield label, made(plain, _SMALL, scale=scale), usual
    for label, options in _ADAM_OPTIONS.items():
        yield label, made(plain, _SMALL), options
    for label, flag in _flags(plain):
        yield label, made(plain, _SMALL), {**usual, "noop_flag": flag}
    for value in ("inf", "nan"):
        states = made(plain, _SMALL)
        states.grads[0][0, 1] = float(value)
        yield f"a gradient of {value}", states, usual
        yield f"a gradient of {value}, noop_flag=1", states, {"noop_flag": plain.flag(1)}
    expanded = made(plain, [(3, 5)])
    yield (
        "an expanded gradient",
        dataclasses.replace(expanded, grads=[expanded.grads[0][:1].expand(3, 5)]),
        usual,
    )


def _stepping(options: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
    """(lr, step, the other options)."""
    others = {name: value for name, value in options.items() if name not in ("lr", "step")}
    return options.get("lr", 0.01), options.get("step", 3), others


def _masters(states: _States) -> list[Tensor]:
    """Master parameters; the parameters of the states are these, rounded."""
    import torch

    found = []
    for place, param in enumerate(states.params):
        full = param.to(math_dtype(param.dtype))
        noise = normal(tuple(param.shape), torch.float64, "cpu", 60 + place).to(full)
        found.append(full * (1 + 2.0**-10 * noise))
    return found


def _param_dtypes(dtype: str) -> tuple[str, ...]:
    """The dtypes of parameters to combine with gradients of ``dtype``."""
    others = NARROW if dtype != "float64" else FLOATS
    return dtype, *(it for it in others if it != dtype)


def _adam_samples(dtype: str, device: str) -> Iterator[Sample]:
    params = _param_dtypes(dtype)
    moments = () if dtype == "float64" else ("bfloat16",)
    for label, states, options in _adam_states(dtype, device, params, moments):
        lr, step, others = _stepping(options)
        yield Sample(label, (*states.lists, lr, step), others)
        if label in ("typical", "no tensors", "mixed dtypes", "noop_flag=1", "L2", "transposed"):
            others = {**others, "master_params": _masters(states)}
            yield Sample(f"{label}, masters", (*states.lists, lr, step), others)


def _capturable_samples(
    dtype: str, device: str, lists: Callable[[_States], tuple[list[Tensor], ...]]
) -> Iterator[Sample]:
    import torch

    maker = _Maker(dtype, device)
    params = _param_dtypes(dtype)
    moments = () if dtype == "float64" else ("bfloat16",)
    for label, states, options in _adam_states(dtype, device, params, moments):
        lr, step, others = _stepping(options)
        tensors = maker.number(lr, "float32"), maker.number(step, "int32")
        yield Sample(label, (*lists(states), *tensors), others)
        if label in ("typical", "mixed dtypes", "noop_flag=1", "L2"):
            others = {**others, "inv_scale": maker.number(2.0**-6 / 3, "float32")}
            yield Sample(f"{label}, inv_scale", (*lists(states), *tensors), others)
    states = _states(maker, _SMALL)
    scalar = torch.tensor(0.01, dtype=torch.float64, device=device)
    for kind in ("int64", "float32"):
        step_tensor = maker.number(5, kind)
        yield Sample(f"a float64 lr, a {kind} step", (*lists(states), scalar, step_tensor))
    skipped = (*lists(states), maker.number(0.01, "float32"), maker.number(0, "int32"))
    yield Sample("skipped before the first step", skipped, {"noop_flag": maker.flag(1)})


def _plain_capturable_samples(dtype: str, device: str) -> Iterator[Sample]:
    return _capturable_samples(dtype, device, lambda states: states.lists)


def _master_capturable_samples(dtype: str, device: str) -> Iterator[Sample]:
    return _capturable_samples(dtype, device, lambda states: (*states.lists, _masters(states)))


def _remainder_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    generator = torch.Generator().manual_seed(70)
    low, high = -(2**15), 2**15

    def remainder(param: Tensor) -> Tensor:
        drawn = torch.randint(low, high, param.shape, generator=generator)
        return torch.empty_like(param, dtype=torch.int16).copy_(drawn)

    for label, states, options in _adam_states(dtype, device, ("bfloat16",), ("bfloat16",)):
        lr, step, others = _stepping(options)
        remainders = [remainder(it) for it in states.params]
        yield Sample(label, (*states.lists, remainders, lr, step), others)
    edges = torch.tensor([low, low + 1, -1, 0, 1, high - 1], dtype=torch.int16, device=device)
    states = _states(_Maker(dtype, device), [(6,)], params=["bfloat16"])
    yield Sample("remainders at their limits", (*states.lists, [edges], 0.0, 1))
    powers = [torch.tensor([1.0, -2.0, 0.5, -0.25, 4.0, -8.0], device=device).bfloat16()]
    lists = (states.grads, powers, *states.lists[2:])
    yield Sample("powers of two", (*lists, [edges], 0.01, 1))


def _off_ties(states: _States, masters: list[Tensor], sample: Sample) -> None:
    """Zeroes the elements whose new parameter is so close to the middle of two float8 values
    that float32 arithmetic may round it either way.
    """
    import torch

    data = _fp8_oracle(*sample.args, **{**sample.kwargs, "noop_flag": None})[0]
    for place, value in enumerate(data):
        kind = states.params[place].dtype
        close = value.clone().nan_to_num(0)
        low, high = ((close * (1 + off)).to(kind).view(torch.uint8) for off in (-1e-5, 1e-5))
        for tensor in (states.grads[place], masters[place], states.exp_avgs[place]):
            tensor.masked_fill_(low != high, 0)


def _fp8_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    maker = _Maker(dtype, device)
    for label, states, options in _adam_states(dtype, device, ("float32",), ()):
        lr, step, others = _stepping(options)
        if label == "an expanded gradient":
            continue  # expanded: single elements cannot be changed
        for kind in FP8 if label in ("typical", "large gradients") else FP8[:1]:
            states8, count = _float8(states, kind), len(states.params)
            masters = [it.clone() for it in states.params]
            scales = [maker.number(40.0 + 9 * place, "float32") for place in range(count)]
            amaxes = [maker.number(0.5 * place, "float32") for place in range(count)]
            inverses = [maker.number(7.0, "float32") for _ in range(count)]
            args = (*states8.lists, masters, scales, amaxes, inverses, lr, step)
            sample = Sample(label if kind == FP8[0] else f"{label}, {kind}", args, others)
            _off_ties(states8, masters, sample)
            yield sample
    states8 = _float8(_states(maker, _SMALL, params=["float32"]), FP8[0])
    masters = [torch.full_like(it, 3.0, dtype=torch.float32) for it in states8.params]
    many = [maker.number(1e4, "float32")] * 2
    ones = [maker.number(1.0, "float32") for _ in range(4)]
    args = (*states8.lists, masters, many, ones[:2], ones[2:], 0.01, 3)
    yield Sample("what does not fit is the largest value", args)


def _float8(states: _States, kind: str) -> _States:
    """The same states with parameters of a float8 dtype, and with their own gradients."""
    import torch

    params = [it.to(getattr(torch, kind)) for it in states.params]
    grads = [it.clone() if it.is_contiguous() else it for it in states.grads]
    return dataclasses.replace(states, params=params, grads=grads)


_SGD_OPTIONS: dict[str, dict[str, Any]] = {
    "no momentum": {"momentum": 0.0},
    "no momentum, no weight decay": {"momentum": 0.0, "weight_decay": 0.0},
    "first run": {"first_run": True},
    "first run, nesterov": {"first_run": True, "nesterov": True},
    "nesterov": {"nesterov": True},
    "dampening": {"dampening": 0.3},
    "dampening, nesterov": {"dampening": 0.3, "nesterov": True},
    "weight decay after momentum": {"wd_after_momentum": True},
    "weight decay after momentum, nesterov": {"wd_after_momentum": True, "nesterov": True},
    "weight decay alone, after momentum": {"wd_after_momentum": True, "momentum": 0.0},
    "scale": {"scale": 2.0**-5 / 3},
    "lr=0": {"lr": 0.0},
}


def _sgd_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    plain = _Maker(dtype, device)

    def sample(label: str, states: _States, **options: Any) -> Sample:
        buffers = [it.to(p.dtype) for it, p in zip(states.exp_avgs, states.params, strict=True)]
        named = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, **options}
        args = (states.grads, states.params, named.pop("buffers", buffers), named.pop("lr"))
        return Sample(label, args, named)

    for label, maker, shapes in _kinds(dtype, device):
        yield sample(label, _states(maker, shapes))
    mixed = _states(plain, [(5,)] * 5, params=_param_dtypes(dtype), grads=[dtype, *FLOATS[:3]])
    yield sample("mixed dtypes", mixed)
    small = _states(plain, _SMALL)
    for label, options in _SGD_OPTIONS.items():
        yield sample(label, small, **options)
    yield sample("wide momentum", small, buffers=small.exp_avgs)
    for kind in (torch.float16, torch.bfloat16):
        copies = [torch.full_like(it, 3.0, dtype=kind) for it in small.params]
        yield sample(f"{kind} copies", small, model_params=copies)
    for label, flag in _flags(plain):
        yield sample(label, small, noop_flag=flag)
        copies = [torch.full_like(it, 3.0, dtype=torch.float16) for it in small.params]
        yield sample(f"{label}, copies", small, noop_flag=flag, model_params=copies)
    for value in ("inf", "nan"):
        states = _states(plain, _SMALL)
        states.grads[0][0, 1] = float(value)
        yield sample(f"a gradient of {value}", states)
        yield sample(f"a gradient of {value}, noop_flag=1", states, noop_flag=plain.flag(1))


def _compute_scale_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    maker = _Maker(dtype, device)

    def sample(label: str, amaxes: list[Tensor], max_fp8: float = 448.0, **options: Any) -> Sample:
        places = [torch.full_like(it, 3.0) for it in amaxes]
        return Sample(label, (amaxes, places, [it.clone() for it in places], max_fp8), options)

    for label, kind, shapes in _kinds(dtype, device):
        amaxes = [kind.lay(it.abs()) for it in kind.many(shapes, 50)]
        yield sample(label, amaxes)
        yield sample(f"{label}, powers of two", amaxes, force_pow_2_scales=True)
    edge = torch.tensor([0.0, float("inf"), float("nan"), 448.0, 1.75, 1e-44, 1e-3])
    exact = torch.exp2(torch.arange(-20.0, 20.0))
    around = torch.cat([exact, exact * (1 + 2**-23), exact * (1 - 2**-24)]) * 7
    for powers in (False, True):
        options = {"force_pow_2_scales": powers}
        yield sample(f"edge values, {powers}", [edge.to(device)], **options)
        large = torch.tensor([1e38, 3.4e38], device=device)
        yield sample(f"large values, {powers}", [large], **options)
        yield sample(f"around powers of two, {powers}", [around.to(device)], **options)
        yield sample(f"epsilon, {powers}", [edge.to(device)], epsilon=0.01, **options)
        for largest in (57344.0, 6.0, 448.1):
            yield sample(f"max_fp8={largest}, {powers}", [around.to(device)], largest, **options)
    for label, flag in _flags(maker):
        amaxes = [it.abs() for it in maker.many(_SMALL, 51)]
        yield sample(label, amaxes, noop_flag=flag)


def _e8m0_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    maker = _Maker(dtype, device)

    def sample(label: str, amaxes: list[Tensor], places: torch.dtype, **options: Any) -> Sample:
        held = [torch.full_like(it, 200.0, dtype=torch.uint8).view(places) for it in amaxes]
        return Sample(label, (amaxes, held), options)

    for label, kind, shapes in _kinds(dtype, device):
        amaxes = [kind.lay(it.abs()) for it in kind.many(shapes, 52)]
        yield sample(label, amaxes, torch.float8_e8m0fnu)
        yield sample(f"{label}, bytes", amaxes, torch.uint8)
    every = torch.arange(2**15, dtype=torch.int16, device=device).view(torch.bfloat16)
    yield sample("every amax there is", [every], torch.uint8)
    for label, flag in _flags(maker):
        amaxes = [it.abs() for it in maker.many(_SMALL, 53)]
        yield sample(label, amaxes, torch.float8_e8m0fnu, noop_flag=flag)


# ---------------------------------------------------------------------------- contracts


@contract(
    family="optimizer",
    check=_check_scale,
    samples=_scale_samples,
    tolerance=TOLERANCE,
    oracle=_scale_oracle,
    mutates=("outputs", "noop_flag"),
)
def multi_tensor_scale(
    inputs: list[Tensor],
    outputs: list[Tensor],
    scale: float,
    *,
    noop_flag: Tensor | None = None,
) -> None:
    """``output = input * scale`` for each pair; also checks whether all inputs are finite.

    Args:
        inputs: float32, bfloat16, float16 or float64, any shapes.
        outputs: written; shapes of the inputs, but any of the same dtypes. An output may be its
            own input, but must not overlap another tensor.
        scale: the factor.
        noop_flag: written: 1 if any input is infinite or NaN, otherwise left as it is. The
            outputs are written in any case. An output that overflows its dtype does not set it.

    Raises:
        ArgumentError: a length, shape, dtype or device does not agree.
    """


@contract(
    family="optimizer",
    check=_check_scale_tensor,
    samples=_scale_tensor_samples,
    tolerance=TOLERANCE,
    oracle=_scale_oracle,
    mutates=("outputs", "noop_flag"),
)
def multi_tensor_scale_tensor(
    inputs: list[Tensor],
    outputs: list[Tensor],
    scale: Tensor,
    *,
    noop_flag: Tensor | None = None,
) -> None:
    """:func:`multi_tensor_scale` with a factor that only the device knows.

    Where an output is its own input, the factor is 1 and there is no flag, a kernel need not write
    it: as in gradient clipping below the limit, or for an unscaled loss.

    Args:
        inputs, outputs, noop_flag: as in :func:`multi_tensor_scale`.
        scale: one element, float32 or float64; never read on the host.

    Raises:
        ArgumentError: a length, shape, dtype or device does not agree.
    """


def _norm_shapes(
    inputs: list[Tensor], per_tensor: bool, device: torch.device | None
) -> tuple[Tensor, Tensor | None]:
    import torch

    wide = any(it.dtype == torch.float64 for it in inputs)
    options: dict[str, Any] = {
        "dtype": torch.float64 if wide else torch.float32,
        "device": inputs[0].device if inputs else device,
    }
    return torch.empty(1, **options), torch.empty(len(inputs), **options) if per_tensor else None


@contract(
    family="optimizer",
    check=_check_norm,
    samples=_norm_samples,
    tolerance=NORM_TOLERANCE,
    oracle=_norm_oracle,
    mutates=("noop_flag",),
)
def multi_tensor_l2norm(
    inputs: list[Tensor], *, per_tensor: bool = False, noop_flag: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The Euclidean norm of all inputs together, ``sqrt(sum(x**2))``.

    Args:
        inputs: float32, bfloat16, float16 or float64, any shapes.
        per_tensor: also return the norm of each input.
        noop_flag: written: 1 if the norm is not finite, otherwise left as it is. A norm is
            not finite if an input is not, or if the sum of squares overflows.

    Returns:
        norm: ``[1]``, calculated in and returned as float32, or float64 if any input is float64;
            0 without inputs. On the device of the inputs; without inputs on that
            of ``noop_flag``, without both on the CPU.
        per_tensor: ``[len(inputs)]``, dtype and device of ``norm``; None unless asked for.

    Raises:
        ArgumentError: a dtype or device does not agree.
    """
    return _norm_shapes(inputs, per_tensor, None if noop_flag is None else noop_flag.device)


@contract(
    family="optimizer",
    check=_check_unscale_norm,
    samples=_unscale_norm_samples,
    tolerance=NORM_TOLERANCE,
    oracle=_unscale_norm_oracle,
    mutates=("noop_flag",),
)
def multi_tensor_unscale_l2norm(
    inputs: list[Tensor],
    inv_scale: Tensor,
    *,
    per_tensor: bool = False,
    noop_flag: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The Euclidean norm of the inputs multiplied by ``inv_scale``.

    ``sqrt(sum((x * inv_scale)**2))``, with the product computed before the square. The inputs are
    left as they are.

    Args:
        inputs, per_tensor, noop_flag: as in :func:`multi_tensor_l2norm`.
        inv_scale: one element, float32 or float64; never read on the host.

    Returns:
        As :func:`multi_tensor_l2norm`; without inputs, on the device of ``inv_scale``.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return _norm_shapes(inputs, per_tensor, inv_scale.device)


@contract(
    family="optimizer",
    check=_check_adam,
    samples=_adam_samples,
    tolerance=TOLERANCE,
    oracle=_adam_oracle,
    mutates=("params", "exp_avgs", "exp_avg_sqs", "master_params"),
    dispatch_on="params",
)
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
    """A step of Adam (Kingma and Ba, 2015, arXiv:1412.6980), in place.

    For each parameter p with its gradient g and its moments m and v::

        g = g + weight_decay * p                     unless decoupled_weight_decay
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        u = (m / c1) / (sqrt(v / c2) + eps)
        u = u + weight_decay * p                     if decoupled_weight_decay
        p = p - lr * u

    with ``c = 1 - beta**step``, or 1 without bias correction. Decoupled weight decay is that of
    AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101); the other kind is L2 regularisation.

    An infinity or NaN in a gradient makes that element of the parameter NaN; ``noop_flag``
    prevents this.

    Args:
        grads: float32, bfloat16, float16 or float64, whatever the parameters are.
        params: float32, bfloat16, float16 or float64; written.
        exp_avgs, exp_avg_sqs: m and v, both float32 or both bfloat16; float64 if the
            parameter is. Written.
        lr: at least 0.
        step: which step this is, counted from 1.
        beta1, beta2: at least 0 and below 1.
        eps, weight_decay: at least 0.
        decoupled_weight_decay: AdamW instead of L2.
        bias_correction: divide by c1 and c2.
        master_params: float32 (float64 if the parameter is); written. The update applies to the
            masters, and each parameter becomes its rounded master, whatever it held before.
        noop_flag: nothing is written if it is not 0.

    Raises:
        ArgumentError: a length, shape, dtype, number or device does not agree.
    """


@contract(
    family="optimizer",
    check=_check_capturable,
    samples=_plain_capturable_samples,
    tolerance=TOLERANCE,
    oracle=_capturable_oracle,
    mutates=("params", "exp_avgs", "exp_avg_sqs"),
    dispatch_on="params",
)
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
    """:func:`multi_tensor_adam` with every value that changes between steps on the device.

    No value is read on the host, so a CUDA graph can capture the call: the same graph
    serves every step, and skips a step if ``noop_flag`` is not 0.

    Args:
        grads, params, exp_avgs, exp_avg_sqs: as in :func:`multi_tensor_adam`. The gradients are
            not written (Transformer Engine's kernel leaves ``grad * inv_scale`` in them).
        lr: one element, float32 or float64.
        step: one element, int32, int64 or float32, counted from 1. It is not written. It may
            still be 0 in a step that is skipped.
        beta1, beta2, eps, weight_decay, decoupled_weight_decay, bias_correction: as in
            :func:`multi_tensor_adam`.
        inv_scale: one element, float32 or float64: the gradients are multiplied by it first.
        noop_flag: nothing is written if it is not 0.

    Raises:
        ArgumentError: a length, shape, dtype, number or device does not agree.
    """


@contract(
    family="optimizer",
    check=_check_capturable_master,
    samples=_master_capturable_samples,
    tolerance=TOLERANCE,
    oracle=_capturable_master_oracle,
    mutates=("params", "exp_avgs", "exp_avg_sqs", "master_params"),
    dispatch_on="params",
)
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
    """:func:`multi_tensor_adam_capturable` with master parameters.

    Args:
        master_params: float32 (float64 if the parameter is); written. The update applies to the
            masters, and each parameter becomes its rounded master.
        Others: as in :func:`multi_tensor_adam_capturable`.

    Raises:
        ArgumentError: a length, shape, dtype, number or device does not agree.
    """


@contract(
    family="optimizer",
    check=_check_remainder,
    samples=_remainder_samples,
    tolerance={dtype: TOLERANCE[dtype] for dtype in NARROW},
    oracle=_remainder_oracle,
    mutates=("params", "exp_avgs", "exp_avg_sqs", "param_remainders"),
    decode=_decode_remainder,
)
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
    """:func:`multi_tensor_adam` whose float32 masters are stored as two halves of 16 bits.

    The parameter holds the upper 16 bits of the master and the remainder the lower ones, as
    signed numbers, so that masters cost 2 bytes for each parameter instead of 4. The parameter
    is the rounded master, not the truncated one: if the remainder is negative (the highest bit of
    the lower half is 1), the parameter's bits are one larger than the master's upper half. So

        ``master bits = (param bits - (remainder < 0)) << 16 | (remainder & 0xffff)``

    and writing is the reverse. This rounds to nearest, ties away from zero. A NaN is
    written with the bits 0x7fc00000, as other NaNs could become a number when rounded up. The
    update itself is that of :func:`multi_tensor_adam` on the masters.

    Args:
        grads: float32, bfloat16 or float16.
        params: bfloat16; written.
        exp_avgs, exp_avg_sqs: both float32 or both bfloat16; written.
        param_remainders: int16; written.
        Others: as in :func:`multi_tensor_adam`.

    Raises:
        ArgumentError: a length, shape, dtype, number or device does not agree.
    """


@contract(
    family="optimizer",
    check=_check_fp8,
    samples=_fp8_samples,
    tolerance={dtype: TOLERANCE[dtype] for dtype in NARROW},
    oracle=_fp8_oracle,
    mutates=("params", "exp_avgs", "exp_avg_sqs", "master_params", "amaxes", "scale_invs"),
)
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
    """:func:`multi_tensor_adam` whose parameters are float8 with a scale per tensor.

    The step updates the masters. Then, for each parameter::

        param     = master * scale, in float32, rounded to nearest even in float8;
                    clamped to the largest value
        amax      = max(amax, |master|); NaN does not count
        scale_inv = 1 / scale

    Args:
        grads: float32, bfloat16 or float16.
        params: float8_e4m3fn or float8_e5m2; written, never read.
        exp_avgs, exp_avg_sqs: float32; written.
        master_params: float32; written.
        scales: ``[1]``, float32, for each parameter.
        amaxes: ``[1]``, float32; written.
        scale_invs: ``[1]``, float32; written.
        Others: as in :func:`multi_tensor_adam`.

    Raises:
        ArgumentError: a length, shape, dtype, number or device does not agree.
    """


@contract(
    family="optimizer",
    check=_check_sgd,
    samples=_sgd_samples,
    tolerance=TOLERANCE,
    oracle=_sgd_oracle,
    mutates=("params", "momentum_buffers", "model_params"),
    dispatch_on="params",
)
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
    """A step of stochastic gradient descent with momentum, in place.

    For each parameter p with its gradient g and its momentum buffer b::

        g = scale * g
        g = g + weight_decay * p                     unless wd_after_momentum
        b = momentum * b + (1 - dampening) * g       or b = g, if first_run
        g = g + momentum * b                         if nesterov, else g = b
        g = g + weight_decay * p                     if wd_after_momentum
        p = p - lr * g

    as in ``torch.optim.SGD`` (Sutskever et al., 2013, PMLR 28). Without momentum the lines
    with b are left out, and the buffers are neither read nor written.

    Args:
        grads: float32, bfloat16, float16 or float64, whatever the parameters are.
        params: float32, bfloat16, float16 or float64; written.
        momentum_buffers: each in its parameter's dtype or in float32; written.
        lr, weight_decay, momentum: at least 0.
        dampening: any number.
        nesterov: Nesterov's momentum.
        first_run: the buffers are not initialised yet.
        wd_after_momentum: keep weight decay out of the momentum.
        scale: the gradients are multiplied by it first.
        model_params: float16 or bfloat16; written: copies of the updated parameters.
        noop_flag: nothing is written if it is not 0.

    Raises:
        ArgumentError: a length, shape, dtype, number or device does not agree.
    """


@contract(
    family="optimizer",
    check=_check_compute_scale,
    samples=_compute_scale_samples,
    tolerance=SCALE_TOLERANCE,
    oracle=_compute_scale_oracle,
    mutates=("scales", "scale_invs"),
)
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
    """Scales of a float8 format, from the largest magnitude of the values to be scaled.

    For each element, in float32 with correct rounding:

    1. an amax below epsilon becomes epsilon;
    2. ``scale = max_fp8 / amax``, and 1 if amax is 0, infinite or NaN;
    3. an infinite scale becomes the largest float32;
    4. with ``force_pow_2_scales``, the scale is rounded down to a power of two;
    5. ``scale_inv = 1 / scale``.

    Args:
        amaxes: float32, any shapes, no element negative.
        scales, scale_invs: float32, shapes of ``amaxes``; written.
        max_fp8: the format's largest value, e.g. 448 for E4M3 and 57344 for E5M2; at least 1.
        force_pow_2_scales: powers of two only.
        epsilon: at least 0; like ``max_fp8``, in the range of float32.
        noop_flag: nothing is written if it is not 0.

    Raises:
        ArgumentError: a length, shape, dtype, number or device does not agree.
    """


@contract(
    family="optimizer",
    check=_check_e8m0,
    samples=_e8m0_samples,
    tolerance=E8M0_TOLERANCE,
    oracle=_e8m0_oracle,
    mutates=("scale_invs",),
)
def multi_tensor_compute_scale_inv_e8m0(
    amaxes: list[Tensor], scale_invs: list[Tensor], *, noop_flag: Tensor | None = None
) -> None:
    """The E8M0 scales of MXFP8 blocks, from the largest magnitude of each block.

    The smallest power of two by which 448, the largest value of E4M3, must be multiplied to
    reach amax: the byte is the smallest e with ``448 * 2**(e - 127) >= amax``, at most 254 (for
    infinity too), and 255, which stands for NaN, if amax is NaN (OCP Microscaling Formats 1.0).

    Args:
        amaxes: bfloat16, any shapes, no element negative; one element for each block.
        scale_invs: float8_e8m0fnu, or uint8 for the same bytes; shapes of ``amaxes``. Written.
        noop_flag: nothing is written if it is not 0.

    Raises:
        ArgumentError: a length, shape, dtype or device does not agree.
    """

"""Choosing the experts of each token, and the load-balancing loss.

Logits are ``[T, E]``: T tokens, E experts.

**Scores.** ``score_function`` turns each logit x into a score s: ``"softmax"`` over the
experts, ``"sigmoid"``, ``1 / (1 + exp(-x))``, or ``"sqrtsoftplus"``,
``sqrt(log(1 + exp(x)))``.

**Choice.** Each token goes to the topk experts with the highest scores; among equal scores, to
the experts with the lowest numbers. Scores are compared in float32 (float64 for float64 logits),
in which the scores of different logits may round to the same number.

**Normalization.** The scores of sigmoid and sqrtsoftplus do not sum to 1. Where topk is above
1 they are divided by their sum plus 1e-20.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Backward, Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import FLOATS, math_dtype
from transformer_engine_fl.ops._rounding import LARGEST_FLOAT32
from transformer_engine_fl.ops._samples import layouts, normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "fused_moe_aux_loss_bwd",
    "fused_moe_aux_loss_fwd",
    "fused_score_for_moe_aux_loss_bwd",
    "fused_score_for_moe_aux_loss_fwd",
    "fused_topk_with_score_function_bwd",
    "fused_topk_with_score_function_fwd",
]

EPSILON = 1e-20
"""Added to a sum of scores, which may all be zero, before dividing by it."""

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")

STATISTICS = ("float32", "float64")
COUNTS = ("int32", "int64", *FLOATS)

# For the narrow dtypes: half a unit in the last place, plus the error of float32 arithmetic.
TOLERANCE = {
    "float32": Tolerance(rtol=2e-6, atol=1e-6),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-18),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-16),
    "float64": Tolerance(rtol=1e-13, atol=1e-14),
}
# A gradient is a difference of values that may be nearly equal; in float16 many are subnormal.
BACKWARD_TOLERANCE = {
    "float32": Tolerance(rtol=2e-6, atol=4e-6),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-16),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-14),
    "float64": Tolerance(rtol=1e-13, atol=1e-13),
}


# ------------------------------------------------------------------------------ checks


def _check_choice(op: str, topk: Any, score_function: Any, experts: int) -> None:
    check.is_choice(op, "score_function", score_function, SCORE_FUNCTIONS)
    check.is_integer(op, "topk", topk, at_least=1, below=experts + 1)


def _check_logits(op: str, logits: Any) -> Tensor:
    tensor = check.is_tensor(op, "logits", logits, dtypes=FLOATS)
    check.has_axes(op, "logits", tensor, "[T, E]")
    if not tensor.shape[1]:
        raise ArgumentError(op, "logits", check.describe(logits), "at least one expert (column)")
    return tensor


def _check_groups(op: str, topk: int, num_groups: Any, group_topk: Any, experts: int) -> None:
    if num_groups is None and group_topk is None:
        return
    check.is_integer(op, "num_groups", num_groups, at_least=1)
    check.is_integer(op, "group_topk", group_topk, at_least=1, below=num_groups + 1)
    if experts % num_groups:
        expected = f"a divisor of the number of experts, {experts}"
        raise ArgumentError(op, "num_groups", check.describe(num_groups), expected)
    if topk < group_topk or topk > group_topk * (experts // num_groups):
        expected = (
            f"enough groups to choose {topk} of {experts} experts in {num_groups} groups, "
            f"and at most {topk}"
        )
        raise ArgumentError(op, "group_topk", check.describe(group_topk), expected)


def _check_topk(
    op: str,
    logits: Any,
    topk: Any,
    expert_bias: Any,
    use_pre_softmax: Any,
    num_groups: Any,
    group_topk: Any,
    scaling_factor: Any,
    score_function: Any,
) -> None:
    tensor = _check_logits(op, logits)
    experts = tensor.shape[1]
    _check_choice(op, topk, score_function, experts)
    check.is_flag(op, "use_pre_softmax", use_pre_softmax)
    check.is_number(op, "scaling_factor", scaling_factor)
    _check_groups(op, topk, num_groups, group_topk, experts)
    if expert_bias is None:
        return
    bias = check.is_tensor(op, "expert_bias", expert_bias, dtypes=FLOATS)
    check.has_shape(op, "expert_bias", bias, (experts,), "one for each expert")
    check.same_device(op, "logits", {"logits": tensor, "expert_bias": bias})
    if score_function == "softmax":
        expected = "None: 'softmax' scores have no bias"
        raise ArgumentError(op, "expert_bias", check.describe(expert_bias), expected)


def _check_saved(op: str, name: str, grad: Any, **saved: tuple[Any, tuple[str, ...]]) -> Tensor:
    """Check a gradient ``[T, E]`` and the tensors that the forward saved, of the same shape."""
    tensor = check.is_tensor(op, name, grad, dtypes=FLOATS)
    check.has_axes(op, name, tensor, "[T, E]")
    for other, (value, dtypes) in saved.items():
        kept = check.is_tensor(op, other, value, dtypes=dtypes)
        check.has_shape(op, other, kept, tensor.shape, f"the shape of {name!r}")
    values = {other: value for other, (value, _) in saved.items()}
    check.same_device(op, name, {name: tensor, **values})
    return tensor


def _check_topk_backward(
    op: str,
    grad_probs: Any,
    routing_map: Any,
    intermediate: Any,
    topk: Any,
    use_pre_softmax: Any,
    scaling_factor: Any,
    score_function: Any,
) -> None:
    saved = {"routing_map": (routing_map, ("bool",)), "intermediate": (intermediate, STATISTICS)}
    grad = _check_saved(op, "grad_probs", grad_probs, **saved)
    _check_choice(op, topk, score_function, grad.shape[1])
    check.is_flag(op, "use_pre_softmax", use_pre_softmax)
    check.is_number(op, "scaling_factor", scaling_factor)


def _check_score(op: str, logits: Any, topk: Any, score_function: Any) -> None:
    tensor = _check_logits(op, logits)
    _check_choice(op, topk, score_function, tensor.shape[1])


def _check_score_backward(
    op: str, grad_scores: Any, intermediate: Any, topk: Any, score_function: Any
) -> None:
    saved = {"intermediate": (intermediate, STATISTICS)}
    grad = _check_saved(op, "grad_scores", grad_scores, **saved)
    _check_choice(op, topk, score_function, grad.shape[1])


def _check_counts(op: str, value: Any) -> Tensor:
    counts = check.is_tensor(op, "tokens_per_expert", value, dtypes=COUNTS)
    if counts.ndim != 1:
        expected = "one dimension, [E]"
        raise ArgumentError(op, "tokens_per_expert", check.describe(value), expected)
    return counts


def _check_aux_loss(
    op: str, probs: Any, tokens_per_expert: Any, total_num_tokens: Any, topk: Any, coeff: Any
) -> None:
    tensor = check.is_tensor(op, "probs", probs, dtypes=FLOATS)
    check.has_axes(op, "probs", tensor, "[T, E]")
    counts = _check_counts(op, tokens_per_expert)
    check.has_shape(
        op, "tokens_per_expert", counts, tensor.shape[1:], "one for each column of 'probs'"
    )
    check.same_device(op, "probs", {"probs": tensor, "tokens_per_expert": counts})
    check.is_integer(op, "total_num_tokens", total_num_tokens, at_least=1)
    check.is_integer(op, "topk", topk, at_least=1)
    check.is_number(op, "coeff", coeff, at_least=-LARGEST_FLOAT32, at_most=LARGEST_FLOAT32)


def _check_aux_loss_backward(
    op: str, grad_aux_loss: Any, const_buf: Any, tokens_per_expert: Any, num_rows: Any
) -> None:
    grad = check.is_tensor(op, "grad_aux_loss", grad_aux_loss, dtypes=FLOATS)
    check.has_shape(op, "grad_aux_loss", grad, (), "a scalar")
    const = check.is_tensor(op, "const_buf", const_buf, dtypes=STATISTICS)
    check.has_shape(op, "const_buf", const, (), "a scalar")
    counts = _check_counts(op, tokens_per_expert)
    given = {"grad_aux_loss": grad, "const_buf": const, "tokens_per_expert": counts}
    check.same_device(op, "grad_aux_loss", given)
    check.is_integer(op, "num_rows", num_rows)


# ------------------------------------------------------------------------------ oracles


def _scores(logits: Tensor, score_function: str) -> Tensor:
    """The scores of float64 logits."""
    if score_function == "softmax":
        return logits.softmax(-1)
    if score_function == "sigmoid":
        return logits.sigmoid()
    return logits.logaddexp(logits.new_zeros(())).sqrt()


def _highest(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:count]


def _chosen(scores: Tensor, topk: int, groups: int | None, group_topk: int | None) -> Tensor:
    """The routing map, token by token."""
    import torch

    routed = torch.zeros(scores.shape, dtype=torch.bool)
    for t, line in enumerate(scores.tolist()):
        allowed = list(range(len(line)))
        if groups is not None and group_topk is not None:
            size = len(line) // groups
            members = [line[start : start + size] for start in range(0, len(line), size)]
            best = [sum(sorted(it, reverse=True)[: topk // group_topk]) for it in members]
            kept = _highest(best, group_topk)
            allowed = [e for e in allowed if e // size in kept]
        for place in _highest([line[e] for e in allowed], topk):
            routed[t, allowed[place]] = True
    return routed.to(scores.device)


def _normalized(scores: Tensor, topk: int, score_function: str) -> Tensor:
    if score_function == "softmax" or topk == 1:
        return scores
    return scores / (scores.sum(-1, keepdim=True) + EPSILON)


def _topk_oracle(
    logits: Tensor,
    topk: int,
    expert_bias: Tensor | None = None,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    x = logits.double()
    afterwards = score_function == "softmax" and not use_pre_softmax
    scores = x if afterwards else _scores(x, score_function)
    compared = scores if expert_bias is None else scores + expert_bias.double()
    routed = _chosen(compared, topk, num_groups, group_topk)
    if afterwards:
        scores = x.masked_fill(~routed, -torch.inf).softmax(-1)
    probs = _normalized(scores.masked_fill(~routed, 0), topk, score_function)
    return probs * scaling_factor, routed, scores


def _moved(scores: Tensor, by: Tensor, score_function: str) -> Tensor:
    """The scores after each logit changes by ``by``, computed from the scores alone.

    Saved scores are used as they are, rounded: those of softmax need not sum to 1. ``by`` is
    zero; the oracle differentiates with respect to it.
    """
    import torch

    if score_function == "softmax":
        return scores * by.exp() / (1 + (scores * by.expm1()).sum(-1, keepdim=True))
    if score_function == "sigmoid":
        return scores * by.exp() / (1 + scores * by.expm1())
    softplus = scores.square()
    logits = softplus + torch.log(-torch.expm1(-softplus))
    return (logits + by).logaddexp(by.new_zeros(())).sqrt()


def _gradient(
    grad: Tensor, intermediate: Tensor, score_function: str, output: Callable[[Tensor], Tensor]
) -> Tensor:
    """The gradient of the logits, if ``output`` of their scores has the gradient ``grad``."""
    import torch

    scores = intermediate.detach().double()
    with torch.enable_grad():
        by = torch.zeros_like(scores).requires_grad_()
        result = output(_moved(scores, by, score_function))
        (gradient,) = torch.autograd.grad(result, by, grad.double())
    return gradient


def _topk_backward_oracle(
    grad_probs: Tensor,
    routing_map: Tensor,
    intermediate: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> Tensor:
    def probs(scores: Tensor) -> Tensor:
        chosen = scores.masked_fill(~routing_map, 0)
        return _normalized(chosen, topk, score_function) * scaling_factor

    return _gradient(grad_probs, intermediate, score_function, probs)


def _score_oracle(
    logits: Tensor, topk: int, *, score_function: str = "softmax"
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(logits.double(), score_function)
    routed = _chosen(scores, topk, None, None)
    return _normalized(scores, topk, score_function), routed, scores


def _score_backward_oracle(
    grad_scores: Tensor, intermediate: Tensor, topk: int, *, score_function: str = "softmax"
) -> Tensor:
    def normalized(scores: Tensor) -> Tensor:
        return _normalized(scores, topk, score_function)

    return _gradient(grad_scores, intermediate, score_function, normalized)


def _aux_loss_oracle(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, topk: int, coeff: float
) -> tuple[Tensor, Tensor]:
    import torch

    const = probs.shape[1] * coeff / (topk * total_num_tokens**2)
    loads = (probs.double().sum(0) * tokens_per_expert.double()).sum()
    return const * loads, torch.full_like(loads, const)


def _aux_loss_backward_oracle(
    grad_aux_loss: Tensor, const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int
) -> Tensor:
    """Differentiates the forward; it is linear, so any probs will do."""
    import torch

    counts = tokens_per_expert.double()
    with torch.enable_grad():
        probs = counts.new_zeros((num_rows, counts.shape[0])).requires_grad_()
        loss = const_buf.double() * (probs.sum(0) * counts).sum()
        (gradient,) = torch.autograd.grad(loss, probs, grad_aux_loss.double())
    return gradient


# ------------------------------------------------------------------------------ samples

_SHAPES = {
    "typical": (12, 16),
    "odd sizes": (7, 19),
    "many tokens": (130, 8),
    "one token": (1, 8),
    "256 experts": (5, 256),
    "no tokens": (0, 8),
}


@dataclass(frozen=True, slots=True)
class _Call:
    """Logits and how they are routed."""

    label: str
    logits: Tensor
    topk: int
    bias: Tensor | None
    options: dict[str, Any]


def _logits(dtype: str, device: str) -> Iterator[tuple[str, Tensor]]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    yield from layouts(_SHAPES, 12, 16, dtype, device)
    values = normal((6, 16), torch.float64, "cpu", seed=60)
    # The differences are large enough to survive float32 in every score function.
    yield "large values", (values.clamp(-2, 2) * 3).to(device, kind)
    yield "small values", (values * 2**-10).to(device, kind)
    yield "all equal", torch.full((3, 16), 0.75, dtype=kind, device=device)
    yield "many equal experts", torch.zeros((2, 300), dtype=kind, device=device)


_FUNCTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax before": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
}


def _calls(dtype: str, device: str) -> Iterator[_Call]:
    typical = None
    for label, logits in _logits(dtype, device):
        typical = logits if typical is None else typical
        yield _Call(label, logits, 2, None, {})
        for name in ("sigmoid", "sqrtsoftplus"):
            yield _Call(f"{label}, {name}", logits, 2, None, _FUNCTIONS[name])
    assert typical is not None
    for name, function in _FUNCTIONS.items():
        yield from _option_calls(name, function, typical)
    one = typical[:, :1].contiguous()
    yield _Call("one expert", one, 1, None, {})
    yield _Call("one expert, sigmoid", one, 1, None, _FUNCTIONS["sigmoid"])
    hidden = typical.clone()
    hidden[:, ::2] = -math.inf
    for name in ("softmax", "softmax before", "sigmoid"):
        yield _Call(f"experts that are hidden, {name}", hidden, 3, None, _FUNCTIONS[name])
    yield from _extreme_calls(dtype, device)


def _extreme_calls(dtype: str, device: str) -> Iterator[_Call]:
    """Sums of zero, and scores that are nearly zero."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    zero = torch.full((3, 8), -1000.0, dtype=kind, device=device)
    yield _Call("scores that are zero", zero, 2, None, _FUNCTIONS["sigmoid"])
    yield from _tiny_call("tiny scores", -80.0, dtype, device)


def _tiny_call(label: str, logit: float, dtype: str, device: str) -> Iterator[_Call]:
    import torch

    if dtype != "float16":  # where such values are zero
        logits = torch.full((3, 8), logit, dtype=getattr(torch, dtype), device=device)
        yield _Call(label, logits, 1, None, _FUNCTIONS["sqrtsoftplus"])


def _saved_calls(calls: Iterator[_Call], dtype: str, device: str) -> Iterator[_Call]:
    """The calls for a backward, plus scores whose square is outside the range of float32."""
    yield from calls
    yield from _tiny_call("scores too small to square", -150.0, dtype, device)


def _option_calls(name: str, function: dict[str, Any], logits: Tensor) -> Iterator[_Call]:
    experts = logits.shape[1]
    for topk in (1, experts):
        yield _Call(f"{name}, topk={topk}", logits, topk, None, function)
    for groups, group_topk, topk in ((4, 2, 4), (8, 3, 4), (2, 1, 8)):
        options = {**function, "num_groups": groups, "group_topk": group_topk}
        label = f"{name}, {group_topk} of {groups} groups, topk={topk}"
        yield _Call(label, logits, topk, None, options)
    yield _Call(f"{name}, scaled", logits, 2, None, {**function, "scaling_factor": 2.5})
    if "score_function" in function:
        bias = normal((experts,), logits.dtype, str(logits.device), seed=61) * 0.1
        yield _Call(f"{name}, bias", logits, 3, bias, function)
        yield _Call(f"{name}, bias, topk=1", logits, 1, bias, function)
        yield _Call(f"{name}, bias of float32", logits, 3, bias.float(), function)
        strided = bias.repeat_interleave(2)[::2]
        yield _Call(f"{name}, strided bias", logits, 3, strided, function)
        options = {"num_groups": 4, "group_topk": 2, "scaling_factor": 2.5}
        yield _Call(f"{name}, everything", logits, 4, bias, {**function, **options})
        hidden = bias.clone()
        # Two groups are chosen, with two visible experts each: the fifth is the first hidden one.
        hidden[1::2] = -math.inf
        yield _Call(f"{name}, hidden in groups", logits, 5, hidden, {**function, **options})


def _topk_samples(dtype: str, device: str) -> Iterator[Sample]:
    for call in _calls(dtype, device):
        bias = () if call.bias is None else (call.bias,)
        yield Sample(call.label, (call.logits, call.topk, *bias), call.options)


def _gradients(dtype: str, like: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(label, a gradient of the shape and the strides of logits)."""
    import torch

    grad = normal(tuple(like.shape), like.dtype, str(like.device), seed=62)
    yield "", grad if 0 in like.stride() else torch.empty_like(like).copy_(grad)
    if tuple(like.shape) == _SHAPES["typical"]:
        yield ", transposed gradient", grad.t().contiguous().t()
        yield ", expanded gradient", grad[:1].expand_as(grad)


def _topk_backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    for call in _saved_calls(_calls(dtype, device), dtype, device):
        _, routed, scores = _topk_oracle(call.logits, call.topk, call.bias, **call.options)
        kept = scores.to(math_dtype(call.logits.dtype))
        known = ("use_pre_softmax", "scaling_factor", "score_function")
        options = {name: it for name, it in call.options.items() if name in known}
        for what, grad in _gradients(dtype, call.logits):
            if what and call.label != "typical":
                continue
            yield Sample(call.label + what, (grad, routed, kept, call.topk), options)
        if call.label == "typical":
            turned = (grad, routed.t().contiguous().t(), kept.t().contiguous().t(), call.topk)
            yield Sample("transposed routing_map and intermediate", turned, options)
            other = (grad, routed, kept.to(torch.float64), call.topk)
            yield Sample("intermediate of float64", other, options)


def _score_calls(dtype: str, device: str) -> Iterator[_Call]:
    for call, function in product(_logits(dtype, device), SCORE_FUNCTIONS):
        label, logits = call
        named = {} if function == "softmax" else {"score_function": function}
        for topk in (2, 1, 5) if label == "typical" else (2,):
            name = label if (topk, named) == (2, {}) else f"{label}, {function}, topk={topk}"
            yield _Call(name, logits, topk, None, named)
        if label == "typical":
            yield _Call(f"one expert, {function}", logits[:, :1].contiguous(), 1, None, named)
    yield from _extreme_calls(dtype, device)


def _score_samples(dtype: str, device: str) -> Iterator[Sample]:
    for call in _score_calls(dtype, device):
        yield Sample(call.label, (call.logits, call.topk), call.options)


def _score_backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    for call in _saved_calls(_score_calls(dtype, device), dtype, device):
        kept = _score_oracle(call.logits, call.topk, **call.options)[2]
        kept = kept.to(math_dtype(call.logits.dtype))
        for what, grad in _gradients(dtype, call.logits):
            if what and call.label != "typical":
                continue
            yield Sample(call.label + what, (grad, kept, call.topk), call.options)
        if call.label == "typical":
            turned = (grad, kept.t().contiguous().t(), call.topk)
            yield Sample("transposed intermediate", turned, call.options)
            other = (grad, kept.to(torch.float64), call.topk)
            yield Sample("intermediate of float64", other, call.options)


def _counts(experts: int, device: str) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(63)
    return torch.randint(0, 9, (experts,), generator=generator).to(device, torch.int32)


def _aux_loss_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    for label, logits in layouts(_SHAPES, 12, 16, dtype, device):
        probs = logits if 0 in logits.stride() else logits.copy_(logits.float().softmax(-1))
        counts = _counts(probs.shape[1], device)
        yield Sample(label, (probs, counts, probs.shape[0] + 3, 2, 0.01))
        if label == "typical":
            yield Sample("int64 counts", (probs, counts.long(), 12, 2, 0.01))
            yield Sample("counts of the same dtype", (probs, counts.to(kind), 12, 2, 1.0))
            strided = counts.repeat_interleave(2)[::2]
            yield Sample("strided counts", (probs, strided, 12, 2, 1.0))
            yield Sample("no tokens for any", (probs, counts * 0, 12, 2, 1.0))
            yield Sample("one expert", (probs[:, :1].contiguous(), counts[:1], 12, 1, 1.0))
            many = (probs, counts * 1_000_000, 50_000_000, 8, 1e6)
            yield Sample("many tokens in all", many)


def _aux_loss_backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    const = torch.tensor(0.0375, dtype=math_dtype(kind), device=device)
    for label, (rows, experts) in {**_SHAPES, "one expert": (5, 1)}.items():
        grad = torch.tensor(-1.7, dtype=kind, device=device)
        counts = _counts(experts, device)
        yield Sample(label, (grad, const, counts, rows))
        if label == "typical":
            yield Sample("int64 counts", (grad, const, counts.long(), rows))
            yield Sample("counts of the same dtype", (grad, const, counts.to(kind), rows))
            yield Sample("strided counts", (grad, const, counts.repeat_interleave(2)[::2], rows))
            yield Sample("const_buf of float64", (grad, const.double(), counts, rows))


# ---------------------------------------------------------------------------- contracts


@contract(
    family="router",
    check=_check_topk,
    samples=_topk_samples,
    tolerance=TOLERANCE,
    oracle=_topk_oracle,
    backward=Backward(
        "fused_topk_with_score_function_bwd",
        saves={"routing_map": "output[1]", "intermediate": "output[2]"},
        gradients=("logits",),
        options=("topk", "use_pre_softmax", "scaling_factor", "score_function"),
    ),
)
def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    expert_bias: Tensor | None = None,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses the topk experts of each token, and how much each counts.

    The head of this module defines scores, choice and normalization. The prob of a
    chosen expert is ``scaling_factor`` times its score, normalized over the chosen experts
    (sigmoid, sqrtsoftplus); the prob of any other expert is 0.

    For ``"softmax"`` there are two orders. With ``use_pre_softmax`` the scores are the
    softmax over all experts, and those of the chosen experts are used as they are. Without it,
    logits are compared, and the scores are the softmax over the chosen experts alone. The other
    score functions ignore the flag.

    Groups (DeepSeek-V3, arXiv:2412.19437): the experts form ``num_groups`` consecutive groups of
    equal size. A group's score is the sum of its ``topk // group_topk`` highest scores;
    a token's experts are chosen from the ``group_topk`` groups with the highest scores, the
    first of equal ones.

    Args:
        logits: ``[T, E]``, float32, bfloat16, float16 or float64; E at least 1.
        topk: how many experts each token goes to, from 1 to E.
        expert_bias: ``[E]``, any of the same dtypes, added to the scores only for comparing
            experts or groups; not for softmax. It has no gradient.
        use_pre_softmax: softmax before the choice, not after.
        num_groups: a divisor of E, or None.
        group_topk: at most num_groups and at most topk; that many groups must have at least topk
            experts. None if num_groups is.
        scaling_factor: factor of the probs.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.

    Returns:
        probs: ``[T, E]``, dtype of ``logits``, contiguous.
        routing_map: ``[T, E]``, bool, topk true in each row. Saved for the backward.
        intermediate: ``[T, E]``, float32 (float64 for float64), the score of every expert
            before normalization and scaling, without the bias; if softmax comes after the choice,
            0 for experts that are not chosen. Saved for the backward.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    import torch

    return (
        logits.new_empty(logits.shape),
        logits.new_empty(logits.shape, dtype=torch.bool),
        logits.new_empty(logits.shape, dtype=math_dtype(logits.dtype)),
    )


@contract(
    family="router",
    check=_check_topk_backward,
    samples=_topk_backward_samples,
    tolerance=BACKWARD_TOLERANCE,
    oracle=_topk_backward_oracle,
)
def fused_topk_with_score_function_bwd(
    grad_probs: Tensor,
    routing_map: Tensor,
    intermediate: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    scaling_factor: float = 1.0,
    score_function: str = "softmax",
) -> Tensor:
    """Gradient of :func:`fused_topk_with_score_function_fwd` with respect to the logits.

    The choice is treated as constant. With s the intermediate, M the chosen experts and
    ``g = scaling_factor * grad_probs`` on M and 0 elsewhere, and sums over a row:

    - softmax, before or after the choice: ``dx = s * (g - sum(g * s))``;
    - the others: ``ds = (g - sum(g * s) / S) / S`` on M and 0 elsewhere, with
      ``S = sum over M of s + 1e-20`` (``ds = g`` for topk = 1), and ``dx = ds * s * (1 - s)``
      for sigmoid, ``dx = ds * (1 - exp(-s**2)) / (2 * s)`` for sqrtsoftplus.

    Args:
        grad_probs: ``[T, E]``, float32, bfloat16, float16 or float64.
        routing_map: ``[T, E]``, bool, as the forward returned it.
        intermediate: ``[T, E]``, float32 or float64, as the forward returned it.
        topk: as in the forward.
        use_pre_softmax: as in the forward.
        scaling_factor: as in the forward.
        score_function: as in the forward.

    Returns:
        grad_logits: ``[T, E]``, dtype of ``grad_probs``, contiguous; calculated in float32
            (float64 for float64).

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return grad_probs.new_empty(grad_probs.shape)


@contract(
    family="router",
    check=_check_score,
    samples=_score_samples,
    tolerance=TOLERANCE,
    oracle=_score_oracle,
    backward=Backward(
        "fused_score_for_moe_aux_loss_bwd",
        saves={"intermediate": "output[2]"},
        gradients=("logits",),
        options=("topk", "score_function"),
    ),
)
def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, *, score_function: str = "softmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """The scores of all experts, as input of the load-balancing loss.

    The head of this module defines scores and choice; here the scores of sigmoid
    and sqrtsoftplus are normalized over all experts (for topk above 1).

    Args:
        logits: ``[T, E]``, float32, bfloat16, float16 or float64; E at least 1.
        topk: how many experts each token goes to, from 1 to E.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.

    Returns:
        scores: ``[T, E]``, dtype of ``logits``, contiguous.
        routing_map: ``[T, E]``, bool, true for the topk highest scores of each row.
        intermediate: ``[T, E]``, float32 (float64 for float64), the scores before
            normalization. Saved for the backward.

    Raises:
        ArgumentError: a shape, dtype or option does not agree.
    """
    import torch

    return (
        logits.new_empty(logits.shape),
        logits.new_empty(logits.shape, dtype=torch.bool),
        logits.new_empty(logits.shape, dtype=math_dtype(logits.dtype)),
    )


@contract(
    family="router",
    check=_check_score_backward,
    samples=_score_backward_samples,
    tolerance=BACKWARD_TOLERANCE,
    oracle=_score_backward_oracle,
)
def fused_score_for_moe_aux_loss_bwd(
    grad_scores: Tensor, intermediate: Tensor, topk: int, *, score_function: str = "softmax"
) -> Tensor:
    """Gradient of :func:`fused_score_for_moe_aux_loss_fwd` with respect to the logits.

    As :func:`fused_topk_with_score_function_bwd`, with every expert chosen and a
    scaling factor of 1.

    Args:
        grad_scores: ``[T, E]``, float32, bfloat16, float16 or float64.
        intermediate: ``[T, E]``, float32 or float64, as the forward returned it.
        topk: as in the forward.
        score_function: as in the forward.

    Returns:
        grad_logits: ``[T, E]``, dtype of ``grad_scores``, contiguous; calculated in float32
            (float64 for float64).

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return grad_scores.new_empty(grad_scores.shape)


@contract(
    family="router",
    check=_check_aux_loss,
    samples=_aux_loss_samples,
    tolerance=TOLERANCE,
    oracle=_aux_loss_oracle,
    backward=Backward(
        "fused_moe_aux_loss_bwd",
        saves={"const_buf": "output[1]", "tokens_per_expert": "tokens_per_expert"},
        sizes={"num_rows": ("probs", 0)},
        gradients=("probs",),
    ),
)
def fused_moe_aux_loss_fwd(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int, topk: int, coeff: float
) -> tuple[Tensor, Tensor]:
    """The load-balancing loss of Switch Transformer (arXiv:2101.03961, equation 4).

    ``aux_loss = c * sum over e of tokens_per_expert[e] * sum over t of probs[t, e]`` with
    ``c = E * coeff / (topk * total_num_tokens**2)``: for each expert, its fraction of the
    (token, expert) pairs times its mean prob; summed, and multiplied by E and ``coeff``. The loss
    is ``coeff`` if every expert has the same load and the probs of a token sum to 1.

    Args:
        probs: ``[T, E]``, the scores of all experts; float32, bfloat16, float16 or float64.
        tokens_per_expert: ``[E]``, int32, int64 or any of the same dtypes: the number of tokens
            of each expert, which may be counted over more than T tokens. It has no gradient.
        total_num_tokens: the number of tokens it is counted over, at least 1.
        topk: how many experts each token goes to, at least 1.
        coeff: the weight of the loss, in the range of float32.

    Returns:
        aux_loss: a scalar (no dimensions), dtype of ``probs``; summed in float32 (float64
            for float64).
        const_buf: a scalar, float32 (float64 for float64): c. Saved for the backward.

    Raises:
        ArgumentError: a shape, dtype, number or device does not agree.
    """
    return probs.new_empty(()), probs.new_empty((), dtype=math_dtype(probs.dtype))


@contract(
    family="router",
    check=_check_aux_loss_backward,
    samples=_aux_loss_backward_samples,
    tolerance=TOLERANCE,
    oracle=_aux_loss_backward_oracle,
)
def fused_moe_aux_loss_bwd(
    grad_aux_loss: Tensor, const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int
) -> Tensor:
    """Gradient of :func:`fused_moe_aux_loss_fwd` with respect to the probs.

    ``grad_probs[t, e] = const_buf * tokens_per_expert[e] * grad_aux_loss``.

    Args:
        grad_aux_loss: a scalar (no dimensions), float32, bfloat16, float16 or float64.
        const_buf: a scalar, float32 or float64, as the forward returned it.
        tokens_per_expert: ``[E]``, as in the forward.
        num_rows: T, the rows of the forward's probs.

    Returns:
        grad_probs: ``[num_rows, E]``, dtype of ``grad_aux_loss``, contiguous; calculated in
            float32 (float64 for float64).

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return grad_aux_loss.new_empty((num_rows, tokens_per_expert.shape[0]))

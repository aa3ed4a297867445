"""Cross entropy of logits, of shards of the vocabulary, or fused with the linear layer before it.

A row has the logits ``x_0 .. x_(V-1)`` and a target t. In all operators below

- the scores are ``s = x``, or ``s = softcap * tanh(x / softcap)`` (Gemma 2, 2024);
- ``lse = log(sum over v of exp(s_v))`` and ``p_v = exp(s_v - lse)``;
- ``loss = (1 - e) * (lse - s_t) + e * (lse - mean of s) + z * lse**2``, where e is
  ``label_smoothing`` (Szegedy et al., 2016) and z is ``z_loss`` (PaLM, Chowdhery et al.,
  2022). A term whose factor e or z is 0 is left out, so a score of ``-inf`` does not make it NaN.

Hence the loss's gradient with respect to ``s_v`` is
``(1 + 2 * z * lse) * p_v - (1 - e) * [v = t] - e / V``, and the gradient of lse is ``p_v``. With
a softcap both are multiplied by ``1 - (s_v / softcap)**2``.

A row whose target is ``ignore_index`` has loss 0, lse 0 and a gradient of exactly 0,
even if its logits are NaN; they need not be read. A target that is neither ``ignore_index``
nor in the vocabulary makes the loss and the gradient of its row NaN. A logit of
``-inf`` hides a word: its p is 0.

Each row has its own loss; :func:`transformer_engine_fl.functional.cross_entropy` has the mean
and the sum. Losses, statistics and the arithmetic are float32, or float64 for float64 logits.

Forward and backward read the logits once each. If the loss's gradient is known before the
forward, as for a mean over the rows, :func:`cross_entropy_fwd_bwd` does both at once, and so does
:func:`fused_linear_cross_entropy_fwd_bwd` for the outputs of a linear layer.

**Shards of the vocabulary** (Shoeybi et al., 2019, "Megatron-LM"): each rank holds some
columns of the logits. :func:`cross_entropy_partial_fwd` computes four numbers for each row of
a shard. :func:`cross_entropy_merge` turns the gathered numbers of all ranks into loss and lse.
:func:`cross_entropy_bwd` then needs nothing from the other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Backward, Between, Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import FLOATS, math_dtype
from transformer_engine_fl.ops._rounding import LARGEST_FLOAT32
from transformer_engine_fl.ops._samples import layouts, normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "cross_entropy_fwd_bwd",
    "cross_entropy_merge",
    "cross_entropy_partial_fwd",
    "fused_linear_cross_entropy_bwd",
    "fused_linear_cross_entropy_fwd",
    "fused_linear_cross_entropy_fwd_bwd",
]

# The results are float32 whatever the logits are.
_FLOAT32 = Tolerance(rtol=1e-6, atol=1e-6)
_FLOAT64 = Tolerance(rtol=1e-12, atol=1e-12)
FORWARD_TOLERANCE = {
    "float32": _FLOAT32,
    "bfloat16": _FLOAT32,
    "float16": _FLOAT32,
    "float64": _FLOAT64,
}
MERGE_TOLERANCE = {"float32": _FLOAT32, "float64": _FLOAT64}

# For the narrow dtypes: half a unit in the last place, plus the error of float32 arithmetic;
# small probabilities are subnormal in float16.
BACKWARD_TOLERANCE = {
    "float32": Tolerance(rtol=1e-5, atol=1e-5),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-14),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-11),
    "float64": Tolerance(rtol=1e-12, atol=1e-12),
}
# Adds the error of the products over H and V. In the narrow dtypes the gradients of the logits
# may be rounded before the products: that adds half a unit in the last place, or more relative to
# a sum in which they largely cancel.
LINEAR_FORWARD_TOLERANCE = FORWARD_TOLERANCE | dict.fromkeys(
    ("float32", "bfloat16", "float16"), Tolerance(rtol=2e-6, atol=2e-6)
)
LINEAR_BACKWARD_TOLERANCE = {
    "float32": Tolerance(rtol=2e-5, atol=2e-5),
    "bfloat16": Tolerance(rtol=2**-7, atol=2**-6),
    "float16": Tolerance(rtol=2**-10, atol=2**-9),
    "float64": Tolerance(rtol=1e-12, atol=1e-12),
}

_LIMIT = 2**63


# ------------------------------------------------------------------------------ checks


def _is_softcap(op: str, name: str, value: Any) -> None:
    if value is None:
        return
    check.is_number(op, name, value)
    if isinstance(value, int | float) and not 2**-126 <= value <= LARGEST_FLOAT32:
        expected = "None or a normal number of float32 above 0"
        raise ArgumentError(op, name, check.describe(value), expected)


_OPTION_CHECKS: Mapping[str, Callable[[str, str, Any], None]] = {
    "label_smoothing": partial(check.is_number, at_least=0, at_most=1),
    "ignore_index": partial(check.is_integer, at_least=-_LIMIT, below=_LIMIT),
    "z_loss": partial(check.is_number, at_least=0, at_most=LARGEST_FLOAT32),
    "softcap": _is_softcap,
}


def _check_options(op: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        _OPTION_CHECKS[name](op, name, value)


def _check_words(op: str, name: str, value: Tensor, place: int) -> None:
    if value.shape[place] == 0:
        raise ArgumentError(op, name, check.describe(value), "at least one word of the vocabulary")


def _check_target(op: str, input: Tensor, target: Any) -> None:
    tensor = check.is_tensor(op, "target", target, dtypes=("int64",))
    check.has_shape(op, "target", tensor, input.shape[:-1], "one for each row of 'input'")
    check.same_device(op, "input", {"input": input, "target": tensor})


def _check_logits(op: str, input: Any, target: Any) -> None:
    tensor = check.is_tensor(op, "input", input, dtypes=FLOATS, min_ndim=1)
    _check_words(op, "input", tensor, -1)
    _check_target(op, tensor, target)


def _check_per_row(op: str, input: Tensor, values: dict[str, Any]) -> None:
    dtype = check.dtype_name(math_dtype(input.dtype))
    for name, value in values.items():
        tensor = check.is_tensor(op, name, value, dtypes=(dtype,))
        check.has_shape(op, name, tensor, input.shape[:-1], "one for each row of 'input'")
    check.same_device(op, "input", {"input": input, **values})


def _check_statistics(op: str, input: Tensor, grad_loss: Any, lse: Any, grad_lse: Any) -> None:
    statistics = {"grad_loss": grad_loss, "lse": lse, "grad_lse": grad_lse}
    if grad_lse is None:
        del statistics["grad_lse"]
    _check_per_row(op, input, statistics)


def _check_shard(op: str, input: Tensor, vocab_start: Any, vocab_size: Any) -> None:
    words = input.shape[-1]
    check.is_integer(op, "vocab_start", vocab_start, below=_LIMIT - words)
    if vocab_size is not None:
        least = vocab_start + words
        check.is_integer(op, "vocab_size", vocab_size, at_least=least, below=_LIMIT)


def _check_forward(op: str, input: Any, target: Any, **options: Any) -> None:
    _check_logits(op, input, target)
    _check_options(op, options)


def _check_partial(op: str, input: Any, target: Any, vocab_start: Any, **options: Any) -> None:
    _check_logits(op, input, target)
    _check_shard(op, input, vocab_start, None)
    _check_options(op, options)


def _check_merge(op: str, stats: Any, target: Any, vocab_size: Any, **options: Any) -> None:
    tensor = check.is_tensor(op, "stats", stats, dtypes=tuple(MERGE_TOLERANCE), min_ndim=2)
    if tensor.shape[0] == 0 or tensor.shape[-1] != 4:
        expected = "[shards, ..., 4] with at least one shard"
        raise ArgumentError(op, "stats", check.describe(stats), expected)
    target = check.is_tensor(op, "target", target, dtypes=("int64",))
    check.has_shape(op, "target", target, tensor.shape[1:-1], "one for each row of 'stats'")
    check.same_device(op, "stats", {"stats": tensor, "target": target})
    check.is_integer(op, "vocab_size", vocab_size, at_least=1, below=_LIMIT)
    _check_options(op, options)


def _check_backward(
    op: str,
    grad_loss: Any,
    input: Any,
    target: Any,
    lse: Any,
    grad_lse: Any,
    vocab_start: Any,
    vocab_size: Any,
    **options: Any,
) -> None:
    _check_logits(op, input, target)
    _check_statistics(op, input, grad_loss, lse, grad_lse)
    _check_shard(op, input, vocab_start, vocab_size)
    _check_options(op, options)


def _check_both(op: str, input: Any, target: Any, grad_loss: Any, **options: Any) -> None:
    _check_logits(op, input, target)
    _check_per_row(op, input, {"grad_loss": grad_loss})
    _check_options(op, options)


def _check_linear(op: str, input: Any, weight: Any, target: Any, bias: Any, **options: Any) -> None:
    tensor = check.is_tensor(op, "input", input, dtypes=FLOATS, min_ndim=1)
    dtypes = (check.dtype_name(tensor.dtype),)
    weight = check.is_tensor(op, "weight", weight, dtypes=dtypes)
    if weight.ndim != 2 or weight.shape[1] != tensor.shape[-1]:
        expected = f"[V, {tensor.shape[-1]}], as many columns as 'input' has"
        raise ArgumentError(op, "weight", check.describe(weight), expected)
    _check_words(op, "weight", weight, 0)
    if bias is not None:
        bias = check.is_tensor(op, "bias", bias, dtypes=dtypes)
        check.has_shape(op, "bias", bias, weight.shape[:1], "one for each row of 'weight'")
    _check_target(op, tensor, target)
    check.same_device(op, "input", {"input": tensor, "weight": weight, "bias": bias})
    _check_options(op, options)


def _check_linear_backward(
    op: str,
    grad_loss: Any,
    input: Any,
    weight: Any,
    target: Any,
    lse: Any,
    bias: Any,
    grad_lse: Any,
    **options: Any,
) -> None:
    _check_linear(op, input, weight, target, bias, **options)
    _check_statistics(op, input, grad_loss, lse, grad_lse)


def _check_linear_both(
    op: str, input: Any, weight: Any, target: Any, grad_loss: Any, bias: Any, **options: Any
) -> None:
    _check_linear(op, input, weight, target, bias, **options)
    _check_per_row(op, input, {"grad_loss": grad_loss})


# ------------------------------------------------------------------------------ oracles


def _scores(logits: Tensor, softcap: float | None) -> Tensor:
    import torch

    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _one_hot(target: Tensor, columns: int, vocab_start: int = 0) -> Tensor:
    """``[..., columns]``: true at the target; all false if it is in another shard."""
    import torch

    words = torch.arange(vocab_start, vocab_start + columns, device=target.device)
    return target.unsqueeze(-1) == words


def _hidden(input: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The logits in float64, zero in the rows that are ignored."""
    return input.double().masked_fill((target == ignore_index).unsqueeze(-1), 0)


def _cross_entropy_fwd_oracle(
    input: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    import torch

    scores = _scores(_hidden(input, target, ignore_index), softcap)
    lse, logarithms = scores.logsumexp(-1), scores.log_softmax(-1)
    chosen = _one_hot(target, scores.shape[-1])
    loss = (label_smoothing - 1) * torch.where(chosen, logarithms, 0).sum(-1)
    if label_smoothing:
        loss = loss - label_smoothing * logarithms.mean(-1)
    if z_loss:
        loss = loss + z_loss * lse**2
    loss = loss.masked_fill(~chosen.any(-1), torch.nan)
    ignored = target == ignore_index
    return loss.masked_fill(ignored, 0), lse.masked_fill(ignored, 0)


def _partial_oracle(
    input: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    import torch

    scores = _scores(_hidden(input, target, ignore_index), softcap)
    highest = scores.amax(-1)
    # The logarithm of the sum is lse - highest, which is NaN (-inf minus -inf) if all is hidden.
    total = (scores.logsumexp(-1) - highest).exp().masked_fill(highest == -torch.inf, 0)
    chosen = _one_hot(target, scores.shape[-1], vocab_start)
    at_target = torch.where(chosen, scores, 0).sum(-1)
    stats = torch.stack((highest, total, at_target, scores.sum(-1)), -1)
    return stats.masked_fill((target == ignore_index).unsqueeze(-1), 0)


def _merge_oracle(
    stats: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    import torch

    highest, total, at_target, summed = stats.double().unbind(-1)
    lse = (highest + total.log()).logsumexp(0)
    loss = (1 - label_smoothing) * (lse - at_target.sum(0))
    if label_smoothing:
        loss = loss + label_smoothing * (lse - summed.sum(0) / vocab_size)
    if z_loss:
        loss = loss + z_loss * lse**2
    loss = loss.masked_fill((target < 0) | (target >= vocab_size), torch.nan)
    ignored = target == ignore_index
    return loss.masked_fill(ignored, 0), lse.masked_fill(ignored, 0)


def _cross_entropy_bwd_oracle(
    grad_loss: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """Differentiates the forward around the saved lse.

    If the scores change by d, lse changes by ``sum(exp(s - lse) * (exp(d) - 1))`` to first
    order in d. This form uses the saved lse as it is, rounded, and only needs the scores of this
    shard. Constant terms of the loss are left out.
    """
    import torch

    columns = input.shape[-1]
    size = vocab_start + columns if vocab_size is None else vocab_size
    with torch.enable_grad():
        leaf = _hidden(input, target, ignore_index).detach().requires_grad_()
        scores = _scores(leaf, softcap)
        moved = torch.zeros_like(leaf).requires_grad_()
        weights = (scores.detach() - lse.double().unsqueeze(-1)).exp()
        moved_lse = lse.double() + (weights * moved.expm1()).sum(-1)
        chosen = _one_hot(target, columns, vocab_start)
        loss = moved_lse - (1 - label_smoothing) * torch.where(chosen, moved, 0).sum(-1)
        loss = loss - label_smoothing * moved.sum(-1) / size
        if z_loss:
            loss = loss + z_loss * moved_lse**2
        others = torch.zeros_like(lse) if grad_lse is None else grad_lse
        (gradient,) = torch.autograd.grad(
            (loss, moved_lse), moved, (grad_loss.double(), others.double())
        )
        (gradient,) = torch.autograd.grad(scores, leaf, gradient)
    outside = (target < 0) | (target >= size)
    gradient = gradient.masked_fill(outside.unsqueeze(-1), torch.nan)
    return gradient.masked_fill((target == ignore_index).unsqueeze(-1), 0)


def _both_oracle(
    input: Tensor, target: Tensor, grad_loss: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Between]:
    """Accepts p computed from the exact lse and, as in the separate backward, the rounded lse."""
    import torch

    loss, lse = _cross_entropy_fwd_oracle(input, target, **options)
    rounded = lse.to(math_dtype(input.dtype)).abs()
    beyond = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    unit = (beyond - rounded).double().nan_to_num(posinf=0.0)
    gradient, less, more = (
        _cross_entropy_bwd_oracle(grad_loss, input, target, of, **options)
        for of in (lse, lse + unit, lse - unit)
    )
    tolerance = BACKWARD_TOLERANCE[check.dtype_name(input.dtype)]
    finite = torch.where(gradient.isfinite(), gradient, 0)
    allowed = tolerance.rtol * finite.abs() + tolerance.atol * finite.square().mean().sqrt()
    return loss, lse, Between(less.minimum(more) - allowed, less.maximum(more) + allowed)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = input @ weight.t()
    return logits if bias is None else logits + bias


def _linear_fwd_oracle(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    offset = None if bias is None else bias.double()
    logits = _linear(input.double(), weight.double(), offset)
    return _cross_entropy_fwd_oracle(logits, target, **options)


def _linear_bwd_oracle(
    grad_loss: Tensor,
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    import torch

    given = [it for it in (input, weight, bias) if it is not None]
    with torch.enable_grad():
        leaves = [it.detach().double().requires_grad_() for it in given]
        logits = _linear(leaves[0], leaves[1], leaves[2] if bias is not None else None)
        gradient = _cross_entropy_bwd_oracle(grad_loss, logits, target, lse, grad_lse, **options)
        dx, dw, *db = torch.autograd.grad(logits, leaves, gradient)
    return dx, dw, db[0] if db else None


def _linear_both_oracle(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    loss, lse = _linear_fwd_oracle(input, weight, target, bias, **options)
    gradients = _linear_bwd_oracle(grad_loss, input, weight, target, lse, bias, **options)
    return loss, lse, *gradients


# ------------------------------------------------------------------------------ samples

_SHAPES = {
    "typical": (16, 96),
    "three dimensions": (2, 3, 96),
    "one dimension": (48,),
    "one row": (1, 256),
    "one column": (5, 1),
    "odd width": (5, 129),
    "wide odd row": (3, 5003),
    "many rows": (257, 40),
    "no rows": (0, 64),
}

_OPTIONS: tuple[dict[str, Any], ...] = (
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"ignore_index": 3},
    {"z_loss": 0.02},
    {"softcap": 2.0},
    {"softcap": 30},
    {"softcap": 1e7},
    {"label_smoothing": 0.2, "ignore_index": -1, "z_loss": 0.01, "softcap": 5.0},
)

Call = tuple[str, "Tensor", "Tensor", dict[str, Any]]


def _targets(shape: tuple[int, ...], words: int, device: str) -> Tensor:
    """Random targets, with some at both ends of the vocabulary."""
    import torch

    generator = torch.Generator().manual_seed(60)
    target = torch.randint(0, words, shape, generator=generator)
    if target.numel() > 1:
        target.view(-1)[0] = 0
        target.view(-1)[-1] = words - 1
    return target.to(device)


def _named(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _calls(dtype: str, device: str) -> Iterator[Call]:
    """(label, logits, targets, options) of every kind that must work."""
    import torch

    for label, input in layouts(_SHAPES, 12, 64, dtype, device):
        target = _targets(tuple(input.shape[:-1]), input.shape[-1], device)
        yield label, input, target, {}
        if label == "typical":
            for options in _OPTIONS:
                chosen = target.clone()
                chosen[2::5] = options.get("ignore_index", 3)
                yield _named(options), input, chosen, options
            yield "strided targets", input, target.repeat_interleave(2)[::2], {}
            yield "one target for all", input, target[3].expand(16), {}
    yield from _calls_with_extremes(dtype, device)
    # Not for shards: their sums of scores round away the differences between such scores.
    input, target = normal((12, 640), torch.float64, device, 61), _targets((12,), 640, device)
    common = (input - 1e4).to(getattr(torch, dtype))
    yield "smoothed logits around -1e4", common, target, {"label_smoothing": 0.1}
    kind: torch.dtype = getattr(torch, dtype)
    far, target = normal((2, 1501), kind, device, 61), torch.tensor([5, 700], device=device)
    far[range(2), target] = -5e4
    yield "smoothed almost entirely", far, target, {"label_smoothing": 0.999}
    # Rows at multiples of 16 bytes; a slice of one row keeps a stride that is no such multiple.
    spread = normal((8, 2, 1000 + 8 // kind.itemsize), kind, device, 61)[:, :1, :1000]
    yield "every other row", spread, _targets((8, 1), 1000, device), {}
    # Rows of no single stride, and of a width that is no multiple of 16 bytes; a slice has one.
    spread = normal((8, 3, 1504), kind, device, 61)[:, :2, :1501]
    yield "two rows of three", spread, _targets((8, 2), 1501, device), {}
    columns_first = normal((1000, 18), kind, device, 61).t()
    yield "columns first", columns_first, _targets((18,), 1000, device), {}


def _calls_with_extremes(dtype: str, device: str) -> Iterator[Call]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    input, target = normal((12, 64), kind, device, 61), _targets((12,), 64, device)
    some, everything = target.clone(), torch.full_like(target, -100)
    some[1::3] = -100
    yield "rows that are ignored", input, some, {"label_smoothing": 0.1, "z_loss": 0.01}
    yield "every row ignored", input, everything, {"label_smoothing": 0.1, "z_loss": 0.01}
    broken = input.clone()
    broken[1] = torch.nan
    broken[4, 5:] = torch.inf
    broken[7] = -torch.inf
    yield "anything in ignored rows", broken, some, {"label_smoothing": 0.1, "softcap": 9.0}
    outside = target.clone()
    outside[2], outside[3], outside[5], outside[8] = 64, -1, 2**40, -(2**40)
    yield "targets outside the vocabulary", input, outside, {"label_smoothing": 0.1}
    yield "logits up to 1e4", (input.clamp(-2, 2) * 5e3), target, {}
    yield "capped logits up to 1e4", (input.clamp(-2, 2) * 5e3), target, {"softcap": 2e3}
    yield "logits around -1e4", input - 1e4, target, {}
    yield "small logits", input * 1e-3, target, {}
    yield "all equal", torch.full_like(input, -3.0), target, {"z_loss": 0.01}
    masked = input.masked_fill(normal((12, 64), torch.float32, device, 62) > 0.43, -torch.inf)
    visible = masked.argmax(-1)
    yield "masked words", masked, visible, {"z_loss": 0.01}
    yield "masked words under a cap", masked, visible, {"softcap": 4.0, "label_smoothing": 0.1}
    yield "masked words and label smoothing", masked, visible, {"label_smoothing": 0.1}
    hidden = masked.clone()
    hidden[0, 0], hidden[3] = -torch.inf, -torch.inf
    yield "masked targets and a masked row", hidden, target, {}


def _forward_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input, target, options in _calls(dtype, device):
        yield Sample(label, (input, target), options)


def _partial_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    seen = []
    for label, input, target, options in _calls(dtype, device):
        own = {name: it for name, it in options.items() if name in ("ignore_index", "softcap")}
        if own or not options or input.isinf().any():
            yield Sample(label, (input, target), own)
        seen.append((input, target))
    input, target = seen[0]
    for start in (1, 50, 96, 2**40):
        yield Sample(f"a shard from word {start}", (input, target + 48), {"vocab_start": start})
    ends = torch.tensor([49, 50, 145, 146] * 4, device=device)
    yield Sample("targets at the ends of the shard", (input, ends), {"vocab_start": 50})


def _merge_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)

    def gathered(input: Tensor, target: Tensor, shards: int, **options: Any) -> Tensor:
        width = input.shape[-1] // shards
        parts = [
            _partial_oracle(part, target, vocab_start=place * width, **options)
            for place, part in enumerate(torch.split(input, width, -1))
        ]
        return torch.stack(parts).to(kind)

    for label, shape in {
        "typical": (16, 96),
        "three dimensions": (2, 3, 24),
        "one dimension": (48,),
        "one row": (1, 256),
        "many rows": (257, 8),
        "no rows": (0, 8),
    }.items():
        input = normal(shape, torch.float64, device, 63)
        target = _targets(shape[:-1], shape[-1], device)
        stats = gathered(input, target, 2)
        yield Sample(label, (stats, target), {"vocab_size": shape[-1]})
        if label != "typical":
            continue
        for options in _OPTIONS:
            own = {name: value for name, value in options.items() if name != "softcap"}
            chosen = target.clone()
            chosen[2::5] = own.get("ignore_index", 3)
            if own:
                given = gathered(input, chosen, 4, ignore_index=own.get("ignore_index", -100))
                yield Sample(_named(own), (given, chosen), own | {"vocab_size": 96})
        for shards in (1, 3, 8):
            given = gathered(input, target, shards)
            yield Sample(f"{shards} shards", (given, target), {"vocab_size": 96})
        turned = stats.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        yield Sample("transposed stats", (turned, target), {"vocab_size": 96})
        strided = target.repeat_interleave(2)[::2]
        yield Sample("strided targets", (stats, strided), {"vocab_size": 96})
        yield Sample("a larger vocabulary", (stats, target), {"vocab_size": 120})
    for label, input, target, options in _calls_with_extremes("float64", device):
        own = {name: value for name, value in options.items() if name != "softcap"}
        stats = gathered(input, target, 2, softcap=options.get("softcap"))
        yield Sample(label, (stats, target), own | {"vocab_size": 64})
    masked = normal((12, 64), torch.float64, device, 64)
    masked[:, :32] = -torch.inf
    target = _targets((12,), 32, device) + 32
    yield Sample("a masked shard", (gathered(masked, target, 2), target), {"vocab_size": 64})


def _per_row(like: Tensor, target: Tensor, seed: int) -> Tensor:
    return normal(tuple(target.shape), math_dtype(like.dtype), str(like.device), seed)


def _backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input, target, options in _calls(dtype, device):
        lse = _cross_entropy_fwd_oracle(input, target, **options)[1].to(math_dtype(input.dtype))
        grad, other = _per_row(lse, target, 65), _per_row(lse, target, 66)
        yield Sample(label, (grad, input, target, lse, other), options)
        if label == "typical":
            yield Sample("no grad_lse", (grad, input, target, lse), options)
            yield Sample("expanded grad_loss", (grad[3].expand(16), input, target, lse), options)
            strided = [it.repeat_interleave(2)[::2] for it in (grad, lse, other)]
            call = (strided[0], input, target, strided[1], strided[2])
            yield Sample("strided statistics", call, options)
            yield from _shard_samples(grad, input, target, lse, other)


def _both_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input, target, options in _calls(dtype, device):
        grad = _per_row(input, target, 65)
        yield Sample(label, (input, target, grad), options)
        if label == "typical":
            yield Sample("expanded grad_loss", (input, target, grad[3].expand(16)), options)
            strided = grad.repeat_interleave(2)[::2]
            yield Sample("strided grad_loss", (input, target, strided), options)
            given = (input, target, grad * 0)
            yield Sample("a grad_loss of 0", given, options)


def _shard_samples(
    grad: Tensor, input: Tensor, target: Tensor, lse: Tensor, other: Tensor
) -> Iterator[Sample]:
    """The typical logits as one shard of a vocabulary twice as large."""
    lse, target = lse + 0.7, target + 48
    smoothed = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 6.0}
    for options in (
        {"vocab_start": 96},
        {"vocab_size": 192},
        {"vocab_start": 50, "vocab_size": 192},
        {"vocab_start": 50, "vocab_size": 192, **smoothed},
        {"vocab_start": 30, "vocab_size": 130, **smoothed},
    ):
        yield Sample(_named(options), (grad, input, target, lse, other), options)


_LINEAR_SIZES: dict[str, tuple[tuple[int, ...], int]] = {
    "typical": ((24, 16), 40),
    "three dimensions": ((2, 5, 8), 17),
    "one dimension": ((8,), 17),
    "one row": ((1, 32), 100),
    "one word": ((5, 8), 1),
    "odd sizes": ((7, 13), 29),
    "a wide vocabulary": ((3, 8), 1501),
    "more features than words": ((6, 64), 5),
    "many rows": ((130, 8), 12),
    "no rows": ((0, 16), 40),
}

LinearCall = tuple[str, "Tensor", "Tensor", "Tensor", "Tensor | None", dict[str, Any]]


def _linear_calls(dtype: str, device: str) -> Iterator[LinearCall]:
    """(label, input, weight, target, bias, options)."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)

    def weights(words: int, features: int) -> Tensor:
        return normal((words, features), kind, device, 67) / math.sqrt(features)

    for label, (shape, words) in _LINEAR_SIZES.items():
        input, weight = normal(shape, kind, device, 68), weights(words, shape[-1])
        target = _targets(shape[:-1], words, device)
        yield label, input, weight, target, None, {}
        if label != "typical":
            continue
        bias = normal((words,), kind, device, 69)
        yield "a bias", input, weight, target, bias, {}
        for options in _OPTIONS:
            chosen = target.clone()
            chosen[2::5] = options.get("ignore_index", 3)
            yield _named(options), input, weight, chosen, bias, options
        yield "transposed weight", input, weight.t().contiguous().t(), target, None, {}
        yield "strided bias", input, weight, target, bias.repeat_interleave(2)[::2], {}
        yield "strided targets", input, weight, target.repeat_interleave(2)[::2], None, {}
        every = torch.full_like(target, -100)
        yield "every row ignored", input, weight, every, bias, {"label_smoothing": 0.1}
        some, large = target.clone(), bias.clone()
        some[2::5], large[5] = -100, 100.0
        yield "ignored rows and a bias whose exp overflows", input, weight, some, large, {}
        broken = bias.clone()
        broken[3], broken[4], broken[7] = torch.inf, torch.nan, -torch.inf
        yield "every row ignored and a bias of inf and NaN", input, weight, every, broken, {}
        masked = bias.clone()
        masked[5:20] = -torch.inf
        yield "words masked by the bias", input, weight, target % 5, masked, {}
        yield "large logits", input * 4, weight * 2, target, bias, {}
    for label, input in layouts({}, 10, 16, dtype, device):
        yield label, input, weights(40, 16), _targets((10,), 40, device), None, {}


def _linear_forward_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input, weight, target, bias, options in _linear_calls(dtype, device):
        given = (input, weight, target) + (() if bias is None else (bias,))
        yield Sample(label, given, options)


def _linear_backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input, weight, target, bias, options in _linear_calls(dtype, device):
        wide = _linear_fwd_oracle(input, weight, target, bias, **options)[1]
        lse = wide.to(math_dtype(input.dtype))
        grad, other = _per_row(lse, target, 65), _per_row(lse, target, 66)
        yield Sample(label, (grad, input, weight, target, lse, bias, other), options)
        if label == "typical":
            call = (input, weight, target, lse)
            yield Sample("no grad_lse", (grad, *call))
            yield Sample("expanded grad_loss", (grad[3].expand(24), *call))
            # As in a mean over many rows: before the products too small for float16.
            yield Sample("a small grad_loss", (grad * 2**-12, *call))


def _linear_both_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input, weight, target, bias, options in _linear_calls(dtype, device):
        grad = _per_row(input, target, 65)
        yield Sample(label, (input, weight, target, grad, bias), options)
        if label == "typical":
            yield Sample("expanded grad_loss", (input, weight, target, grad[3].expand(24)))
            yield Sample("a small grad_loss", (input, weight, target, grad * 2**-12, bias))
            yield Sample("a grad_loss of 0", (input, weight, target, grad * 0, bias))


# ---------------------------------------------------------------------------- contracts

_FORWARD_OPTIONS = ("label_smoothing", "ignore_index", "z_loss", "softcap")


@contract(
    family="loss",
    check=_check_forward,
    samples=_forward_samples,
    tolerance=FORWARD_TOLERANCE,
    oracle=_cross_entropy_fwd_oracle,
    backward=Backward(
        "cross_entropy_bwd",
        saves={"input": "input", "target": "target", "lse": "output[1]"},
        gradients=("input",),
        options=_FORWARD_OPTIONS,
        output_grads=("grad_loss", "grad_lse"),
    ),
)
def cross_entropy_fwd(
    input: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The cross entropy of each row, by the formula at the head of this module.

    Both outputs have a gradient; what z_loss adds to the loss is ``z_loss * lse**2``. The
    arguments and lse are saved for the backward, which calculates the probabilities again.

    Args:
        input: logits ``[..., V]`` with V at least 1; float32, bfloat16, float16 or float64.
        target: ``[...]``, int64, from 0 to V - 1, or ``ignore_index``.
        label_smoothing: e, from 0 to 1.
        ignore_index: the target of rows that are ignored; may be in the vocabulary.
        z_loss: z, at least 0 and in the range of float32; the factor of the square of lse.
        softcap: None, or the bound of the scores, above 0 and a normal float32 number.

    Returns:
        loss: ``[...]``, float32 (float64 for float64).
        lse: ``[...]``, likewise.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    dtype, shape = math_dtype(input.dtype), input.shape[:-1]
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


@contract(
    family="loss",
    check=_check_backward,
    samples=_backward_samples,
    tolerance=BACKWARD_TOLERANCE,
    oracle=_cross_entropy_bwd_oracle,
    dispatch_on="input",
)
def cross_entropy_bwd(
    grad_loss: Tensor,
    input: Tensor,
    target: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """Gradient of :func:`cross_entropy_fwd` with respect to its logits, or a shard of them.

    By the formula at the head of this module, ``grad_loss`` times the loss's gradient plus
    ``grad_lse`` times the gradient of lse. p is ``exp(s - lse)`` with the given lse, which is
    that of the whole vocabulary.

    Args:
        grad_loss: ``[...]``, float32 (float64 for a float64 input).
        input: ``[..., C]``, as in the forward; all logits, or the columns of a shard.
        target: ``[...]``, int64, as in the forward: counted in the whole vocabulary.
        lse: ``[...]``, dtype of ``grad_loss``, as the forward or
            :func:`cross_entropy_merge` returned it.
        grad_lse: ``[...]``, dtype of ``grad_loss``; None for 0.
        label_smoothing: as in the forward.
        ignore_index: as in the forward.
        z_loss: as in the forward.
        softcap: as in the forward.
        vocab_start: the word of the first column, at least 0.
        vocab_size: V, at least ``vocab_start + C``, which is the default.

    Returns:
        grad_input: shape and dtype of ``input``, contiguous. Nothing is written in place.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return input.new_empty(input.shape)


@contract(
    family="loss",
    check=_check_both,
    samples=_both_samples,
    tolerance=BACKWARD_TOLERANCE,
    oracle=_both_oracle,
)
def cross_entropy_fwd_bwd(
    input: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`cross_entropy_fwd` and :func:`cross_entropy_bwd` of the same logits at once.

    An implementation may therefore read the logits only once, instead of once in each operator;
    whether it does depends on the set, the options and the layout of the rows (see
    ``docs/kernels.md`` and ``docs/cuda-kernels.md``). ``grad_loss`` must be known before the
    loss: for a mean, 1 over the number of rows. The incoming gradient of the reduced loss is then
    a factor of the whole gradient, see :func:`transformer_engine_fl.functional.cross_entropy`.

    Args:
        input: logits ``[..., V]`` with V at least 1; float32, bfloat16, float16 or float64.
        target: ``[...]``, int64, from 0 to V - 1, or ``ignore_index``.
        grad_loss: ``[...]``, float32 (float64 for a float64 input).
        label_smoothing: as in :func:`cross_entropy_fwd`.
        ignore_index: as in :func:`cross_entropy_fwd`.
        z_loss: as in :func:`cross_entropy_fwd`.
        softcap: as in :func:`cross_entropy_fwd`.

    Returns:
        loss: ``[...]``, float32 (float64 for float64).
        lse: ``[...]``, likewise.
        grad_input: shape and dtype of ``input``, contiguous: ``grad_loss`` times the loss's
            gradient, with p computed from lse either before or after it is rounded. Nothing
            is written in place.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    dtype, shape = math_dtype(input.dtype), input.shape[:-1]
    loss, lse = input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)
    return loss, lse, input.new_empty(input.shape)


@contract(
    family="loss",
    check=_check_partial,
    samples=_partial_samples,
    tolerance=FORWARD_TOLERANCE,
    oracle=_partial_oracle,
)
def cross_entropy_partial_fwd(
    input: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """The numbers that one shard of the vocabulary adds to the cross entropy of each row.

    With the scores s of the shard's C columns, as defined at the head of this module:

    - the highest score, ``m = max(s)``;
    - ``sum(exp(s - m))``, and 0 if m is ``-inf``;
    - the target's score, 0 if the target is not in the shard;
    - ``sum(s)``.

    An ignored row has four zeros. In a row with NaN the second number is NaN, and so is every
    loss that it is merged into; the first number may be the highest of the other scores.

    Args:
        input: ``[..., C]``, the logits of the words from ``vocab_start`` on, C at least 1;
            float32, bfloat16, float16 or float64.
        target: ``[...]``, int64, counted in the whole vocabulary.
        vocab_start: the word of the first column, at least 0.
        ignore_index: as in :func:`cross_entropy_fwd`.
        softcap: as in :func:`cross_entropy_fwd`.

    Returns:
        ``[..., 4]``, float32 (float64 for float64), the four numbers in this order.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return input.new_empty((*input.shape[:-1], 4), dtype=math_dtype(input.dtype))


@contract(
    family="loss",
    check=_check_merge,
    samples=_merge_samples,
    tolerance=MERGE_TOLERANCE,
    oracle=_merge_oracle,
)
def cross_entropy_merge(
    stats: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Loss and lse of each row, from the numbers of all shards of the vocabulary.

    The result is that of :func:`cross_entropy_fwd` for all shards side by side. The shards may
    come in any order, but together they must be the whole vocabulary.

    Args:
        stats: ``[shards, ..., 4]``, float32 or float64, the results of
            :func:`cross_entropy_partial_fwd` for each shard.
        target: ``[...]``, int64, as in :func:`cross_entropy_partial_fwd`.
        vocab_size: V, at least 1.
        label_smoothing: as in :func:`cross_entropy_fwd`.
        ignore_index: as in :func:`cross_entropy_partial_fwd`.
        z_loss: as in :func:`cross_entropy_fwd`.

    Returns:
        loss: ``[...]``, dtype of ``stats``.
        lse: ``[...]``, likewise.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    return stats.new_empty(target.shape), stats.new_empty(target.shape)


@contract(
    family="loss",
    check=_check_linear,
    samples=_linear_forward_samples,
    tolerance=LINEAR_FORWARD_TOLERANCE,
    oracle=_linear_fwd_oracle,
    backward=Backward(
        "fused_linear_cross_entropy_bwd",
        saves={
            "input": "input",
            "weight": "weight",
            "target": "target",
            "lse": "output[1]",
            "bias": "bias",
        },
        gradients=("input", "weight", "bias"),
        options=_FORWARD_OPTIONS,
        output_grads=("grad_loss", "grad_lse"),
    ),
    aliases=("fused_linear_cross_entropy",),
)
def fused_linear_cross_entropy_fwd(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`cross_entropy_fwd` of ``input @ weight.T + bias``, never in memory as a whole.

    The memory allocated besides the outputs grows with the arguments, not with the number of
    rows times V. The logits are float32 (float64 for float64), not rounded to the dtype
    of the input. The arguments and lse are saved for the backward.

    Args:
        input: hidden states ``[..., H]``, finite in every row; float32, bfloat16, float16
            or float64.
        weight: ``[V, H]`` with V at least 1, dtype of ``input``.
        target: ``[...]``, int64, from 0 to V - 1, or ``ignore_index``.
        bias: ``[V]``, dtype of ``input``, or None.
        label_smoothing: as in :func:`cross_entropy_fwd`.
        ignore_index: as in :func:`cross_entropy_fwd`.
        z_loss: as in :func:`cross_entropy_fwd`.
        softcap: as in :func:`cross_entropy_fwd`.

    Returns:
        loss: ``[...]``, float32 (float64 for float64).
        lse: ``[...]``, likewise.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    dtype = math_dtype(input.dtype)
    return input.new_empty(target.shape, dtype=dtype), input.new_empty(target.shape, dtype=dtype)


@contract(
    family="loss",
    check=_check_linear_backward,
    samples=_linear_backward_samples,
    tolerance=LINEAR_BACKWARD_TOLERANCE,
    oracle=_linear_bwd_oracle,
    dispatch_on="input",
)
def fused_linear_cross_entropy_bwd(
    grad_loss: Tensor,
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
    grad_lse: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of :func:`fused_linear_cross_entropy_fwd`.

    With d the gradient of the logits, as in :func:`cross_entropy_bwd`, these are
    ``d @ weight``, ``d.T @ input`` and the sum of d over the rows. Neither the logits nor d
    are ever in memory as a whole. d may be rounded to the dtype of the input before the products,
    but must not vanish in float16 where ``grad_loss`` is as small as in a mean over many rows.
    The sums are float32 (float64 for float64), rounded once.

    Args:
        grad_loss: ``[...]``, float32 (float64 for a float64 input).
        input: ``[..., H]``, as in the forward.
        weight: ``[V, H]``, as in the forward.
        target: ``[...]``, as in the forward.
        lse: ``[...]``, dtype of ``grad_loss``, as the forward returned it.
        bias: ``[V]``, as in the forward, or None.
        grad_lse: ``[...]``, dtype of ``grad_loss``; None for 0.
        label_smoothing: as in the forward.
        ignore_index: as in the forward.
        z_loss: as in the forward.
        softcap: as in the forward.

    Returns:
        grad_input: shape and dtype of ``input``, contiguous.
        grad_weight: ``[V, H]``, dtype of ``weight``, contiguous.
        grad_bias: ``[V]``, dtype of ``bias``; None if there is none.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    grad_bias = None if bias is None else bias.new_empty(bias.shape)
    return input.new_empty(input.shape), weight.new_empty(weight.shape), grad_bias


@contract(
    family="loss",
    check=_check_linear_both,
    samples=_linear_both_samples,
    tolerance=LINEAR_BACKWARD_TOLERANCE,
    oracle=_linear_both_oracle,
)
def fused_linear_cross_entropy_fwd_bwd(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    grad_loss: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """:func:`fused_linear_cross_entropy_fwd` and its gradients at once.

    This saves calculating the logits a second time, one of four products. The logits of as many
    rows are in memory as an implementation processes at a time. In the sets with kernels that is
    the number of features, but at least 1,024 and at most 4,096 rows, in float32 and again
    in the dtype of the input (for float16 these sets call the two separate operators).
    ``grad_loss`` must be known before the loss, as in :func:`cross_entropy_fwd_bwd`; the gradients
    are those of :func:`fused_linear_cross_entropy_bwd`.

    Args:
        input: ``[..., H]``, as in the forward.
        weight: ``[V, H]``, as in the forward.
        target: ``[...]``, as in the forward.
        grad_loss: ``[...]``, float32 (float64 for a float64 input).
        bias: ``[V]``, as in the forward, or None.
        label_smoothing: as in the forward.
        ignore_index: as in the forward.
        z_loss: as in the forward.
        softcap: as in the forward.

    Returns:
        loss: ``[...]``, float32 (float64 for float64).
        lse: ``[...]``, likewise.
        grad_input: shape and dtype of ``input``, contiguous: ``grad_loss`` times the loss's
            gradient.
        grad_weight: ``[V, H]``, dtype of ``weight``, contiguous, likewise.
        grad_bias: ``[V]``, dtype of ``bias``, likewise; None if there is none.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """
    dtype = math_dtype(input.dtype)
    loss, lse = (input.new_empty(target.shape, dtype=dtype) for _ in range(2))
    grad_bias = None if bias is None else bias.new_empty(bias.shape)
    return loss, lse, input.new_empty(input.shape), weight.new_empty(weight.shape), grad_bias

"""Scaled softmax over the last dimension: plain, under a mask, and the two causal forms.

Attention scores are ``[..., sq, sk]``: sq queries, sk keys, of any sizes. The forward's output is
saved for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from transformer_engine_fl.core.contract import (
    Backward,
    Between,
    Contract,
    Sample,
    SampleMaker,
    Tolerance,
    contract,
)
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import FLOATS
from transformer_engine_fl.ops._samples import layouts, normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "scaled_aligned_causal_masked_softmax_backward",
    "scaled_aligned_causal_masked_softmax_forward",
    "scaled_masked_softmax_backward",
    "scaled_masked_softmax_forward",
    "scaled_softmax_backward",
    "scaled_softmax_forward",
    "scaled_upper_triang_masked_softmax_backward",
    "scaled_upper_triang_masked_softmax_forward",
]

P = ParamSpec("P")
R = TypeVar("R")

MASK_DTYPES = ("bool", "uint8")

# For the narrow dtypes: half a unit in the last place, plus the error of float32 arithmetic; the
# small probabilities of long rows are subnormal in float16.
FORWARD_TOLERANCE = {
    "float32": Tolerance(rtol=4e-6, atol=2e-6),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-14),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-11),
    "float64": Tolerance(rtol=1e-13, atol=1e-13),
}
BACKWARD_TOLERANCE = {
    "float32": Tolerance(rtol=1e-5, atol=1e-5),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-14),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-11),
    "float64": Tolerance(rtol=1e-12, atol=1e-12),
}


# ------------------------------------------------------------------------------ checks


@dataclass(frozen=True, slots=True)
class _Form:
    """What a form of softmax requires of the shape of its scores.

    Attributes:
        min_ndim: the least number of dimensions.
        square: sq must be sk.
        shapes: the shapes of its samples, by label.
    """

    min_ndim: int
    square: bool
    shapes: dict[str, tuple[int, ...]]

    def check_forward(self, op: str, input: Any, scale: Any) -> None:
        """Check ``(input, scale)``."""
        self._check_scores(op, "input", input)
        check.is_number(op, "scale", scale)

    def check_masked(self, op: str, input: Any, mask: Any, scale: Any) -> None:
        """Check ``(input, mask, scale)``."""
        self.check_forward(op, input, scale)
        mask = check.is_tensor(op, "mask", mask, dtypes=MASK_DTYPES)
        check.expands_to(op, "mask", mask, input.shape, "the shape of 'input'")
        check.same_device(op, "input", {"input": input, "mask": mask})

    def check_backward(self, op: str, output_grad: Any, softmax_output: Any, scale: Any) -> None:
        """Check ``(output_grad, softmax_output, scale)``."""
        self._check_scores(op, "softmax_output", softmax_output)
        grad = check.is_tensor(op, "output_grad", output_grad, dtypes=FLOATS)
        check.has_shape(
            op, "output_grad", grad, softmax_output.shape, "the shape of 'softmax_output'"
        )
        given = {"softmax_output": softmax_output, "output_grad": output_grad}
        check.same_device(op, "softmax_output", given)
        check.is_number(op, "scale", scale)

    def _check_scores(self, op: str, name: str, value: Any) -> None:
        scores = check.is_tensor(op, name, value, dtypes=FLOATS, min_ndim=self.min_ndim)
        if self.square and scores.shape[-1] != scores.shape[-2]:
            expected = "as many keys as queries: the last two dimensions equal"
            raise ArgumentError(op, name, check.describe(value), expected)


# ------------------------------------------------------------------------------ oracles


def _softmax(input: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    """The definition in float64; rows in which everything is hidden are zero."""
    import torch

    scores = input.double() * scale
    if not scores.numel():
        return scores
    if hidden is None:
        hidden = torch.zeros_like(scores, dtype=torch.bool)
    highest = scores.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True)
    weights = (scores - highest).exp().masked_fill(hidden, 0)
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1)


def _future(input: Tensor) -> Tensor:
    """``[sq, sk]``: true where the key is after the query, with the last of both aligned."""
    import torch

    queries, keys = input.shape[-2:]
    i = torch.arange(queries, device=input.device)[:, None]
    k = torch.arange(keys, device=input.device)
    return k > i + (keys - queries)


def _of_visible(input: Tensor, scale: float, hidden: Tensor) -> Tensor | Between:
    """Softmax of visible keys; accepts 0 and NaN for hidden keys of a row with visible NaN."""
    expected = _softmax(input, scale, hidden | (input.double() * scale).isneginf())
    free = hidden & expected.isnan()
    if not free.any():
        return expected
    tolerance = FORWARD_TOLERANCE[check.dtype_name(input.dtype)]
    finite = expected.nan_to_num(nan=0.0)
    allowed = tolerance.rtol * finite.abs() + tolerance.atol * finite.square().mean().sqrt()
    return Between(
        expected.masked_fill(free, 0) - allowed,
        expected.masked_fill(free, 0) + allowed,
        values=lambda output: output.double().masked_fill(free & output.isnan(), 0),
    )


def _plain_oracle(input: Tensor, scale: float = 1.0) -> Tensor:
    return _softmax(input, scale)


def _masked_oracle(input: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor | Between:
    return _of_visible(input, scale, mask != 0)


def _causal_oracle(input: Tensor, scale: float = 1.0) -> Tensor | Between:
    return _of_visible(input, scale, _future(input))


def _backward_oracle(output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0) -> Tensor:
    """Differentiates softmax at the saved output.

    If scores whose softmax is y change by d, it becomes ``y * exp(d) / sum(y * exp(d))``,
    and the sum is ``1 + sum(y * (exp(d) - 1))`` because y sums to 1. This form uses the saved
    y as it is, rounded, and keeps hidden keys hidden.
    """
    import torch

    y = softmax_output.detach().double()
    with torch.enable_grad():
        moved = torch.zeros_like(y).requires_grad_()
        total = 1 + (y * moved.expm1()).sum(-1, keepdim=True)
        (gradient,) = torch.autograd.grad(y * moved.exp() / total, moved, output_grad.double())
    return gradient * scale


# ------------------------------------------------------------------------------ samples

_SQUARE = {
    "typical": (2, 3, 16, 16),
    "three dimensions": (6, 32, 32),
    "two dimensions": (40, 40),
    "one query": (2, 1, 1),
    "odd": (3, 33, 33),
    "many rows": (24, 17, 17),
    "wide odd rows": (301, 301),
    "nothing": (0, 8, 8),
    "no keys": (2, 0, 0),
}
_RECTANGULAR = _SQUARE | {
    "more keys": (2, 3, 7, 40),
    "more queries": (2, 3, 40, 7),
    "one query, many keys": (2, 1, 5003),
    "no queries": (2, 0, 8),
}
_ANY = _RECTANGULAR | {"one dimension": (48,)}

_PLAIN = _Form(1, False, _ANY)
_ALIGNED = _Form(2, False, _RECTANGULAR)
_TRIANGLE = _Form(2, True, _SQUARE)

_SCALES = (0.125, 2.0, -0.5)


def _inputs(form: _Form, dtype: str, device: str) -> Iterator[tuple[str, Tensor]]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    yield from layouts(form.shapes, 24, 24, dtype, device)
    values = normal((2, 24, 24), torch.float64, "cpu", seed=41).clamp(-2, 2)
    largest = min(torch.finfo(kind).max / 2, 1e100)
    yield "large values", (values * (largest / 2)).to(device, kind)
    yield "where exp overflows", (values * 200).to(device, kind)
    yield "small values", (values * 1e-3).to(device, kind)
    yield "all equal", torch.full((3, 24, 24), -3.0, dtype=kind, device=device)


def _with_broken_rows(dtype: str, device: str) -> tuple[str, Tensor]:
    """Scores whose early keys, and one late key, make NaN of the rows where they are visible."""
    import torch

    input = normal((3, 24, 24), getattr(torch, dtype), device, seed=44)
    input[0, 5, 2] = input[2, 4, 20] = torch.nan
    input[1, 7, 3] = torch.inf
    return "rows that are not numbers", input


def _forward_samples(form: _Form) -> SampleMaker:
    def samples(dtype: str, device: str) -> Iterator[Sample]:
        for label, input in (*_inputs(form, dtype, device), _with_broken_rows(dtype, device)):
            yield Sample(label, (input,))
            if label == "typical":
                for scale in _SCALES:
                    yield Sample(f"scale={scale}", (input, scale))

    return samples


def _mask(shape: tuple[int, ...], device: str) -> Tensor:
    """Hides a third at random, and the whole first row of each group."""
    import torch

    mask = normal(shape, torch.float32, device, seed=42) > 0.43
    if mask.ndim > 1:
        mask[..., :1, :] = True
    return mask


def _masked_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    for label, input in _inputs(_PLAIN, dtype, device):
        mask = _mask(tuple(input.shape), device)
        yield Sample(label, (input, mask))
        if label != "typical":
            continue
        batch, _, queries, keys = input.shape
        for scale in _SCALES:
            yield Sample(f"scale={scale}", (input, mask, scale))
        per_batch = _mask((batch, 1, queries, keys), device)
        yield Sample("mask for all heads", (input, per_batch))
        yield Sample("mask for all", (input, per_batch[:1]))
        yield Sample("mask of two dimensions", (input, per_batch[0, 0]))
        yield Sample("mask of keys", (input, _mask((batch, 1, 1, keys), device).logical_not()))
        yield Sample("transposed mask", (input, mask.transpose(-1, -2)))
        yield Sample("uint8 mask", (input, mask.to(torch.uint8)))
        yield Sample("uint8 mask of other values", (input, mask.to(torch.uint8) * 130))
        yield Sample("everything hidden", (input, torch.ones_like(mask)))
        yield Sample("nothing hidden", (input, torch.zeros_like(mask)))
    label, broken = _with_broken_rows(dtype, device)
    yield Sample(label, (broken, _future(broken)))


def _backward_samples(form: _Form, oracle: Callable[..., Any]) -> SampleMaker:
    def samples(dtype: str, device: str) -> Iterator[Sample]:
        import torch

        for label, input in _inputs(form, dtype, device):
            grad = normal(tuple(input.shape), input.dtype, device, seed=43)
            hidden = (_mask(tuple(input.shape), device),) if oracle is _masked_oracle else ()
            output = oracle(input, *hidden).to(input.dtype)
            if 0 not in input.stride():
                output = input.copy_(output)  # keeps its layout
            yield Sample(label, (grad, output))
            if label == "typical":
                for scale in _SCALES:
                    yield Sample(f"scale={scale}", (grad, output, scale))
                other = torch.float32 if dtype != "float32" else torch.bfloat16
                turned = grad.transpose(-1, -2).contiguous().transpose(-1, -2)
                yield Sample("transposed output_grad", (turned, output))
                yield Sample("expanded output_grad", (grad[:1].expand_as(output), output))
                yield Sample("output_grad of another dtype", (grad.to(other), output))

    return samples


# ---------------------------------------------------------------------------- contracts


def _backward(
    form: _Form, oracle: Callable[..., Any]
) -> Callable[[Callable[P, R]], Contract[P, R]]:
    """The contract of a backward; the backwards differ only in the shapes that they take."""
    return contract(
        family="softmax",
        check=form.check_backward,
        samples=_backward_samples(form, oracle),
        tolerance=BACKWARD_TOLERANCE,
        oracle=_backward_oracle,
        dispatch_on="softmax_output",
    )


def _gradient_of_input(op: str) -> Backward:
    return Backward(
        op, saves={"softmax_output": "output[0]"}, gradients=("input",), options=("scale",)
    )


@contract(
    family="softmax",
    check=_PLAIN.check_forward,
    samples=_forward_samples(_PLAIN),
    tolerance=FORWARD_TOLERANCE,
    oracle=_plain_oracle,
    backward=_gradient_of_input("scaled_softmax_backward"),
)
def scaled_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of scaled scores over the last dimension.

    ``y_k = exp(s_k) / sum over j of exp(s_j)`` with ``s = scale * input``. The largest
    score is subtracted first, so that no exp overflows.

    Args:
        input: ``[..., sk]``; float32, bfloat16, float16 or float64.
        scale: the factor of the scores, 1 / sqrt(head_dim) in attention.

    Returns:
        Shape and dtype of ``input``, contiguous; calculated in float32 (float64 for a
        float64 input). Saved for the backward.

    Raises:
        ArgumentError: a shape or dtype does not agree.
    """
    return input.new_empty(input.shape)


@_backward(_PLAIN, _plain_oracle)
def scaled_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """Gradient of :func:`scaled_softmax_forward`.

    ``dx = scale * y * (dy - sum(y * dy))`` over the last dimension, for
    ``dy = output_grad`` and ``y = softmax_output``.

    Args:
        output_grad: ``[..., sk]``; any dtype of the contract.
        softmax_output: ``[..., sk]``, as the forward returned it.
        scale: as in the forward.

    Returns:
        Shape and dtype of ``softmax_output``, contiguous; calculated in float32 (float64
        for float64). Nothing is written in place.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return softmax_output.new_empty(softmax_output.shape)


@contract(
    family="softmax",
    check=_PLAIN.check_masked,
    samples=_masked_samples,
    tolerance=FORWARD_TOLERANCE,
    oracle=_masked_oracle,
    backward=_gradient_of_input("scaled_masked_softmax_backward"),
)
def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """Softmax of scaled scores over the last dimension, over what a mask leaves visible.

    As :func:`scaled_softmax_forward`, with the sum over visible keys only; hidden keys
    give 0, and so does a row in which every key is hidden or has the score ``-inf``. (Kernels
    that replace a hidden score by -10000 give the same result while visible scores stay above
    about -9900.) In rows whose visible keys give NaN, hidden keys give 0 or NaN.

    Args:
        input: ``[..., sq, sk]``; float32, bfloat16, float16 or float64.
        mask: bool or uint8, 0 where visible; its shape expands to the input's, as
            ``[b, 1, sq, sk]`` or ``[1, 1, sq, sk]`` for scores ``[b, h, sq, sk]``.
        scale: the factor of the scores.

    Returns:
        Shape and dtype of ``input``, contiguous; calculated in float32 (float64 for a
        float64 input). Saved for the backward, which does not need the mask.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return input.new_empty(input.shape)


@_backward(_PLAIN, _masked_oracle)
def scaled_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """Gradient of :func:`scaled_masked_softmax_forward`; 0 where a score was hidden.

    ``dx = scale * y * (dy - sum(y * dy))`` over the last dimension, for
    ``dy = output_grad`` and ``y = softmax_output``.

    Args:
        output_grad: ``[..., sq, sk]``; any dtype of the contract. An infinity or NaN where a key
            is hidden may make NaN of its row.
        softmax_output: ``[..., sq, sk]``, as the forward returned it.
        scale: as in the forward.

    Returns:
        Shape and dtype of ``softmax_output``, contiguous; calculated in float32 (float64
        for float64). Nothing is written in place.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return softmax_output.new_empty(softmax_output.shape)


@contract(
    family="softmax",
    check=_TRIANGLE.check_forward,
    samples=_forward_samples(_TRIANGLE),
    tolerance=FORWARD_TOLERANCE,
    oracle=_causal_oracle,
    backward=_gradient_of_input("scaled_upper_triang_masked_softmax_backward"),
)
def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """Causal softmax of scaled scores: query i sees the keys up to i.

    As :func:`scaled_softmax_forward`, with the sum over keys ``k <= i`` only; the upper
    triangle, ``k > i``, gives 0, or NaN in rows whose visible keys give NaN. A row whose
    visible scores are all ``-inf`` gives 0.

    Args:
        input: ``[..., s, s]``; float32, bfloat16, float16 or float64.
        scale: the factor of the scores.

    Returns:
        Shape and dtype of ``input``, contiguous; calculated in float32 (float64 for a
        float64 input). Saved for the backward.

    Raises:
        ArgumentError: a shape or dtype does not agree.
    """
    return input.new_empty(input.shape)


@_backward(_TRIANGLE, _causal_oracle)
def scaled_upper_triang_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """Gradient of :func:`scaled_upper_triang_masked_softmax_forward`; 0 where ``k > i``.

    ``dx = scale * y * (dy - sum(y * dy))`` over the last dimension, for
    ``dy = output_grad`` and ``y = softmax_output``.

    Args:
        output_grad: ``[..., s, s]``; any dtype of the contract. An infinity or NaN where a key
            is hidden may make NaN of its row.
        softmax_output: ``[..., s, s]``, as the forward returned it.
        scale: as in the forward.

    Returns:
        Shape and dtype of ``softmax_output``, contiguous; calculated in float32 (float64
        for float64). Nothing is written in place.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return softmax_output.new_empty(softmax_output.shape)


@contract(
    family="softmax",
    check=_ALIGNED.check_forward,
    samples=_forward_samples(_ALIGNED),
    tolerance=FORWARD_TOLERANCE,
    oracle=_causal_oracle,
    backward=_gradient_of_input("scaled_aligned_causal_masked_softmax_backward"),
)
def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float = 1.0) -> Tensor:
    """Causal softmax of scaled scores, the last query aligned with the last key.

    As :func:`scaled_softmax_forward`, with the sum over keys ``k <= i + sk - sq`` only;
    later keys give 0, or NaN in rows whose visible keys give NaN. If sq is larger
    than sk, the first ``sq - sk`` rows see no key and give 0, as rows do whose visible
    scores are all ``-inf``.

    Args:
        input: ``[..., sq, sk]``; float32, bfloat16, float16 or float64.
        scale: the factor of the scores.

    Returns:
        Shape and dtype of ``input``, contiguous; calculated in float32 (float64 for a
        float64 input). Saved for the backward.

    Raises:
        ArgumentError: a shape or dtype does not agree.
    """
    return input.new_empty(input.shape)


@_backward(_ALIGNED, _causal_oracle)
def scaled_aligned_causal_masked_softmax_backward(
    output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0
) -> Tensor:
    """Gradient of :func:`scaled_aligned_causal_masked_softmax_forward`; 0 where hidden.

    ``dx = scale * y * (dy - sum(y * dy))`` over the last dimension, for
    ``dy = output_grad`` and ``y = softmax_output``.

    Args:
        output_grad: ``[..., sq, sk]``; any dtype of the contract. An infinity or NaN where a key
            is hidden may make NaN of its row.
        softmax_output: ``[..., sq, sk]``, as the forward returned it.
        scale: as in the forward.

    Returns:
        Shape and dtype of ``softmax_output``, contiguous; calculated in float32 (float64
        for float64). Nothing is written in place.

    Raises:
        ArgumentError: a shape, dtype or device does not agree.
    """
    return softmax_output.new_empty(softmax_output.shape)

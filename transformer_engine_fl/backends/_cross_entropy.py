"""Cross entropy: the parts shared by all sets that have kernels for it.

How a call's options and rows reach a kernel, and the linear forms, in which torch multiplies
matrices and the kernels are those of logits (:class:`LinearCrossEntropy`). Where torch would
multiply float32 as TF32, which the contracts do not allow, the set multiplies itself, or declines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from transformer_engine_fl.backends._arguments import check_numbers, fresh
from transformer_engine_fl.backends._tf32 import AS_TF32, uses_tf32
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import loss as contracts
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops._rounding import power_of_two

__all__ = [
    "LinearCrossEntropy",
    "Losses",
    "Options",
    "Rows",
    "options_of",
    "run_both",
    "vector_of",
]

# The number of logits that the linear forms hold at a time, and the fewest words of a part. The
# kernels then read most logits from a large GPU's L2 cache, or part of them.
_LOGITS = {"forward": 2**22, "backward": 2**25}
_FEWEST_WORDS = 256
_WHOLE = 16  # divides the row stride of the logits
# Bounds of the rows whose logits are held when both directions run at once: as many rows as there
# are hidden features, so that logits are no more numbers than the weight, within these bounds. With
# fewer rows, products do not fill a GPU, and the sum of the weight's gradients is read and written
# for each part; with more, that costs little beside the products.
_ROWS_AT_ONCE = (1024, 4096)


class Options(NamedTuple):
    """The options that all forms have, as the kernels take them."""

    smoothing: float
    ignore: int
    z: float
    softcap: float | None

    @property
    def cap(self) -> float:
        """The bound of the scores, 1 if there is none."""
        return 1.0 if self.softcap is None else self.softcap


def options_of(
    op: str,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Options:
    """The options; declines options that are no numbers yet."""
    given = (label_smoothing, ignore_index, z_loss, 1.0 if softcap is None else softcap)
    check_numbers(op, *given)
    cap = None if softcap is None else float(softcap)
    return Options(float(label_smoothing), ignore_index, float(z_loss), cap)


def vector_of(tensor: Tensor) -> Tensor:
    """A contiguous vector with one number for each row."""
    return tensor.reshape(-1).contiguous()


class Rows(NamedTuple):
    """The inputs of a backward for each row, as contiguous vectors.

    Attributes:
        target, grad_loss, lse, grad_lse: as in the contract.
        scale: a number by which every gradient is multiplied.
    """

    target: Tensor
    grad_loss: Tensor
    lse: Tensor
    grad_lse: Tensor | None
    scale: Tensor | None = None


class Losses(NamedTuple):
    """What a softmax kernel needs besides, for each row, to compute losses and gradients.

    Attributes:
        target, grad_loss: contiguous vectors, one number for each row.
        loss, lse: likewise; written.
        ignore: the target of rows that do not count.
        z: the factor of the square of lse.
    """

    target: Tensor
    grad_loss: Tensor
    loss: Tensor
    lse: Tensor
    ignore: int
    z: float


# ---------------------------------------------------------------------- of linear layers
#
# Logits are computed for some words at a time, and all rows. In a backward, the gradients of these
# logits then give a complete part of the weight's gradient; what is summed over the parts is the
# gradient of the input, which is smaller.

# By device type: whether torch multiplies narrow matrices into a wider output, and whether it adds
# such a product; assumed until it fails.
_WIDENS: dict[str, bool] = {}
_ADDS: dict[str, bool] = {}


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the product to ``out``, in whose dtype it is summed."""
    kind = out.device.type
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
        return
    if _WIDENS.get(kind, True):
        try:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
            return
        except (NotImplementedError, TypeError):  # not on this device, or not in this torch
            _WIDENS[kind] = False
    torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product to ``total``, in whose dtype it is summed."""
    kind = total.device.type
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
        return
    if _ADDS.get(kind, True):
        try:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
            return
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError):  # some versions want three matrices of one dtype
            pass
    product = torch.empty_like(total)
    _multiply(left, right, product)
    total += product
    _ADDS[kind] = False  # nothing else failed, so the dtypes must be the reason


def _as_tf32(tensor: Tensor) -> bool:
    """Whether torch would round the tensor's numbers before it multiplies them."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cuda" and uses_tf32()


class _Linear(NamedTuple):
    """A linear layer whose outputs are logits, which are computed for some words at a time.

    Attributes:
        op: the operator.
        input: ``[rows, H]``.
        weight, bias: as the contract has them.
        most: most words at a time, in whole vectors.
        exact: multiplies if torch would do so as TF32; None if torch multiplies exactly.
    """

    op: str
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    most: int
    exact: _Exact | None

    def parts(self) -> list[slice]:
        """The parts of the words, in their order."""
        words = self.weight.shape[0]
        return [slice(at, min(at + self.most, words)) for at in range(0, words, self.most)]

    def memory(self, dtype: torch.dtype) -> Tensor:
        """Memory for the logits of a part."""
        return fresh(self.op, self.input, (self.input.shape[0], self.most), dtype)

    def gradients(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Memory for the gradients of input, weight and bias; zeroed if there are no rows."""
        op, like, dtype = self.op, self.input, self.input.dtype
        input, weight = (fresh(op, like, it, dtype) for it in (shape, tuple(self.weight.shape)))
        bias = None if self.bias is None else fresh(op, like, tuple(self.bias.shape), dtype)
        if not like.shape[0]:
            weight.zero_()
            if bias is not None:
                bias.zero_()
        return input, weight, bias

    def logits(self, words: slice, memory: Tensor) -> Tensor:
        """The logits of a part, without the bias, written to ``memory``."""
        logits = memory[:, : words.stop - words.start]
        self.multiply(self.input, self.weight[words].t(), logits)
        return logits

    def multiply(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write the product to ``out``, in whose dtype it is summed."""
        if self.exact is None:
            _multiply(left, right, out)
        else:
            self.exact(self.op, left, right, out, 0.0)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the product to ``total``, in whose dtype it is summed."""
        if self.exact is None:
            _add_product(total, left, right)
        else:
            self.exact(self.op, left, right, total, 1.0)

    def offset(self, words: slice) -> Tensor | None:
        """The bias of a part."""
        return None if self.bias is None else self.bias[words]


def _whole(count: int) -> int:
    """The count, rounded up to whole vectors."""
    return -(-count // _WHOLE) * _WHOLE


def _rows_at_once(rows: int, features: int) -> list[slice]:
    """The rows in parts of about equal size; the logits of a part are computed at once."""
    least, most = _ROWS_AT_ONCE
    count = -(-rows // min(max(features, least), most))
    size = _whole(-(-rows // count))
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


def _scale(rows: Rows, options: Options) -> Tensor:
    """A power of two that scales gradients of float16 logits far above underflow."""
    largest = rows.grad_loss.abs()
    if rows.grad_lse is not None:
        largest = largest + rows.grad_lse.abs()
    if options.z:
        largest = largest + (2 * options.z * rows.lse * rows.grad_loss).abs()
    counts = largest.isfinite() & (rows.target != options.ignore)
    exponent = torch.frexp(torch.where(counts, largest, 0).amax()).exponent
    return power_of_two((12 - exponent).clamp(-100, 100), largest.dtype)


def _as_summed(output: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for what is summed in ``dtype``: the output's own, if that is its dtype."""
    return output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)


def _finish(output: Tensor, value: Tensor, scale: Tensor | None) -> None:
    """Write a value of :func:`_as_summed`, divided by ``scale``, to the output."""
    if scale is not None:
        value = value / scale
    if value is not output:
        output.copy_(value)


class _Memory(Protocol):
    def __call__(self, op: str, name: str, tensor: Tensor) -> Tensor:
        """The same memory as a plain tensor; declines a tensor without memory."""


class _Forward(Protocol):
    def __call__(
        self,
        op: str,
        logits: Tensor,
        step: int,
        bias: Tensor | None,
        target: Tensor,
        outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
        start: int,
        options: Options,
    ) -> None:
        """Write (statistics, None, None) or (None, loss, lse) of rows with stride ``step``."""


class _Merge(Protocol):
    def __call__(
        self,
        op: str,
        stats: Tensor,
        target: Tensor,
        loss: Tensor,
        lse: Tensor,
        words: int,
        options: Options,
    ) -> None:
        """Write loss and lse of dense statistics."""


class _Backward(Protocol):
    def __call__(
        self,
        op: str,
        logits: Tensor,
        step: int,
        bias: Tensor | None,
        rows: Rows,
        out: Tensor,
        out_step: int,
        start: int,
        words: int,
        options: Options,
    ) -> None:
        """Write the gradients of logits with row stride ``step``, perhaps in place."""


class _ReadOnce(Protocol):
    def __call__(self, op: str, logits: Tensor, step: int, losses: Losses, out: Tensor) -> bool:
        """Write losses and dense gradients, not in place, of plain scores, which are read once.

        Returns:
            Whether it did so.
        """


def run_both(
    run_forward: _Forward,
    run_backward: _Backward,
    read_once: _ReadOnce,
    op: str,
    logits: Tensor,
    step: int,
    bias: Tensor | None,
    rows: Rows,
    loss: Tensor,
    out: Tensor,
    out_step: int,
    options: Options,
) -> None:
    """Write loss and lse of rows of a whole vocabulary, then gradients (row stride ``out_step``).

    The gradients may be written over the logits. The first three arguments are a set's kernels.
    """
    columns = logits.shape[-1]
    plain_scores = (
        bias is None
        and out_step == columns
        and out.data_ptr() != logits.data_ptr()
        and options.softcap is None
        and not options.smoothing
        and loss.dtype == torch.float32
    )
    losses = Losses(rows.target, rows.grad_loss, loss, rows.lse, options.ignore, options.z)
    if not (plain_scores and read_once(op, logits, step, losses, out)):
        run_forward(op, logits, step, bias, rows.target, (None, loss, rows.lse), 0, options)
        run_backward(op, logits, step, bias, rows, out, out_step, 0, columns, options)


class _Product(Protocol):
    def __call__(self, op: str, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write a product of narrow matrices, summed in float32 and rounded once, to ``out``."""


class _Exact(Protocol):
    def __call__(self, op: str, left: Tensor, right: Tensor, out: Tensor, beta: float) -> None:
        """Write ``beta * out`` and an exact product of float32 matrices to ``out``."""


_FusedStatistics = Callable[[str, Tensor, Tensor, Tensor | None, Tensor, Options], Tensor | None]
"""(op, input, weight, bias, target, options) -> the statistics of all words in some shards, or
None for calls that the set has no such kernel for."""
_StoreGradients = Callable[[slice, Tensor], None]
"""(words, out): write the gradients of their logits."""
_FusedGradients = Callable[
    [str, Tensor, Tensor, Tensor | None, Rows, Options], _StoreGradients | None
]
"""(op, input, weight, bias, rows, options) -> a writer of gradients, or None as above."""


def _none_fused(*arguments: object) -> None:
    """For a set without kernels that fuse the loss into products."""


class LinearCrossEntropy:
    """The linear forms over a set's kernels.

    Args:
        memory_of: the set's conversion to a plain tensor.
        run_forward, run_merge, run_backward, read_once: its kernels.
        product: its product of narrow matrices, in their dtype.
        fused_statistics, fused_gradients: its kernels that store no logits.
        exact: its product of float32, where torch would use TF32; None declines such calls.
    """

    def __init__(
        self,
        memory_of: _Memory,
        run_forward: _Forward,
        run_merge: _Merge,
        run_backward: _Backward,
        read_once: _ReadOnce,
        product: _Product,
        fused_statistics: _FusedStatistics = _none_fused,
        fused_gradients: _FusedGradients = _none_fused,
        exact: _Exact | None = None,
    ) -> None:
        self._fused_statistics = fused_statistics
        self._fused_gradients = fused_gradients
        self._memory_of = memory_of
        self._run_forward = run_forward
        self._run_merge = run_merge
        self._run_backward = run_backward
        self._run_both = partial(run_both, run_forward, run_backward, read_once)
        self._product = product
        self._exact = exact

    def _linear(
        self, op: str, way: str, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
    ) -> _Linear:
        rows = target.numel()
        hidden = self._memory_of(op, "input", input).reshape(rows, input.shape[-1])
        weight = self._memory_of(op, "weight", weight)
        bias = None if bias is None else self._memory_of(op, "bias", bias).contiguous()
        most = min(weight.shape[0], max(_FEWEST_WORDS, _LOGITS[way] // max(1, rows)))
        rounds = _as_tf32(hidden)
        if rounds and self._exact is None:
            raise NotSupportedError(f"{op}: {AS_TF32}")
        exact = self._exact if rounds else None
        return _Linear(op, hidden, weight, bias, _whole(most), exact)

    def rows_of(
        self, op: str, target: Tensor, grad_loss: Tensor, lse: Tensor, grad_lse: Tensor | None
    ) -> Rows:
        """The inputs of a backward for each row, as contiguous vectors."""
        return Rows(
            vector_of(self._memory_of(op, "target", target)),
            vector_of(self._memory_of(op, "grad_loss", grad_loss)),
            vector_of(self._memory_of(op, "lse", lse)),
            None if grad_lse is None else vector_of(self._memory_of(op, "grad_lse", grad_lse)),
        )

    def fused_linear_cross_entropy_fwd(
        self,
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
        """``fused_linear_cross_entropy_fwd`` of the contract."""
        op = "fused_linear_cross_entropy_fwd"
        contracts.fused_linear_cross_entropy_fwd.check(
            input,
            weight,
            target,
            bias,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            z_loss=z_loss,
            softcap=softcap,
        )
        options = options_of(op, label_smoothing, ignore_index, z_loss, softcap)
        layer = self._linear(op, "forward", input, weight, target, bias)
        targets = vector_of(self._memory_of(op, "target", target))
        shape, dtype = tuple(target.shape), math_dtype(input.dtype)
        loss, lse = (fresh(op, layer.input, shape, dtype) for _ in range(2))
        if not targets.numel():
            return loss, lse
        stats = self._fused_statistics(op, layer.input, layer.weight, layer.bias, targets, options)
        if stats is None:
            stats = self._statistics(op, layer, targets, options)
        self._run_merge(op, stats, targets, loss, lse, weight.shape[0], options)
        return loss, lse

    def _statistics(self, op: str, layer: _Linear, targets: Tensor, options: Options) -> Tensor:
        """The statistics of the words, part by part, whose logits are computed and read."""
        dtype = math_dtype(layer.input.dtype)
        parts, memory = layer.parts(), layer.memory(dtype)
        stats = fresh(op, layer.input, (len(parts), targets.numel(), 4), dtype)
        for words, part in zip(parts, stats, strict=True):
            logits, outputs = layer.logits(words, memory), (part, None, None)
            self._run_forward(
                op,
                logits,
                layer.most,
                layer.offset(words),
                targets,
                outputs,
                words.start,
                options,
            )
        return stats

    def fused_linear_cross_entropy_bwd(
        self,
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
        """``fused_linear_cross_entropy_bwd`` of the contract."""
        op = "fused_linear_cross_entropy_bwd"
        contracts.fused_linear_cross_entropy_bwd.check(
            grad_loss,
            input,
            weight,
            target,
            lse,
            bias,
            grad_lse,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            z_loss=z_loss,
            softcap=softcap,
        )
        options = options_of(op, label_smoothing, ignore_index, z_loss, softcap)
        layer = self._linear(op, "backward", input, weight, target, bias)
        rows = self.rows_of(op, target, grad_loss, lse, grad_lse)
        dtype, wide = input.dtype, math_dtype(input.dtype)
        gradients = grad_input, grad_weight, grad_bias = layer.gradients(tuple(input.shape))
        if not target.numel():
            return gradients
        scale = None
        if dtype == torch.float16:
            scale = _scale(rows, options)
            rows = rows._replace(scale=scale)
        write = self._fused_gradients(op, layer.input, layer.weight, layer.bias, rows, options)
        if write is not None:  # no float32 logits are held besides their gradients
            layer = layer._replace(most=min(2 * layer.most, _whole(weight.shape[0])))
        memory = layer.memory(wide) if write is None else None
        # The logits' gradients, written over the logits if dtypes are equal.
        narrow = layer.memory(dtype) if memory is None or dtype != wide else memory
        total = _as_summed(grad_input, wide)
        along = total.view(layer.input.shape)
        for words in layer.parts():
            d = narrow[:, : words.stop - words.start]
            if write is not None:
                write(words, d)
            elif memory is not None:
                logits = layer.logits(words, memory)
                place = (layer.most, words.start, weight.shape[0])
                self._run_backward(
                    op, logits, layer.most, layer.offset(words), rows, d, *place, options
                )
            if words.start:
                layer.add_product(along, d, layer.weight[words])
            else:
                layer.multiply(d, layer.weight[words], along)
            self._store_product(layer, d.t(), layer.input, grad_weight[words], scale)
            if grad_bias is not None:
                _finish(grad_bias[words], d.sum(0, dtype=wide), scale)
        _finish(grad_input, total, scale)
        return gradients

    def _store_product(
        self, layer: _Linear, left: Tensor, right: Tensor, out: Tensor, scale: Tensor | None = None
    ) -> None:
        """Write a product, divided by ``scale``, to ``out``, rounded once."""
        wide = math_dtype(out.dtype)
        if out.dtype != wide and scale is None:
            self._product(layer.op, left, right, out)
        else:
            summed = _as_summed(out, wide)
            layer.multiply(left, right, summed)
            _finish(out, summed, scale)

    def fused_linear_cross_entropy_fwd_bwd(
        self,
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
        """``fused_linear_cross_entropy_fwd_bwd`` of the contract."""
        op = "fused_linear_cross_entropy_fwd_bwd"
        given: Any = {
            "label_smoothing": label_smoothing,
            "ignore_index": ignore_index,
            "z_loss": z_loss,
            "softcap": softcap,
        }
        contracts.fused_linear_cross_entropy_fwd_bwd.check(
            input, weight, target, grad_loss, bias, **given
        )
        if input.dtype == torch.float16:  # with z_loss, their scale needs the lse of all rows
            loss, lse = self.fused_linear_cross_entropy_fwd(input, weight, target, bias, **given)
            return (
                loss,
                lse,
                *self.fused_linear_cross_entropy_bwd(
                    grad_loss, input, weight, target, lse, bias, **given
                ),
            )
        options = options_of(op, label_smoothing, ignore_index, z_loss, softcap)
        layer = self._linear(op, "backward", input, weight, target, bias)
        dtype, wide = input.dtype, math_dtype(input.dtype)
        loss, lse = (fresh(op, layer.input, tuple(target.shape), wide) for _ in range(2))
        gradients = grad_input, grad_weight, grad_bias = layer.gradients(tuple(input.shape))
        if not target.numel():
            return loss, lse, *gradients
        layer = layer._replace(most=_whole(weight.shape[0]))
        every = self.rows_of(op, target, grad_loss, lse, None)
        parts = _rows_at_once(*layer.input.shape)
        largest = layer._replace(input=layer.input[parts[0]])
        memory = largest.memory(wide)
        narrow = memory if dtype == wide else largest.memory(dtype)
        # With several parts, their contributions to the gradients of the weight and the bias.
        total = grad_weight if len(parts) == 1 else _as_summed(grad_weight, wide)
        of_bias = None
        for at in parts:
            part = layer._replace(input=layer.input[at])
            rows = every._replace(
                target=every.target[at], grad_loss=every.grad_loss[at], lse=every.lse[at]
            )
            logits = part.logits(slice(0, weight.shape[0]), memory[: rows.target.numel()])
            d = narrow[: rows.target.numel(), : weight.shape[0]]
            self._run_both(
                op, logits, layer.most, layer.bias, rows, loss.view(-1)[at], d, layer.most, options
            )
            self._store_product(part, d, layer.weight, grad_input.view(layer.input.shape)[at])
            if len(parts) == 1:
                self._store_product(part, d.t(), part.input, grad_weight)
            elif at.start:
                part.add_product(total, d.t(), part.input)
            else:
                part.multiply(d.t(), part.input, total)
            if grad_bias is not None:
                summed = d.sum(0, dtype=wide)
                of_bias = summed if of_bias is None else of_bias + summed
        _finish(grad_weight, total, None)
        if grad_bias is not None and of_bias is not None:
            _finish(grad_bias, of_bias, None)
        return loss, lse, *gradients

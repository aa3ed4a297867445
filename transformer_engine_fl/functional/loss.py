"""Cross entropy, differentiable, with a choice of reduction over the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.functional._differentiable import (
    Gradients,
    apply,
    checked_outputs,
    first_derivative,
    records,
)
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops._tensors import is_transformed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "cross_entropy",
    "fused_linear_cross_entropy",
]

_REDUCTIONS: Final = ("none", "mean", "sum")


class _Options(TypedDict, total=False):
    label_smoothing: float
    ignore_index: int
    z_loss: float
    softcap: float | None
    reduction: str
    gradient_in_forward: bool


class _LogitsOptions(_Options, total=False):
    process_group: ProcessGroup | None
    vocab_start: int | None
    vocab_size: int | None


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    return_z_loss: Literal[False] = False,
    **options: Unpack[_LogitsOptions],
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    return_z_loss: Literal[True],
    **options: Unpack[_LogitsOptions],
) -> tuple[Tensor, Tensor]: ...


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_z_loss: bool = False,
    gradient_in_forward: bool = False,
    process_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of logits, differentiable with respect to them.

    See :func:`transformer_engine_fl.ops.cross_entropy_fwd` for the formula and the other
    arguments. The logits are kept for the backward, which calculates the probabilities again.
    As lse is float32 (float64 for float64), the logarithm of a probability has an absolute error
    of about ``eps * |lse|``: where that matters, first subtract from each row its largest logit.

    With a process group the logits are this rank's columns, a shard of the vocabulary, and
    every rank has the same targets. The only communication is one all-gather of four numbers for
    each row; the backward needs none. Every rank returns the same loss, calls backward on its
    own, and gets the gradient of its own columns.

    Args:
        input: ``[..., V]``; with a process group ``[..., C]``.
        target: ``[...]``, int64, counted in the whole vocabulary.
        reduction: "none", one loss for each row; "sum"; "mean", the sum over the number of
            rows that are not ignored, which is NaN if all are.
        return_z_loss: whether to return what z_loss adds to the loss, too.
        gradient_in_forward: whether the forward computes the gradient, so that the logits are read
            once (:func:`transformer_engine_fl.ops.cross_entropy_fwd_bwd`). The backward then
            multiplies it by the loss's incoming gradient, in place and rounded once more; where
            that is 1, as in ``loss.backward()``, it reads nothing. The option saves time there,
            and costs more than it saves where the loss is scaled. A second backward calculates
            the gradient anew. Ignored where no gradient is wanted, for "none", with
            ``return_z_loss`` or a process group, for float16, whose gradients could vanish before
            they are scaled, and under torch.compile.
        process_group: the ranks that share the vocabulary; None if this rank has all of it.
        vocab_start: the word of the first column; unless given, the shards have equal widths and
            are in the order of the ranks.
        vocab_size: V of all shards together; goes with ``vocab_start``.

    Returns:
        loss: float32 (float64 for float64), a scalar or, for "none", ``[...]``.
        z_loss: what z_loss adds to the loss, likewise, with ``return_z_loss``.
    """
    check.is_choice("cross_entropy", "reduction", reduction, _REDUCTIONS)
    options = {
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "z_loss": z_loss,
        "softcap": softcap,
    }
    if process_group is None:
        for name, value in {"vocab_start": vocab_start, "vocab_size": vocab_size}.items():
            if value is not None:
                raise ArgumentError("cross_entropy", name, str(value), "None without process_group")
        if gradient_in_forward and not return_z_loss:
            total = _with_gradient("cross_entropy", options, reduction, target, input)
            if total is not None:
                return total
        loss, lse = apply("cross_entropy_fwd", options, input, target)
    else:
        start, size = _shard(input, process_group, vocab_start, vocab_size)
        records("cross_entropy", input)  # raises where it cannot be differentiated
        loss, lse = _VocabularyParallel.apply(  # type: ignore[no-untyped-call]
            input, target, process_group, start, size, options
        )
    results = (loss, z_loss * lse.square()) if return_z_loss else (loss,)
    return _reduced(results, target, ignore_index, reduction)


@overload
def fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_z_loss: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_z_loss: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


def fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_z_loss: bool = False,
    gradient_in_forward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of ``input @ weight.T + bias``, differentiable in all three.

    Neither the logits nor their gradient are ever in memory as a whole, forward or backward; with
    ``gradient_in_forward`` those of some thousand rows are at a time. See
    :func:`transformer_engine_fl.ops.fused_linear_cross_entropy_fwd`.

    Args:
        input: ``[..., H]``.
        weight: ``[V, H]``.
        target: ``[...]``, int64.
        bias: ``[V]`` or None.
        reduction: as in :func:`cross_entropy`.
        return_z_loss: as in :func:`cross_entropy`.
        gradient_in_forward: as in :func:`cross_entropy`: whether the forward computes the
            gradients, so that the logits are calculated once instead of twice
            (:func:`transformer_engine_fl.ops.fused_linear_cross_entropy_fwd_bwd`). The gradients
            are kept for the backward and take as much memory as the arguments. Also ignored where
            one of the arguments needs no gradient.

    Returns:
        As :func:`cross_entropy`.
    """
    check.is_choice("fused_linear_cross_entropy", "reduction", reduction, _REDUCTIONS)
    options = {
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "z_loss": z_loss,
        "softcap": softcap,
    }
    if gradient_in_forward and not return_z_loss:
        total = _with_gradient(
            "fused_linear_cross_entropy", options, reduction, target, input, weight, bias
        )
        if total is not None:
            return total
    loss, lse = apply("fused_linear_cross_entropy_fwd", options, input, weight, target, bias)
    results = (loss, z_loss * lse.square()) if return_z_loss else (loss,)
    return _reduced(results, target, ignore_index, reduction)


def _reduced(
    results: tuple[Tensor, ...], target: Tensor, ignore_index: int, reduction: str
) -> Tensor | tuple[Tensor, Tensor]:
    """One or two results, reduced over the rows."""
    if reduction != "none":
        results = tuple(rows.sum() for rows in results)
    if reduction == "mean":
        count = (target != ignore_index).sum()
        results = tuple(total / count for total in results)
    return results[0] if len(results) == 1 else (results[0], results[1])


def _gather(output: Tensor, input: Tensor, group: ProcessGroup) -> None:
    """Gather every rank's input, by rank, with the function that this torch does not deprecate."""
    gather: Any = getattr(torch.distributed, "all_gather_single", None)
    (gather or torch.distributed.all_gather_into_tensor)(output, input, group=group)


def _shard(
    input: Any, group: Any, vocab_start: int | None, vocab_size: int | None
) -> tuple[int, int]:
    """(word of the first column, words in all shards)."""
    available = torch.distributed.is_available()
    if not available or not isinstance(group, torch.distributed.ProcessGroup):
        expected = "None or a torch.distributed.ProcessGroup that this rank is in"
        raise ArgumentError("cross_entropy", "process_group", check.describe(group), expected)
    # The contract's check reports an input that is no tensor of logits.
    columns = input.shape[-1] if isinstance(input, Tensor) and input.ndim else 0
    if vocab_start is None and vocab_size is None:
        return group.rank() * columns, group.size() * columns
    if vocab_start is None or vocab_size is None:
        missing = "vocab_start" if vocab_start is None else "vocab_size"
        raise ArgumentError(
            "cross_entropy", missing, "None", "vocab_start and vocab_size, or neither"
        )
    # No operator of the forward takes both; without this check the backward would be the first
    # to refuse them.
    check.is_integer("cross_entropy", "vocab_start", vocab_start)
    least = vocab_start + columns
    check.is_integer("cross_entropy", "vocab_size", vocab_size, at_least=least)
    return vocab_start, vocab_size


def _with_gradient(
    op: str, options: dict[str, Any], reduction: str, target: Tensor, *given: Tensor | None
) -> Tensor | None:
    """The sum or mean, with gradients computed in the forward; None where the option is ignored."""
    tensors: list[Any] = [target, *(it for it in given if it is not None)]
    if (
        reduction == "none"
        or not records(op, *given)
        # The contract's check reports what is wrong with other arguments.
        or not all(isinstance(it, Tensor) for it in tensors)
        or given[0] is None
        or type(options["ignore_index"]) is not int
        or not all(it.requires_grad for it in tensors[1:])
        or any(it.dtype == torch.float16 for it in tensors)
        or torch.compiler.is_compiling()
    ):
        return None
    count = (target != options["ignore_index"]).sum() if reduction == "mean" else None
    total: Tensor = _WithGradient.apply(  # type: ignore[no-untyped-call]
        op, options, count, target, *given
    )
    return total


class _WithGradient(torch.autograd.Function):
    """The sum of the losses, divided by ``count`` if there is one; computes its gradients as well.

    ``parameters``: weight and bias (or None) of the linear layer whose outputs are the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        op: str,
        options: dict[str, Any],
        count: Tensor | None,
        target: Tensor,
        input: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        manager = get_default_manager()
        each = input.new_ones((), dtype=math_dtype(input.dtype))
        each = each if count is None else each / count
        grad_loss = each.expand(target.shape)
        before, behind = parameters[:1], parameters[1:]
        call = input, *before, target, grad_loss, *behind
        present = [place for place, it in enumerate((input, *parameters)) if it is not None]
        required = 0, 1, *(2 + place for place in present)
        outputs = 3 + len(parameters)
        loss, lse, *gradients = checked_outputs(f"{op}_fwd_bwd", outputs, required, call, options)
        ctx.save_for_backward(grad_loss, input, *before, target, lse, *behind, *gradients)
        ctx.count, ctx.present = len(gradients), present
        ctx.op, ctx.op_name = op, f"{op}_fwd_bwd"
        ctx.scale = manager.pin("multi_tensor_scale_tensor")
        ctx.again = manager.pin(f"{op}_bwd")
        ctx.options = options
        ctx.gradients_returned = False
        total: Tensor = loss.sum()
        return total if count is None else total / count

    @staticmethod
    @first_derivative
    def backward(ctx: Any, saved: Gradients, grad: Tensor) -> Gradients:
        grad_loss, *others = saved[: -ctx.count]
        assert grad_loss is not None  # invariant: the forward saved it
        if ctx.gradients_returned or is_transformed(
            grad
        ):  # a batch does not fit the saved gradients
            call = grad_loss * grad, *others
            gradients: Gradients = checked_outputs(
                f"{ctx.op}_bwd", ctx.count, ctx.present, call, ctx.options, ctx.again
            )
        else:
            # The saved gradients are scaled in place, and their new owner may write them. ``data``
            # hides those writes from autograd, which checks saved tensors for changes: these are
            # never read from there again.
            ctx.gradients_returned = True
            gradients = tuple(None if it is None else it.data for it in saved[-ctx.count :])
            present = [it for it in gradients if it is not None]
            ctx.scale(present, present, grad.reshape(1))
        return None, None, None, None, *gradients


class _VocabularyParallel(torch.autograd.Function):
    """(loss, lse) of each row, for logits whose columns are spread over several ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        target: Tensor,
        group: ProcessGroup,
        vocab_start: int,
        vocab_size: int,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        ignore_index, softcap = options["ignore_index"], options["softcap"]
        of_columns = {
            "vocab_start": vocab_start,
            "ignore_index": ignore_index,
            "softcap": softcap,
        }
        call = input, target
        (stats,) = checked_outputs("cross_entropy_partial_fwd", 1, (0,), call, of_columns)
        gathered = stats.new_empty((group.size(), *stats.shape))
        _gather(gathered.view(-1), stats.view(-1), group)
        of_all = {
            "vocab_size": vocab_size,
            "label_smoothing": options["label_smoothing"],
            "ignore_index": ignore_index,
            "z_loss": options["z_loss"],
        }
        loss, lse = checked_outputs("cross_entropy_merge", 2, (0, 1), (gathered, target), of_all)
        ctx.save_for_backward(input, target, lse)
        ctx.op_name = "cross_entropy_partial_fwd"
        ctx.run = get_default_manager().pin("cross_entropy_bwd")
        ctx.options = {**options, "vocab_start": vocab_start, "vocab_size": vocab_size}
        return loss, lse

    @staticmethod
    @first_derivative
    def backward(ctx: Any, saved: Gradients, grad_loss: Tensor, grad_lse: Tensor) -> Gradients:
        call = grad_loss, *saved, grad_lse
        outputs = checked_outputs("cross_entropy_bwd", 1, (0,), call, ctx.options, ctx.run)
        return *outputs, None, None, None, None, None

"""Maps FlagGems' functions to the ATen operators that they implement, and calls them as such.

A function of FlagGems that implements an ATen operator takes the operator's arguments. It is
called as torch's dispatcher would: by position up to the last argument that is not at its default,
and by name where the schema says so. The function's own parameter names are not used.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from transformer_engine_fl.core.contract import same
from transformer_engine_fl.core.errors import NotSupportedError, PluginError

if TYPE_CHECKING:
    import torch

__all__ = ["ATEN", "FUNCTIONS", "as_kernel", "aten_of", "mutates"]

ATEN: Final = {
    "add": "add.Tensor",
    "add_": "add_.Tensor",
    "all_dim": "all.dim",
    "any_dim": "any.dim",
    "batch_norm": "native_batch_norm",
    "clamp_tensor": "clamp.Tensor",
    "cross_entropy_loss": "cross_entropy_loss",
    "div": "div.Tensor",
    "dropout": "native_dropout",
    "dropout_backward": "native_dropout_backward",
    "group_norm": "native_group_norm",
    "group_norm_backward": "native_group_norm_backward",
    "layer_norm": "native_layer_norm",
    "layer_norm_backward": "native_layer_norm_backward",
    "log_softmax": "_log_softmax",
    "log_softmax_backward": "_log_softmax_backward_data",
    "max_dim": "max.dim",
    "mean_dim": "mean.dim",
    "min_dim": "min.dim",
    "mul": "mul.Tensor",
    "mul_": "mul_.Tensor",
    "pow_tensor_scalar": "pow.Tensor_Scalar",
    "pow_tensor_tensor": "pow.Tensor_Tensor",
    "softmax": "_softmax",
    "softmax_backward": "_softmax_backward_data",
    "sort_stable": "sort.stable",
    "sub": "sub.Tensor",
    "sub_": "sub_.Tensor",
    "sum_dim": "sum.dim_IntList",
    "to_copy": "_to_copy",
    "where_self": "where.self",
}
"""Function -> ATen operator, where the names differ."""

FUNCTIONS: Final = {aten: function for function, aten in ATEN.items()}
"""ATen operator -> function, where the names differ."""

_WRITING: Final = frozenset({"native_batch_norm"})
"""Operators that write an argument, though their schemas do not say so."""


def aten_of(function: str) -> str | None:
    """The ATen operator that a function implements; None if it is one of FlagGems' own functions.

    If FlagGems is installed, its own list decides. Otherwise it is the operator in :data:`ATEN`,
    or the one with the function's name that has a default overload.
    """
    import torch

    for name, registered, *_ in getattr(sys.modules.get("flag_gems"), "_FULL_CONFIG", ()):
        if getattr(registered, "__name__", None) == function:
            return str(name)
    if (named := ATEN.get(function)) is not None:
        return named
    packet = getattr(torch.ops.aten, function, None)
    return function if packet is not None and "default" in packet.overloads() else None


def mutates(aten: str) -> tuple[str, ...] | None:
    """The arguments that an ATen operator writes, by its schema; None if that is unknown."""
    operator = _operator(aten)
    if operator is None or aten in _WRITING:
        return None
    arguments = operator._schema.arguments
    return tuple(it.name for it in arguments if it.alias_info and it.alias_info.is_write)


def _operator(aten: str) -> Any:
    """The operator of that name; None if this version of torch has none."""
    import torch

    name, _, overload = aten.partition(".")
    return getattr(getattr(torch.ops.aten, name, None), overload or "default", None)


def as_kernel(aten: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of FlagGems with the signature of its ATen operator.

    It runs without autograd, as torch differentiates operators by separate backward operators. A
    composite operator, which torch would decompose, is replaced as a whole; for it the function
    must itself be differentiable where a gradient is wanted.

    Raises:
        PluginError: this version of torch has no such operator.
    """
    import torch

    name, operator = aten.partition(".")[0], _operator(aten)
    if operator is None:
        raise PluginError(f"this torch has no operator aten::{aten}")
    arguments = operator._schema.arguments

    whole = _is_taken_apart(operator)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(whole and torch.is_grad_enabled()):
            result = function(*args, **kwargs)
        if whole and _wants_gradient((*args, *kwargs.values())) and not _wants_gradient((result,)):
            raise NotSupportedError(f"aten::{aten}: {function.__name__} is not differentiable")
        return result

    kernel.__name__ = name
    kernel.__doc__ = getattr(function, "__doc__", None)
    parameters = _parameters(arguments)
    if parameters is None:
        return kernel
    signature = inspect.Signature(parameters)
    places = [it.name for it in arguments if not it.kwarg_only]
    defaults = {it.name: it.default_value for it in arguments if it.has_default_value()}

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        given = {it: bound[it] for it in bound if not same(bound[it], defaults.get(it, bound))}
        last = max((at for at, it in enumerate(places) if it in given), default=-1)
        values = [given[it] if it in given else defaults[it] for it in places[: last + 1]]
        named = {it: value for it, value in given.items() if it not in places}
        return kernel(*values, **named)

    call.__name__, call.__doc__ = name, kernel.__doc__
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _is_taken_apart(operator: Any) -> bool:
    """Whether the operator is a composite, which torch decomposes above autograd."""
    import torch

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operator.name()
    return bool(has(name, "CompositeImplicitAutograd") and not has(name, "Autograd"))


def _wants_gradient(values: tuple[Any, ...]) -> bool:
    import torch

    found = (it for it in values if isinstance(it, torch.Tensor))
    return torch.is_grad_enabled() and any(it.requires_grad for it in found)


def _parameters(arguments: Sequence[torch.Argument]) -> list[inspect.Parameter] | None:
    """The parameters of a schema; None if one has no valid Python name."""
    made = []
    for it in arguments:
        kind = (
            inspect.Parameter.KEYWORD_ONLY
            if it.kwarg_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        default = it.default_value if it.has_default_value() else inspect.Parameter.empty
        try:
            made.append(inspect.Parameter(it.name, kind, default=default))
        except ValueError:  # "from" is a keyword
            return None
    return made

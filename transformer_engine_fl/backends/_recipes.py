"""Recipes of quantisation for the sets with kernels: the options that operators share.

A recipe's constants have the same names in the kernels of every set.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.backends._arguments import check_fresh
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops._formats import FORMATS, LARGEST, Format
from transformer_engine_fl.ops.quantization import GLOBAL_LARGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformer_engine_fl.ops.epilogue import Epilogue

__all__ = [
    "KINDS",
    "SCALES",
    "Lists",
    "Quantized",
    "Recipe",
    "in_lists",
    "options_of",
    "outputs_of",
    "quantizing",
]

Quantized = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Lists = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]

KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}
"""The kind of number that a data dtype holds."""
SCALES = {"float32": "float32", "float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}
"""The kind of number that a dtype of scales holds."""


class Recipe(NamedTuple):
    """How to quantise: the options that the operators share, already checked.

    Attributes:
        op: the operator.
        form: the scaling format.
        dtype: the dtype of the data.
        columnwise, force_pow_2_scales, amax_epsilon: see ``quantize``.
    """

    op: str
    form: Format
    dtype: torch.dtype
    columnwise: bool
    force_pow_2_scales: bool
    amax_epsilon: float

    @classmethod
    def of(
        cls,
        op: str,
        *,
        format: str,
        dtype: torch.dtype | None,
        columnwise: bool,
        force_pow_2_scales: bool,
        amax_epsilon: float,
    ) -> Recipe:
        """The recipe of an operator's options."""
        if not isinstance(amax_epsilon, int | float):
            raise NotSupportedError(f"{op}: amax_epsilon is symbolic, not a concrete number")
        form = FORMATS[format]
        kind = dtype or getattr(torch, form.dtypes[0])
        return cls(op, form, kind, columnwise, force_pow_2_scales, float(amax_epsilon))

    @property
    def width(self) -> int:
        """The width of blocks along a row; 0 without blocks, or if they are square."""
        return 0 if self.form.block is None or self.square else self.form.block[1]

    @property
    def square(self) -> bool:
        """Whether blocks are as high as they are wide."""
        return self.form.block is not None and self.form.block[0] > 1

    @property
    def shared_largest(self) -> float:
        """The value to which the scale shared by all values maps their amax."""
        return GLOBAL_LARGEST if self.form.global_scale else self._largest

    @property
    def _largest(self) -> float:
        return LARGEST[str(self.dtype).removeprefix("torch.")]

    def constants(self) -> dict[str, Any]:
        """Constants for the kernels."""
        return {
            "KIND": KINDS[self.dtype],
            "LARGEST": self._largest,
            "WIDTH": self.width,
            "SCALES": SCALES[self.form.scale_dtype],
            "POW2": self.force_pow_2_scales,
        }


def options_of(
    format: str,
    dtype: torch.dtype | None,
    columnwise: bool,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> dict[str, Any]:
    """The options by their names, as checks and recipes take them."""
    return {
        "format": format,
        "dtype": dtype,
        "columnwise": columnwise,
        "force_pow_2_scales": force_pow_2_scales,
        "amax_epsilon": amax_epsilon,
    }


def in_lists(each: Sequence[Quantized]) -> Lists:
    """The outputs for several tensors: a list in place of each output."""
    data, scale_inv, amax, global_scale_inv, data_t, scale_inv_t = (
        [it for it in outputs if it is not None] for outputs in zip(*each, strict=True)
    )
    return data, scale_inv, amax, global_scale_inv, data_t, scale_inv_t


def outputs_of(recipe: Recipe, like: Tensor, shape: Sequence[int], groups: int) -> Quantized:
    """Memory for the outputs, on the device of ``like``; ``shape`` is that of the values."""
    form = recipe.form
    rows, columns = math.prod(shape[:-1]), shape[-1]
    scale_dtype: torch.dtype = getattr(torch, form.scale_dtype)
    packed = form.values_per_byte

    def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=like.device)

    def scales(down: int, across: int) -> Tensor:
        counts = (groups,) if form.block is None else form.scale_shape(down, across)
        return empty(counts, scale_dtype)

    data = empty((*shape[:-1], columns // packed), recipe.dtype)
    check_fresh(recipe.op, data)
    return (
        data,
        scales(rows, columns),
        empty((groups,)) if form.by_tensor else None,
        empty((groups,)) if form.global_scale else None,
        empty((columns, rows // packed), recipe.dtype) if recipe.columnwise else None,
        scales(columns, rows) if recipe.columnwise else None,
    )


def quantizing(epilogue: Epilogue, calculate: Callable[..., Any]) -> Callable[..., Any]:
    """The quantised operator: it checks its arguments and calls ``calculate``.

    Args:
        epilogue: its definition.
        calculate: gives the outputs for the epilogue, the recipe, the base operator's
            arguments by name, and the given scale or None.
    """
    contract = epilogue.contract

    def operator(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = contract.check(*args, **kwargs)
        arguments, scale, options = epilogue.divided(given)
        outputs: tuple[Any, ...] = calculate(
            epilogue, Recipe.of(contract.name, **options), arguments, scale
        )
        return outputs

    operator.__name__ = operator.__qualname__ = contract.name
    operator.__signature__ = contract.signature  # type: ignore[attr-defined]
    operator.__doc__ = f"``{contract.name}`` of the contract."
    return repeating(operator)

"""Quantised epilogues in CUDA C++: an operator and the cast of its output, in one pass.

Activations are quantised by the kernels of ``_casting``, which compute the activation that they
cast. A norm needs whole rows: the kernel of ``normalization.cu`` that keeps a row on the chip also
casts along it. A transposed tensor, square blocks, or a scale that depends on all values need more
than a row: then that kernel writes only the statistics and partial amaxes, and the kernel that
casts normalizes its input as it reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.backends._recipes import Quantized, Recipe, outputs_of, quantizing
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    MOST_COLUMNS,
    access_width,
    by_rows,
    check_numbers,
    check_size,
    fresh,
    plain,
    pointer,
    vector_width,
)
from transformer_engine_fl.backends.vendor.cuda._casting import (
    MOST,
    PIECE,
    Source,
    SourceKey,
    amax_source,
    cast,
    cast_source,
    cast_with_sums,
    dense_scale,
    recipes,
    row_way,
    write_largest,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.backends.vendor.cuda.activation import KINDS, OPERATORS
from transformer_engine_fl.backends.vendor.cuda.normalization import (
    STATISTICS,
    Cast,
    ForwardKey,
    forward_of,
    forward_source,
)
from transformer_engine_fl.ops.epilogue import EPILOGUES, Epilogue

# -------------------------------------------------------------------------- activations


def _activation(
    epilogue: Epilogue, recipe: Recipe, given: Mapping[str, Any], scale: Tensor | None
) -> tuple[Any, ...]:
    """An activation or its gradient, quantised; preceded by the gradient of a bias, if wanted."""
    base = epilogue.base
    of = OPERATORS[base.name]
    limit, alpha = given.get("limit", 0.0), given.get("alpha", 0.0)
    check_numbers(recipe.op, limit, alpha)
    x, x_stride = by_rows(plain(recipe.op, base.dispatch_on, given[base.dispatch_on]))
    grad, grad_stride = None, 0
    if of.backward:
        grad, grad_stride = by_rows(plain(recipe.op, "grad", given["grad"]))
    source = Source(
        of.kind,
        tuple(epilogue.shape(given)),
        x,
        x_stride,
        grad,
        grad_stride,
        of.gated,
        limit=float(limit),
        alpha=float(alpha),
    )
    if not epilogue.place:
        return cast(recipe, source, scale)
    assert grad is not None  # an invariant of this module
    dbias, quantized = cast_with_sums(recipe, source, grad.dtype, scale)
    return dbias, *quantized


# -------------------------------------------------------------------------------- norms


class _Norm(NamedTuple):
    """The arguments and the statistics of a norm.

    Attributes:
        shape: the input's shape.
        x, x_stride: the input, and its row stride.
        residual, residual_stride: the residual that is added to it, and its row stride.
        weight, bias, zero_centred: the parameters; the weight may be stored minus 1.
        eps: added to the mean of squares.
        sum, mu, rsigma: outputs besides the codes.
    """

    shape: tuple[int, ...]
    x: Tensor
    x_stride: int
    residual: Tensor | None
    residual_stride: int
    weight: Tensor
    bias: Tensor | None
    zero_centred: bool
    eps: float
    sum: Tensor | None
    mu: Tensor | None
    rsigma: Tensor

    @classmethod
    def of(cls, op: str, base: str, given: Mapping[str, Any]) -> _Norm:
        """From the arguments of the operator ``base``, which its check has passed."""
        check_numbers(op, given["eps"])
        x, x_stride = by_rows(plain(op, "input", given["input"]))
        shape = tuple(given["input"].shape)
        rows = (math.prod(shape[:-1]),)
        check_size(op, "rows", rows[0], MOST)
        check_size(op, "columns", shape[-1], MOST_COLUMNS)
        residual, residual_stride, total = None, 0, None
        if "residual" in given:
            residual, residual_stride = by_rows(plain(op, "residual", given["residual"]))
            total = fresh(op, x, shape)
        bias = given.get("bias")
        return cls(
            shape,
            x,
            x_stride,
            residual,
            residual_stride,
            plain(op, "weight", given["weight"]).contiguous(),
            None if bias is None else plain(op, "bias", bias).contiguous(),
            bool(given["zero_centered_gamma"]),
            float(given["eps"]),
            total,
            fresh(op, x, rows, torch.float32) if base == "layernorm_fwd" else None,
            fresh(op, x, rows, torch.float32),
        )

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.rsigma.shape[0]

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """What the operator returns after its output."""
        return tuple(it for it in (self.sum, self.mu, self.rsigma) if it is not None)

    def source(self, amaxes: Tensor | None) -> Source:
        """The source of a cast that normalizes, once the statistics are written."""
        x, x_stride = (self.x, self.x_stride) if self.sum is None else (self.sum, self.shape[-1])
        return Source(
            "norm",
            self.shape,
            x,
            x_stride,
            weight=self.weight,
            bias=self.bias,
            mu=self.mu,
            rsigma=self.rsigma,
            zero_centred=self.zero_centred,
            amaxes=amaxes,
        )

    def key(self, what: Cast) -> ForwardKey:
        """What the norm's kernel depends on."""
        columns, size = self.shape[-1], self.x.element_size()
        parts = [(self.x.data_ptr(), size), (self.x_stride * size, size)]
        if self.residual is not None:
            parts += [(self.residual.data_ptr(), size), (self.residual_stride * size, size)]
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parts.append((parameter.data_ptr(), parameter.element_size()))
        vec = vector_width(columns, size)
        return ForwardKey(
            columns,
            access_width(vec, *parts) if self.rows else vec,
            self.x.dtype,
            self.weight.dtype,
            self.weight.dtype if self.bias is None else self.bias.dtype,
            self.x.dtype,
            self.mu is not None,
            self.zero_centred,
            self.residual is not None,
            what,
            self.bias is not None,
        )

    def amaxes(self, what: Cast) -> int:
        """How many partial amaxes the norm's kernel writes."""
        return forward_of(self.key(what), self.x.get_device()).amaxes(self.rows)

    def run(self, what: Cast, outputs: Quantized | None, *more: int | float) -> None:
        """Write the statistics and, if there are outputs, the codes; ``more``: other arguments."""
        columns = self.shape[-1]
        kernel = forward_of(self.key(what), self.x.get_device())
        kernel(
            self.rows,
            *map(pointer, (self.x, self.residual, self.weight, self.bias)),
            0 if outputs is None else outputs[0].data_ptr(),
            *map(pointer, (self.sum, self.mu, self.rsigma)),
            self.rows,
            self.x_stride,
            self.residual_stride,
            columns,
            kernel.share,
            self.eps,
            *more,
        )


def _casts_along_rows(norm: _Norm, recipe: Recipe, device: _launch.Limits) -> bool:
    """Whether a row stays on the chip, and each of its blocks lies within one warp."""
    tile = norm.key(STATISTICS).tile(device)
    if tile is None:
        return False
    return not recipe.width or recipe.width // tile.vec <= 32 or tile.lanes < 32


def _norm(
    epilogue: Epilogue, recipe: Recipe, given: Mapping[str, Any], scale: Tensor | None
) -> tuple[Any, ...]:
    """A norm, quantised; followed by the statistics."""
    norm = _Norm.of(recipe.op, epilogue.base.name, given)
    scale = dense_scale(recipe.op, scale)
    limits = _launch.limits(norm.x.get_device())
    by_tensor = recipe.form.by_tensor
    computed = by_tensor and scale is None
    on_chip = norm.key(STATISTICS).tile(limits) is not None
    apart = (
        recipe.columnwise
        or recipe.square
        or computed
        or not _casts_along_rows(norm, recipe, limits)
    )
    found = by_tensor and on_chip and (computed or not apart)
    what = Cast(None if apart else recipe._replace(op="", amax_epsilon=0.0), found)
    amaxes = None
    if found and norm.rows:
        amaxes = fresh(recipe.op, norm.x, (norm.amaxes(what),), torch.float32)
    if apart:
        if norm.rows:
            norm.run(what, None, pointer(amaxes))
        quantized = cast(recipe, norm.source(amaxes if computed else None), scale)
        return *quantized, *norm.statistics
    quantized = outputs_of(recipe, norm.x, norm.shape, 1)
    if not norm.rows:  # a cast writes the outputs that exist without rows
        return *cast(recipe, norm.source(None), scale), *norm.statistics
    norm.run(
        what,
        quantized,
        *map(pointer, (scale, quantized[1], quantized[3], amaxes)),
        recipe.amax_epsilon,
    )
    if amaxes is not None and quantized[2] is not None:
        write_largest(amaxes, quantized[2])
    return *quantized, *norm.statistics


# ---------------------------------------------------------------------------- operators


_CALCULATE = {"activation": _activation, "normalization": _norm}

globals().update(
    (name, quantizing(epilogue, _CALCULATE[epilogue.base.family]))
    for name, epilogue in EPILOGUES.items()
)


# ----------------------------------------------------------------------- compiling ahead


def activation_key(
    kind: str, gated: bool, backward: bool, dtype: torch.dtype, both: bool = False
) -> SourceKey:
    """The key of an activation whose columns are whole pieces."""
    halves = gated and backward
    same = (dtype,) * 4
    return SourceKey(
        kind,
        *same,
        False,
        False,
        gated,
        backward,
        halves and both,
        halves and not both,
        PIECE,
        True,
    )


def norm_key(dtype: torch.dtype, centred: bool, access: int = PIECE) -> SourceKey:
    """The key of a norm whose statistics are known."""
    same = (dtype,) * 4
    return SourceKey("norm", *same, centred, True, *(False,) * 4, access, access == PIECE)


def norm_sources(
    device: _launch.Limits, columns: int, dtype: torch.dtype, centred: bool, added: bool
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """The kernels of a norm that cast along its rows, and those that write only statistics."""
    vec = vector_width(columns, dtype.itemsize)
    whats = [Cast(recipe, recipe.form.by_tensor) for recipe in recipes() if not recipe.columnwise]
    whats = [it for it in whats if it.recipe is not None and not it.recipe.square]
    for what in (*whats, STATISTICS, Cast(None, True)):
        key = ForwardKey(columns, vec, *(dtype,) * 4, centred, False, added, what)
        tile = key.tile(device)
        if tile is None and what != STATISTICS:
            continue
        width = what.recipe.width if what.recipe is not None else 0
        if tile is not None and width // tile.vec > 32:
            continue
        yield forward_source(key, device)[:2]


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """A selection of the operators' kernels for a device: every kind, type and shape."""
    low, full = torch.bfloat16, torch.float32
    several = list(recipes())
    for place, kind in enumerate(KINDS):
        for gated in (False, True):
            for backward in (False, True):
                recipe = several[(3 * place + 2 * gated + 5 * backward) % len(several)]
                both = not (recipe.columnwise or recipe.square)
                key = activation_key(kind, gated, backward, low, both)
                ahead = row_way(key, recipe)[0]
                yield cast_source(key, recipe, device, amax=recipe.form.by_tensor, ahead=ahead)
    for recipe in several:
        plain_key = activation_key("Gelu", False, True, full)
        yield cast_source(plain_key, recipe, device, sums=True)
        odd = plain_key._replace(gated=True, halves=True, access=1, whole=False)
        yield cast_source(odd, recipe, device, store=1, lanes=8)
        centred = recipe.columnwise
        dependent = recipe.form.by_tensor
        yield cast_source(norm_key(low, centred), recipe, device, dependent=dependent)
        yield cast_source(norm_key(full, not centred, 1), recipe, device, store=1, lanes=8)
    for columns in (48, 8192, 2**21):
        yield from norm_sources(device, columns, low, False, columns != 48)
    yield from norm_sources(device, 32768, low, True, False)
    yield from norm_sources(device, 516, full, True, False)
    yield amax_source(activation_key("Silu", True, True, low, True), 32, 8, device)
    yield amax_source(norm_key(low, True), 32, 8, device)

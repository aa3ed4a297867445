"""Norms and activations with a quantised output, in one pass.

``<operator>_quantize`` is the operator with one of its outputs cast as ``quantize`` does. The
float32 result is quantised directly, without being rounded to another dtype first.
The operator's own contract and that of ``quantize`` specify everything else, so each contract
here is derived from these two. An implementation declines the options that it does not fuse, and
registers only the operators that it fuses.

Implementations may calculate in a different order, so a value close to a tie may be cast to
either neighbour, and a scale may be the next float. The oracle returns bounds: the results for
every float32 value within the operator's own tolerance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Between, Contract, Sample
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops import activation, normalization
from transformer_engine_fl.ops._formats import FORMATS, LARGEST, Format
from transformer_engine_fl.ops._rounding import (
    LARGEST_FLOAT32,
    float32,
    largest_of,
    microscaling_exponent,
    nearest,
    power_of_two,
    scale_of,
    single,
    unpacked,
)
from transformer_engine_fl.ops.quantization import (
    DTYPES,
    GLOBAL_LARGEST,
    check_options,
    check_scale,
    check_shape,
    matrix_shape,
    option_samples,
    quantize,
    quantized_shapes,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "EPILOGUES",
    "Epilogue",
    "clamped_dswiglu_quantize",
    "clamped_swiglu_quantize",
    "dbias_dgelu_quantize",
    "dbias_dqgelu_quantize",
    "dbias_drelu_quantize",
    "dbias_dsilu_quantize",
    "dbias_dsrelu_quantize",
    "dgeglu_quantize",
    "dgelu_quantize",
    "dglu_quantize",
    "dqgeglu_quantize",
    "dqgelu_quantize",
    "dreglu_quantize",
    "drelu_quantize",
    "dsilu_quantize",
    "dsreglu_quantize",
    "dsrelu_quantize",
    "dswiglu_quantize",
    "geglu_quantize",
    "gelu_quantize",
    "glu_quantize",
    "layernorm_fwd_quantize",
    "qgeglu_quantize",
    "qgelu_quantize",
    "reglu_quantize",
    "relu_quantize",
    "rmsnorm_fwd_add_quantize",
    "rmsnorm_fwd_quantize",
    "silu_quantize",
    "sreglu_quantize",
    "srelu_quantize",
    "swiglu_quantize",
]

Quantizing = Contract[..., tuple[Any, ...]]

_OPTIONS = tuple(name for name in quantize.options if name != "scale")
"""The options of ``quantize`` but ``scale``."""


# ------------------------------------------------------------------------------- bounds

Ends = tuple["Tensor", "Tensor"]
"""The least and the greatest correct value."""

_LEAST_FLOAT32 = 2.0**-149


def error_of(value: Tensor, base: Contract[..., Any]) -> Tensor:
    """How far a float32 result of ``base`` may be from the float64 value of each element.

    The operator's tolerance, relative to the root mean square of the row, since a block may be in
    a row of small values; of the whole tensor where the row is zero in float64.
    """
    tolerance = base.tolerance["float32"]
    known = value.nan_to_num(0.0, posinf=0.0, neginf=0.0)
    scale = known.square().mean(-1, keepdim=True).sqrt()
    scale = scale.where(scale > 0, known.square().mean().sqrt().nan_to_num(0.0))
    error = tolerance.rtol * known.abs() + tolerance.atol * scale
    return error.clamp_min(_LEAST_FLOAT32).masked_fill(scale == 0, 0.0)


@dataclass(frozen=True, slots=True)
class _Cast:
    """How a float64 matrix, known up to an error, is quantised."""

    form: Format
    dtype: str
    scale: Tensor | None
    epsilon: float
    power_of_2: bool

    def bounds(self, value: Tensor, error: Tensor) -> tuple[Between, Between, Any, Any]:
        """The bounds of data, scale_inv, amax and global_scale_inv."""
        import torch

        form = self.form
        size = value.abs().nan_to_num(0.0, posinf=torch.inf)
        sizes = ((size - error).clamp_min(0.0), size + error)
        none = torch.zeros_like(value, dtype=torch.int64)
        whole = self._each(lambda it: largest_of(it, none, 1), sizes)
        amax = Between(*whole) if form.by_tensor else None
        shared = whole if self.scale is None else (self.scale.double(),) * 2
        if form.block is None:
            ends = shared if self.scale is not None else self._scales(whole, LARGEST[self.dtype])
            return self._data(value, error, ends, none), self._inverse(ends), amax, None
        down, across = form.grid(*value.shape)
        row = torch.arange(value.shape[0], device=value.device)[:, None] // form.block[0]
        column = torch.arange(value.shape[1], device=value.device) // form.block[1]
        block = row * across + column
        each = self._each(lambda it: largest_of(it, block, down * across), sizes)
        if form.scale_dtype == "float32":
            ends = self._scales(each, LARGEST[self.dtype])
            return self._data(value, error, ends, block), self._inverse(ends), None, None
        if form.scale_dtype == "float8_e8m0fnu":
            powers = self._each(lambda it: microscaling_exponent(it, LARGEST[self.dtype]), each)
            ends = (power_of_two(-powers[1]), power_of_two(-powers[0]))
            inverse = Between(*self._each(power_of_two, powers))
            return self._data(value, error, ends, block), inverse, None, None
        if self.scale is None:
            shared = self._scales(whole, GLOBAL_LARGEST)
        factor = self._inverse(shared)
        sixth = float32(value.new_tensor(1 / 6))
        low, high = (
            nearest(float32(a * float32(s * sixth)), "float8_e4m3fn")
            for a, s in zip(each, shared, strict=True)
        )
        least, most = (
            float32(1 / float32(d * g)).clamp_max(LARGEST_FLOAT32)
            for d, g in ((high, factor.high), (low, factor.low))
        )
        return self._data(value, error, (least, most), block), Between(low, high), amax, factor

    def _each(self, change: Callable[[Tensor], Tensor], ends: Ends) -> Ends:
        return change(ends[0]), change(ends[1])

    def _scales(self, amax: Ends, largest: float) -> Ends:
        """The least and greatest float32 scale of an amax between two bounds."""
        low, high = (it.clamp_min(self.epsilon) for it in amax)
        nothing = low == 0  # the amax may be 0, with the scale 1, or tiny, with a large scale
        low = low.masked_fill(nothing, _LEAST_FLOAT32).minimum(high)
        least, most = (scale_of(it, largest, 0.0, self.power_of_2) for it in (high, low))
        return least.where(~nothing, least.clamp_max(1.0)), most

    def _inverse(self, scales: Ends) -> Between:
        return Between(float32(1 / scales[1]), float32(1 / scales[0]))

    def _data(self, value: Tensor, error: Tensor, scales: Ends, owner: Tensor) -> Between:
        """The bounds of the cast of ``value`` within ``error``, with the scales of its owners."""
        least, most = (it[owner] for it in scales)
        low, high = value - error, value + error
        low = nearest(float32((low * least).minimum(low * most)), self.dtype)
        high = nearest(float32((high * least).maximum(high * most)), self.dtype)
        if self.form.values_per_byte == 1:
            return Between(low, high)
        largest = LARGEST[self.dtype]
        return Between(low.nan_to_num(largest), high.nan_to_num(largest), values=unpacked)


# ---------------------------------------------------------------------------- contracts


@dataclass(frozen=True, slots=True)
class Epilogue:
    """An operator with one output quantised.

    Attributes:
        base: the operator.
        place: the index of the output that is quantised.
        shape: computes the shape of that output from the operator's arguments.
        contract: of the operator that does both.
    """

    base: Contract[..., Any]
    place: int
    shape: Callable[[Mapping[str, Any]], Sequence[int]]
    contract: Quantizing

    def divided(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """The arguments of the base operator, the scale, and the other options of ``quantize``."""
        base = {name: given[name] for name in self.base.signature.parameters if name in given}
        return base, given["scale"], {name: given[name] for name in _OPTIONS}

    def outputs(self, of_base: Any, quantized: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs of the base operator, one of them quantised."""
        each = list(of_base) if isinstance(of_base, tuple) else [of_base]
        each[self.place : self.place + 1] = quantized
        return tuple(each)

    def of(self, outputs: Any) -> Any:
        """The output of the base operator that is quantised."""
        return outputs[self.place] if isinstance(outputs, tuple) else outputs

    def check(self, op: str, **given: Any) -> None:
        """Check the base operator's arguments, then the others."""
        arguments, scale, options = self.divided(given)
        left_out = {"out_dtype": None} if "out_dtype" in self.base.options else {}
        self.base.check_as(op, **arguments, **left_out)
        form = check_options(op, **options)
        name = self.base.dispatch_on
        anchor = check.is_tensor(op, name, given[name], dtypes=DTYPES, min_ndim=1)
        check_shape(op, name, anchor, self.shape(arguments), form, options["columnwise"])
        check_scale(op, "scale", scale, form)
        check.same_device(op, name, {name: anchor, "scale": scale})

    def shapes(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The shape rule."""
        arguments, _, options = self.divided(self.contract.bind(*args, **kwargs))
        outputs = self.base.shapes(**arguments)
        how = (options["format"], options["dtype"], options["columnwise"])
        return self.outputs(outputs, quantized_shapes(self.of(outputs), 1, *how))

    def oracle(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The base operator's outputs in float64, with bounds for the quantised one."""
        arguments, scale, options = self.divided(self.contract.bind(*args, **kwargs))
        outputs = self.base.oracle(**arguments)
        value = self.of(outputs)
        error = error_of(value, self.base)
        form = FORMATS[options["format"]]
        dtype, columnwise = options["dtype"], options["columnwise"]
        kind = form.dtypes[0] if dtype is None else check.dtype_name(dtype)
        epsilon = single(options["amax_epsilon"])
        cast = _Cast(form, kind, scale, epsilon, options["force_pow_2_scales"])
        matrix = matrix_shape(value.shape)
        value, error = value.reshape(matrix), error.reshape(matrix)
        turned = cast.bounds(value.t(), error.t())[:2] if columnwise else (None, None)
        return self.outputs(outputs, (*cast.bounds(value, error), *turned))

    def samples(self, dtype: str, device: str) -> Iterator[Sample]:
        """The typical sample in every format with every option, the others in one format each."""
        forms = list(FORMATS.values())
        samples = [it for it in self.base.samples(dtype, device) if "out_dtype" not in it.kwargs]
        typical, *others = samples
        anchor = self.base.bind(*typical.args)[self.base.dispatch_on]
        for form in forms:
            yield self._cast(typical, form)
            for name, options in option_samples(anchor, form):
                yield self._cast(typical, form, name, **options)
        others = [it for it in others if it.kwargs or it.label in _LABELS]
        for count, sample in enumerate(others):
            shape = self.shape(self.base.bind(*sample.args, **sample.kwargs))
            rows, columns = matrix_shape(shape)
            fitting = [it for it in forms if columns % it.values_per_byte == 0]
            form = fitting[count % len(fitting)]
            columnwise: dict[str, Any] = {"columnwise": rows % form.values_per_byte == 0}
            yield self._cast(sample, form, **columnwise)

    def _cast(self, sample: Sample, form: Format, name: str = "", **options: Any) -> Sample:
        """A sample of the base operator, cast."""
        label = ", ".join(it for it in (sample.label, form.name, name) if it)
        given = {} if form.name == "per_tensor" else {"format": form.name}
        return Sample(label, sample.args, {**sample.kwargs, **given, **options})


_LABELS = (
    "three dimensions",
    "one dimension",
    "odd width",
    "many rows",
    "no rows",
    "transposed",
    "padded rows",
    "rows an odd distance apart",
    "large values",
    "small values",
    "kinks",
    "infinities and NaN",
    "offset mean",
)
"""The base operators' samples to cast, besides the typical one and those with an option."""


EPILOGUES: dict[str, Epilogue] = {}
"""Every epilogue by the name of the operator that does both."""


def _quantizing(
    base: Contract[..., Any],
    shape: Callable[[Mapping[str, Any]], Sequence[int]],
    place: int = 0,
) -> Quantizing:
    """The contract of the operator with its output at ``place`` quantised."""
    name = f"{base.name}_quantize"

    def shape_rule(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return EPILOGUES[name].shapes(*args, **kwargs)

    shape_rule.__name__ = shape_rule.__qualname__ = name
    shape_rule.__doc__ = _description(base, place)
    shape_rule.__signature__ = _signature(base, place)  # type: ignore[attr-defined]
    made: Quantizing = Contract(
        shape_rule,
        family="epilogue",
        check=lambda op, **given: EPILOGUES[name].check(op, **given),
        samples=lambda dtype, device: EPILOGUES[name].samples(dtype, device),
        tolerance={dtype: base.tolerance[dtype] for dtype in DTYPES},
        oracle=lambda *args, **kwargs: EPILOGUES[name].oracle(*args, **kwargs),
        dispatch_on=base.dispatch_on,
    )
    EPILOGUES[name] = Epilogue(base, place, shape, made)
    return made


def _results(contract: Contract[..., Any]) -> list[str]:
    returned = str(contract.signature.return_annotation)
    return returned.removeprefix("tuple[").removesuffix("]").split(", ")


def _signature(base: Contract[..., Any], place: int) -> inspect.Signature:
    """The base operator's parameters but ``out_dtype``, then the options of ``quantize``."""
    own = base.signature.parameters.items()
    parameters = [parameter for name, parameter in own if name != "out_dtype"]
    parameters += [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in quantize.signature.parameters.items()
        if name in quantize.options
    ]
    results = _results(base)
    results[place : place + 1] = _results(quantize)
    return inspect.Signature(parameters, return_annotation=f"tuple[{', '.join(results)}]")


def _description(base: Contract[..., Any], place: int) -> str:
    which = ("output", "second output")[place]
    return f""":func:`{base.name}` with its {which} quantised, in one pass.

    The {which}, calculated in float32 and not rounded to another dtype, is cast as
    :func:`quantize` casts.

    Args: those of :func:`{base.name}`, float64 excepted and without a dtype of the output,
        then by name those of :func:`quantize`: scale, format, dtype, columnwise,
        force_pow_2_scales and amax_epsilon.

    Returns: what :func:`{base.name}` returns, in place of the {which} the six outputs of
        :func:`quantize`: data, scale_inv, amax, global_scale_inv, data_t, scale_inv_t.

    Raises:
        ArgumentError: a shape, dtype, option or device does not agree.
    """


def _of_input(given: Mapping[str, Any]) -> Sequence[int]:
    shape: Sequence[int] = given["input"].shape
    return shape


def _of_half_the_input(given: Mapping[str, Any]) -> Sequence[int]:
    shape = _of_input(given)
    return (*shape[:-1], shape[-1] // 2)


def _of_forward_input(given: Mapping[str, Any]) -> Sequence[int]:
    shape: Sequence[int] = given["fwd_input"].shape
    return shape


rmsnorm_fwd_quantize = _quantizing(normalization.rmsnorm_fwd, _of_input)
rmsnorm_fwd_add_quantize = _quantizing(normalization.rmsnorm_fwd_add, _of_input)
layernorm_fwd_quantize = _quantizing(normalization.layernorm_fwd, _of_input)

gelu_quantize = _quantizing(activation.gelu, _of_input)
qgelu_quantize = _quantizing(activation.qgelu, _of_input)
relu_quantize = _quantizing(activation.relu, _of_input)
srelu_quantize = _quantizing(activation.srelu, _of_input)
silu_quantize = _quantizing(activation.silu, _of_input)

glu_quantize = _quantizing(activation.glu, _of_half_the_input)
geglu_quantize = _quantizing(activation.geglu, _of_half_the_input)
qgeglu_quantize = _quantizing(activation.qgeglu, _of_half_the_input)
reglu_quantize = _quantizing(activation.reglu, _of_half_the_input)
sreglu_quantize = _quantizing(activation.sreglu, _of_half_the_input)
swiglu_quantize = _quantizing(activation.swiglu, _of_half_the_input)
clamped_swiglu_quantize = _quantizing(activation.clamped_swiglu, _of_half_the_input)

dgelu_quantize = _quantizing(activation.dgelu, _of_forward_input)
dqgelu_quantize = _quantizing(activation.dqgelu, _of_forward_input)
drelu_quantize = _quantizing(activation.drelu, _of_forward_input)
dsrelu_quantize = _quantizing(activation.dsrelu, _of_forward_input)
dsilu_quantize = _quantizing(activation.dsilu, _of_forward_input)

dglu_quantize = _quantizing(activation.dglu, _of_forward_input)
dgeglu_quantize = _quantizing(activation.dgeglu, _of_forward_input)
dqgeglu_quantize = _quantizing(activation.dqgeglu, _of_forward_input)
dreglu_quantize = _quantizing(activation.dreglu, _of_forward_input)
dsreglu_quantize = _quantizing(activation.dsreglu, _of_forward_input)
dswiglu_quantize = _quantizing(activation.dswiglu, _of_forward_input)
clamped_dswiglu_quantize = _quantizing(activation.clamped_dswiglu, _of_forward_input)

dbias_dgelu_quantize = _quantizing(activation.dbias_dgelu, _of_forward_input, place=1)
dbias_dqgelu_quantize = _quantizing(activation.dbias_dqgelu, _of_forward_input, place=1)
dbias_drelu_quantize = _quantizing(activation.dbias_drelu, _of_forward_input, place=1)
dbias_dsrelu_quantize = _quantizing(activation.dbias_dsrelu, _of_forward_input, place=1)
dbias_dsilu_quantize = _quantizing(activation.dbias_dsilu, _of_forward_input, place=1)

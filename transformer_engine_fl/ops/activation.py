"""Activations, elementwise and gated, their gradients, and these fused with a bias gradient.

A gated activation takes ``[..., 2H]``, the activated half ``a`` and then the gate ``b``,
and returns ``[..., H]``. The forward's input is saved for the backward.

Each operator states its formula and source. Operators of one kind share arguments, results and
errors, which their decorator adds to the docstring.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from transformer_engine_fl.core.contract import Backward, Contract, Sample, Tolerance, contract
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.ops import _checks as check
from transformer_engine_fl.ops._dtypes import FLOATS
from transformer_engine_fl.ops._rounding import LARGEST_FLOAT32
from transformer_engine_fl.ops._samples import layouts, normal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "clamped_dswiglu",
    "clamped_swiglu",
    "dbias_dgelu",
    "dbias_dqgelu",
    "dbias_drelu",
    "dbias_dsilu",
    "dbias_dsrelu",
    "dgeglu",
    "dgelu",
    "dglu",
    "dqgeglu",
    "dqgelu",
    "dreglu",
    "drelu",
    "dsilu",
    "dsreglu",
    "dsrelu",
    "dswiglu",
    "geglu",
    "gelu",
    "glu",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "silu",
    "sreglu",
    "srelu",
    "swiglu",
]

P = ParamSpec("P")
R = TypeVar("R")

# For the narrow dtypes: half a unit in the last place, plus the error of float32 arithmetic.
TOLERANCE = {
    "float32": Tolerance(rtol=4e-6, atol=2e-6),
    "bfloat16": Tolerance(rtol=2**-8 + 2**-15, atol=2**-14),
    "float16": Tolerance(rtol=2**-11 + 2**-16, atol=2**-12),
    "float64": Tolerance(rtol=1e-13, atol=1e-13),
}
BIAS_TOLERANCE = TOLERANCE | {
    "float32": Tolerance(rtol=1e-5, atol=1e-5),
    "float64": Tolerance(rtol=1e-12, atol=1e-12),
}

_SHAPES = {
    "typical": (16, 64),
    "three dimensions": (2, 3, 96),
    "one dimension": (48,),
    "one row": (1, 256),
    "odd width": (5, 129),
    "wide odd row": (3, 5003),
    "many rows": (257, 40),
    "no rows": (0, 64),
    "no columns": (3, 0),
}
_OPTIONS: dict[str, float] = {"limit": 1.0, "alpha": 0.7}
"""A value for each activation option that differs from its default."""


# ------------------------------------------------- what each is, and all that follows


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation's definition; its checks, oracles and samples follow from it.

    Attributes:
        formula: computes the output from the operator's input and options.
        degree: the output grows like this power of the input, which bounds the samples.
        gated: the input is ``[..., 2H]``.
        options: names of the forward's options; the backward has them as well.
    """

    formula: Callable[..., Tensor]
    degree: int
    gated: bool = False
    options: tuple[str, ...] = ()

    # Checks

    def check_forward(self, op: str, input: Any, **options: Any) -> None:
        """Check ``(input, **options)``."""
        self._check_input(op, "input", input)
        self._check_options(op, options)

    def check_backward(self, op: str, grad: Any, fwd_input: Any, **options: Any) -> None:
        """Check ``(grad, fwd_input, **options)``."""
        shape = self._check_input(op, "fwd_input", fwd_input)
        grad = check.is_tensor(op, "grad", grad, dtypes=FLOATS)
        check.has_shape(op, "grad", grad, shape, "the shape of the forward's output")
        check.same_device(op, "fwd_input", {"fwd_input": fwd_input, "grad": grad})
        self._check_options(op, options)

    def check_bias_backward(self, op: str, grad: Any, fwd_input: Any) -> None:
        """Check ``(grad, fwd_input)``; the bias gradient needs at least one dimension."""
        check.is_tensor(op, "fwd_input", fwd_input, dtypes=FLOATS, min_ndim=1)
        self.check_backward(op, grad, fwd_input)

    def _check_input(self, op: str, name: str, value: Any) -> tuple[int, ...]:
        """Check the forward's input; returns the shape of the output."""
        tensor = check.is_tensor(op, name, value, dtypes=FLOATS, min_ndim=int(self.gated))
        if not self.gated:
            return tuple(tensor.shape)
        if tensor.shape[-1] % 2:
            expected = "an even last dimension: the activated half, then the gate"
            raise ArgumentError(op, name, check.describe(value), expected)
        return _gated_shape(tensor)

    def _check_options(self, op: str, options: dict[str, Any]) -> None:
        for name, value in options.items():
            lowest = 0 if name == "limit" else None
            check.is_number(op, name, value, at_least=lowest)
            if name == "limit" and value != math.inf:  # infinity means no limit
                check.is_number(op, name, value, at_most=LARGEST_FLOAT32)

    # Oracles

    def value(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The forward in float64."""
        return self.formula(input.double(), *args, **kwargs)

    def gradient(self, grad: Tensor, fwd_input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The backward in float64, by differentiating the forward."""
        import torch

        with torch.enable_grad():
            leaf = fwd_input.detach().double().requires_grad_()
            output = self.formula(leaf, *args, **kwargs)
            (gradient,) = torch.autograd.grad(output, leaf, grad.double())
        return gradient

    def bias_gradient(self, grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the gradient over the rows, and the gradient, in float64."""
        gradient = self.gradient(grad, fwd_input)
        rows = math.prod(gradient.shape[:-1])
        return gradient.reshape(rows, gradient.shape[-1]).sum(0), gradient

    # Samples

    def forward_samples(self, dtype: str, device: str) -> Iterator[Sample]:
        """For ``(input, **options)``."""
        for label, input in self._inputs(dtype, device):
            yield from self._with_options(label, (input,))
        if not self.gated:
            yield Sample("no dimensions", (_scalar(dtype, device),))

    def backward_samples(self, dtype: str, device: str) -> Iterator[Sample]:
        """For ``(grad, fwd_input, **options)``."""
        yield from self.bias_samples(dtype, device)
        if not self.gated:
            value = _scalar(dtype, device)
            yield Sample("no dimensions", (value.clone(), value))

    def bias_samples(self, dtype: str, device: str) -> Iterator[Sample]:
        """For ``(grad, fwd_input, **options)`` of at least one dimension."""
        import torch

        for label, fwd_input in self._inputs(dtype, device):
            shape = _gated_shape(fwd_input) if self.gated else tuple(fwd_input.shape)
            grad = normal(shape, fwd_input.dtype, device, seed=31).clamp(-2, 2)
            yield from self._with_options(label, (grad, fwd_input))
            if label == "typical":
                other = torch.float32 if dtype != "float32" else torch.bfloat16
                yield Sample("transposed grad", (grad.t().contiguous().t(), fwd_input))
                yield Sample("expanded grad", (grad[:1].expand(shape), fwd_input))
                yield Sample("grad of another dtype", (grad.to(other), fwd_input))

    def _with_options(self, label: str, args: tuple[Tensor, ...]) -> Iterator[Sample]:
        yield Sample(label, args)
        if label in ("typical", "kinks"):
            for name in self.options:
                value = _OPTIONS[name]
                yield Sample(f"{label}, {name}={value}", args, {name: value})

    def _inputs(self, dtype: str, device: str) -> Iterator[tuple[str, Tensor]]:
        import torch

        halves = 2 if self.gated else 1
        shapes = {label: (*shape[:-1], halves * shape[-1]) for label, shape in _SHAPES.items()}
        yield from layouts(shapes, 8, 72 * halves, dtype, device)
        kind: torch.dtype = getattr(torch, dtype)
        typical = normal((4, 64 * halves), torch.float64, "cpu", seed=32).clamp(-2, 2)
        usual = typical[:1]  # one row keeps usual values, since large ones may all saturate
        # Neither an output nor the cube within the float64 formula overflows.
        largest = min((torch.finfo(kind).max / 2) ** (1 / self.degree), 1e100)
        for label, factor in (
            ("large values", largest / 2),
            ("where exp overflows", min(100.0, largest / 2)),
        ):
            yield label, torch.cat([usual, typical * factor]).to(device, kind)
        yield "small values", (typical * (0.1 if dtype == "float16" else 1e-3)).to(device, kind)
        yield "kinks", self._kinks().to(device, kind)
        if self.options:  # NaN compares as neither within nor beyond a limit
            missing = typical.clone()
            missing[1, ::3], missing[2, 1::5], missing[3] = torch.nan, torch.inf, -torch.inf
            missing[3, ::7] = torch.nan
            yield "infinities and NaN", missing.to(device, kind)

    def _kinks(self) -> Tensor:
        """Zeros of both signs, and values below, at and above a limit; pairs if gated."""
        import torch

        a = torch.tensor([0.0, -0.0, 0.75, 1.0, 1.25, 6.75, 7.0, 7.25]).repeat(2)
        a[8:] = -a[8:]
        if not self.gated:
            return a
        return torch.cat([a[:, None].expand(16, 16), a.expand(16, 16)], -1)


def _scalar(dtype: str, device: str) -> Tensor:
    import torch

    return torch.tensor(0.7, dtype=getattr(torch, dtype), device=device)


def _gated_shape(input: Tensor) -> tuple[int, ...]:
    return (*input.shape[:-1], input.shape[-1] // 2)


# ------------------------------------------------------------------------- definitions


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def _qgelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def _relu(x: Tensor) -> Tensor:
    return x.relu()


def _srelu(x: Tensor) -> Tensor:
    return x.relu().square()


def _silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def _sigmoid(x: Tensor) -> Tensor:
    return x.sigmoid()


def _clamped_swiglu(input: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    a, b = input.chunk(2, -1)
    # Not ``clamp``: versions of torch differ in its gradient for a value exactly at a bound. Here
    # such a value is not clamped.
    a = a.masked_fill(a > limit, limit)
    b = b.masked_fill(b > limit, limit).masked_fill(b < -limit, -limit)
    return a * (alpha * a).sigmoid() * (b + 1)


def _gated(activation: Callable[[Tensor], Tensor], degree: int) -> _Activation:
    def formula(input: Tensor) -> Tensor:
        a, b = input.chunk(2, -1)
        return activation(a) * b

    return _Activation(formula, degree, gated=True)


_GELU = _Activation(_gelu, degree=1)
_QGELU = _Activation(_qgelu, degree=1)
_RELU = _Activation(_relu, degree=1)
_SRELU = _Activation(_srelu, degree=2)
_SILU = _Activation(_silu, degree=1)
_GLU = _gated(_sigmoid, degree=1)
_GEGLU = _gated(_gelu, degree=2)
_QGEGLU = _gated(_qgelu, degree=2)
_REGLU = _gated(_relu, degree=2)
_SREGLU = _gated(_srelu, degree=3)
_SWIGLU = _gated(_silu, degree=2)
_CLAMPED_SWIGLU = _Activation(_clamped_swiglu, degree=1, gated=True, options=("limit", "alpha"))


# ------------------------------------------------- decorators of the three kinds


def _forward(of: _Activation, backward: str) -> Callable[[Callable[P, R]], Contract[P, R]]:
    decorate = contract(
        family="activation",
        check=of.check_forward,
        samples=of.forward_samples,
        tolerance=TOLERANCE,
        oracle=of.value,
        backward=Backward(
            backward, saves={"fwd_input": "input"}, gradients=("input",), options=of.options
        ),
    )
    given = f"input: {_INPUT_SHAPE[of.gated]}; float32, bfloat16, float16 or float64."
    output = f"{_OUTPUT_SHAPE[of.gated]}, dtype of ``input``, contiguous; {_MATH}."
    return _described(decorate, [given, *_option_texts(of)], [output])


def _backward(of: _Activation) -> Callable[[Callable[P, R]], Contract[P, R]]:
    decorate = contract(
        family="activation",
        check=of.check_backward,
        samples=of.backward_samples,
        tolerance=TOLERANCE,
        oracle=of.gradient,
        dispatch_on="fwd_input",
    )
    output = f"Shape and dtype of ``fwd_input``, contiguous; {_MATH}."
    return _described(decorate, [*_backward_texts(of), *_option_texts(of)], [output])


def _bias_backward(of: _Activation) -> Callable[[Callable[P, R]], Contract[P, R]]:
    decorate = contract(
        family="activation",
        check=of.check_bias_backward,
        samples=of.bias_samples,
        tolerance=BIAS_TOLERANCE,
        oracle=of.bias_gradient,
        dispatch_on="fwd_input",
    )
    outputs = [
        "dbias: ``[H]``, dtype of ``grad``; the sum of the unrounded gradient over the rows.",
        f"dact: shape and dtype of ``fwd_input``, contiguous; {_MATH}.",
    ]
    return _described(decorate, _backward_texts(of, shape="``[..., H]``"), outputs)


_INPUT_SHAPE = {False: "any shape", True: "``[..., 2H]``, ``a`` and then ``b``"}
_OUTPUT_SHAPE = {False: "Shape of ``input``", True: "``[..., H]``"}
_MATH = "calculated in float32\n        (float64 for a float64 input)"
_OPTION_TEXTS = {
    "limit": "limit: the largest ``a``, and the largest ``b`` of either sign; not negative, and\n"
    "        no more than float32 holds unless infinite.",
    "alpha": "alpha: how steep the sigmoid is.",
}


def _option_texts(of: _Activation) -> list[str]:
    return [_OPTION_TEXTS[name] for name in of.options]


def _backward_texts(of: _Activation, shape: str | None = None) -> list[str]:
    return [
        "grad: gradient of the output, of its shape; any dtype of the contract.",
        f"fwd_input: {shape or _INPUT_SHAPE[of.gated]}; the forward's input.",
    ]


def _described(
    decorate: Callable[[Callable[P, R]], Contract[P, R]], args: list[str], returns: list[str]
) -> Callable[[Callable[P, R]], Contract[P, R]]:
    """``decorate``, preceded by adding the sections that operators of a kind share."""

    def described(shape_rule: Callable[P, R]) -> Contract[P, R]:
        errors = ["ArgumentError: a shape, dtype or device does not agree."]
        parts = [inspect.cleandoc(shape_rule.__doc__ or "")]
        for title, lines in (("Args", args), ("Returns", returns), ("Raises", errors)):
            parts.append("\n    ".join([f"{title}:", *lines]))
        shape_rule.__doc__ = "\n\n".join(parts)
        return decorate(shape_rule)

    return described


def _like(input: Tensor) -> Tensor:
    return input.new_empty(input.shape)


def _gated_like(input: Tensor) -> Tensor:
    return input.new_empty(_gated_shape(input))


def _bias_and_like(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    return grad.new_empty(fwd_input.shape[-1:]), _like(fwd_input)


# --------------------------------------------------------------------------- forward


@_forward(_GELU, "dgelu")
def gelu(input: Tensor) -> Tensor:
    """Gaussian error linear unit, tanh form (Hendrycks and Gimpel, 2016, arXiv:1606.08415).

    ``output = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))`` for each ``x``.
    """
    return _like(input)


@_forward(_QGELU, "dqgelu")
def qgelu(input: Tensor) -> Tensor:
    """Gaussian error linear unit, sigmoid form (Hendrycks and Gimpel, 2016, arXiv:1606.08415).

    ``output = x * sigmoid(1.702 * x)`` for each ``x``.
    """
    return _like(input)


@_forward(_RELU, "drelu")
def relu(input: Tensor) -> Tensor:
    """Rectified linear unit (Nair and Hinton, 2010).

    ``output = max(x, 0)`` for each ``x``.
    """
    return _like(input)


@_forward(_SRELU, "dsrelu")
def srelu(input: Tensor) -> Tensor:
    """Squared rectified linear unit (So et al., 2021, arXiv:2109.08668).

    ``output = max(x, 0) ** 2`` for each ``x``.
    """
    return _like(input)


@_forward(_SILU, "dsilu")
def silu(input: Tensor) -> Tensor:
    """Sigmoid linear unit (Elfwing, Uchibe and Doya, 2017, arXiv:1702.03118).

    ``output = x * sigmoid(x)`` for each ``x``.
    """
    return _like(input)


@_forward(_GLU, "dglu")
def glu(input: Tensor) -> Tensor:
    """Gated linear unit (Dauphin et al., 2016, arXiv:1612.08083).

    ``output = sigmoid(a) * b``. The sigmoid is applied to the first half, as in all gated forms
    here; ``torch.nn.functional.glu`` applies it to the second.
    """
    return _gated_like(input)


@_forward(_GEGLU, "dgeglu")
def geglu(input: Tensor) -> Tensor:
    """Gated :func:`gelu` (Shazeer, 2020, arXiv:2002.05202).

    ``output = gelu(a) * b``.
    """
    return _gated_like(input)


@_forward(_QGEGLU, "dqgeglu")
def qgeglu(input: Tensor) -> Tensor:
    """Gated :func:`qgelu`, in the manner of Shazeer (2020, arXiv:2002.05202).

    ``output = qgelu(a) * b``.
    """
    return _gated_like(input)


@_forward(_REGLU, "dreglu")
def reglu(input: Tensor) -> Tensor:
    """Gated :func:`relu` (Shazeer, 2020, arXiv:2002.05202).

    ``output = relu(a) * b``.
    """
    return _gated_like(input)


@_forward(_SREGLU, "dsreglu")
def sreglu(input: Tensor) -> Tensor:
    """Gated :func:`srelu`, in the manner of Shazeer (2020, arXiv:2002.05202).

    ``output = srelu(a) * b``.
    """
    return _gated_like(input)


@_forward(_SWIGLU, "dswiglu")
def swiglu(input: Tensor) -> Tensor:
    """Gated :func:`silu` (Shazeer, 2020, arXiv:2002.05202).

    ``output = silu(a) * b``.
    """
    return _gated_like(input)


@_forward(_CLAMPED_SWIGLU, "clamped_dswiglu")
def clamped_swiglu(input: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """Gated :func:`silu` with clamped inputs, as in gpt-oss (OpenAI, 2025, arXiv:2508.10925).

    ``output = a' * sigmoid(alpha * a') * (b' + 1)`` with ``a' = min(a, limit)`` and
    ``b' = min(max(b, -limit), limit)``.
    """
    return _gated_like(input)


# -------------------------------------------------------------------------- backward


@_backward(_GELU)
def dgelu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`gelu`.

    ``dx = grad * ((1 + t) / 2 + x / 2 * (1 - t ** 2) * u')`` with ``t = tanh(u)``,
    ``u = c * (x + 0.044715 * x ** 3)``, ``u' = c * (1 + 3 * 0.044715 * x ** 2)`` and
    ``c = sqrt(2 / pi)``.
    """
    return _like(fwd_input)


@_backward(_QGELU)
def dqgelu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`qgelu`.

    ``dx = grad * s * (1 + 1.702 * x * (1 - s))`` with ``s = sigmoid(1.702 * x)``.
    """
    return _like(fwd_input)


@_backward(_RELU)
def drelu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`relu`, 0 where the input is 0.

    ``dx = grad * (0 if x <= 0 else 1)``: the gradient passes where the input is NaN, as in torch.
    """
    return _like(fwd_input)


@_backward(_SRELU)
def dsrelu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`srelu`.

    ``dx = grad * 2 * max(x, 0)``.
    """
    return _like(fwd_input)


@_backward(_SILU)
def dsilu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`silu`.

    ``dx = grad * s * (1 + x * (1 - s))`` with ``s = sigmoid(x)``.
    """
    return _like(fwd_input)


@_backward(_GLU)
def dglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`glu`, that of ``a`` and then that of ``b``.

    ``da = grad * b * s * (1 - s)`` and ``db = grad * s`` with ``s = sigmoid(a)``.
    """
    return _like(fwd_input)


@_backward(_GEGLU)
def dgeglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`geglu`, that of ``a`` and then that of ``b``.

    ``da = grad * b * gelu'(a)``, as in :func:`dgelu`, and ``db = grad * gelu(a)``.
    """
    return _like(fwd_input)


@_backward(_QGEGLU)
def dqgeglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`qgeglu`, that of ``a`` and then that of ``b``.

    ``da = grad * b * qgelu'(a)``, as in :func:`dqgelu`, and ``db = grad * qgelu(a)``.
    """
    return _like(fwd_input)


@_backward(_REGLU)
def dreglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`reglu`, that of ``a`` and then that of ``b``.

    ``da = grad * b * (0 if a <= 0 else 1)`` and ``db = grad * relu(a)``.
    """
    return _like(fwd_input)


@_backward(_SREGLU)
def dsreglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`sreglu`, that of ``a`` and then that of ``b``.

    ``da = grad * b * 2 * max(a, 0)`` and ``db = grad * max(a, 0) ** 2``.
    """
    return _like(fwd_input)


@_backward(_SWIGLU)
def dswiglu(grad: Tensor, fwd_input: Tensor) -> Tensor:
    """Gradient of :func:`swiglu`, that of ``a`` and then that of ``b``.

    ``da = grad * b * silu'(a)``, as in :func:`dsilu`, and ``db = grad * silu(a)``.
    """
    return _like(fwd_input)


@_backward(_CLAMPED_SWIGLU)
def clamped_dswiglu(
    grad: Tensor, fwd_input: Tensor, limit: float = 7.0, alpha: float = 1.702
) -> Tensor:
    """Gradient of :func:`clamped_swiglu`, that of ``a`` and then that of ``b``.

    With ``a'`` and ``b'`` as in the forward and ``s = sigmoid(alpha * a')``:
    ``da = grad * (b' + 1) * s * (1 + alpha * a' * (1 - s))``, 0 where ``a > limit``, and
    ``db = grad * a' * s``, 0 where ``|b| > limit``.
    """
    return _like(fwd_input)


# --------------------------------------------- backward, and the gradient of a bias


@_bias_backward(_GELU)
def dbias_dgelu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`dgelu`, and the gradient of a bias that was added to its ``fwd_input``.

    ``dact = dgelu(grad, fwd_input)`` and ``dbias = sum over the rows of dact``.
    """
    return _bias_and_like(grad, fwd_input)


@_bias_backward(_SILU)
def dbias_dsilu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`dsilu`, and the gradient of a bias that was added to its ``fwd_input``.

    ``dact = dsilu(grad, fwd_input)`` and ``dbias = sum over the rows of dact``.
    """
    return _bias_and_like(grad, fwd_input)


@_bias_backward(_RELU)
def dbias_drelu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`drelu`, and the gradient of a bias that was added to its ``fwd_input``.

    ``dact = drelu(grad, fwd_input)`` and ``dbias = sum over the rows of dact``.
    """
    return _bias_and_like(grad, fwd_input)


@_bias_backward(_QGELU)
def dbias_dqgelu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`dqgelu`, and the gradient of a bias that was added to its ``fwd_input``.

    ``dact = dqgelu(grad, fwd_input)`` and ``dbias = sum over the rows of dact``.
    """
    return _bias_and_like(grad, fwd_input)


@_bias_backward(_SRELU)
def dbias_dsrelu(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`dsrelu`, and the gradient of a bias that was added to its ``fwd_input``.

    ``dact = dsrelu(grad, fwd_input)`` and ``dbias = sum over the rows of dact``.
    """
    return _bias_and_like(grad, fwd_input)

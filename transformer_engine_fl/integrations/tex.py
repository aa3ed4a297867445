"""Adapters from functions with the signatures of ``transformer_engine_torch`` to contracts.

NVIDIA's extension module and the backends that vendors write for TransformerEngine-FL have
functions of the same names and positional signatures. An adapter states a function's parameters
and turns it into a function with the contract's signature. A quantizer is never passed: quantised
outputs are separate operators here. An adapter declines what its function cannot do before
calling it; an operator without an adapter is not bridged.

The signatures and their limits were read from Transformer Engine's sources, in
``pytorch/csrc/extensions``: ``pybind``, ``activation``, ``normalization`` and ``softmax``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.backends._arguments import TensorPreparer
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import CATALOGUE

__all__ = ["ADAPTERS", "DTYPES", "Adapter", "adapted", "has_signature"]

DTYPES: Final = ("float32", "bfloat16", "float16")
"""The dtypes that the functions take; softmax takes only the last two."""

_HALVES: Final = (torch.float16, torch.bfloat16)
_LONGEST: Final = 16384
"""The most keys that a softmax takes."""

Named = Callable[[torch.dtype], Any]
"""Converts a torch dtype to the value that the functions take for it."""

Function = Callable[..., Any]


class Adapter(NamedTuple):
    """How a function of that family serves the contract's operator of the same name.

    Attributes:
        parameters: the names of the function's parameters; any further ones have defaults.
        make: takes the operator's name, the function and a dtype conversion, and returns a
            function with the contract's signature.
    """

    parameters: tuple[str, ...]
    make: Callable[[str, Function, Named], Function]


def adapted(op_name: str, function: Function, named: Named) -> Function:
    """A function with the contract's signature, served by ``function``.

    Args:
        op_name: the operator, one of :data:`ADAPTERS`.
        function: has the signature of ``transformer_engine_torch``'s function of that name.
        named: converts a torch dtype to the function's value for it.
    """
    return ADAPTERS[op_name].make(op_name, function, named)


def has_signature(op_name: str, function: Function) -> bool:
    """Whether a function has the parameters that its adapter passes, by name and order."""
    adapter = ADAPTERS.get(op_name)
    if adapter is None:
        return False
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    names = [it.name for it in found if it.kind in kinds]
    count = len(adapter.parameters)
    rest = [it for it in found if it.name not in adapter.parameters]
    return tuple(names[:count]) == adapter.parameters and all(
        it.default is not it.empty or it.kind in (it.VAR_POSITIONAL, it.VAR_KEYWORD) for it in rest
    )


def _no_data(device: torch.device) -> str | None:
    return "a meta tensor has no data" if device.type == "meta" else None


def _plain(op_name: str, **tensors: Tensor) -> list[Tensor]:
    """The tensors, contiguous; declines what a kernel cannot take."""
    taking = TensorPreparer(_no_data)
    found = [taking.plain(op_name, name, tensor) for name, tensor in tensors.items()]
    if not all(tensor.numel() for tensor in found):
        raise NotSupportedError(f"{op_name}: empty tensors are not supported")
    return [tensor.contiguous() for tensor in found]


def _one_dtype(op_name: str, **tensors: Tensor | None) -> None:
    found = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name} is {dtype}" for name, dtype in found.items())
        raise NotSupportedError(f"{op_name}: the tensors must have the same dtype; {said}")
    (dtype,) = set(found.values())
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise NotSupportedError(f"{op_name}: {dtype} is not supported")


def _on(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's device current, as the functions allocate on the current device."""
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


# --------------------------------------------------------------------------- activations


def _activation(op_name: str, function: Function, named: Named) -> Function:
    contract = CATALOGUE[op_name]

    def forward(input: Tensor) -> Tensor:
        contract.check(input)
        (input,) = _plain(op_name, input=input)
        _one_dtype(op_name, input=input)
        with torch.no_grad(), _on(input):
            output: Tensor = function(input, None)
        return output

    return forward


def _derivative(op_name: str, function: Function, named: Named) -> Function:
    contract = CATALOGUE[op_name]

    def backward(grad: Tensor, fwd_input: Tensor) -> Tensor:
        contract.check(grad, fwd_input)
        grad, fwd_input = _plain(op_name, grad=grad, fwd_input=fwd_input)
        _one_dtype(op_name, grad=grad, fwd_input=fwd_input)
        with torch.no_grad(), _on(fwd_input):
            output: Tensor = function(grad, fwd_input, None)
        return output

    return backward


# ------------------------------------------------------------------------- normalization


def _rmsnorm_fwd(op_name: str, function: Function, named: Named) -> Function:
    def rmsnorm_fwd(
        input: Tensor,
        weight: Tensor,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
    ) -> tuple[Tensor, Tensor]:
        CATALOGUE[op_name].check(input, weight, eps, zero_centered_gamma=zero_centered_gamma)
        x, gamma = _plain(op_name, input=input, weight=weight)
        _one_dtype(op_name, input=x, weight=gamma)
        with torch.no_grad(), _on(x):
            output, _, rsigma = function(
                _rows(x), gamma, eps, None, None, named(x.dtype), 0, zero_centered_gamma
            )
        return output.view(x.shape), rsigma

    return rmsnorm_fwd


def _rmsnorm_bwd(op_name: str, function: Function, named: Named) -> Function:
    def rmsnorm_bwd(
        dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *, zero_centered_gamma: bool = False
    ) -> tuple[Tensor, Tensor]:
        CATALOGUE[op_name].check(dy, x, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
        dy, x, rsigma, gamma = _plain(op_name, dy=dy, x=x, rsigma=rsigma, gamma=gamma)
        _one_dtype(op_name, dy=dy, x=x, gamma=gamma)
        with torch.no_grad(), _on(x):
            dx, dgamma = function(_rows(dy), _rows(x), rsigma, gamma, 0, zero_centered_gamma)
        return dx.view(x.shape), dgamma

    return rmsnorm_bwd


def _rmsnorm_bwd_add(op_name: str, function: Function, named: Named) -> Function:
    def rmsnorm_bwd_add(
        dz: Tensor,
        x: Tensor,
        add: Tensor,
        rsigma: Tensor,
        gamma: Tensor,
        *,
        zero_centered_gamma: bool = False,
    ) -> tuple[Tensor, Tensor]:
        contract = CATALOGUE[op_name]
        contract.check(dz, x, add, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
        given = {"dz": dz, "x": x, "add": add, "rsigma": rsigma, "gamma": gamma}
        dz, x, add, rsigma, gamma = _plain(op_name, **given)
        _one_dtype(op_name, dz=dz, x=x, add=add, gamma=gamma)
        with torch.no_grad(), _on(x):
            rows = (_rows(dz), _rows(x), _rows(add))
            dx, dgamma = function(*rows, rsigma, gamma, 0, zero_centered_gamma)
        return dx.view(x.shape), dgamma

    return rmsnorm_bwd_add


def _layernorm_fwd(op_name: str, function: Function, named: Named) -> Function:
    def layernorm_fwd(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        CATALOGUE[op_name].check(input, weight, bias, eps, zero_centered_gamma=zero_centered_gamma)
        x, gamma = _plain(op_name, input=input, weight=weight)
        # The function's bias is optional, but what it calls compares its shape with the weight's.
        beta = torch.zeros_like(gamma) if bias is None else _plain(op_name, bias=bias)[0]
        _one_dtype(op_name, input=x, weight=gamma, bias=beta)
        with torch.no_grad(), _on(x):
            output, mu, rsigma = function(
                _rows(x), gamma, beta, eps, None, None, named(x.dtype), 0, zero_centered_gamma
            )
        return output.view(x.shape), mu, rsigma

    return layernorm_fwd


def _layernorm_bwd(op_name: str, function: Function, named: Named) -> Function:
    def layernorm_bwd(
        dy: Tensor,
        x: Tensor,
        mu: Tensor,
        rsigma: Tensor,
        gamma: Tensor,
        *,
        zero_centered_gamma: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        CATALOGUE[op_name].check(dy, x, mu, rsigma, gamma, zero_centered_gamma=zero_centered_gamma)
        given = {"dy": dy, "x": x, "mu": mu, "rsigma": rsigma, "gamma": gamma}
        dy, x, mu, rsigma, gamma = _plain(op_name, **given)
        _one_dtype(op_name, dy=dy, x=x, gamma=gamma)
        with torch.no_grad(), _on(x):
            rows = (_rows(dy), _rows(x))
            dx, dgamma, dbeta = function(*rows, mu, rsigma, gamma, 0, zero_centered_gamma)
        return dx.view(x.shape), dgamma, dbeta

    return layernorm_bwd


# ------------------------------------------------------------------------------- softmax


def _scores(op_name: str, scores: Tensor, *, by_eights: bool = True) -> None:
    """Decline the scores that no form of the fused softmax takes."""
    keys = scores.shape[-1]
    wrong = None
    if scores.dtype not in _HALVES:
        wrong = f"needs half precision, got {scores.dtype}"
    elif keys > _LONGEST or (by_eights and keys % 8):
        step = ", in multiples of 8" if by_eights else ""
        wrong = f"needs at most {_LONGEST} keys{step}; got {keys}"
    if wrong is not None:
        raise NotSupportedError(f"{op_name}: {wrong}")


def _block(keys: int) -> int:
    """The number of rows that a block of the fused softmax processes.

    Its kernels process only whole blocks of rows. With rows left over, a forward refuses the call
    and a backward leaves their results unwritten (``common/fused_softmax``, where the grids are
    computed).
    """
    padded = 1 << (keys - 1).bit_length()
    return 128 // min(padded, 32) * (2 if padded <= 128 else 1)


def _rows_of_scores(op_name: str, scores: Tensor) -> Tensor:
    """The scores as ``[1, 1, rows, keys]``; declines rows that are not whole blocks."""
    _scores(op_name, scores)
    rows = scores.view(1, 1, -1, scores.shape[-1])
    block = _block(rows.shape[3])
    if rows.shape[2] % block:
        raise NotSupportedError(
            f"{op_name}: with {rows.shape[3]} keys, the rows must be a multiple of {block}; got "
            f"{rows.shape[2]}"
        )
    return rows


def _heads(op_name: str, scores: Tensor) -> Tensor:
    """The scores, ``[batches, heads, queries, keys]``; declines other numbers of dimensions."""
    _scores(op_name, scores)
    if scores.ndim != 4:
        raise NotSupportedError(f"{op_name}: needs 4 dimensions, got {scores.ndim}")
    return scores


def _squares(op_name: str, scores: Tensor) -> Tensor:
    """``[batches, queries, keys]``, padded with batches of zeros to whole blocks."""
    keys = scores.shape[-1]
    _scores(op_name, scores, by_eights=keys > 64)  # shorter rows are read one by one
    squares = scores.view(-1, keys, keys)
    over = -len(squares) % _block(keys)
    return torch.cat([squares, squares.new_zeros(over, keys, keys)]) if over else squares


Prepare = Callable[[str, Tensor], Tensor]
"""Reshapes dense scores for a function, or declines."""


def _softmax(prepare: Prepare) -> Callable[[str, Function, Named], Function]:
    def make(op_name: str, function: Function, named: Named) -> Function:
        def forward(input: Tensor, scale: float = 1.0) -> Tensor:
            CATALOGUE[op_name].check(input, scale)
            (input,) = _plain(op_name, input=input)
            with torch.no_grad(), _on(input):
                output: Tensor = function(prepare(op_name, input), scale)
            return output.view(-1)[: input.numel()].view(input.shape)

        return forward

    return make


def _masked_softmax(op_name: str, function: Function, named: Named) -> Function:
    def forward(input: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        CATALOGUE[op_name].check(input, mask, scale)
        input, mask = _plain(op_name, input=input, mask=mask)
        of_all_heads = mask.ndim == 4 and mask.shape[1:] == (1, *input.shape[2:])
        if of_all_heads and input.shape[2] % _block(input.shape[3]) == 0:
            scores = _heads(op_name, input)
        else:  # expand the mask to every row
            scores = _rows_of_scores(op_name, input)
            mask = mask.expand(input.shape).reshape(scores.shape)
        hides = mask if mask.dtype == torch.bool else mask != 0
        with torch.no_grad(), _on(input):
            output: Tensor = function(scores, hides.view(torch.uint8), scale)
        return output.view(input.shape)

    return forward


def _softmax_backward(prepare: Prepare) -> Callable[[str, Function, Named], Function]:
    def make(op_name: str, function: Function, named: Named) -> Function:
        def backward(output_grad: Tensor, softmax_output: Tensor, scale: float = 1.0) -> Tensor:
            CATALOGUE[op_name].check(output_grad, softmax_output, scale)
            given = {"output_grad": output_grad, "softmax_output": softmax_output}
            grad, output = _plain(op_name, **given)
            _one_dtype(op_name, output_grad=grad, softmax_output=output)
            with torch.no_grad(), _on(output):
                scores = prepare(op_name, output)
                # Some releases write the result over the gradient that they are given.
                result: Tensor = function(prepare(op_name, grad.clone()), scores, scale)
            return result.view(-1)[: output.numel()].view(output.shape)

        return backward

    return make


_UNARY: Final = ("input", "quantizer")
_BACKWARD: Final = ("grad", "fwd_input", "quantizer")
_ACTIVATIONS: Final = (
    *("gelu", "geglu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu"),
    *("silu", "swiglu", "glu"),
)
_NORM: Final = ("eps", "ln_out", "quantizer", "otype", "sm_margin", "zero_centered_gamma")
_LAST: Final = ("sm_margin", "zero_centered_gamma")
_SCORES: Final = ("input", "scale")
_PAIR: Final = ("output_grad", "softmax_output", "scale")

ADAPTERS: Final = {
    **{name: Adapter(_UNARY, _activation) for name in _ACTIVATIONS},
    **{f"d{name}": Adapter(_BACKWARD, _derivative) for name in _ACTIVATIONS},
    "rmsnorm_fwd": Adapter(("input", "weight", *_NORM), _rmsnorm_fwd),
    "rmsnorm_bwd": Adapter(("dy", "x", "rsigma", "gamma", *_LAST), _rmsnorm_bwd),
    "rmsnorm_bwd_add": Adapter(("dz", "x", "add", "rsigma", "gamma", *_LAST), _rmsnorm_bwd_add),
    "layernorm_fwd": Adapter(("input", "weight", "bias", *_NORM), _layernorm_fwd),
    "layernorm_bwd": Adapter(("dy", "x", "mu", "rsigma", "gamma", *_LAST), _layernorm_bwd),
    "scaled_softmax_forward": Adapter(_SCORES, _softmax(_rows_of_scores)),
    "scaled_softmax_backward": Adapter(_PAIR, _softmax_backward(_rows_of_scores)),
    "scaled_masked_softmax_forward": Adapter(("input", "mask", "scale"), _masked_softmax),
    "scaled_masked_softmax_backward": Adapter(_PAIR, _softmax_backward(_rows_of_scores)),
    "scaled_upper_triang_masked_softmax_forward": Adapter(_SCORES, _softmax(_squares)),
    "scaled_upper_triang_masked_softmax_backward": Adapter(_PAIR, _softmax_backward(_squares)),
    "scaled_aligned_causal_masked_softmax_forward": Adapter(_SCORES, _softmax(_heads)),
    "scaled_aligned_causal_masked_softmax_backward": Adapter(_PAIR, _softmax_backward(_heads)),
}
"""The adapters by the operator that they serve."""

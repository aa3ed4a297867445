"""Autograd over any operator whose contract names its backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from transformer_engine_fl.core.contract import Backward, same
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError, TeFlError
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.ops import CATALOGUE

__all__ = ["Gradients", "apply", "checked_outputs", "first_derivative", "records", "witness"]


Gradients = tuple[Tensor | None, ...]
Run = Callable[..., Any]


def first_derivative(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorate the backward of a function that has no second derivative.

    Differentiating its gradients raises, with respect to the outputs' gradients and to the saved
    tensors alike. torch's ``once_differentiable`` raises only where an output's gradient itself
    requires a gradient; otherwise a derivative with respect to a saved tensor would silently be
    zero. A forward that saves only values it has calculated, and neither an input nor a returned
    output, must also save a :func:`witness`.

    Args:
        backward: called with the context, which has an ``op_name``, the saved tensors and the
            gradients of the outputs. The saved tensors are read here, once, because
            checkpointing hands them out only once.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> Gradients:
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return gradients
        known = [it for it in (*grads, *saved) if it is not None and it.requires_grad]
        if not known:
            return gradients
        # The tensors that the gradients were computed from go in too: the error is raised for a
        # derivative with respect to any of them.
        refuse = torch._C._functions.DelayedError(
            f"{ctx.op_name}: its gradients cannot be differentiated again: the operators have no "
            "second derivative",
            len(gradients) + len(known),
        )
        given: Any = (*gradients, *known)
        refused: Gradients = refuse(*given)
        return refused[: len(gradients)]

    return once


def records(op_name: str, *tensors: object) -> bool:
    """Whether autograd records a call with these tensors.

    Values that are not tensors are left to the contract's check.

    Raises:
        NotSupportedError: the call would need forward-mode derivatives, or a gradient within a
            transform of torch.func.
    """
    if forward_ad._current_level >= 0 and _has_tangent(tensors):
        raise NotSupportedError(
            f"{op_name}: forward-mode derivatives are not supported: inside a dual level, such as "
            "torch.func.jvp, no argument may have a tangent, and the call cannot be compiled; use "
            "backward() or torch.autograd.grad"
        )
    if not torch.is_grad_enabled():
        return False
    if not any(isinstance(it, Tensor) and it.requires_grad for it in tensors):
        return False
    if (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is not None
    ):
        raise NotSupportedError(
            f"{op_name}: gradients inside a transform of torch.func are not supported; use "
            "backward() or torch.autograd.grad"
        )
    return True


def _has_tangent(tensors: tuple[object, ...]) -> bool:
    """Whether one of the tensors has a forward-mode tangent; call it within a dual level only."""
    if torch.compiler.is_compiling():  # tracing cannot see tangents
        return True
    unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
    return any(unpack(it).tangent is not None for it in tensors if isinstance(it, Tensor))


def witness(output: Tensor) -> Tensor:
    """An empty output, returned and saved: it links the saved tensors to the forward's inputs.

    Autograd has no graph for other values that a forward computes and saves, so it would not see
    that the gradients depend on the inputs.
    """
    return output.new_empty(0)


class _Differentiable(torch.autograd.Function):
    """Any operator whose contract names its backward.

    Returns the first ``wanted`` outputs (None: those that are differentiable), then perhaps a
    witness. Outputs without a gradient are marked non-differentiable. ``places`` maps the name of
    each argument to its index in ``tensors``: two arguments may be the same tensor, which
    torch.compile accepts only once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        op_name: str,
        options: dict[str, Any],
        places: dict[str, int],
        wanted: int | None,
        run: Run | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        backward = CATALOGUE[op_name].backward
        assert backward is not None  # invariant: only such operators come here
        known = {name: tensors[place] for name, place in places.items()}
        args, keywords = _arranged(op_name, known)
        keywords |= options
        outputs = _outputs(op_name, run, args, keywords)
        for place, output in enumerate(outputs):
            if not isinstance(output, Tensor) and (place == 0 or output is not None):
                raise _no_tensor(op_name, run, place, output, args, keywords)
        known |= {f"output[{place}]": output for place, output in enumerate(outputs)}
        saved = {name: known.get(source) for name, source in backward.saves.items()}
        for name, other in backward.saved_with.items():
            if known.get(other) is None:
                saved[name] = None
        first = next(iter(CATALOGUE[backward.op].signature.parameters))
        ctx.grads = backward.output_grads or (first,)
        returned = outputs[: len(ctx.grads) if wanted is None else wanted]
        hidden = (witness(outputs[0]),) if _needs_witness(backward, saved, len(returned)) else ()
        ctx.save_for_backward(*saved.values(), *hidden)
        # Lists are copied: the caller may change them before the backward runs.
        ctx.options = {
            name: options[name][:] if isinstance(options[name], list) else options[name]
            for name in backward.options
            if name in options
        }
        for name, (source, dimension) in backward.sizes.items():
            tensor = known[source]
            assert tensor is not None  # sizes are saved of required arguments only
            ctx.options[name] = tensor.shape[dimension]
        ctx.run = get_default_manager().pin(backward.op)
        ctx.op_name = op_name
        ctx.places = places
        ctx.count = len(tensors)
        # Integer outputs are never differentiable, and torch.compile of torch 2.11 mistakes sizes
        # for outputs that are marked.
        others = returned[len(ctx.grads) :]
        ctx.mark_non_differentiable(*[it for it in others if it.is_floating_point()])
        return (*returned, *hidden)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, saved: Gradients, *grads: Tensor) -> Gradients:
        backward = CATALOGUE[ctx.op_name].backward
        assert backward is not None
        given = dict(zip(ctx.grads, grads, strict=False))
        given |= dict(zip(backward.saves, saved, strict=False))  # a witness may follow
        args, keywords = _arranged(backward.op, given)
        try:
            gradients = ctx.run(*args, **keywords, **ctx.options)
        except ArgumentError as error:
            source = backward.saves.get(error.argument, "") if len(error.args) == 4 else ""
            if source.startswith("output["):
                error.add_note(
                    f"This is {source} of {ctx.op_name!r}, as its implementation returned it; "
                    f"check it with `te-fl verify IMPL --op {ctx.op_name}`"
                )
            raise
        if not isinstance(gradients, tuple):
            gradients = (gradients,)
        if len(gradients) != len(backward.gradients):
            raise _no_gradient(backward, gradients)
        returned: list[Tensor | None] = [None] * ctx.count
        for owners, gradient in zip(backward.gradients, gradients, strict=True):
            for owner in (owners,) if isinstance(owners, str) else owners:
                place = ctx.places[owner]
                if ctx.needs_input_grad[5 + place]:
                    if not isinstance(gradient, Tensor):
                        raise _no_gradient(backward, gradients)
                    before = returned[place]
                    returned[place] = gradient if before is None else before + gradient
        return None, None, None, None, None, *returned


def apply(
    op_name: str,
    options: dict[str, Any],
    *tensors: Tensor | None,
    outputs: int | None = None,
    run: Run | None = None,
) -> tuple[Tensor, ...]:
    """The operator's outputs; those that have a gradient come first.

    Args:
        options: the other arguments by name; they may include tensors.
        tensors: the operator's first arguments.
        outputs: how many outputs to return, if some without a gradient are wanted.
        run: the implementation that runs the forward; by default the one that the policy chooses.
    """
    contract = CATALOGUE[op_name]
    keywords, plain = {}, {}
    for name, value in options.items():
        if isinstance(value, Tensor):
            keywords[name] = value
        elif name not in contract.options or not same(value, contract.options[name]):
            # An option at its default is not passed on: an implementation need not have
            # every option.
            plain[name] = value
    if not records(op_name, *tensors):
        return _outputs(op_name, run, tensors, keywords | plain)[:outputs]
    given = {**dict(zip(contract.signature.parameters, tensors, strict=False)), **keywords}
    places: dict[str, int] = {}
    different: list[Tensor | None] = []
    for name, tensor in given.items():
        earlier = [place for place, other in enumerate(different) if other is tensor]
        places[name] = earlier[0] if earlier else len(different)
        if not earlier:
            different.append(tensor)
    result: tuple[Tensor, ...] = _Differentiable.apply(  # type: ignore[no-untyped-call]
        op_name, plain, places, outputs, run, *different
    )
    if outputs is None:
        backward = contract.backward
        outputs = len(backward.output_grads) or 1 if backward is not None else None
    return result[:outputs]


def _needs_witness(backward: Backward, saved: dict[str, Tensor | None], returned: int) -> bool:
    """Whether saved values depend on the inputs and autograd cannot see it: see :func:`witness`."""
    differentiable = min(returned, len(backward.output_grads) or 1)
    numbers = False
    for name, source in backward.saves.items():
        if source in backward.gradients:
            return False
        if source.startswith("output["):
            if int(source[7:-1]) < differentiable:
                return False
            tensor = saved[name]
            numbers |= tensor is not None and tensor.is_floating_point()
    return numbers


def _arranged(
    op_name: str, given: dict[str, Tensor | None]
) -> tuple[list[Tensor | None], dict[str, Tensor]]:
    """Tensors by position up to the first parameter that is not given, the others by name."""
    args, rest = [], dict(given)
    for name, parameter in CATALOGUE[op_name].signature.parameters.items():
        if name not in rest or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            break
        args.append(rest.pop(name))
    return args, {name: tensor for name, tensor in rest.items() if tensor is not None}


def _returned(op_name: str, run: Run | None, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """The result of ``run``, or of the implementation that the policy chooses."""
    if run is None:
        return get_default_manager().call(op_name, *args, **keywords)
    return run(*args, **keywords)


def _outputs(
    op_name: str, run: Run | None, args: Sequence[Any], keywords: dict[str, Any]
) -> tuple[Any, ...]:
    """The outputs of an operator, as a tuple of tensors to differentiate."""
    value = _returned(op_name, run, args, keywords)
    if isinstance(value, tuple):
        outputs = value
    elif isinstance(value, Tensor):
        outputs = (value,)
    else:
        raise _no_tensor(op_name, run, 0, value, args, keywords)
    backward = CATALOGUE[op_name].backward
    return outputs[0].unbind() if backward is not None and backward.unbind else outputs


def checked_outputs(
    op_name: str,
    count: int,
    required: Sequence[int],
    args: Sequence[Any],
    keywords: dict[str, Any],
    run: Run | None = None,
) -> tuple[Any, ...]:
    """The outputs of an operator, as a tuple, for a function made of several operators.

    Args:
        count: how many outputs the operator has; an operator with one returns a tensor.
        required: indices of the outputs that must be tensors.
        run: the implementation that runs it; by default the one that the policy chooses.

    Raises:
        TeFlError: the outputs are not as the contract has them; names the implementation.
    """
    value = _returned(op_name, run, args, keywords)
    outputs = (value,) if count == 1 else value
    if not isinstance(outputs, tuple) or len(outputs) != count:
        kinds = _kinds(value if isinstance(value, tuple) else (value,))
        raise TeFlError(
            f"{op_name}: {_implementation_name(op_name, run, args, keywords)} returned ({kinds}); "
            f"the contract requires {count} outputs, in a tuple{_verify(op_name)}"
        )
    for place in required:
        if not isinstance(outputs[place], Tensor):
            raise _no_tensor(op_name, run, place, outputs[place], args, keywords)
    return outputs


def _no_tensor(
    op_name: str,
    run: Run | None,
    place: int,
    found: object,
    args: Sequence[Any],
    keywords: dict[str, Any],
) -> TeFlError:
    """The error for an output that should be a tensor; names the implementation."""
    implementation = _implementation_name(op_name, run, args, keywords)
    kind = "None" if found is None else f"a {type(found).__name__}"
    return TeFlError(
        f"{op_name}: output {place} of {implementation} is {kind}; the contract requires a tensor "
        f"there, and several outputs in a tuple{_verify(op_name)}"
    )


def _no_gradient(backward: Backward, found: tuple[Any, ...]) -> TeFlError:
    """The error for a backward that did not return a gradient that is wanted."""
    owners = (it if isinstance(it, str) else " and ".join(it) for it in backward.gradients)
    return TeFlError(
        f"{backward.op}: its implementation returned ({_kinds(found)}); the contract requires the "
        f"gradients of ({', '.join(owners)}), several of them in a tuple{_verify(backward.op)}"
    )


def _implementation_name(
    op_name: str, run: Run | None, args: Sequence[Any], keywords: dict[str, Any]
) -> str:
    """The implementation that such calls are dispatched to, for an error message."""
    chosen = None
    if run is None:
        chosen = get_default_manager().explain(op_name, *args, **keywords).selected
    return "its implementation" if chosen is None else repr(chosen.impl_id)


def _kinds(found: tuple[Any, ...]) -> str:
    return ", ".join("None" if it is None else type(it).__name__ for it in found)


def _verify(op_name: str) -> str:
    return f" (check it with `te-fl verify IMPL --op {op_name}`)"

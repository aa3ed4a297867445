"""Contract: what an operator promises, and whether a signature keeps the promise.

A contract is a decorated function. Its typed signature is the operator's, its
docstring the specification, its body the shape rule: given arguments (fake ones
too) it returns empty outputs of the right shape, dtype and device. Everything
that must agree with the operator is derived from here: argument errors,
conformance tests, the ``torch.library`` registration, the documentation table.

This module knows no tensors: each family in ``ops/`` writes its own checks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

from transformer_engine_fl.core.blame import out_of_stack
from transformer_engine_fl.core.errors import ArgumentError, SignatureMismatchError, suggestion
from transformer_engine_fl.core.late import load_attribute
from transformer_engine_fl.core.tracing import in_compiled_code, traced_default_call

__all__ = [
    "Backward",
    "Between",
    "Contract",
    "Fit",
    "Sample",
    "SampleMaker",
    "Tolerance",
    "adapt_predicate",
    "check_predicate",
    "contract",
    "fit",
    "same",
    "set_binder",
    "signature_of",
]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Sample:
    """One set of inputs for an operator, as the conformance kit and benchmarks use it.

    Attributes:
        label: what is special about it, e.g. ``"odd width"``.
        args, kwargs: the call.
    """

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may be from the float64 value.

    ``|result - expected| <= rtol * |expected| + atol * r`` where r is the root mean
    square of the expected tensor, so that the bound scales with the values. With ``by_row``
    r is the root mean square of the element's row (the last dimension) where that is larger:
    for operators whose rows differ in magnitude, and whose rounding error scales with the row.
    """

    rtol: float
    atol: float
    by_row: bool = False

    @classmethod
    def coarsest(cls, met: Iterable[Tolerance]) -> Tolerance:
        """A tolerance that allows every error that one of these allows; there is at least one."""
        met = list(met)
        return cls(
            max(it.rtol for it in met), max(it.atol for it in met), any(it.by_row for it in met)
        )


@dataclass(frozen=True, slots=True)
class Between:
    """What an oracle returns for an output that must lie within bounds, in place of a tolerance.

    Every element must be at least its ``low`` and at most its ``high``, or NaN where both
    are. ``Between(value, value)`` asks for exactly ``value``.

    Attributes:
        low, high: tensors in float64.
        values: maps the output to the values to compare; None if its elements are compared.
    """

    low: Any
    high: Any
    values: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Backward:
    """The operator that computes the gradients, and what it needs from the forward.

    Attributes:
        op: name of the backward operator.
        saves: backward parameter -> where it comes from: a forward argument's name,
            or ``"output[i]"``.
        options: forward options that are passed on to the backward by name.
        gradients: forward arguments, in the order of the backward's outputs; a tuple of
            them where one output is the gradient of several.
        output_grads: backward parameters that take the gradients of the forward's
            outputs, in order from the first; the outputs without one are not differentiable.
            Unless given, the first output's gradient is the first parameter.
        sizes: backward parameter -> (forward argument, dimension): a size that the backward's
            other arguments do not determine.
        unbind: the forward's one output is a stack of several along its first dimension;
            ``functional`` returns, and autograd differentiates, each by itself.
        saved_with: backward parameter -> a forward argument; where that is None, nothing is
            saved for the parameter, and the backward gets None for it.
    """

    op: str
    saves: Mapping[str, str]
    gradients: tuple[str | tuple[str, ...], ...]
    options: tuple[str, ...] = ()
    output_grads: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    unbind: bool = False
    saved_with: Mapping[str, str] = field(default_factory=dict)


def _traced_contract_call(contract: Any, *args: Any, **kwargs: Any) -> Any:
    return traced_default_call(contract.name, *args, **kwargs)


class SampleMaker(Protocol):
    """Yields the samples for a dtype (by name) on a device."""

    def __call__(self, dtype: str, device: str) -> Iterator[Sample]: ...


class Contract(Generic[P, R]):
    """An operator's contract; calling it dispatches through the default manager.

    Attributes:
        name: the operator's name.
        family: the family it belongs to (the file name in ``ops/`` and in each set).
        dtypes: names of the dtypes its dispatch tensor may have.
        mutates: names of the arguments it writes.
        dispatch_on: the argument whose device and dtype choose the implementation.
        signature: the operator's signature.
        positional: parameters that may be passed by position.
        options: parameters with a default, and their defaults.
        backward: its backward operator, if it has one.
        aliases: other names of the same operator.
        tolerance: allowed error against float64, by dtype name.
        oracle: the formula in float64. It writes nothing. For an operator that writes
            arguments it returns, after the outputs, what each argument named in
            ``mutates`` must hold afterwards, in float64 and in that order; for an argument
            that is a list, a list. In place of a tensor there may be a :class:`Between`.
        decode: turns what the arguments in ``mutates`` hold into the values to compare, where
            a value is spread over several of them; None where each holds values by itself.
    """

    def __init__(
        self,
        shape_rule: Callable[P, R],
        *,
        family: str,
        check: Callable[..., None],
        samples: SampleMaker,
        tolerance: Mapping[str, Tolerance],
        oracle: Callable[..., Any],
        mutates: tuple[str, ...] = (),
        dispatch_on: str | None = None,
        backward: Backward | None = None,
        aliases: tuple[str, ...] = (),
        schema: str | None = None,
        decode: Callable[..., tuple[Any, ...]] | None = None,
    ) -> None:
        functools.update_wrapper(self, shape_rule)
        self.name = shape_rule.__name__
        self.family = family
        self.mutates = mutates
        self.backward = backward
        self.aliases = aliases
        self.tolerance = dict(tolerance)
        self.dtypes = tuple(self.tolerance)
        self.samples = samples
        self.oracle = oracle
        self.schema = schema
        self.decode = decode
        self._shape_rule = shape_rule
        self._check = check
        self.signature = inspect.signature(shape_rule)
        self.options = {
            name: parameter.default
            for name, parameter in self.signature.parameters.items()
            if not _required(parameter)
        }
        self.dispatch_on = dispatch_on or next(iter(self.signature.parameters))
        self.positional = tuple(_positional(self.signature))

    @in_compiled_code(_traced_contract_call)
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        handle = _Handles.made.get(self.name) or self._handle()
        try:
            result: R = handle(*args, **kwargs)
        except TypeError:
            self.bind(*args, **kwargs)  # if the call is wrong, this error names the argument
            raise
        return result

    def _handle(self) -> Callable[..., Any]:
        made = _Handles.made  # a reset meanwhile replaces the dict, and discards this handle
        if _Handles.bind is None:
            raise RuntimeError(f"{self.name}: import transformer_engine_fl before calling it")
        handle = made[self.name] = _Handles.bind(self.name)
        return handle

    def __copy__(self) -> Contract[P, R]:
        return self

    def __deepcopy__(self, memo: object) -> Contract[P, R]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return load_attribute, (f"{self._shape_rule.__module__}:{self.name}",)

    def __repr__(self) -> str:
        return f"<contract {self.name}{shown(self.signature)}>"

    def tolerance_for(self, *dtypes: str) -> Tolerance:
        """The tolerance where these dtypes meet: that of the coarsest.

        Args:
            dtypes: names, e.g. of the dispatch tensor's dtype and of the output's.
        """
        return Tolerance.coarsest(
            self.tolerance[dtype] for dtype in dtypes if dtype in self.tolerance
        )

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The call's arguments by name, defaults filled in.

        Raises:
            ArgumentError: the call does not fit the signature.
        """
        positional = self.positional
        arguments = {**self.options, **dict(zip(positional, args, strict=False)), **kwargs}
        twice = [name for name in positional[: len(args)] if name in kwargs]
        expected = self.signature.parameters.keys()
        if twice or len(args) > len(positional) or arguments.keys() != expected:
            raise self._binding_error(args, kwargs)
        return arguments

    def check(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Check a call on metadata alone; returns the arguments by name.

        Raises:
            ArgumentError: names the first argument that breaks the contract.
        """
        arguments = self.bind(*args, **kwargs)
        self._check(self.name, **arguments)
        return arguments

    def objection(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentError | None:
        """The error that :meth:`check` raises for a call, or None.

        None also if the check fails with another error: a tensor may have no sizes or strides.
        """
        try:
            self.check(*args, **kwargs)
        except ArgumentError as wrong:
            wrong.__suppress_context__ = True
            return wrong.with_traceback(None)
        except Exception as error:
            if out_of_stack(error):
                raise
        return None

    def check_as(self, op_name: str, **arguments: Any) -> None:
        """Check all arguments of a call of another operator, which has the same parameters.

        Raises:
            ArgumentError: names that operator, and the first argument that breaks the contract.
        """
        self._check(op_name, **arguments)

    def shapes(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The shape rule: checks the call, then returns empty outputs of the right kind."""
        self.check(*args, **kwargs)
        return self._shape_rule(*args, **kwargs)

    def without(self, fn: Callable[..., Any], missing: Collection[str]) -> Callable[..., Any]:
        """Wrap ``fn`` to leave out the options that it does not take (they have their defaults).

        The wrapper raises an ArgumentError for more positional arguments than the contract has.
        """
        names = self.positional

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > len(names):
                raise self._binding_error(args, kwargs)
            taken = {name: value for name, value in kwargs.items() if name not in missing}
            kept = [it for name, it in zip(names, args, strict=False) if name not in missing]
            return fn(*kept, **taken)

        return call

    def _binding_error(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentError:
        expected = f"{self.name}{shown(self.signature)}"
        names = list(self.signature.parameters)
        positional = self.positional
        passed = {*positional[: len(args)], *kwargs, *self.options}
        missing = [name for name in names if name not in passed]
        for given in kwargs:
            if given not in names:
                lacking = f", and {missing[0]!r} is missing" if missing else ""
                hint = suggestion(given, names)
                return ArgumentError(self.name, given, f"not a parameter{lacking}{hint}", expected)
        if len(args) > len(positional):
            given = f"one too many: {len(args)} positional arguments were passed"
            return ArgumentError(self.name, f"#{len(positional) + 1}", given, expected)
        for name in positional[: len(args)]:
            if name in kwargs:
                return ArgumentError(self.name, name, "passed twice", expected)
        return ArgumentError(self.name, missing[0], "missing", expected)


def contract(
    *,
    family: str,
    check: Callable[..., None],
    samples: SampleMaker,
    tolerance: Mapping[str, Tolerance],
    oracle: Callable[..., Any],
    mutates: tuple[str, ...] = (),
    dispatch_on: str | None = None,
    backward: Backward | None = None,
    aliases: tuple[str, ...] = (),
    schema: str | None = None,
    decode: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[[Callable[P, R]], Contract[P, R]]:
    """Decorate a shape rule into a :class:`Contract`.

    Args:
        family: the family's file name.
        check: ``check(op_name, **arguments)``; raises ArgumentError on metadata alone.
        samples: yields inputs for a dtype and a device.
        tolerance: allowed error by dtype name; its keys are the dtypes of the contract.
        oracle: the formula in float64, independent of every implementation; takes the
            operator's arguments and returns its outputs in float64.
        mutates: arguments the operator writes.
        dispatch_on: the argument whose device and dtype choose the implementation;
            the first parameter unless named.
        backward: the backward operator and what is saved for it.
        aliases: other names of the same operator.
        schema: an explicit ``torch.library`` schema, where derivation falls short.
        decode: takes what each argument in ``mutates`` holds and returns as many values to
            compare with the oracle's, where a number is spread over several arguments.
    """

    def decorate(shape_rule: Callable[P, R]) -> Contract[P, R]:
        return Contract(
            shape_rule,
            family=family,
            check=check,
            samples=samples,
            tolerance=tolerance,
            oracle=oracle,
            mutates=mutates,
            dispatch_on=dispatch_on,
            backward=backward,
            aliases=aliases,
            schema=schema,
            decode=decode,
        )

    return decorate


Binder = Callable[[str], Callable[..., Any]]


class _Handles:
    """The default manager's handles by operator, and the function that makes them."""

    bind: Binder | None = None
    made: ClassVar[dict[str, Callable[..., Any]]] = {}


def set_binder(bind: Binder) -> None:
    """Set the function that makes an operator's handle; forgets the handles made before."""
    _Handles.bind = staticmethod(bind)
    _Handles.made = {}


@dataclass(frozen=True, slots=True)
class Fit:
    """How an implementation's signature relates to its contract's.

    Attributes:
        missing: options of the contract that the implementation does not name, with
            their defaults. A call that passes any other value for one is not supported.
    """

    missing: Mapping[str, Any]


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def fit(expected: inspect.Signature, fn: Callable[..., Any], label: str) -> Fit:
    """Check that ``fn`` can be called wherever the contract's signature can.

    Args:
        expected: the contract's signature.
        fn: the implementation.
        label: names the implementation in the error.

    Raises:
        SignatureMismatchError: with both signatures and the reason.
    """
    found = signature_of(fn)
    if found is None:
        raise SignatureMismatchError(
            f"{label}: the callable has no readable signature; wrap it in a function "
            f"with the operator's own:\n  contract       {shown(expected)}"
        )
    reason = _misfit(expected, found)
    if reason:
        raise SignatureMismatchError(
            f"{label}: the signature does not fit the contract: {reason}\n"
            f"  contract       {shown(expected)}\n  implementation {shown(found)}"
        )
    return Fit(
        {
            name: parameter.default
            for name, parameter in expected.parameters.items()
            if not (_required(parameter) or _named(found, name))
        }
    )


def check_predicate(expected: inspect.Signature, fn: Callable[..., Any], label: str) -> None:
    """Check that a ``supports`` can be called with the contract's required arguments.

    It need not have the options: a contract may get new ones later, and :func:`adapt_predicate`
    leaves out those that it does not name.

    Raises:
        SignatureMismatchError: with both signatures.
    """
    found = signature_of(fn)
    if found is None:
        return
    required = {name: it for name, it in expected.parameters.items() if _required(it)}
    by_name = [name for name in required if _keyword_only(expected, name)]
    try:
        found.bind(*[None] * (len(required) - len(by_name)), **dict.fromkeys(by_name))
    except TypeError as error:
        raise SignatureMismatchError(
            f"{label}: supports() is called with the operator's arguments, and {error}\n"
            f"  contract   {shown(expected)}\n  supports() {shown(found)}"
        ) from None


def adapt_predicate(
    expected: inspect.Signature, supports: Callable[..., Any]
) -> Callable[..., Any]:
    """Make ``supports`` callable with the arguments of any call of the contract.

    Options that it does not name are left out. The others are passed by keyword where it may
    have them in another order than the contract.
    """
    found = signature_of(supports)
    if found is None:
        return supports
    kinds = {it.kind for it in found.parameters.values()}
    anywhere = inspect.Parameter.VAR_POSITIONAL in kinds
    unnamed = {
        name
        for name, it in expected.parameters.items()
        if not (_required(it) or inspect.Parameter.VAR_KEYWORD in kinds or _named(found, name))
    }
    order = _positional(expected)
    if not unnamed and (anywhere or _positional(found)[: len(order)] == order):
        return supports
    required = [name for name in order if _required(expected.parameters[name])]

    def ask(*args: Any, **kwargs: Any) -> Any:
        first: Collection[Any] = args
        if not anywhere:
            kwargs = {**dict(zip(order, args, strict=False)), **kwargs}
            first = [kwargs.pop(name) for name in required if name in kwargs]
        named = {name: value for name, value in kwargs.items() if name not in unnamed}
        return supports(*first, **named)

    return ask


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a callable; None if it cannot be read, as of some functions in C."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


class _Bare(str):
    """An annotation that is shown as it is written, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def shown(signature: inspect.Signature) -> str:
    """A signature as its source has it: annotations that are text are not quoted."""

    def bare(annotation: object) -> object:
        return _Bare(annotation) if isinstance(annotation, str) else annotation

    parameters = [
        it.replace(annotation=bare(it.annotation)) for it in signature.parameters.values()
    ]
    returns = bare(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returns))


def _misfit(expected: inspect.Signature, found: inspect.Signature) -> str | None:
    """Why a call that fits ``expected`` might not fit ``found``; None if it always does."""
    wanted = [name for name, parameter in expected.parameters.items() if _required(parameter)]
    offered = [name for name, parameter in found.parameters.items() if _required(parameter)]
    if offered != wanted:
        return f"required parameters are {offered}, the contract has {wanted}"
    for name in offered:
        if found.parameters[name].kind not in _NAMED:
            return f"{name!r} is positional-only, the contract allows it by name"
        if _keyword_only(found, name) and not _keyword_only(expected, name):
            return f"{name!r} is keyword-only, the contract allows it by position"
    order = _positional(expected)
    for place, name in enumerate(_positional(found)[: len(order)]):
        if name != order[place]:
            return f"position {place + 1} is {name!r}, the contract has {order[place]!r} there"
    for name, parameter in expected.parameters.items():
        other = found.parameters.get(name)
        if other is None or _required(parameter):
            continue
        if _keyword_only(found, name) and name in order:
            return f"{name!r} is keyword-only, the contract allows it by position"
        if not same(other.default, parameter.default):
            return (
                f"the default of {name!r} is {other.default!r}, "
                f"the contract has {parameter.default!r}"
            )
    return None


def _required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def _named(signature: inspect.Signature, name: str) -> bool:
    return name in signature.parameters and signature.parameters[name].kind in _NAMED


def _keyword_only(signature: inspect.Signature, name: str) -> bool:
    return signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def _positional(signature: inspect.Signature) -> list[str]:
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]


def same(left: object, right: object) -> bool:
    """Whether an option has that value, in the same type: 0 is neither 0.0 nor False."""
    return left is right or (type(left) is type(right) and bool(left == right))

"""Repeated calls: an operator called as before repeats the recorded launches of that call.

What an operator does on the host, from its checks to its launches, follows from properties of its
arguments that a guard can test: the tensors' dtypes, sizes, strides, devices and alignment, and the
options. When calls of one kind have come often enough, one is recorded: the memory it allocates,
the kernels it launches, the addresses it passes to them, and what it returns. From the recording a
function is generated that tests whether a call is like the recorded one (torch guards all tensors
at once) and, if so, allocates, launches and returns.

A call that does anything which does not follow from the guarded properties (reads a value from a
tensor, computes with an operator of torch, uses memory that is neither an argument nor allocated by
the call) is not repeated: calls like it take the ordinary path. :func:`repeating` is for operators
that report what they write (:func:`written`) and take their numbers from nowhere else (no generator
of random numbers, say). While a torch mode wants to see allocations, while tensors are traced, or
on a device that is not the current one, every call takes the ordinary path.
``TE_FL_REPEAT_CALLS=0`` leaves every operator undecorated.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine_fl.backends import _allocation
from transformer_engine_fl.backends._memory import PLAIN, extent
from transformer_engine_fl.core.blame import error_text
from transformer_engine_fl.core.dispatch import MISS, Repeats
from transformer_engine_fl.core.locks import ForkSafeLock
from transformer_engine_fl.core.policy import get_environment

__all__ = [
    "CALLS_BEFORE",
    "LEAST_ADDRESS",
    "Address",
    "UnrepeatableError",
    "active",
    "forget",
    "note",
    "repeating",
    "repeating_from_starts",
    "tensor_guard",
    "written",
]

CALLS_BEFORE = 8
"""Similar calls before one of them is recorded; a power of two."""
LEAST_ADDRESS = 2**32
"""Integers from here on may be addresses; a launch with such an integer is not repeated."""
_MOST_RECENT = 4
_MOST_WATCHED = 64
_MOST_KINDS = 256
_MOST_LOOKS = 65536
_ALIGNMENT_MASK = 15
_NEVER = -(2**62)

Operator = TypeVar("Operator", bound=Callable[..., Any])


@functools.cache
def _tensor_guards() -> Any:
    """torch's guard for many tensors at once; None if it misses a difference that matters here."""
    made = getattr(_allocation._guards, "TensorGuards", None)
    if made is None:
        return None
    # The result is cached for good, so it must not depend on the modes that are set now.
    with torch.inference_mode(False), torch.enable_grad():
        try:
            return made if _detects_differences(made) else None
        except (TypeError, RuntimeError, AttributeError):
            return None


def _detects_differences(made: Any) -> bool:
    size = (2, 4)
    like: Any = {"dtype": torch.float32, "device": "cpu"}
    one = torch.zeros(size, **like)
    check = _check(made, [one])
    others = (
        torch.zeros((4, 2), **like),
        torch.zeros((4, 2), **like).t(),
        torch.zeros(size, dtype=torch.float16, device="cpu"),
        torch.zeros(size, dtype=torch.float32, device="meta"),
        torch._neg_view(one),
        torch.nn.Parameter(one),
        torch.zeros(size, **like).requires_grad_(),
        None,
    )
    same = check(torch.zeros(size, **like))
    return same is True and not any(map(check, others))


def _check(made: Any, tensors: list[Tensor]) -> Callable[..., bool]:
    sizes = [list(it.shape) for it in tensors]
    strides = [list(it.stride()) for it in tensors]
    check: Callable[..., bool] = made(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


def tensor_guard(tensors: list[Tensor]) -> Callable[[list[Tensor]], bool] | None:
    """A guard for as many tensors: equal to these in all but addresses and contents.

    The guard rejects lists that contain a tensor twice. The result is None if torch has no such
    guard, a tensor is of another subclass or not strided, or calls are not to be repeated.
    """
    made = _tensor_guards() if get_environment().repeat_calls else None
    if made is None or not all(type(it) in PLAIN and it.layout is torch.strided for it in tensors):
        return None
    check = _check(made, tensors)

    def alike(others: list[Tensor]) -> bool:
        if _allocation.sees_allocations():
            return False
        try:
            # torch's guard crashes the process on a nested tensor without strides.
            return not any(it.is_nested for it in others) and check(*others)
        except AttributeError:
            return False

    return alike


# ------------------------------------------------------------------------------ watching


class UnrepeatableError(Exception):
    """A call does something that does not follow from the guarded properties of its arguments."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records one call.

    Attributes:
        steps: what the call did, in order: ``("empty", tensor)``, ``("fill", tensor, value)``,
            ``("launch", function, arguments)``, ``("written", address)``.
        refusal: what was seen that cannot be repeated; None if nothing was.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.thread = threading.get_ident()
        self.steps: list[tuple[Any, ...]] = []
        self.refusal: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True makes torch import its compiler in the first recorded call, which takes more than a
        # second and keeps what that call held until garbage is collected.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY or func in _ZEROS:
            if type(result) is not Tensor or result.device != self.device:
                self.refusal = f"{func} on another device"
            self.steps.append(("empty", result))
            if func in _ZEROS:
                self.steps.append(("fill", result, 0))
        elif func in _FILLS:
            self.steps.append(("fill", args[0], args[1] if len(args) > 1 else 0))
        elif not _is_view(func):
            self.refusal = str(func)
        return result


_ATEN = torch.ops.aten
_EMPTY = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.empty_strided.default,
        _ATEN.empty_like.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    }
)
_ZEROS = frozenset({_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default})
_FILLS = frozenset({_ATEN.zero_.default, _ATEN.fill_.Scalar})


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether the result aliases an argument's memory, and nothing is written.

    In inference mode torch dispatches composite operators whole, and some of them copy where they
    must. A copy that is launched on, or returned, is refused later because of its address.
    """
    schema = func._schema
    aliases = [it.alias_info for it in schema.returns]
    written = [it.alias_info for it in schema.arguments]
    return (
        bool(aliases)
        and all(it is not None and not it.is_write for it in aliases)
        and not any(it is not None and it.is_write for it in written)
    )


active: _Watch | None = None
"""The recording in progress; launches report themselves to it by :func:`note`."""
_watching = ForkSafeLock()


def _end_watch() -> None:
    """Drop, in a forked child, the recording that another thread had begun in the parent."""
    global active
    active = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_watch)


def note(function: Any, *arguments: Any) -> bool:
    """Record a launch if a recording runs on this thread; returns whether one does.

    Args:
        function: repeats the launch when called with the arguments. If it has ``statements``, its
            lines are inlined into the generated function, which saves a call:
            ``function.statements(name, *arguments)`` gives lines of Python. They write a value as
            ``name(value)``; for an :class:`Address` that is the address in the repeated call. Their
            own variables begin with ``_its_`` and are not read after these lines; ``return _MISS``
            sends a call to the ordinary path.
        arguments: for a function without ``statements``, everything but numbers and None is an
            :class:`Address`, or a tuple of these.
    """
    watch = active
    if watch is None or watch.thread != threading.get_ident():
        return False
    watch.steps.append(("launch", function, arguments))
    return True


def written(tensor: Tensor) -> None:
    """Report to autograd, and a recording on this thread, that kernels wrote an argument."""
    torch.autograd.graph.increment_version(tensor)
    watch = active
    if watch is not None and watch.thread == threading.get_ident():
        watch.steps.append(("written", tensor.data_ptr()))


class Address(int):
    """A number that is an address."""


# ---------------------------------------------------------------------------- generating


class _Writer:
    """Generates the function that repeats calls like a recorded one."""

    def __init__(self, declared: _Declared, arguments: tuple[Any, ...]) -> None:
        self.parameters = declared.parameters
        self.from_starts = declared.from_starts
        self.namespace: dict[str, Any] = {"_MISS": MISS, "_type": type, "_all": all}
        self.namespace |= declared.defaults
        self.named: dict[int, str] = {}  # what was allocated
        self.tests: list[str] = []
        self.lines: list[str] = []
        self.given: list[tuple[str, Tensor]] = []
        for name, value in zip(declared.names, arguments, strict=True):
            self._argument(name, value)
        if not self.given:
            raise UnrepeatableError("no tensors")
        self.device = self.given[0][1].device
        # The memory that addresses belong to: (first, end, name, tensor).
        self.owners: list[tuple[int, int, str, Tensor]] = []
        for name, tensor in self.given:
            if (
                tensor.device != self.device
                or not tensor.numel()
                or tensor.data_ptr() & _ALIGNMENT_MASK
            ):
                raise UnrepeatableError(f"{name!r} is empty, unaligned or on another device")
            self._own(name, tensor)
        # Where arguments overlap, an address does not tell which one it belongs to, unless kernels
        # get only the first address of each. A shared storage is no test for it: tensors of one
        # storage need not overlap, and tensors of different storages may.
        self.owners.sort(key=lambda owner: owner[:2])
        for (first, end, name, _), (start, _, other, _) in itertools.pairwise(self.owners):
            if start == first or (start < end and not declared.from_starts):
                raise UnrepeatableError(f"{name!r} and {other!r} overlap in memory")

    def constant(self, value: Any) -> str:
        if value is None or type(value) is bool:
            return repr(value)  # cheaper than a name lookup
        name = f"_c{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def _own(self, name: str, tensor: Tensor) -> None:
        start = tensor.data_ptr()
        self.owners.append((start, start + extent(tensor) * tensor.element_size(), name, tensor))

    def _argument(self, name: str, value: Any) -> None:
        kind = type(value)
        same = next((other for other, it in self.given if it is value), None)
        if same is not None:
            self.tests.append(f"{name} is {same}")
        elif kind in PLAIN and value.layout is torch.strided:
            self.given.append((name, value))
        elif value is None or kind in (bool, torch.dtype):
            self.tests.append(f"{name} is {self.constant(value)}")
        elif kind in (int, float, str):
            known = self.constant(value)  # a default is the same object
            like = f"_type({name}) is {self.constant(kind)} and {name} == {known}"
            if value == 0 and kind is float:
                like += f" and {name}.hex() == {value.hex()!r}"
            self.tests.append(f"({name} is {known} or {like})")
        elif kind in (list, tuple) and all(type(it) is int for it in value):
            # The items' types are tested first: a tensor among them must not be compared.
            self.tests.append(f"_type({name}) is {self.constant(kind)}")
            self.tests.append(f"_all([_type(_it) is {self.constant(int)} for _it in {name}])")
            self.tests.append(f"{name} == {self.constant(kind(value))}")
        else:
            raise UnrepeatableError(f"{name!r} is a {kind.__name__}")

    def address(self, value: int) -> str:
        if not value:
            return "0"
        allocated = self.named.values()
        for start, end, name, _ in self.owners:
            if value == start:
                return f"_a{name}"
            if start < value < end and (name in allocated or not self.from_starts):
                return f"_a{name} + {value - start}"
        raise UnrepeatableError("an address outside the arguments and allocations")

    def name(self, value: Any) -> str:
        """For the statements of a launch: see :func:`note`."""
        return self.address(value) if type(value) is Address else self.constant(value)

    def value(self, value: Any) -> str:
        if type(value) is Address:
            return self.address(value)
        if value is None:
            return "None"
        if type(value) is tuple:
            inside = "".join(f"{self.value(it)}, " for it in value)
            return f"({inside})"
        kind = type(value)
        if kind in (float, bool) or (kind is int and abs(value) < LEAST_ADDRESS):
            return self.constant(value)
        raise UnrepeatableError(f"a kernel argument of type {type(value).__name__}")

    def step(self, kind: str, *what: Any) -> None:
        if kind == "empty":
            (tensor,) = what
            name = f"_b{len(self.namespace)}"
            size, stride, dtype = (
                self.constant(it)
                for it in (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
            )
            self.lines.append(f"{name} = _empty({size}, {stride}, {dtype})")
            self.lines.append(f"_a{name} = {name}.data_ptr()")
            if tensor.numel():
                self._own(name, tensor)
            self.named[id(tensor)] = name
        elif kind == "fill":
            tensor, value = what
            name = self.named.get(id(tensor)) or self.result(tensor)
            if type(value) not in (int, float):
                raise UnrepeatableError("a fill value that is not a number")
            is_zero = value == 0 and math.copysign(1, value) > 0
            self.lines.append(
                f"{name}.zero_()" if is_zero else f"{name}.fill_({self.constant(value)})"
            )
        elif kind == "written":
            (address,) = what
            starts = {start: name for start, _, name, _ in self.owners}
            if address not in starts:
                raise UnrepeatableError("a write to a tensor that is not an argument")
            self.namespace["_increment"] = torch.autograd.graph.increment_version
            self.lines.append(f"_increment({starts[address]})")
        else:
            function, arguments = what
            statements = getattr(function, "statements", None)
            if statements is not None:
                # These lines may return _MISS after earlier launches: the ordinary path repeats
                # those, and no result has been returned yet.
                self.lines += statements(self.name, *arguments)
            else:
                passed_arguments = ", ".join([self.value(it) for it in arguments])
                self.lines.append(f"{self.constant(function)}({passed_arguments})")

    def result(self, value: Any) -> str:
        if type(value) in (tuple, list):
            inside = "".join(f"{self.result(it)}, " for it in value)
            return f"({inside})" if type(value) is tuple else f"[{inside}]"
        if value is None or type(value) in (int, bool, float):
            return self.constant(value)
        if type(value) is not Tensor:
            raise UnrepeatableError(f"a result of type {type(value).__name__}")
        if (name := self.named.get(id(value))) is not None:
            return name
        for start, end, name, owner in self.owners:
            if name in self.named.values() and start <= value.data_ptr() < end:
                seen = name
                if value.dtype != owner.dtype:
                    if owner.element_size() != value.element_size():
                        raise UnrepeatableError("a result viewed with another element size")
                    seen += f".view({self.constant(value.dtype)})"
                shape = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
                if value.shape != owner.shape or value.stride() != owner.stride() or shape[2]:
                    seen += f".as_strided(*{self.constant(shape)})"
                return seen
        raise UnrepeatableError("a result that was not allocated")

    def write(self, steps: list[tuple[Any, ...]], result: Any) -> Callable[..., Any]:
        for step in steps:
            self.step(*step)
        returned = self.result(result)
        if not any(step[0] == "launch" for step in steps):
            raise UnrepeatableError("nothing was launched")
        on_cuda = self.device.type == "cuda"
        if on_cuda and _allocation._on_current_device is None:
            raise UnrepeatableError("allocations go through torch's dispatcher")
        names = [name for name, _ in self.given]
        self.namespace |= {
            "_check": _check(_tensor_guards(), [it for _, it in self.given]),
            "_empty": _allocation.quickest(self.device),
            "_function_modes": _allocation._function_modes,
            "_dispatch_modes": _allocation._dispatch_modes,
            "_current_device": _allocation._current_device,
        }
        # The guard notices only some of torch's dispatcher modes, so the rest is tested here.
        elsewhere = ["_function_modes()", "_dispatch_modes()"]
        if on_cuda and _allocation._count_devices() > 1:
            elsewhere.append(f"_current_device() != {self.device.index}")
        given, bits = ", ".join(names), " | ".join(f"_a{name}" for name in names)
        lines = [
            f"def again({self.parameters}):",
            # torch's guard crashes the process on a nested tensor without strides.
            "    try:",
            f"        if {' or '.join([f'{name}.is_nested' for name in names])}:",
            "            return _MISS",
            "    except AttributeError:",
            "        return _MISS",
            f"    if not ({' and '.join([f'_check({given})', *self.tests])}):",
            "        return _MISS",
            *(f"    _a{name} = {name}.data_ptr()" for name in names),
            f"    if ({bits}) & {_ALIGNMENT_MASK} or {' or '.join(elsewhere)}:",
            "        return _MISS",
            *(f"    {line}" for line in self.lines),
            f"    return {returned}",
        ]
        exec(compile("\n".join(lines), "<a call like before>", "exec"), self.namespace)
        made: Callable[..., Any] = self.namespace["again"]
        made.source = "\n".join(lines)  # type: ignore[attr-defined]
        return made


# ------------------------------------------------------------------------------- calling


def _never(*arguments: Any, **options: Any) -> Any:
    return MISS


class _Declared(NamedTuple):
    """The signature of an operator.

    Attributes:
        names: its parameters' names.
        positional: how many of them may be passed by position.
        parameters: the parameter list with defaults, as in a ``def``.
        defaults: the values of the default names used in ``parameters``.
        from_starts: whether kernels are given only the first address of each argument.
    """

    names: tuple[str, ...]
    positional: int
    parameters: str
    defaults: dict[str, Any]
    from_starts: bool


class _Calls(Repeats):
    """The calls of one operator.

    Attributes:
        refusal: why the call recorded last cannot be repeated; None if it can.
    """

    last: Callable[..., Any]

    def __init__(self, declared: _Declared, plain: Callable[..., Any]) -> None:
        self._declared = declared
        self._plain = plain
        self._times_forgotten = 0
        self.forget()

    def forget(self) -> None:
        # These two come first, in this order. By the counter, a thread that is recording sees that
        # it must discard the result; by ``_recent``, a thread that repeats an older call sees that
        # it must not keep that one as the last.
        self._times_forgotten += 1
        self._recent: tuple[Callable[..., Any], ...] = ()
        self.last = _never
        self.refusal: str | None = None
        self._seen: dict[Any, int] = {}
        self._watched = 0
        self._looks = 0

    def serve(self, *arguments: Any) -> Any:
        """Serve a call that ``last`` did not repeat; all arguments are positional."""
        recent = self._recent
        most = self._declared.positional
        for again in recent:
            options = zip(self._declared.names[most:], arguments[most:], strict=True)
            found = again(*arguments[:most], **dict(options))
            if found is not MISS:
                self.last = again
                if self._recent is not recent:  # forget() may have run meanwhile
                    self.last = _never
                return found
        if self._watched < _MOST_WATCHED and self._looks < _MOST_LOOKS and active is None:
            self._looks += 1
            key = _kind(arguments)
            if key is not None and self._should_record(key):
                return self._watch(key, arguments)
        return self._plain(*arguments)

    def _should_record(self, key: tuple[Any, ...]) -> bool:
        """Whether to record this call of its kind: the 8th, the 16th, the 32nd, ...

        Later ones too, because the 8th may have come where recording was impossible, or its
        generated function may have been evicted from ``_recent``.
        """
        count = self._seen.get(key, 0) + 1
        if len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        self._seen[key] = count
        return count >= CALLS_BEFORE and not count & (count - 1)

    def _watch(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        global active
        try:
            writer = _Writer(self._declared, arguments)
        except (UnrepeatableError, RuntimeError):
            return self._plain(*arguments)
        # Do not block on the lock: its holder may be waiting for something that this thread holds.
        if not _can_watch(writer.device) or not _watching.acquire(0):
            return self._plain(*arguments)
        try:
            times_forgotten = self._times_forgotten
            active = watch = _Watch(writer.device)
            try:
                with watch:
                    result = self._plain(*arguments)
            finally:
                active = None
        finally:
            _watching.release()
        self._watched += 1
        again = None
        if watch.refusal is None:
            try:
                again = writer.write(watch.steps, result)
            except (UnrepeatableError, RuntimeError, TypeError, ValueError) as reason:
                watch.refusal = error_text(reason)
        if times_forgotten == self._times_forgotten:
            self.refusal = watch.refusal
            if again is None:
                self._seen[key] = _NEVER
            else:
                self._recent = (again, *self._recent[: _MOST_RECENT - 1])
                self.last = again
            if times_forgotten != self._times_forgotten:
                self.forget()
        return result


def _can_watch(device: torch.device) -> bool:
    elsewhere = device.type == "cuda" and _allocation._current_device() != device.index
    return not (
        elsewhere
        or _allocation.sees_allocations()
        or torch.compiler.is_compiling()
        or _tensor_guards() is None
    )


def _kind(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A key under which similar calls are counted; None for calls that cannot be repeated.

    The key must keep nothing alive, so it contains nothing that is or may hold a tensor.
    """
    facts: list[Any] = []
    for it in arguments:
        kind = type(it)
        if kind in PLAIN:
            try:
                facts.append((kind, it.shape, it.stride(), it.dtype, it.device, it.requires_grad))
            except RuntimeError:  # a layout without strides
                return None
        elif it is None or kind in (bool, int, float, str, torch.dtype):
            facts.append((kind, it))
        elif kind in (list, tuple) and all(type(one) is int for one in it):
            facts.append((kind, *it))
        else:
            return None
    try:
        hash(found := tuple(facts))
    except TypeError:  # sizes that are not known yet
        return None
    return found


_OPERATORS: list[_Calls] = []

_WRAPPER = """\
def {name}({parameters}):
    _found = _calls.last({passed})
    return _calls.serve({names}) if _found is _MISS else _found
def _other({parameters}):
    return _calls.serve({names})
def _plain({names}):
    return _operator({passed})
"""


def repeating(operator: Operator) -> Operator:
    """Decorate an implementation, so that a repeated call costs little more than its launches.

    The implementation must report each argument that it writes, and what it does on the host must
    follow only from its options and its tensors' dtypes, sizes, strides, devices and alignment.
    """
    return _repeating(operator, from_starts=False)


def repeating_from_starts(operator: Operator) -> Operator:
    """Like :func:`repeating`, if kernels are given only the first address of each argument.

    Then arguments may overlap, as queries, keys and values that are parts of one tensor do.
    """
    return _repeating(operator, from_starts=True)


def _repeating(operator: Operator, *, from_starts: bool) -> Operator:
    if not get_environment().repeat_calls:
        return operator
    parameters: list[str] = []
    names: list[str] = []
    passed: list[str] = []
    defaults: dict[str, Any] = {}
    positional: int | None = None
    for it in inspect.signature(operator).parameters.values():
        named = it.kind is it.KEYWORD_ONLY
        if named and positional is None:
            parameters.append("*")
            positional = len(names)
        text = it.name
        if it.default is not it.empty:
            defaults[f"_default_{it.name}"] = it.default
            text += f"=_default_{it.name}"
        parameters.append(text)
        names.append(it.name)
        passed.append(f"{it.name}={it.name}" if named else it.name)
    declared = _Declared(
        tuple(names),
        len(names) if positional is None else positional,
        ", ".join(parameters),
        defaults,
        from_starts,
    )
    namespace: dict[str, Any] = {"_MISS": MISS, "_operator": operator, **defaults}
    source = _WRAPPER.format(
        name=operator.__name__,
        parameters=declared.parameters,
        names=", ".join(names),
        passed=", ".join(passed),
    )
    exec(compile(source, f"<calls of {operator.__name__}>", "exec"), namespace)
    namespace["_calls"] = calls = _Calls(declared, namespace["_plain"])
    _OPERATORS.append(calls)
    made: Any = functools.wraps(operator)(namespace[operator.__name__])
    made.calls = calls
    calls.of, calls.other = made, namespace["_other"]
    return made  # type: ignore[no-any-return]


def forget() -> None:
    """Forget every recorded call: what was planned or chosen for them is no longer valid."""
    for calls in _OPERATORS:
        calls.forget()

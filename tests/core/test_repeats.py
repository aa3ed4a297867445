"""Implementations that remember their last call are tried before dispatch looks at a tensor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
from core_helpers import StubTensor, StubTensors, answering, impl, make_manager

from transformer_engine_fl import OpManager
from transformer_engine_fl.core.dispatch import MISS, HandleCell, Repeats, handle

X = StubTensor()
OTHER_DTYPE = StubTensor(dtype="bfloat16")
OTHER_DEVICE = StubTensor(device="cuda")


class Keys(StubTensors):
    """Counts how often dispatch computes a tensor's key."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def key(self, value: Any, /) -> tuple[Any, ...]:  # type: ignore[override]
        self.asked += 1
        return attrgetter("device", "dtype")(value)  # type: ignore[no-any-return]


class Memory(Repeats):
    """Serves calls with the same tensor and factor as the last one.

    Attributes:
        fails: the exception that a repeated call raises, if any.
        repeated: the number of repeated calls.
    """

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.repeated = 0

    def remember(self, tensor: StubTensor, factor: float) -> None:
        def again(x: Any, given: float = 1.0, *, mode: str = "plain") -> Any:
            if x != tensor or given != factor:
                return MISS
            self.repeated += 1
            if self.fails is not None:
                raise self.fails
            return f"remembered {mode}"

        self.last = again


def remembering() -> tuple[Callable[..., Any], Memory]:
    """An implementation that remembers its last call."""
    calls = Memory()

    def other(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        calls.remember(x, factor)
        return f"worked out {mode}"

    def fn(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        assert calls.last is not None
        found = calls.last(x, factor, mode=mode)
        return other(x, factor, mode=mode) if found is MISS else found

    calls.last = lambda *args, **kwargs: MISS
    calls.of, calls.other, fn.calls = fn, other, calls  # type: ignore[attr-defined]
    return fn, calls


def manager_of(fn: Callable[..., Any], **fields: Any) -> OpManager:
    first = impl(
        "vendor.acme",
        "vendor",
        fn=fn,
        priority=100,
        devices=("cpu",),
        supported_dtypes=("float32",),
        **fields,
    )
    return make_manager(first, impl("reference.torch", priority=50), tensors=Keys())


def asked(manager: OpManager) -> int:
    return manager.tensors.asked  # type: ignore[attr-defined, no-any-return]


WAYS: dict[str, Callable[[OpManager], Callable[..., Any]]] = {
    "name": lambda manager: functools.partial(manager.call, "scale"),
    "handle": lambda manager: manager.bind("scale"),
    "pin": lambda manager: manager.pin("scale"),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Callable[[OpManager], Callable[..., Any]]:
    """How the operator is called; takes the manager."""
    return WAYS[request.param]


Way = Callable[[OpManager], Callable[..., Any]]


def test_a_call_like_the_last_one_is_done_without_a_look_at_its_tensor(way: Way) -> None:
    fn, _ = remembering()
    manager = manager_of(fn)
    call = way(manager)
    assert call(X) == "worked out plain"
    assert call(X, mode="odd") == "remembered odd"  # dispatch looks, and approves repeats
    looks = asked(manager)
    assert [call(X), call(X, 1.0, mode="odd"), call(x=X)] == [
        "remembered plain",
        "remembered odd",
        "remembered plain",
    ]
    assert asked(manager) == looks


def test_other_calls_are_looked_at(way: Way) -> None:
    fn, _ = remembering()
    manager = manager_of(fn)
    call = way(manager)
    for _ in range(3):
        call(X)
    looks = asked(manager)
    assert call(X, 2.0, mode="odd") == "worked out odd"
    assert asked(manager) == looks + 1
    for other in (OTHER_DTYPE, OTHER_DEVICE):
        assert call(other) == "reference.torch"


def test_calls_that_take_turns_are_tried_once_each(way: Way) -> None:
    fn, calls = remembering()
    manager = manager_of(fn)
    call = way(manager)
    tried: list[float] = []
    remember = calls.remember

    def counted(tensor: StubTensor, factor: float) -> None:
        remember(tensor, factor)
        again = calls.last
        assert again is not None

        def last(*args: Any, **kwargs: Any) -> Any:
            tried.append(factor)
            return again(*args, **kwargs)

        calls.last = last

    calls.remember = counted  # type: ignore[method-assign]
    for factor in (1.0, 2.0, 2.0, 1.0, 2.0):
        call(X, factor)
    assert tried == [1.0, 2.0, 2.0, 1.0]


def test_a_repeat_that_the_manager_did_not_approve_is_not_used(way: Way) -> None:
    """An implementation may have served its last call, on other tensors, outside this manager."""
    fn, calls = remembering()
    first, second = way(manager_of(fn)), way(manager_of(fn))
    for _ in range(3):
        first(X)
    calls.remember(OTHER_DTYPE, 1.0)  # as a direct call of the function does
    assert first(OTHER_DTYPE) == "reference.torch"
    assert second(OTHER_DTYPE) == "reference.torch"
    assert calls.repeated == 2  # the second and third call, with X


def test_each_implementation_repeats_its_own_last_call(way: Way) -> None:
    manager = make_manager(
        *(
            impl(f"vendor.{dtype}", "vendor", fn=remembering()[0], supported_dtypes=(dtype,))
            for dtype in ("float32", "bfloat16")
        ),
        tensors=Keys(),
    )
    call = way(manager)
    for x in (X, OTHER_DTYPE):
        assert [call(x) for _ in range(3)] == ["worked out plain", *2 * ["remembered plain"]]


def test_a_wrapper_with_the_attributes_of_what_it_wraps_is_called() -> None:
    fn, _ = remembering()

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return f"wrapped, {fn(*args, **kwargs)}"

    manager = manager_of(wrapper)
    assert [manager.call("scale", X) for _ in range(3)] == [
        "wrapped, worked out plain",
        "wrapped, remembered plain",
        "wrapped, remembered plain",
    ]


def test_something_else_called_calls_is_left_alone() -> None:
    fn = answering("vendor.acme")
    fn.calls = []  # type: ignore[attr-defined]
    assert manager_of(fn).call("scale", X) == "vendor.acme"


def test_a_failure_of_a_repeated_call_is_one_of_its_implementation(way: Way) -> None:
    fn, calls = remembering()
    manager = manager_of(fn)
    call = way(manager)
    for _ in range(3):
        call(X)
    calls.fails, before = RuntimeError("no such kernel"), calls.repeated
    assert call(X, mode="odd") == "reference.torch"
    assert calls.repeated == before + 1, "it ran again"
    (key,) = manager.quarantine.held()
    assert (key.impl_id, key.device, key.dtype) == ("vendor.acme", "cpu", "float32")
    calls.fails = None
    assert manager.call("scale", X) == "reference.torch"  # vendor.acme is in quarantine
    manager.reset_quarantine()
    assert manager.call("scale", X) == "remembered plain"


def test_a_failure_after_a_repeat_lookup_is_judged_once(way: Way) -> None:
    fn, calls = remembering()
    manager = manager_of(fn)
    call = way(manager)
    for _ in range(3):
        call(X)
    tried = []

    def other(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        tried.append(factor)
        raise RuntimeError("no such kernel")

    calls.other = other
    assert call(X, 2.0) == "reference.torch"
    assert tried == [2.0]
    (key,) = manager.quarantine.held()
    assert key.impl_id == "vendor.acme"


def test_a_failed_repeat_lookup_is_not_a_failure_of_what_serves_the_call(way: Way) -> None:
    fn, calls = remembering()
    manager = manager_of(fn)
    call = way(manager)
    for _ in range(3):
        call(X)
    again = calls.last

    def strict(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        if x != X:
            raise TypeError("no such tensor")
        return again(x, factor, mode=mode)

    calls.last = strict
    assert call(X) == "remembered plain"  # dispatch approves the new ``last``
    for other in (OTHER_DTYPE, OTHER_DEVICE):
        assert call(other) == "reference.torch"
    assert not manager.quarantine.held()


def test_a_failed_repeat_lookup_is_not_the_cause_of_a_later_failure(way: Way) -> None:
    def broken(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        raise RuntimeError("no such kernel")

    def strict(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        if x != X:
            raise TypeError("no such tensor")
        return "remembered"

    fn, calls = remembering()
    manager = make_manager(
        impl("vendor.acme", "vendor", fn=fn, devices=("cpu",)),
        impl("vendor.other", "vendor", fn=broken, devices=("cuda",)),
        tensors=Keys(),
    )
    call, calls.last = way(manager), strict
    assert [call(X), call(X)] == 2 * ["remembered"]
    with pytest.raises(RuntimeError) as raised:
        call(OTHER_DEVICE)
    reasons: list[BaseException] = [raised.value]
    seen: set[type[BaseException]] = set()
    while reasons:
        error = reasons.pop()
        seen.add(type(error))
        reasons += [it for it in (error.__cause__, error.__context__) if it is not None]
    assert RuntimeError in seen
    assert TypeError not in seen


def test_a_call_that_is_wrong_is_refused_after_right_ones(way: Way) -> None:
    fn, _ = remembering()
    manager = manager_of(fn)
    call = way(manager)
    for _ in range(3):
        call(X)
    with pytest.raises(TypeError):
        call(X, 1.0, "plain")


def test_a_monitor_hears_of_repeated_calls() -> None:
    fn, _ = remembering()
    manager = manager_of(fn)
    for _ in range(3):
        manager.call("scale", X)
    heard: list[str] = []
    undo = manager.monitor(lambda op, served: heard.append(served.impl_id))
    manager.call("scale", X)
    undo()
    manager.call("scale", X)
    assert heard == ["vendor.acme"]


@pytest.mark.parametrize("ends", ["found", "missed", "raised"])
def test_parameters_named_like_locals_of_dispatch_reach_the_function(
    ends: str,
) -> None:
    def op(_last: Any, _found: Any, _MISS: Any = 3, *, _served: Any = 4, _repeats: Any = 5) -> Any:
        given = (_last, _found, _MISS, _served, _repeats)
        if ends == "raised":
            raise ValueError(given)
        return given if ends == "found" else MISS

    cell, repeats = HandleCell(op), Repeats()
    repeats.last = cell.served.approved = op
    cell.served.repeats = repeats
    cell.served.missed = lambda last, args, kwargs: (*args, *kwargs.values())
    cell.served.failed = lambda asked, args, kwargs, error: (*args, *kwargs.values())
    made = handle("op", inspect.signature(op), cell, lambda: cell.served, lambda *call: None)
    assert made(1, _found=2) == (1, 2, 3, 4, 5)
    assert made(1, 2, 6, _served=7, _repeats=8) == (1, 2, 6, 7, 8)

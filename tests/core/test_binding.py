"""Bound handles: their signature, and that they follow every later change."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import SCALE, StubTensor, impl, make_manager, one_of_each

from transformer_engine_fl import (
    ArgumentError,
    NoImplementationError,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
    set_global_policy,
    with_denied_vendors,
    with_preference,
)

X = StubTensor()


def uncontracted(*fns: Callable[..., Any], **fields: Any) -> OpManager:
    registry = OpRegistry({})
    registry.register_many(
        OpImpl("op", f"impl.{place}", "reference", fn, priority=-place, **fields)  # type: ignore[arg-type]
        for place, fn in enumerate(fns)
    )
    return OpManager(registry, builtins=False, plugins=False)


# ---------------------------------------------------------------------- what a handle is


def test_a_handle_has_the_operators_own_signature_and_documentation() -> None:
    run = make_manager(impl("only", fn=lambda x: "narrow")).bind("scale")
    assert inspect.signature(run) == SCALE.signature
    assert list(inspect.signature(run).parameters) == ["x", "factor", "mode"]
    assert run.__doc__ == SCALE.__doc__
    assert run.__name__ == "scale"


def test_a_handle_of_a_catalogue_operator_shows_its_defaults() -> None:
    run = OpManager(plugins=False).bind("rmsnorm_fwd")
    parameters = inspect.signature(run).parameters
    assert list(parameters) == ["input", "weight", "eps", "zero_centered_gamma", "out_dtype"]
    assert parameters["eps"].default == 1e-5
    assert parameters["out_dtype"].kind is inspect.Parameter.KEYWORD_ONLY
    output, rsigma = run(torch.full((1, 4), 2.0), torch.ones(4), eps=0.0)
    assert output.tolist() == [[1.0] * 4]
    assert rsigma.tolist() == [0.5]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1,), {}, (1, 1.0, "plain")),
        ((1, 2.0), {}, (1, 2.0, "plain")),
        ((), {"x": 1, "factor": 2.0, "mode": "m"}, (1, 2.0, "m")),
        ((1,), {"mode": "m"}, (1, 1.0, "m")),
    ],
)
def test_arguments_arrive_as_they_were_given(
    args: tuple[Any, ...], kwargs: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    def fn(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        return x, factor, mode

    manager = make_manager(impl("only", fn=fn))
    assert manager.bind("scale")(*args, **kwargs) == expected
    assert manager.call("scale", *args, **kwargs) == expected


def test_a_call_that_does_not_fit_the_signature_is_an_error_that_names_the_argument() -> None:
    run = make_manager(impl("only")).bind("scale")
    with pytest.raises(TypeError, match="facter"):
        run(X, facter=2.0)
    with pytest.raises(TypeError, match="x"):
        run()
    with pytest.raises(TypeError):
        run(X, 1.0, "plain")


def test_defaults_are_the_very_objects_of_the_signature() -> None:
    marker = object()

    def fn(x: Any, option: Any = marker) -> Any:
        return option

    assert uncontracted(fn).bind("op")(1) is marker


# -------------------------------------------------------------- changes that it follows


@pytest.mark.parametrize("name", ["scale", "fused_scale"])
def test_a_handle_follows_the_policy(name: str) -> None:
    run = make_manager(*one_of_each()).bind(name)
    assert run(X) == "default.flagos"
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert run(X) == "vendor.acme"
    with with_preference("reference"):
        assert run(X) == "reference.torch"
        set_global_policy(SelectionPolicy(prefer="vendor:zeta"))
        assert run(X) == "reference.torch"
        with with_preference("vendor"), with_denied_vendors("Acme"):
            assert run(X) == "vendor.zeta"
        assert run(X) == "reference.torch"
    assert run(X) == "vendor.zeta"
    set_global_policy(None)
    assert run(X) == "default.flagos"


@pytest.mark.parametrize("name", ["scale", "fused_scale"])
def test_a_handle_follows_registrations(name: str) -> None:
    manager = make_manager()
    run = manager.bind(name)
    with pytest.raises(NoImplementationError):
        run(X)
    manager.registry.register_impl(impl("first"))
    assert run(X) == "first"
    manager.registry.register_impl(impl("second", priority=5))
    assert run(X) == "second"
    with with_preference("impl:first"):
        assert run(X) == "first"
    manager.registry.clear()
    with pytest.raises(NoImplementationError):
        run(X)


def test_a_handle_follows_quarantine_and_monitors() -> None:
    def unwell(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        raise RuntimeError("unwell")

    manager = make_manager(impl("first", priority=9, fn=unwell), impl("second"))
    run = manager.bind("scale")
    assert run(X) == "second"
    seen: list[tuple[str, str]] = []
    undo = manager.monitor(lambda op_name, served: seen.append((op_name, served.impl_id)))
    run(X)
    assert seen == [("scale", "second")]
    undo()
    run(X)
    assert len(seen) == 1


def test_two_handles_of_one_operator_agree() -> None:
    manager = make_manager(*one_of_each())
    first, second = manager.bind("scale"), manager.bind("fused_scale")
    assert first(X) == second(X) == "default.flagos"
    manager.registry.register_impl(impl("best", "flagos", priority=999))
    assert first(X) == second(X) == "best"


def test_a_handle_bound_in_a_block_is_not_tied_to_it() -> None:
    manager = make_manager(*one_of_each())
    with with_preference("reference"):
        run = manager.bind("scale")
        assert run(X) == "reference.torch"
    assert run(X) == "default.flagos"


# ----------------------------------------------------------------- without a contract


def test_the_candidates_signature_is_taken_where_they_agree() -> None:
    def one(a: Any, b: Any = 2, *, c: Any = 3) -> Any:
        return "one", a, b, c

    def two(a: Any, b: Any = 2, *, c: Any = 3) -> Any:
        return "two", a, b, c

    run = uncontracted(one, two).bind("op")
    assert inspect.signature(run) == inspect.signature(one)
    assert run(1) == ("one", 1, 2, 3)
    assert run(1, c=5, b=4) == ("one", 1, 4, 5)


def test_any_arguments_are_passed_on_where_the_candidates_do_not_agree() -> None:
    manager = uncontracted(lambda a, b=1: ("one", a, b), lambda a, *, c=1: ("two", a, c))
    run = manager.bind("op")
    kinds = [it.kind for it in inspect.signature(run).parameters.values()]
    assert kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    assert run(7, b=8) == ("one", 7, 8)
    with with_preference("impl:impl.1"):
        assert run(7, c=8) == ("two", 7, 8)


def test_a_candidate_that_cannot_be_loaded_has_no_say_in_the_signature() -> None:
    def fn(a: Any) -> Any:
        return a

    run = uncontracted("no_such_module_of_ours:fn", fn).bind("op")  # type: ignore[arg-type]
    assert inspect.signature(run) == inspect.signature(fn)
    assert run(3) == 3


LATER: dict[str, tuple[Callable[..., Any], dict[str, Any], Any]] = {
    "an option fewer": (lambda a, *, c: ("later", a, c), {"c": 1}, ("later", 1, 1)),
    "another default": (lambda a, *, c, d=7: ("later", c, d), {"c": 1}, ("later", 1, 7)),
    "a new option": (lambda a, *, c, e=5: ("later", c, e), {"c": 1, "e": 6}, ("later", 1, 6)),
    "the same": (lambda a, *, c, d=4: ("later", c, d), {"c": 1}, ("later", 1, 4)),
}


@pytest.mark.parametrize(("fn", "kwargs", "expected"), LATER.values(), ids=LATER)
def test_a_handle_passes_its_arguments_unchanged_to_a_later_registration(
    fn: Callable[..., Any], kwargs: dict[str, Any], expected: Any
) -> None:
    manager = uncontracted(lambda a, *, c, d=4: ("first", c, d))
    handles = [manager.bind("op"), manager.bind("op")]
    shown = inspect.signature(handles[0])
    for run in handles:
        assert run(1, c=2) == ("first", 2, 4)
    manager.registry.register_impl(OpImpl("op", "later", "reference", fn, priority=9))  # type: ignore[arg-type]
    for run in handles:
        assert run(1, **kwargs) == manager.call("op", 1, **kwargs) == expected
        assert inspect.signature(run) == shown
        with with_preference("impl:impl.0"):
            assert run(1, c=2) == ("first", 2, 4)
    with pytest.raises(TypeError):
        handles[0](1)


def test_a_registration_while_a_handle_is_made_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = uncontracted(lambda a, *, d=4: ("first", d))
    agreed = OpManager._common_signature

    def slow(self: OpManager, name: str) -> inspect.Signature:
        found = agreed(self, name)
        manager.registry.register_impl(
            OpImpl("op", "later", "reference", lambda a: ("later", a), priority=9)  # type: ignore[arg-type]
        )
        return found

    monkeypatch.setattr(OpManager, "_common_signature", slow)
    assert manager.bind("op")(1) == ("later", 1)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "expected"),
    [
        (lambda a, **rest: (a, rest), (1,), {"b": 2}, (1, {"b": 2})),
        (lambda *all_of, c=3, **rest: (all_of, c, rest), (1, 2), {"d": 4}, ((1, 2), 3, {"d": 4})),
        (lambda a, /, b: (a, b), (1,), {"b": 2}, (1, 2)),
        (lambda a, /, **rest: (a, rest), (1,), {"a": 2}, (1, {"a": 2})),
        (lambda a, b=2, /, *, c: (a, b, c), (1,), {"c": 3}, (1, 2, 3)),
        (lambda fn, error=None: (fn, error), (1,), {"error": 2}, (1, 2)),
        (lambda name, cell, scoped: (name, cell, scoped), (1, 2, 3), {}, (1, 2, 3)),
        (lambda a, b=[]: (a, b), (1,), {}, (1, [])),
        (lambda args, kwargs: (args, kwargs), (1, 2), {}, (1, 2)),
    ],
    ids=[
        "kwargs",
        "varargs",
        "positional",
        "same name",
        "named",
        "fn error",
        "our words",
        "unhashable",
        "args kwargs",
    ],
)
def test_every_form_of_signature_can_be_bound(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any
) -> None:
    run = uncontracted(fn).bind("op")
    assert inspect.signature(run) == inspect.signature(fn)
    assert run(*args, **kwargs) == expected
    with with_preference("reference"):
        assert run(*args, **kwargs) == expected


def test_a_callable_without_a_readable_signature_can_be_bound() -> None:
    run = uncontracted(torch.add).bind("op")
    assert run(torch.ones(2), torch.ones(2), alpha=2).tolist() == [3, 3]


def test_a_parameter_named_like_a_word_of_the_handle_survives_a_failure() -> None:
    given = []

    def unwell(fn: Any, error: Any = None) -> Any:
        raise RuntimeError("unwell")

    def well(fn: Any, error: Any = None) -> Any:
        given.append((fn, error))

    uncontracted(unwell, well, mutates=()).bind("op")("f", error="e")
    assert given == [("f", "e")]


@pytest.mark.parametrize("name", ["aten::gelu.out", "lambda", "None", "match", "operator"])
def test_an_operator_can_be_bound_whatever_its_name_is_to_python(name: str) -> None:
    manager = make_manager(impl("only", op_name=name, fn=lambda x: x))
    assert manager.bind(name)(3) == 3


def test_a_handle_names_wrong_arguments_as_a_call_does() -> None:
    def unwell(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        raise RuntimeError("unwell")

    manager = make_manager(impl("only", fn=unwell))
    with pytest.raises(ArgumentError, match="argument 'x' is 3"):
        manager.bind("scale")(3)

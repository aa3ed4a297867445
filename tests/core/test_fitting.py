"""Which signatures fit a contract, which do not, and what follows if one lacks an option."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_faults import contract_of

from transformer_engine_fl import (
    ArgumentError,
    Contract,
    NoImplementationError,
    OpImpl,
    OpManager,
    OpRegistry,
    SignatureMismatchError,
    StrictModeError,
    with_strict_mode,
)


def blend(
    x: Any, y: Any, alpha: float = 0.5, beta: Any = None, *, mode: str = "mean", scale: float = 1.0
) -> Any:
    """The signature that implementations must fit."""


def gather(x: Any, *, index: Any, mode: str = "clamp") -> Any:
    """A contract with a required keyword-only parameter."""


CONTRACTS: dict[str, Contract[..., Any]] = {
    "blend": contract_of(blend),
    "gather": contract_of(gather),
}


def registered(fn: Callable[..., Any] | str, op_name: str = "blend") -> OpManager:
    registry = OpRegistry(CONTRACTS)
    registry.register_impl(OpImpl(op_name, "mine", "reference", fn))  # type: ignore[arg-type]
    return OpManager(registry, builtins=False, plugins=False)


# --------------------------------------------------------------- signatures that are accepted

FITTING: dict[str, Callable[..., Any]] = {
    "the contract's own": blend,
    "fewer options": lambda x, y: None,
    "the first options only": lambda x, y, alpha=0.5: None,
    "some keyword-only options": lambda x, y, *, scale=1.0: None,
    "keyword-only options in another order": lambda x, y, *, scale=1.0, mode="mean": None,
    "a keyword-only option by position": lambda x, y, alpha=0.5, beta=None, mode="mean": None,
    "an extra option at the end": lambda x, y, alpha=0.5, beta=None, stages=2: None,
    "an extra keyword-only option": lambda x, y, *, stages=2: None,
    "options swallowed": lambda x, y, **options: None,
    "positions swallowed": lambda x, y, *args, **options: None,
    "a partial": functools.partial(lambda handle, x, y: None, object()),
}


@pytest.mark.parametrize("fn", FITTING.values(), ids=FITTING)
def test_a_signature_that_any_call_of_the_contract_fits_is_taken(fn: Callable[..., Any]) -> None:
    manager = registered(fn)
    assert manager.get_selected_impl_id("blend") == "mine"
    assert manager.call("blend", 1, 2) is None
    assert manager.call("blend", 1, y=2, alpha=0.5, mode="mean") is None
    assert manager.call("blend", x=1, y=2) is None
    assert manager.call("blend", 1, 2, 0.5, None, scale=1.0) is None


@pytest.mark.parametrize(
    "fn",
    [
        gather,
        lambda x, *, index: None,
        lambda x, index: None,
        lambda x, index, mode="clamp": None,
    ],
)
def test_a_required_keyword_may_also_be_taken_by_position(fn: Callable[..., Any]) -> None:
    assert registered(fn, "gather").call("gather", 1, index=2, mode="clamp") is None


# ---------------------------------------------------------------- signatures that are refused

MISFITS: dict[str, tuple[Callable[..., Any], str]] = {
    "a required parameter is missing": (lambda x: None, r"required parameters are \['x'\]"),
    "a required parameter too many": (
        lambda x, y, z: None,
        r"required parameters are \['x', 'y', 'z'\], the contract has \['x', 'y'\]",
    ),
    "another name": (lambda x, other: None, r"\['x', 'other'\]"),
    "another order": (lambda y, x: None, r"\['y', 'x'\]"),
    "a required parameter with a default": (lambda x, y=None: None, r"\['x'\]"),
    "an option that is required": (lambda x, y, alpha: None, r"\['x', 'y', 'alpha'\]"),
    "only swallowed": (lambda *args, **kwargs: None, r"required parameters are \[\]"),
    "positional-only": (lambda x, y, /: None, "'x' is positional-only"),
    "a required parameter is keyword-only": (
        lambda x, *, y: None,
        "'y' is keyword-only, the contract allows it by position",
    ),
    "options swapped": (
        lambda x, y, beta=None, alpha=0.5: None,
        "position 3 is 'beta', the contract has 'alpha' there",
    ),
    "a stranger between the options": (
        lambda x, y, stages=2, alpha=0.5: None,
        "position 3 is 'stages', the contract has 'alpha' there",
    ),
    "an option skipped": (lambda x, y, beta=None: None, "position 3 is 'beta'"),
    "an option by keyword only": (
        lambda x, y, *, alpha=0.5: None,
        "'alpha' is keyword-only, the contract allows it by position",
    ),
    "another default": (
        lambda x, y, alpha=0.25: None,
        "the default of 'alpha' is 0.25, the contract has 0.5",
    ),
    "another default of a keyword": (
        lambda x, y, *, mode="sum": None,
        "the default of 'mode' is 'sum', the contract has 'mean'",
    ),
    "a default of another type": (
        lambda x, y, *, scale=1: None,
        "the default of 'scale' is 1, the contract has 1.0",
    ),
}


@pytest.mark.parametrize(("fn", "reason"), MISFITS.values(), ids=MISFITS)
def test_a_misfit_is_refused_at_registration_with_both_signatures(
    fn: Callable[..., Any], reason: str
) -> None:
    with pytest.raises(SignatureMismatchError, match=reason) as caught:
        registered(fn)
    text = str(caught.value)
    assert text.startswith("blend/mine: the signature does not fit the contract: ")
    assert "\n  contract       (x: Any, y: Any, alpha: float = 0.5" in text
    assert "\n  implementation (" in text


@pytest.mark.parametrize("fn", [lambda x, *args, index: None, lambda x, *, index: None])
def test_a_required_keyword_is_no_misfit_of_a_keyword(fn: Callable[..., Any]) -> None:
    registered(fn, "gather")


def test_a_callable_without_a_readable_signature_is_refused() -> None:
    with pytest.raises(SignatureMismatchError, match="no readable signature; wrap it") as caught:
        registered(torch.add)
    assert "contract       (x: Any" in str(caught.value)


def manager_with_predicate(supports: Callable[..., Any], op_name: str = "blend") -> OpManager:
    registry = OpRegistry(CONTRACTS)
    fn = blend if op_name == "blend" else gather
    registry.register_impl(OpImpl(op_name, "mine", "reference", fn, supports=supports))  # type: ignore[arg-type]
    return OpManager(registry, builtins=False, plugins=False)


@pytest.mark.parametrize(
    ("supports", "reason"),
    [
        (lambda: True, "too many positional arguments"),
        (lambda x: True, "too many positional arguments"),
        (lambda x, y, z: True, "missing a required argument: 'z'"),
        (lambda x, y, *, stages: True, "missing a required .*argument: 'stages'"),
        (lambda *, x, y: True, "too many positional arguments"),
    ],
)
def test_a_predicate_that_fits_no_call_is_refused_at_registration(
    supports: Callable[..., Any], reason: str
) -> None:
    """Registered, it would decline every call, and only ``explain`` would say so."""
    with pytest.raises(SignatureMismatchError, match=f"and {reason}\n") as caught:
        manager_with_predicate(supports)
    text = str(caught.value)
    assert text.startswith("blend/mine: supports() is called with the operator's arguments, and ")
    assert "\n  contract   (x: Any, y: Any, alpha: float = 0.5" in text
    assert "\n  supports() (" in text


@pytest.mark.parametrize(
    ("op_name", "supports"),
    [
        ("blend", lambda x, y: True),
        ("blend", lambda a, b, *options, **more: True),
        ("blend", lambda *args, **kwargs: True),
        ("blend", lambda x, y, alpha=0.5, beta=None, *, mode="mean", scale=1.0: True),
        ("blend", functools.partial(lambda most, x, y: True, 3)),
        ("gather", lambda x, index: True),
        ("gather", lambda x, *, index: True),
    ],
)
def test_a_predicate_that_fits_the_simplest_call_is_accepted(
    op_name: str, supports: Callable[..., Any]
) -> None:
    call = ((1, 2), {}) if op_name == "blend" else ((1,), {"index": 2})
    assert manager_with_predicate(supports, op_name).call(op_name, *call[0], **call[1]) is None


PREDICATES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "no option": (lambda x, y: {"x": x, "y": y}, {"x": 1, "y": 2}),
    "by other names": (lambda a, b: {"a": a, "b": b}, {"a": 1, "b": 2}),
    "the first option": (lambda x, y, alpha=0.5: {"alpha": alpha}, {"alpha": 0.25}),
    "a later option": (lambda x, y, beta=None: {"beta": beta}, {"beta": 3}),
    "options in another order": (
        lambda x, y, beta=None, alpha=0.5: {"alpha": alpha, "beta": beta},
        {"alpha": 0.25, "beta": 3},
    ),
    "an option by keyword": (lambda x, y, *, beta=None: {"beta": beta}, {"beta": 3}),
    "positions swallowed": (lambda x, y, *rest: {"rest": rest}, {"rest": (0.25, 3)}),
    "keywords swallowed": (
        lambda x, y, **rest: rest,
        {"alpha": 0.25, "beta": 3, "mode": "sum", "scale": 2.0},
    ),
    "everything": (
        lambda x, y, alpha=0.5, beta=None, *, mode="mean", scale=1.0: {"x": x, "scale": scale},
        {"x": 1, "scale": 2.0},
    ),
}


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(("names", "received"), PREDICATES.values(), ids=PREDICATES)
def test_a_predicate_receives_the_options_that_it_names(
    names: Callable[..., Any], received: dict[str, Any], bound: bool
) -> None:
    asked: list[dict[str, Any]] = []

    @functools.wraps(names)
    def supports(*args: Any, **kwargs: Any) -> bool:
        asked.append(names(*args, **kwargs))
        return True

    manager = manager_with_predicate(supports)
    run = manager.bind("blend") if bound else functools.partial(manager.call, "blend")
    run(1, 2, 0.25, 3, mode="sum", scale=2.0)
    assert asked == [received]
    if not bound and "rest" not in received:
        asked.clear()
        run(1, y=2, alpha=0.25, beta=3, mode="sum", scale=2.0)
        assert asked == [received]
        assert manager.explain("blend", 1, 2, 0.25, beta=3, mode="sum", scale=2.0).selected
        assert asked == [received] * 2


def test_an_unsupported_option_declines_before_the_predicate_is_called() -> None:
    asked: list[Any] = []
    registry = OpRegistry(CONTRACTS)
    registry.register_many(
        [
            OpImpl("blend", "mine", "reference", narrow, supports=lambda x, y: asked.append(x)),  # type: ignore[arg-type,func-returns-value]
            OpImpl("blend", "other", "reference", full, priority=-1),  # type: ignore[arg-type]
        ]
    )
    manager = OpManager(registry, builtins=False, plugins=False)
    assert manager.bind("blend")(1, 2, 0.25)[0] == "full"
    assert not asked


def test_without_a_contract_any_signature_is_taken() -> None:
    assert registered(lambda a, /, *b, **c: a, "acme_op").call("acme_op", 1, 2, c=3) == 1
    assert registered(math.hypot, "acme_op").call("acme_op", 3, 4) == 5.0


# ----------------------------------------------------------------- imported when first chosen


@pytest.fixture
def late_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "late_blend.py").write_text(
        "def fits(x, y, alpha=0.5):\n    return 'late'\ndef misfit(x, z):\n    return 'misfit'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "late_blend"


def test_a_misfit_named_by_a_string_is_a_rejection_with_both_signatures(late_module: str) -> None:
    manager = registered(f"{late_module}:misfit")
    manager.registry.register_impl(
        OpImpl("blend", "other", "reference", lambda x, y: "other", priority=-1)  # type: ignore[arg-type]
    )
    assert manager.call("blend", 1, 2) == "other"
    verdict = manager.explain("blend").verdicts[0]
    assert (verdict.impl.impl_id, verdict.accepted, verdict.cause) == ("mine", False, "available")
    for part in ("does not fit the contract", "contract       (x: Any", "implementation (x, z)"):
        assert part in verdict.reason
    with with_strict_mode(), pytest.raises(StrictModeError, match="does not fit the contract"):
        manager.call("blend", 1, 2)


def test_a_string_is_imported_when_first_chosen_and_not_before(
    late_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.delitem(sys.modules, late_module, raising=False)
    manager = registered(f"{late_module}:fits")
    assert late_module not in sys.modules
    assert manager.call("blend", 1, 2) == "late"
    assert late_module in sys.modules


# ----------------------------------------------- options that an implementation does not name


def narrow(x: Any, y: Any) -> Any:
    return "narrow", x, y


def swallowing(x: Any, y: Any, **options: Any) -> Any:
    return "swallowing", x, y, options


def full(
    x: Any, y: Any, alpha: float = 0.5, beta: Any = None, *, mode: str = "mean", scale: float = 1.0
) -> Any:
    return "full", x, y, alpha, beta, mode, scale


def two(first: Callable[..., Any], second: Callable[..., Any] = full) -> OpManager:
    manager = registered(first)
    manager.registry.register_impl(
        OpImpl("blend", "second", "reference", second, priority=-1)  # type: ignore[arg-type]
    )
    return manager


BEYOND: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((1, 2, 0.25), {}, "alpha"),
    ((1, 2), {"alpha": 0.25}, "alpha"),
    ((1, 2, 0.5, 3), {}, "beta"),
    ((1, 2), {"mode": "sum"}, "mode"),
    ((1, 2), {"scale": 1}, "scale"),
    ((1, 2), {"beta": torch.ones(2)}, "beta"),
]


@pytest.mark.parametrize("first", [narrow, swallowing])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(("args", "kwargs", "option"), BEYOND)
def test_an_option_that_is_not_named_counts_as_unsupported(
    first: Callable[..., Any],
    bound: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    option: str,
) -> None:
    manager = two(first)
    run = manager.bind("blend") if bound else functools.partial(manager.call, "blend")
    assert run(*args, **kwargs)[0] == "full"
    verdict = manager.explain("blend", *args, **kwargs).verdicts[0]
    assert (verdict.impl.impl_id, verdict.cause) == ("mine", "option")
    assert f"does not support the option {option!r}" in verdict.reason
    assert not manager.quarantine.held()


class Unreadable(torch.Tensor):
    """A tensor whose elements cannot be read, as on a device while a graph is captured."""

    def __repr__(self) -> str:  # type: ignore[override]
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("value", [Unreadable(), [Unreadable()]])
def test_an_option_that_is_not_named_is_reported_without_reading_a_tensor(value: Any) -> None:
    manager = two(narrow)
    assert manager.call("blend", 1, 2, beta=value)[0] == "full"
    said = manager.explain("blend", 1, 2, beta=value).verdicts[0].reason
    assert said.endswith(f"does not support the option 'beta' (got {type(value).__name__})")


@pytest.mark.parametrize("first", [narrow, swallowing])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2), {}),
        ((1, 2, 0.5), {}),
        ((1, 2, 0.5, None), {"mode": "mean", "scale": 1.0}),
        ((1,), {"y": 2, "alpha": 0.5}),
    ],
)
def test_the_default_of_an_option_that_is_not_named_is_supported_and_not_passed_on(
    first: Callable[..., Any], bound: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    manager = two(first)
    run = manager.bind("blend") if bound else functools.partial(manager.call, "blend")
    assert run(*args, **kwargs) == first(1, 2)


def test_the_error_names_an_option_that_no_implementation_supports() -> None:
    manager = two(narrow, swallowing)
    with pytest.raises(NoImplementationError) as caught:
        manager.call("blend", 1, 2, mode="sum")
    assert str(caught.value).count("does not support the option 'mode' (got str 'sum')") == 2


def test_what_is_named_is_passed_on_and_only_that() -> None:
    def some(x: Any, y: Any, alpha: float = 0.5, *, scale: float = 1.0) -> Any:
        return x, y, alpha, scale

    manager = two(some)
    assert manager.call("blend", 1, 2, 0.1, None, mode="mean", scale=3.0) == (1, 2, 0.1, 3.0)


# ------------------------------------------------------- calls that do not fit the contract


@pytest.mark.parametrize("first", [narrow, swallowing, full])
def test_a_misspelt_argument_is_named_with_the_one_that_is_missing(
    first: Callable[..., Any],
) -> None:
    manager = two(first, narrow)
    said = r"^blend: argument 'yy' is not a parameter, and 'y' is missing; did you mean 'y'\?"
    with pytest.raises(ArgumentError, match=said):
        manager.call("blend", 1, yy=2)
    with pytest.raises(ArgumentError, match=said):
        CONTRACTS["blend"].check(1, yy=2)
    assert not manager.quarantine.held()


def test_an_operator_object_names_a_misspelt_argument() -> None:
    from transformer_engine_fl import ops

    said = r"^rmsnorm_fwd: argument 'wieght' is not a parameter, and 'weight' is missing"
    with pytest.raises(ArgumentError, match=said):
        ops.rmsnorm_fwd(torch.ones(2, 4), wieght=torch.ones(4))  # type: ignore[call-arg]


SURPLUS: list[tuple[Any, ...]] = [(1, 2, 0.5, None, "mean"), (1, 2, 0.5, None, "sum", 1.0, 42)]
"""Keyword-only options passed by position: a default value; other values, and one too many."""


@pytest.mark.parametrize("args", SURPLUS)
@pytest.mark.parametrize("first", [narrow, swallowing])
def test_a_surplus_positional_argument_is_an_argument_error_for_any_candidate(
    first: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    manager = two(first)
    said = f"^blend: argument '#5' is one too many: {len(args)} positional arguments were passed"
    with pytest.raises(ArgumentError, match=said):
        manager.call("blend", *args)
    with pytest.raises(ArgumentError, match=said):
        manager.resolve("blend", *args)
    with pytest.raises(ArgumentError, match=said):
        manager.resolve("blend", 1, 2)(*args)
    decision = manager.explain("blend", *args)
    assert decision.note == "the arguments break the contract"
    assert [it.cause for it in decision.verdicts] == ["arguments"] * 2
    assert not manager.quarantine.held()

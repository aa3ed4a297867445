"""Strict mode: the first candidate that the policy admits must serve."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_faults import GUARDS, ROUTES, Kernel, KernelError, arrive, in_quarantine, world

import transformer_engine_fl.core.manager as manager_module
from transformer_engine_fl import (
    ArgumentError,
    NotSupportedError,
    OpImpl,
    OpManager,
    PartialMutationError,
    SelectionPolicy,
    StrictModeError,
    policy_context,
    reset_global_policy,
    set_global_policy,
    with_strict_mode,
)

UNABLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "probe": ({"is_available": lambda: "no driver"}, "available", "no driver"),
    "device": ({"devices": ("cuda",)}, "device", "'cpu' is not supported; supported: cuda"),
    "dtype": (
        {"supported_dtypes": ("bfloat16",)},
        "dtype",
        "'float32' is not supported; supported: bfloat16",
    ),
    "arch": ({"min_arch": "sm_90"}, "arch", "needs architecture sm_90"),
    "predicate": ({"supports": lambda *args, **kwargs: "odd length"}, "supports", "odd length"),
    "import": ({"fn": "no_such_module_of_ours:fn"}, "available", "cannot import"),
}
"""What stops the first candidate: the fields of its OpImpl, then the verdict's cause and reason."""

FAILURES: dict[str, tuple[Callable[[], Exception], str]] = {
    "fault": (lambda: KernelError("kernel"), "failed: KernelError: kernel"),
    "decline": (lambda: NotSupportedError("odd"), "declined: NotSupportedError: odd"),
}

every_way = pytest.mark.parametrize(
    ("route", "guarded"), [*itertools.product(ROUTES, GUARDS)], ids=str
)


def ones() -> torch.Tensor:
    return torch.ones(4)


def with_first(second: Kernel, **fields: Any) -> OpManager:
    """A manager in which implementation ``first``, with these fields, ranks before ``impl.0``."""
    manager = world("scale", second)
    fields = {"fn": Kernel()} | fields
    manager.registry.register_impl(
        OpImpl("scale", "first", kind="vendor", vendor="acme", priority=9, **fields)  # type: ignore[arg-type]
    )
    return manager


@pytest.mark.parametrize("obstacle", UNABLE)
@pytest.mark.parametrize("route", ROUTES)
def test_a_first_candidate_that_cannot_serve_is_an_error_with_the_decision(
    obstacle: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, cause, reason = UNABLE[obstacle]
    second = Kernel()
    manager = with_first(second, **fields)
    monkeypatch.setattr(manager_module, "_default", manager)
    with with_strict_mode(), pytest.raises(StrictModeError, match="scale") as caught:
        arrive(manager, "scale", route)(ones())
    first, other = caught.value.decision.verdicts
    assert (first.impl.impl_id, first.accepted, first.cause) == ("first", False, cause)
    assert reason in first.reason
    assert (other.accepted, other.cause) == (False, "policy")
    assert "only the first candidate, 'first', may serve (with block)" in other.reason
    assert str(caught.value.decision) in str(caught.value)
    assert second.runs == 0
    arrive(manager, "scale", route)(ones())
    assert second.runs == 1, "outside the block the next one serves"


@every_way
@pytest.mark.parametrize("failure", FAILURES)
def test_a_first_candidate_that_fails_is_an_error_with_the_decision(
    failure: str, route: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, reason = FAILURES[failure]
    first, second = Kernel(make), Kernel()
    manager = world("scale", first, second, guarded=guarded)
    monkeypatch.setattr(manager_module, "_default", manager)
    with with_strict_mode(), pytest.raises(StrictModeError) as caught:
        arrive(manager, "scale", route)(ones())
    assert caught.value.decision.verdicts[0].reason.startswith(reason)
    assert isinstance(caught.value.__cause__, type(make()))
    assert (first.runs, second.runs) == (1, 0)


@every_way
def test_the_callers_mistake_and_half_written_data_keep_their_own_errors(
    route: str, guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Kernel(lambda: KernelError("kernel"), in_place=True), Kernel(in_place=True)
    manager = world("scale_", first, second, guarded=guarded)
    monkeypatch.setattr(manager_module, "_default", manager)
    with with_strict_mode():
        run = arrive(manager, "scale_", route)
        with pytest.raises(ArgumentError):
            run(torch.ones(2, 2))
        with pytest.raises(PartialMutationError):
            run(ones())
    assert second.runs == 0
    assert not in_quarantine(manager)


def test_an_operator_that_the_preferred_kind_does_not_implement_is_served_by_the_next() -> None:
    kernel = Kernel()
    manager = world("scale", kernel, kind="reference")
    for prefer in ("flagos", "vendor", "vendor:acme", "impl:first"):
        with policy_context(prefer=prefer, strict=True):
            manager.call("scale", ones())
    assert kernel.runs == 4


def test_what_the_policy_rejects_is_not_the_first_candidate() -> None:
    kernel = Kernel()
    manager = with_first(kernel, is_available=lambda: False)
    with policy_context(deny_vendors=["acme"], strict=True):
        manager.call("scale", ones())
    with policy_context(require=["traceable"], strict=True):
        manager.call("scale", ones())
    with policy_context(per_op_order={"scale": ["reference"]}, strict=True):
        manager.call("scale", ones())
    assert kernel.runs == 3


@pytest.mark.parametrize("source", ["TE_FL_STRICT", "set_global_policy"])
def test_the_environment_and_the_global_policy_can_require_strict_mode(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    manager = with_first(kernel, is_available=lambda: False)
    if source == "set_global_policy":
        set_global_policy(SelectionPolicy(strict=True))
    else:
        monkeypatch.setenv("TE_FL_STRICT", "1")
        reset_global_policy()
    with pytest.raises(StrictModeError, match=source):
        manager.call("scale", ones())
    with with_strict_mode(False):
        manager.call("scale", ones())
    assert kernel.runs == 1


def test_a_first_candidate_that_serves_is_no_error() -> None:
    first, second = Kernel(), Kernel()
    manager = world("scale", first, second, guarded=True)
    with with_strict_mode():
        manager.call("scale", ones())
    assert (first.runs, second.runs) == (1, 0)

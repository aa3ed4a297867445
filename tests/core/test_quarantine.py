"""Quarantine: what it covers, what clears it, and that it keeps nothing alive."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from core_faults import GUARDS, ROUTES, Kernel, KernelError, arrive, in_quarantine, world
from torch.testing._internal.two_tensor import TwoTensor

import transformer_engine_fl.core.manager as manager_module
from transformer_engine_fl import (
    NotSupportedError,
    OpImpl,
    OpManager,
    PartialMutationError,
    SelectionPolicy,
    policy_context,
    reset_global_policy,
    set_global_policy,
    with_preference,
    with_strict_mode,
)


def ones(dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.ones(4, dtype=dtype, device=device)


class Unwell:
    """A kernel that fails for tensors for which ``ill`` is true."""

    def __init__(self, ill: Callable[[torch.Tensor], bool] = lambda x: True) -> None:
        self.ill = ill
        self.runs = 0

    def __call__(self, x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
        self.runs += 1
        if self.ill(x):
            raise KernelError("unwell")
        return x * factor


@pytest.mark.parametrize("guarded", GUARDS)
def test_it_covers_one_operator_implementation_device_and_dtype(guarded: bool) -> None:
    first, second = Unwell(lambda x: x.dtype is torch.bfloat16), Kernel()
    manager = world("scale", first, second, guarded=guarded)
    for _ in range(3):
        manager.call("scale", ones(torch.bfloat16))
    assert (first.runs, second.runs) == (1, 3)
    assert in_quarantine(manager) == {("scale", "impl.0", "cpu", "bfloat16")}
    manager.call("scale", ones(torch.float16))
    manager.call("scale", ones(torch.bfloat16, "meta"))  # tried, and fails: another device
    manager.call("scale", ones(torch.float16, "meta"))
    assert (first.runs, second.runs) == (4, 4)
    assert in_quarantine(manager) == {
        ("scale", "impl.0", "cpu", "bfloat16"),
        ("scale", "impl.0", "meta", "bfloat16"),
    }


def test_the_same_implementation_serves_other_operators_and_other_managers() -> None:
    first = Unwell()
    manager = world("scale", first, Kernel())
    manager.registry.register_impl(OpImpl("other", "impl.0", "reference", first, mutates=()))  # type: ignore[arg-type]
    manager.registry.register_impl(OpImpl("other", "impl.1", "reference", Kernel(), priority=-1))  # type: ignore[arg-type]
    manager.call("scale", ones())
    manager.call("other", ones())
    OpManager(manager.registry, builtins=False, plugins=False).call("scale", ones())
    assert first.runs == 3


@pytest.mark.parametrize("guarded", GUARDS)
@pytest.mark.parametrize("route", ROUTES)
def test_one_warning_names_the_failure_its_reason_and_the_fallback(
    route: str,
    guarded: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = world("scale", Unwell(), Kernel(), guarded=guarded)
    monkeypatch.setattr(manager_module, "_default", manager)
    for _ in range(5):
        arrive(manager, "scale", route)(ones())
    said = [it.getMessage() for it in caplog.records if it.levelno == logging.WARNING]
    assert len(said) == 1
    for part in ("scale", "impl.0", "KernelError: unwell", "reset_quarantine()", "impl.1"):
        assert part in said[0]


def batched_gradients(call: Callable[[torch.Tensor], Any]) -> None:
    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            call(grad)
            return grad

    x = ones().requires_grad_()
    grads = torch.ones(3, *x.shape)
    torch.autograd.grad(Asking.apply(x), x, grads, is_grads_batched=True)


UNUSUAL: dict[str, Callable[[Callable[[torch.Tensor], Any]], Any]] = {
    "sparse": lambda call: call(ones().to_sparse()),
    "a subclass": lambda call: call(TwoTensor(ones(), ones())),
    "vmap": lambda call: torch.vmap(call)(torch.ones(3, 4)),
    "a batch of gradients": batched_gradients,
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_fault_on_an_unusual_tensor_quarantines_nothing(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager = world("scale", Unwell(), Kernel())
    writing = world("scale_", Unwell())
    UNUSUAL[kind](lambda x: manager.call("scale", x))
    with pytest.raises(PartialMutationError):
        UNUSUAL[kind](lambda x: writing.call("scale_", x))
    assert not in_quarantine(manager) | in_quarantine(writing)
    assert "'impl.0' failed" in caplog.text
    assert "reset_quarantine" not in caplog.text
    manager.call("scale", ones())
    assert in_quarantine(manager)


def test_explain_shows_it_for_such_tensors_and_only_for_them() -> None:
    manager = world("scale", Unwell(), Kernel())
    manager.call("scale", ones())
    verdict = manager.explain("scale", ones()).verdicts[0]
    assert (verdict.accepted, verdict.cause) == (False, "quarantine")
    assert verdict.reason.startswith("in quarantine after a fault: KernelError: unwell")
    assert manager.explain("scale", ones(torch.float64)).verdicts[0].accepted


def test_a_with_block_neither_scopes_nor_clears_it() -> None:
    first, second = Unwell(), Kernel()
    manager = world("scale", first, second)
    with with_preference("reference"):
        manager.call("scale", ones())
    manager.call("scale", ones())
    with policy_context(deny_vendors=["acme"]), with_preference("impl:impl.0"):
        manager.call("scale", ones())
    assert (first.runs, second.runs) == (1, 3)


def register_another(manager: OpManager) -> None:
    manager.registry.register_impl(
        OpImpl("scale", "another", "reference", Kernel(), priority=-9)  # type: ignore[arg-type]
    )


CLEARED_BY: dict[str, Callable[[OpManager], object]] = {
    "set_global_policy": lambda manager: set_global_policy(SelectionPolicy(prefer="reference")),
    "reset_global_policy": lambda manager: reset_global_policy(),
    "reset_quarantine": OpManager.reset_quarantine,
    "a new registration": register_another,
}


@pytest.mark.parametrize("clear", CLEARED_BY.values(), ids=CLEARED_BY)
@pytest.mark.parametrize("route", ROUTES)
def test_it_is_cleared_and_the_implementation_tried_again(
    route: str, clear: Callable[[OpManager], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Unwell(), Kernel()
    manager = world("scale", first, second)
    monkeypatch.setattr(manager_module, "_default", manager)
    run = arrive(manager, "scale", "call" if route == "pin" else route)
    run(ones())
    run(ones())
    assert (first.runs, second.runs) == (1, 2)
    clear(manager)
    assert not in_quarantine(manager)
    first.ill = lambda x: False
    if route == "pin":
        run = arrive(manager, "scale", route)
    run(ones())
    assert (first.runs, second.runs) == (2, 2)


def test_a_registration_of_another_operator_does_not_clear_it() -> None:
    first = Unwell()
    manager = world("scale", first, Kernel())
    manager.call("scale", ones())
    manager.registry.register_impl(OpImpl("other", "impl.0", "reference", Kernel()))  # type: ignore[arg-type]
    manager.call("scale", ones())
    assert first.runs == 1
    assert in_quarantine(manager) == {("scale", "impl.0", "cpu", "float32")}


@pytest.mark.parametrize("op_name", ["scale", "scale_"])
def test_the_last_one_that_is_left_is_not_set_aside(op_name: str) -> None:
    first, second = Unwell(), Unwell()
    manager = world(op_name, first, second)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="unwell"):
            manager.call(op_name, ones())
    writes = op_name == "scale_"
    assert in_quarantine(manager) == ({("scale_", "impl.0", "cpu", "float32")} if writes else set())
    assert (first.runs, second.runs) == ((1, 2) if writes else (3, 3))
    second.ill = lambda x: False
    manager.call(op_name, ones())


def test_a_partial_mutation_error_names_the_next_implementation() -> None:
    manager = world("scale_", Unwell(), Kernel())
    with pytest.raises(PartialMutationError) as caught:
        manager.call("scale_", ones())
    verdicts = caught.value.decision.verdicts
    assert [it.cause for it in verdicts] == ["failed", ""]
    said = str(caught.value)
    assert "The next call like this will use 'impl.1'" in said
    assert "reset_quarantine()" in said
    assert "'impl.0' serves" not in said
    assert manager.explain("scale_", ones()).verdicts[0].reason.endswith("reset_quarantine()")


def test_the_error_of_the_only_candidate_says_that_it_is_used_again() -> None:
    with pytest.raises(PartialMutationError) as caught:
        world("scale_", Unwell()).call("scale_", ones())
    assert "The next call like this will use 'impl.0' again" in str(caught.value)
    assert "'impl.0' serves" not in str(caught.value)


def test_an_error_that_ends_the_call_notes_the_failure_before_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = world("scale", Unwell(), Kernel(torch.OutOfMemoryError), Kernel())
    with pytest.raises(torch.OutOfMemoryError) as caught:
        manager.call("scale", ones())
    (note,) = caught.value.__notes__
    assert note.startswith(
        "scale: 'impl.0', tried before 'impl.1', failed: KernelError: unwell (at "
    )
    (said,) = [it.getMessage() for it in caplog.records]
    assert "'impl.0' failed (KernelError: unwell" in said
    assert said.endswith("'impl.1', tried next, ended the call with OutOfMemoryError")
    assert in_quarantine(manager) == {("scale", "impl.0", "cpu", "float32")}


def test_a_predicate_that_ends_the_call_does_not_hide_the_failure_before_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_memory(x: Any, factor: float = 2.0, *, mode: str = "plain") -> bool:
        raise MemoryError

    manager = world("scale", Unwell())
    second = OpImpl("scale", "impl.1", "reference", Kernel(), priority=-1, supports=no_memory)
    manager.registry.register_impl(second)
    with pytest.raises(MemoryError) as caught:
        manager.call("scale", ones())
    (note,) = caught.value.__notes__
    assert note.startswith("scale: 'impl.0', tried before 'impl.1', failed: KernelError: unwell")
    assert "'impl.0' failed (KernelError: unwell" in caplog.text
    assert in_quarantine(manager) == {("scale", "impl.0", "cpu", "float32")}


def test_what_if_knows_the_quarantine_of_the_device_and_dtype_asked_for() -> None:
    manager = world("scale", Unwell(), Kernel())
    manager.call("scale", ones())
    for device, served in (("cpu", "impl.1"), ("cuda", "impl.0")):
        selected = manager.explain_for("scale", device=device, dtype="float32").selected
        assert selected is not None
        assert selected.impl_id == served


def test_a_reset_without_anything_to_reset_compiles_nothing_again() -> None:
    manager = world("scale", Unwell(), Kernel())
    epoch = manager.epoch
    manager.reset_quarantine()
    assert manager.epoch == epoch
    manager.call("scale", ones())
    epoch = manager.epoch
    manager.reset_quarantine()
    assert manager.epoch != epoch


def test_a_failure_without_quarantine_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Fickle(Unwell):
        def __call__(self, x: Any, factor: float = 2.0, *, mode: str = "plain") -> Any:
            self.runs += 1
            raise (TypeError if self.runs > 3 else KernelError)(f"unwell {self.runs}")

    manager = world("scale", Fickle(), Kernel())
    for runs in range(1, 6):
        manager.call("scale", ones().to_sparse())
        assert len(caplog.records) == (1 if runs < 4 else 2)


def test_strict_mode_neither_reads_nor_writes_it() -> None:
    first, second = Unwell(), Kernel()
    manager = world("scale", first, second)
    with with_strict_mode(), pytest.raises(RuntimeError, match="strict"):
        manager.call("scale", ones())
    assert not in_quarantine(manager), "not written"
    manager.call("scale", ones())
    assert in_quarantine(manager)
    first.ill = lambda x: False
    with with_strict_mode():
        manager.call("scale", ones())
        assert manager.explain("scale", ones()).verdicts[0].accepted, "not read"
    assert (first.runs, second.runs) == (3, 1)
    assert in_quarantine(manager), "and not cleared"


def test_the_reason_is_kept_as_text_of_bounded_length() -> None:
    def talkative() -> Exception:
        return KernelError("x" * 100_000)

    manager = world("scale", Kernel(talkative), Kernel())
    manager.call("scale", ones())
    (reason,) = manager.quarantine.held().values()
    assert isinstance(reason, str)
    assert len(reason) < 1000


# ----------------------------------------------------------------- nothing is kept alive


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Without garbage collection, objects in a reference cycle stay alive, and a test sees it."""
    gc.disable()
    yield
    gc.enable()


def wrong_dimensions() -> torch.Tensor:
    return torch.ones(2, 2)


AFTERMATHS: dict[str, tuple[str, Callable[[], Exception], Callable[[], torch.Tensor]]] = {
    "recovered": ("scale", lambda: KernelError("kernel"), ones),
    "declined": ("scale", lambda: NotSupportedError("kernel"), ones),
    "half written": ("scale_", lambda: KernelError("kernel"), ones),
    "out of memory": ("scale", type("Oom", (torch.OutOfMemoryError,), {}), ones),
    "wrong arguments": ("scale", lambda: KernelError("kernel"), wrong_dimensions),
}


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("guarded", GUARDS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("all_fail", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("aftermath", AFTERMATHS)
def test_no_tensor_and_no_exception_outlives_the_call_and_its_error(
    aftermath: str,
    strict: bool,
    all_fail: bool,
    route: str,
    guarded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op_name, make, tensor = AFTERMATHS[aftermath]
    raised: list[weakref.ref[Exception]] = []

    def fault() -> Exception:
        error = make()
        raised.append(weakref.ref(error))
        return error

    second = Kernel(fault if all_fail else None, in_place=op_name == "scale_")
    manager = world(op_name, Kernel(fault), second, guarded=guarded)
    monkeypatch.setattr(manager_module, "_default", manager)
    x = tensor()
    given = weakref.ref(x)
    with policy_context(strict=strict):
        run = arrive(manager, op_name, route)
        try:
            run(x)
        except Exception as error:  # noqa: BLE001 - what is left of any of them is the question
            raised.append(weakref.ref(error))
    del x
    assert raised
    assert [it() for it in raised] == [None] * len(raised)
    assert given() is None

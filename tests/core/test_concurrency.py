"""Sixteen threads at once: every call sees a policy that was in force, and caches stay small."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_helpers import StubTensor, answering, impl, make_manager, one_of_each, slowly

from transformer_engine_fl import (
    OpManager,
    OpRegistry,
    SelectionPolicy,
    policy_context,
    set_global_policy,
    with_preference,
)
from transformer_engine_fl.core import discovery
from transformer_engine_fl.core import manager as manager_module
from transformer_engine_fl.core import registry as registry_module
from transformer_engine_fl.core.policy import active_scope

THREADS = 16
X = StubTensor()


def together(*jobs: Callable[[], object]) -> None:
    """Run each job in a thread of its own, all from the same moment; the first error is raised."""
    start = threading.Barrier(len(jobs))
    errors: list[BaseException] = []

    def run(job: Callable[[], object]) -> None:
        try:
            start.wait(30)
            job()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def repeat(count: int, fn: Callable[..., object]) -> Callable[[], None]:
    def job() -> None:
        for place in range(count):
            fn(place)

    return job


def test_registering_switching_policy_and_calling_at_once() -> None:
    manager = make_manager(*one_of_each())
    run = manager.bind("scale")
    serving = {"flagos": "default.flagos", "reference": "reference.torch"}

    def register(job: int) -> Callable[[int], object]:
        def one(place: int) -> None:
            known = manager.registry
            known.register_impl(impl(f"late.{job}.{place}", priority=-1 - place))
            known.register_impl(impl("only", op_name=f"op_{job}_{place}"))
            assert manager.call(f"op_{job}_{place}", X) == "only"

        return one

    def switch(place: int) -> None:
        set_global_policy(SelectionPolicy(prefer=("flagos", "reference")[place % 2]))

    def block(prefer: str, expected: str) -> Callable[[int], object]:
        def one(place: int) -> None:
            with with_preference(prefer):
                assert manager.call("scale", X) == run(X) == expected
                with with_preference("reference"):
                    assert run(X) == manager.call("fused_scale", X) == "reference.torch"
                assert manager.pin("scale")(X) == expected

        return one

    def call(place: int) -> None:
        assert manager.call("scale", X) in serving.values()
        assert run(X) in serving.values()
        assert manager.explain("scale", X).selected is not None

    together(
        *(repeat(25, register(job)) for job in range(4)),
        *(repeat(100, switch) for _ in range(3)),
        *(repeat(100, block("vendor:zeta", "vendor.zeta")) for _ in range(3)),
        *(repeat(100, call) for _ in range(6)),
    )
    assert len(manager.registry.get_implementations("scale")) == 4 + 4 * 25
    assert len(manager.registry.list_operators()) == 1 + 4 * 25


def test_implementations_that_fail_in_many_threads_are_set_aside_once_and_for_all() -> None:
    def unwell(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        raise RuntimeError("unwell")

    manager = make_manager(impl("first", "flagos", fn=unwell), impl("second"))
    run = manager.bind("scale")

    def job(place: int) -> None:
        assert manager.call("scale", X) == run(X) == "second"
        assert manager.explain("scale", X).verdicts[0].cause == "quarantine"

    together(*(repeat(20, job) for _ in range(THREADS)))


def test_a_failure_in_many_threads_at_once_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    barrier = threading.Barrier(THREADS)

    def unwell(x: Any, factor: float = 1.0, *, mode: str = "plain") -> Any:
        barrier.wait(30)
        raise RuntimeError("unwell")

    manager = make_manager(impl("first", "flagos", fn=unwell), impl("second"))

    def job(place: int) -> None:
        assert manager.call("scale", X) == "second"

    for warned in (1, 2):
        together(*(repeat(1, job) for _ in range(THREADS)))
        assert len([it for it in caplog.records if "unwell" in it.getMessage()]) == warned
        manager.reset_quarantine()


def in_lock_step(change: Callable[[int], str], look: Callable[[], set[str]]) -> None:
    """Assert that after each change the next call of every thread sees it."""
    barrier = threading.Barrier(THREADS)
    expected = [""]

    def step(leader: bool) -> Callable[[int], None]:
        def one(place: int) -> None:
            if leader:
                expected[0] = change(place)
            barrier.wait(30)
            try:
                assert look() == {expected[0]}
            except BaseException:
                barrier.abort()
                raise
            barrier.wait(30)

        return one

    together(*(repeat(40, step(leader)) for leader in (True, *[False] * (THREADS - 1))))


def everywhere(manager: OpManager) -> Callable[[], set[str]]:
    run = manager.bind("scale")

    def look() -> set[str]:
        found = {manager.call("scale", X), run(X), manager.pin("scale")(X)}
        with policy_context(require=()):  # requires nothing, but the scope has plans of its own
            found |= {manager.call("scale", X), run(X)}
        return found

    return look


@pytest.mark.parametrize("guarded", [False, True])
def test_a_policy_change_is_seen_by_the_next_call_in_every_thread(guarded: bool) -> None:
    fields = {"devices": ("cpu",)} if guarded else {}
    manager = make_manager(impl("a", "flagos", **fields), impl("b", **fields))

    def change(place: int) -> str:
        set_global_policy(SelectionPolicy(prefer=("flagos", "reference")[place % 2]))
        return "ab"[place % 2]

    in_lock_step(change, everywhere(manager))


@pytest.mark.parametrize("guarded", [False, True])
def test_a_registration_is_seen_by_the_next_call_in_every_thread(guarded: bool) -> None:
    fields = {"devices": ("cpu",)} if guarded else {}
    manager = make_manager(impl("impl.start", **fields))

    def change(place: int) -> str:
        manager.registry.register_impl(impl(f"impl.{place}", priority=1 + place, **fields))
        return f"impl.{place}"

    in_lock_step(change, everywhere(manager))


@pytest.mark.parametrize("bound", [False, True])
def test_what_was_built_while_the_policy_changed_is_not_kept(bound: bool) -> None:
    """The availability check that a plan calls while it is built changes the policy."""

    def probe() -> bool:
        set_global_policy(SelectionPolicy(prefer="reference"))
        return True

    manager = make_manager(impl("a", "flagos", is_available=probe), impl("b"))
    call = functools.partial(manager.call, "scale")
    run = manager.bind("scale") if bound else call
    call(X)
    assert run(X) == "b"


def test_sixteen_threads_that_come_first_start_a_manager_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(discovery, "find_sources", slowly(discovery.find_sources, calls))
    manager = OpManager(OpRegistry(), plugins=False)
    together(*([functools.partial(manager.get_selected_impl_id, "rmsnorm_fwd")] * THREADS))
    assert len(calls) == 1
    impls = manager.registry.get_implementations("rmsnorm_fwd")
    assert [it.impl_id for it in impls].count("reference.torch") == 1
    assert len(manager.plugins) == len({report.name for report in manager.plugins})


def test_sixteen_threads_that_come_first_share_one_default_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformer_engine_fl import get_default_manager

    monkeypatch.setattr(manager_module, "OpManager", slowly(OpManager, []))
    found = []
    together(*([lambda: found.append(get_default_manager())] * THREADS))
    assert len({id(it) for it in found}) == 1


def test_many_threads_run_an_availability_probe_once() -> None:
    asked: list[int] = []

    def probe() -> bool:
        asked.append(1)
        time.sleep(0.05)
        return True

    manager = make_manager(impl("only", is_available=probe))
    together(*([lambda: manager.call("scale", X)] * THREADS))
    assert asked == [1]


def test_a_probe_and_an_import_that_wait_for_each_other_do_not_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread runs the probe and waits for the module's import lock; the other imports the
    module and waits for the probe's answer.
    """
    (tmp_path / "warms_up.py").write_text(
        "import test_world\n"
        "test_world.imported.set()\n"
        "assert test_world.probing.wait(30)\n"
        "test_world.manager.call('probed', test_world.X)\n"
        "def loaded(x):\n    return 'loaded'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry_module, "_PATIENCE", 0.2)
    world: Any = types.ModuleType("test_world")
    world.X, world.imported, world.probing = X, threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "test_world", world)

    def probe() -> bool:
        world.probing.set()
        return importlib.import_module("warms_up") is not None

    def probed() -> None:
        assert world.imported.wait(30)
        assert world.manager.call("probed", X) == "probed"

    world.manager = make_manager(
        impl("probed", op_name="probed", fn=answering("probed"), is_available=probe),
        impl("loaded", op_name="loaded", fn="warms_up:loaded"),
    )
    try:
        together(probed, lambda: world.manager.call("loaded", X))
    finally:
        sys.modules.pop("warms_up", None)


def distinct_policies() -> list[dict[str, Any]]:
    """1024 different policies."""
    vendors = [f"v{place}" for place in range(9)]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(vendors, size) for size in range(len(vendors) + 1)
    )
    return [
        {"deny_vendors": names, "strict": strict} for names in subsets for strict in (False, True)
    ]


def alive(references: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_a_thousand_policies_leave_a_bounded_number_of_plans() -> None:
    vendors = (impl(f"vendor.v{place}", "vendor", vendor=f"v{place}") for place in range(9))
    manager = make_manager(impl("reference.torch"), *vendors)
    run = manager.bind("scale")
    policies = distinct_policies()
    scopes: list[weakref.ref[Any]] = []
    for fields in policies:
        with policy_context(**fields):
            served = manager.call("scale", X)
            assert served == run(X)
            assert served.removeprefix("vendor.") not in fields["deny_vendors"]
            scopes.append(weakref.ref(active_scope()))
    assert len(scopes) == 1024
    assert 0 < alive(scopes) <= 64


def test_a_thousand_kinds_of_tensor_leave_a_bounded_memory() -> None:
    class Device(str):
        """A device name that supports weak references."""

    manager = make_manager(impl("only", supports=lambda *args, **kwargs: True))
    devices: list[weakref.ref[Any]] = []
    for place in range(1000):
        device = Device(f"d{place}")
        assert manager.call("scale", StubTensor(device=device)) == "only"
        devices.append(weakref.ref(device))
    del device
    assert 0 < alive(devices) <= 256


def test_a_thousand_unknown_names_leave_nothing() -> None:
    class Name(str):
        """An operator name that supports weak references."""

    manager = make_manager(impl("only"))
    names: list[weakref.ref[Any]] = []
    for place in range(1000):
        name = Name(f"no_such_{place}")
        with pytest.raises(LookupError):
            manager.call(name, X)
        names.append(weakref.ref(name))
    del name
    assert alive(names) == 0


def test_answers_do_not_mix_between_operators_in_threads() -> None:
    names = [f"op_{place}" for place in range(THREADS)]
    manager = make_manager(*(impl("only", op_name=name, fn=answering(name)) for name in names))

    def job(name: str) -> Callable[[int], object]:
        def one(place: int) -> None:
            assert manager.call(name, X) == name
            set_global_policy(None)

        return one

    together(*(repeat(30, job(name)) for name in names))

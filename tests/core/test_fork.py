"""A forked child keeps registered implementations, registers none twice and never hangs."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_helpers import SCALE, StubTensor, StubTensors, impl, make_manager

from transformer_engine_fl import (
    OpManager,
    OpRegistry,
    SelectionPolicy,
    get_default_manager,
    get_policy,
    policy_context,
    reset_global_policy,
    set_global_policy,
    with_preference,
)
from transformer_engine_fl.core.locks import LOADING, ForkSafeLock
from transformer_engine_fl.core.policy import policy_state

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

PATIENCE = 20.0
"""Seconds after which a child counts as hanging."""

X = StubTensor()


def in_child(job: Callable[[], Any]) -> Any:
    """The result of ``job``, run in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer: Any = job()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, pickle.dumps(answer))
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], PATIENCE)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    assert ready, "the child hangs"
    return pickle.loads(text)


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Starts a job in another thread, which must end by the end of the test."""
    threads: list[threading.Thread] = []

    def start(job: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=job, daemon=True))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def held(elsewhere: Callable[..., None]) -> Iterator[Callable[[ForkSafeLock], None]]:
    """Has another thread hold a lock until the test ends."""
    done = threading.Event()

    def hold(lock: ForkSafeLock) -> None:
        taken = threading.Event()

        def job() -> None:
            with lock:
                taken.set()
                done.wait(30)

        elsewhere(job)
        assert taken.wait(30)

    yield hold
    done.set()


def everything(manager: OpManager) -> list[str]:
    """Use every part of a manager that takes a lock."""
    before = [it.impl_id for it in manager.registry.get_implementations("scale")]
    manager.registry.register_impl(impl("of.child", priority=99))
    first = manager.call("scale", X)
    with policy_context(prefer="reference"), with_preference("impl:first"):
        second = manager.bind("scale")(X)
    set_global_policy(SelectionPolicy(prefer="flagos"))
    manager.reset_quarantine()
    reset_global_policy()
    get_default_manager().get_selected_impl_id("rmsnorm_fwd")
    return [*before, first, second]


LOCKS: dict[str, Callable[[OpManager], ForkSafeLock]] = {
    "manager": lambda manager: manager._lock,
    "registry": lambda manager: manager.registry._lock,
    "quarantine": lambda manager: manager.quarantine._lock,
    "policy": lambda manager: policy_state.lock,
}


@pytest.mark.parametrize("lock", LOCKS.values(), ids=LOCKS)
@pytest.mark.parametrize("warm", [False, True])
def test_a_child_does_not_wait_for_a_lock_that_another_thread_held(
    lock: Callable[[OpManager], ForkSafeLock], warm: bool, held: Callable[[ForkSafeLock], None]
) -> None:
    manager = make_manager(impl("first"), impl("second"))
    if warm:
        manager.call("scale", X)
    held(lock(manager))
    assert in_child(lambda: everything(manager)) == ["first", "second", "of.child", "first"]


def test_a_child_does_not_wait_for_any_lock_of_ours(held: Callable[[ForkSafeLock], None]) -> None:
    manager = make_manager(impl("first"), impl("second"))
    for lock in LOCKS.values():
        held(lock(manager))
    assert in_child(lambda: everything(manager)) == ["first", "second", "of.child", "first"]


def test_a_child_keeps_what_is_registered_and_the_policy() -> None:
    manager = make_manager(impl("first", "flagos"), impl("second"))
    run = manager.bind("scale")
    set_global_policy(SelectionPolicy(prefer="reference"))
    with with_preference("flagos"):
        assert in_child(lambda: (run(X), manager.call("scale", X))) == ("first", "first")
    assert in_child(lambda: (run(X), get_policy().prefer)) == ("second", "reference")


def test_what_a_child_registers_stays_in_the_child() -> None:
    manager = make_manager(impl("first"))
    assert everything(manager)[0] == "first"
    assert in_child(lambda: in_child(lambda: manager.call("scale", X))) == "of.child"
    assert manager.call("scale", X) == "of.child"
    assert len(manager.registry.get_implementations("scale")) == 2


@pytest.mark.parametrize("started", [False, True])
def test_a_child_registers_the_built_in_sets_once(started: bool) -> None:
    manager = OpManager(OpRegistry(), plugins=False)
    if started:
        manager.ensure_initialized()

    def count() -> int:
        manager.ensure_initialized()
        impls = manager.registry.get_implementations("rmsnorm_fwd")
        return [it.impl_id for it in impls].count("reference.torch")

    assert in_child(lambda: (count(), in_child(count))) == (1, 1)
    assert count() == 1


SLOW = {
    "while it is imported": """
        import time
        from core_helpers import impl
        open("{flag}", "w").close()
        time.sleep(0.7)

        def register(registry):
            registry.register_impl(impl("slow"))
    """,
    "while it registers": """
        import time
        from core_helpers import impl

        def register(registry):
            registry.register_impl(impl("slow"))
            open("{flag}", "w").close()
            time.sleep(0.7)
    """,
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes an importable module; returns a path that replaces ``{flag}`` in its source."""

    def written(name: str, source: str) -> Path:
        flag = tmp_path / "begun"
        text = textwrap.dedent(source).replace("{flag}", str(flag))
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return flag

    return written


def wait_for(flag: Path) -> None:
    deadline = time.monotonic() + 30
    while not flag.exists():
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.005)


@pytest.mark.parametrize("moment", SLOW)
def test_a_child_of_a_fork_in_the_middle_of_initialisation_has_every_plugin_once(
    moment: str,
    write: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: Callable[[Callable[[], object]], None],
) -> None:
    name = "slow_plugin_" + moment.replace(" ", "_")
    flag = write(name, SLOW[moment])
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", name)
    manager = OpManager(OpRegistry({"scale": SCALE}), builtins=False, tensors=StubTensors())
    manager.registry.register_impl(impl("first", priority=1))
    elsewhere(manager.ensure_initialized)
    wait_for(flag)

    def job() -> tuple[Any, ...]:
        served = manager.call("scale", X)
        impls = manager.registry.get_implementations("scale")
        ours = [it.error for it in manager.plugins if it.name == f"module {name}"]
        return served, [it.impl_id for it in impls], ours

    expected = ("first", ["first", "slow"], [None])
    assert in_child(job) == expected
    assert job() == expected


def test_a_child_of_a_fork_while_an_implementation_was_imported_can_call_it(
    write: Callable[[str, str], Path],
    elsewhere: Callable[[Callable[[], object]], None],
) -> None:
    source = """
        import time
        open("{flag}", "w").close()
        time.sleep(0.7)

        def fn(x, factor=1.0, *, mode="plain"):
            return "late"
    """
    flag = write("slow_implementation", source)
    manager = make_manager(impl("late", fn="slow_implementation:fn"))
    elsewhere(lambda: manager.call("scale", X))
    wait_for(flag)
    assert in_child(lambda: manager.call("scale", X)) == "late"


class SlowToFind:
    """A module finder that delays the import of one module and finds none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = threading.Event()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.name:
            self.begun.set()
            time.sleep(0.7)


@pytest.mark.parametrize(
    "use", [get_policy, reset_global_policy, lambda: set_global_policy(SelectionPolicy())]
)
def test_a_child_of_a_fork_while_the_reader_of_policy_files_was_imported_can_read_one(
    use: Callable[[], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: Callable[[Callable[[], object]], None],
) -> None:
    (tmp_path / "policy.toml").write_text('prefer = "reference"')
    monkeypatch.setenv("TE_FL_POLICY_FILE", str(tmp_path / "policy.toml"))
    slow = SlowToFind("transformer_engine_fl.core.policy_file")
    monkeypatch.delitem(sys.modules, slow.name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [slow, *sys.meta_path])
    elsewhere(use)
    assert slow.begun.wait(30)
    assert in_child(lambda: get_policy().prefer) == "reference"


def test_a_child_of_a_fork_during_an_availability_probe_can_probe_again(
    elsewhere: Callable[[Callable[[], object]], None],
) -> None:
    begun = threading.Event()

    def probe() -> bool:
        begun.set()
        time.sleep(0.5)
        return True

    manager = make_manager(impl("probed", is_available=probe))
    elsewhere(lambda: manager.call("scale", X))
    assert begun.wait(30)
    assert in_child(lambda: manager.call("scale", X)) == "probed"


def test_a_plugin_may_fork_while_it_registers(
    write: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probing a driver in a child is good practice."""
    source = """
        import os
        from core_helpers import impl

        def register(registry):
            child = os.fork()
            if child == 0:
                os._exit(7)
            _, status = os.waitpid(child, 0)
            registry.register_impl(impl(f"after.{os.waitstatus_to_exitcode(status)}"))
    """
    write("forking_plugin", source)
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "forking_plugin")
    manager = OpManager(OpRegistry({"scale": SCALE}), builtins=False, tensors=StubTensors())
    start = time.monotonic()
    assert manager.call("scale", X) == "after.7"
    assert time.monotonic() - start < PATIENCE


def test_an_availability_probe_may_fork_and_call_operators_in_the_child() -> None:
    """Neither the child nor the parent hangs."""
    answers = []

    def probe() -> bool:
        answers.append(in_child(lambda: manager.call("other", X)))
        return True

    other = impl("other", op_name="other")
    manager = make_manager(impl("probed", is_available=probe), other)
    assert manager.call("scale", X) == "probed"
    assert answers == ["other"]


def test_a_lock_that_the_forking_thread_holds_stays_its_own_in_the_child() -> None:
    lock = ForkSafeLock()

    def from_another_thread() -> bool:
        found: list[bool] = []

        def look() -> None:
            if taken := lock.acquire(0.2):
                lock.release()
            found.append(taken)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return found[0]

    def job() -> list[bool]:
        before = from_another_thread()
        lock.release()
        return [before, from_another_thread()]

    with lock:
        assert in_child(job) == [False, True]
    assert from_another_thread()


def test_a_fork_leaves_the_lock_of_imports_free_in_parent_and_child() -> None:
    def free() -> bool:
        found: list[bool] = []

        def look() -> None:
            if taken := LOADING.acquire(1.0):
                LOADING.release()
            found.append(taken)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return found[0]

    assert in_child(free)
    assert free()

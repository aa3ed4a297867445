"""Policies in with blocks: nested, re-entered, shared, in threads and tasks, merged by field."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from core_helpers import make_manager, one_of_each, order

from transformer_engine_fl import (
    ConfigurationError,
    OpManager,
    SelectionPolicy,
    get_policy,
    policy_context,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from transformer_engine_fl.core.policy import ROOT, active_scope, effective_policy


@pytest.fixture
def manager() -> OpManager:
    return make_manager(*one_of_each())


@pytest.mark.parametrize("way", ["call", "bind", "resolve", "explain"])
def test_a_block_changes_the_selection_only_inside_it(manager: OpManager, way: str) -> None:
    bound = manager.bind("scale")
    ask: Callable[[], Any] = {
        "call": lambda: manager.call("scale", None),
        "bind": lambda: bound(None),
        "resolve": lambda: manager.resolve("scale")(None),
        "explain": lambda: manager.get_selected_impl_id("scale"),
    }[way]
    for _ in range(2):  # without and with cached plans
        assert ask() == "default.flagos"
        with with_preference("reference"):
            assert ask() == "reference.torch"
            with with_preference("vendor"):
                assert ask() == "vendor.acme"
            assert ask() == "reference.torch"
        assert ask() == "default.flagos"


def test_an_inner_block_replaces_the_fields_it_names_and_keeps_the_others() -> None:
    with policy_context(prefer="vendor", deny_vendors=["a", "b"], per_op_order={"x": ["flagos"]}):
        with policy_context(deny_vendors=["c"], strict=True):
            inner = get_policy()
        outer = get_policy()
    assert inner.prefer == "vendor"
    assert inner.strict is True
    assert inner.deny_vendors == {"a", "b", "c"}  # the union
    assert inner.per_op_order == {"x": ("flagos",)}
    assert outer.strict is False
    assert outer.deny_vendors == {"a", "b"}


def test_what_an_outer_block_rules_out_no_inner_one_brings_back(manager: OpManager) -> None:
    with policy_context(
        allow_vendors=["acme", "zeta"], deny_vendors=["acme"], require=["deterministic"]
    ):
        with policy_context(allow_vendors=["acme", "nvidia"], deny_vendors=[], require=[]):
            assert get_policy().allow_vendors == {"acme"}
            assert get_policy().deny_vendors == {"acme"}
            assert get_policy().require == {"deterministic"}
        with policy_context(require=["traceable"]):
            assert get_policy().require == {"deterministic", "traceable"}
    with with_denied_vendors("acme"):
        with policy_context(prefer="vendor"), with_denied_vendors("nobody"):
            assert manager.call("scale", None) == "vendor.zeta"
        with with_preference("vendor"), with_allowed_vendors("acme"):
            assert manager.call("scale", None) == "default.flagos"


def test_an_inner_order_replaces_the_whole_field_of_orders() -> None:
    with (
        policy_context(per_op_order={"x": ["flagos"]}),
        policy_context(per_op_order={"y": "vendor"}),
    ):
        assert get_policy().per_op_order == {"y": ("vendor",)}


def test_a_field_that_says_off_replaces_one_that_says_on() -> None:
    with with_strict_mode():
        with with_strict_mode(False):
            assert get_policy().strict is False
        assert get_policy().strict is True


def test_a_block_outranks_the_global_policy_set_before_or_inside(manager: OpManager) -> None:
    set_global_policy(SelectionPolicy(prefer="vendor", deny_vendors={"acme"}))
    with with_preference("reference"):
        assert order(manager) == ["reference.torch", "default.flagos", "vendor.zeta"]
        set_global_policy(SelectionPolicy(prefer="flagos", deny_vendors={"zeta"}))
        assert order(manager) == ["reference.torch", "default.flagos", "vendor.acme"]
        assert manager.call("scale", None) == "reference.torch"


def test_each_shorthand_sets_its_field() -> None:
    for block, field, value in (
        (with_preference("VENDOR:Acme"), "prefer", "vendor:acme"),
        (with_strict_mode(), "strict", True),
        (with_allowed_vendors("Acme", "zeta"), "allow_vendors", {"acme", "zeta"}),
        (with_allowed_vendors(), "allow_vendors", frozenset()),
        (with_denied_vendors("Acme"), "deny_vendors", {"acme"}),
    ):
        with block as said:
            assert said.to_dict().keys() == {field}
            assert getattr(get_policy(), field) == value
            assert effective_policy().origins[field] == "with block"


def test_a_block_takes_a_policy_and_fields_that_outrank_it() -> None:
    base = SelectionPolicy(prefer="vendor", strict=True)
    with policy_context(base, strict=False) as said:
        assert said == SelectionPolicy(prefer="vendor", strict=False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: policy_context(preffer="vendor"), "unknown field 'preffer'.*mean 'prefer'"),
        (lambda: policy_context(prefer="vendro"), "'vendro'.*mean 'vendor'"),
        (lambda: policy_context("vendor"), "'vendor' is not a SelectionPolicy"),
        (lambda: with_preference("cuda"), "'cuda' is not a selector"),
        (lambda: with_strict_mode("yes"), "'yes' is not True or False"),  # type: ignore[arg-type]
        (lambda: with_denied_vendors("a b"), "'a b' is not a vendor name"),
    ],
)
def test_a_malformed_block_is_refused_before_it_is_entered(
    make: Callable[[], policy_context], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()
    assert active_scope() is ROOT


def test_one_object_may_be_entered_again_inside_itself(manager: OpManager) -> None:
    block = with_preference("reference")
    with block, with_preference("vendor"):
        with block:
            assert manager.call("scale", None) == "reference.torch"
        assert manager.call("scale", None) == "vendor.acme"
    with block:
        assert manager.call("scale", None) == "reference.torch"
    assert manager.call("scale", None) == "default.flagos"


def test_a_block_decorates_functions(manager: OpManager) -> None:
    @with_preference("reference")
    def call(x: object, *, again: bool = False) -> list[object]:
        """Calls it."""
        inner = call(x) if again else []
        return [manager.call("scale", x), *inner]

    assert call(None, again=True) == ["reference.torch"] * 2
    assert (call.__name__, call.__doc__) == ("call", "Calls it.")
    assert manager.call("scale", None) == "default.flagos"


async def _coroutine() -> None: ...


def _generator() -> Iterator[None]:
    yield


async def _stream() -> AsyncIterator[None]:
    yield


class _Coroutine:
    async def __call__(self) -> None: ...

    async def method(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (_coroutine, "_coroutine"),
        (_generator, "_generator"),
        (_stream, "_stream"),
        (functools.partial(_coroutine), "_coroutine"),
        (functools.partial(functools.partial(_generator)), "_generator"),
        (_Coroutine(), "_Coroutine"),
        (functools.partial(_Coroutine()), "_Coroutine"),
        (functools.partial(_Coroutine().method), "_Coroutine.method"),
    ],
)
def test_generators_and_coroutines_are_not_decorated(
    function: Callable[..., Any], name: str
) -> None:
    said = f"put a with block inside '{name}' instead"
    with pytest.raises(ConfigurationError, match=said):
        with_preference("reference")(function)


def test_a_block_decorates_whatever_is_done_when_its_call_is(manager: OpManager) -> None:
    class Caller:
        def __call__(self) -> object:
            return manager.call("scale", None)

    for function in (Caller(), functools.partial(manager.call, "scale", None)):
        assert with_preference("reference")(function)() == "reference.torch"


@pytest.mark.parametrize(
    ("given", "found"), [(_Coroutine, "the class '_Coroutine'"), (3, "3"), (None, "None")]
)
def test_what_is_no_function_is_not_decorated(given: Any, found: str) -> None:
    said = f"policy_context can decorate functions only, got {found}; decorate its methods"
    with pytest.raises(ConfigurationError, match=said):
        with_preference("reference")(given)


def test_a_block_made_before_breaks_the_graph_of_compiled_code() -> None:
    block = with_preference("reference")
    seen = []

    @torch.compiler.disable
    def look() -> None:
        seen.append(get_policy().prefer)

    def entered(x: torch.Tensor) -> torch.Tensor:
        with block:
            look()
            return x + 1

    @block
    def decorated(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 1

    x = torch.ones(4)
    for function in (entered, decorated):
        compiled = torch.compile(function, backend="eager")
        torch.testing.assert_close(compiled(x), x + 1)
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        whole = torch.compile(function, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="policy_context"):
            whole(x)
    assert seen == ["reference", "reference"], "the block holds"


def test_an_exception_leaves_the_block_and_its_policy(manager: OpManager) -> None:
    with pytest.raises(KeyError), with_preference("reference"), with_strict_mode():
        raise KeyError("out")
    assert active_scope() is ROOT
    assert manager.call("scale", None) == "default.flagos"


def test_a_failed_enter_changes_nothing_outside() -> None:
    with with_preference("vendor"):
        with pytest.raises(ConfigurationError), with_preference("vendro"):
            raise AssertionError("never entered")
        assert get_policy().prefer == "vendor"


def test_equal_blocks_nested_alike_are_one_scope() -> None:
    with with_preference("vendor"), with_strict_mode():
        first = active_scope()
    with policy_context(prefer="VENDOR"), policy_context(strict=True):
        assert active_scope() is first
    with with_strict_mode(), with_preference("vendor"):
        assert active_scope() is not first


def test_a_scope_without_references_is_forgotten() -> None:
    with with_denied_vendors("forgotten"):
        key = active_scope().key
        assert key in ROOT._children
    gc.collect()
    assert key not in ROOT._children


def test_tables_of_plans_are_bounded_however_many_blocks_there_are(manager: OpManager) -> None:
    for number in range(200):
        with with_denied_vendors("acme", f"other{number}"):
            assert manager.call("scale", None) == "default.flagos"
    assert 1 <= len(manager._scoped) <= 64


def test_a_generator_ends_its_own_block_wherever_it_is_ended(manager: OpManager) -> None:
    def suspended() -> Iterator[None]:
        with with_preference("reference"):
            yield

    generator = suspended()
    next(generator)
    with with_preference("vendor"), with_denied_vendors("acme"):
        generator.close()
        assert manager.call("scale", None) == "vendor.zeta"
    assert active_scope() is ROOT

    generator = suspended()
    contextvars.copy_context().run(next, generator)
    with with_preference("vendor"):
        generator.close()  # in a context that has not entered the block
        assert manager.call("scale", None) == "vendor.acme"
    assert active_scope() is ROOT


def test_a_generator_that_is_ended_elsewhere_ends_no_equal_block_there(
    manager: OpManager,
) -> None:
    def suspended() -> Iterator[None]:
        with with_preference("reference"):
            yield

    generator = suspended()
    contextvars.copy_context().run(next, generator)
    with with_preference("reference"), with_denied_vendors("acme"):
        generator.close()
        assert manager.call("scale", None) == "reference.torch"
    assert active_scope() is ROOT


def test_blocks_that_end_out_of_order_leave_the_others(manager: OpManager) -> None:
    first, second, third = (with_preference(it) for it in ("reference", "vendor", "reference"))
    for block in (first, second, third):
        block.__enter__()
    first.__exit__(None, None, None)
    assert manager.call("scale", None) == "reference.torch"
    third.__exit__(None, None, None)
    assert manager.call("scale", None) == "vendor.acme"
    second.__exit__(None, None, None)
    assert active_scope() is ROOT


# ------------------------------------------------------------------------------- threads


def test_a_block_is_not_seen_by_another_thread(manager: OpManager) -> None:
    with ThreadPoolExecutor(1) as pool, with_preference("reference"):
        assert pool.submit(manager.call, "scale", None).result() == "default.flagos"
        assert pool.submit(manager.bind("scale"), None).result() == "default.flagos"
        assert manager.call("scale", None) == "reference.torch"


def test_one_object_may_be_shared_between_threads(manager: OpManager) -> None:
    shared = with_preference("reference")
    meet = threading.Barrier(4, timeout=10)

    def work(own: str, expected: str) -> list[str]:
        seen = []
        with with_preference(own):
            for _ in range(50):
                meet.wait()
                with shared:
                    meet.wait()
                    seen.append(manager.call("scale", None))
                seen.append(manager.call("scale", None))
        assert seen == ["reference.torch", expected] * 50
        return seen

    own = [("vendor", "vendor.acme"), ("impl:vendor.zeta", "vendor.zeta")] * 2
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(work, *it) for it in own]
        assert all(len(it.result()) == 100 for it in done)


def test_a_global_policy_is_seen_in_every_thread(manager: OpManager) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(manager.call, "scale", None).result() == "default.flagos"
        set_global_policy(SelectionPolicy(prefer="reference"))
        assert pool.submit(manager.call, "scale", None).result() == "reference.torch"


# --------------------------------------------------------------------------------- tasks


def test_tasks_that_take_turns_keep_their_own_blocks(manager: OpManager) -> None:
    async def work(prefer: str, expected: str) -> None:
        for _ in range(20):
            with with_preference(prefer):
                await asyncio.sleep(0)
                assert manager.call("scale", None) == expected
                with with_strict_mode():
                    await asyncio.sleep(0)
                    assert manager.call("scale", None) == expected
                    assert get_policy().strict is True
                assert get_policy().strict is False
            await asyncio.sleep(0)
            assert manager.call("scale", None) == "default.flagos"

    async def main() -> None:
        await asyncio.gather(
            work("vendor", "vendor.acme"),
            work("reference", "reference.torch"),
            work("vendor:zeta", "vendor.zeta"),
        )

    asyncio.run(main())


def test_a_task_keeps_the_block_it_was_started_in(manager: OpManager) -> None:
    async def later(go: asyncio.Event) -> str:
        await go.wait()
        return str(manager.call("scale", None))

    async def main() -> tuple[str, str]:
        go = asyncio.Event()
        with with_preference("reference"):
            task = asyncio.create_task(later(go))
        go.set()
        return await task, manager.call("scale", None)

    assert asyncio.run(main()) == ("reference.torch", "default.flagos")


def test_a_block_in_a_task_does_not_reach_its_parent(manager: OpManager) -> None:
    async def child(inside: asyncio.Event, done: asyncio.Event) -> None:
        with with_preference("reference"):
            inside.set()
            await done.wait()

    async def main() -> str:
        inside, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(child(inside, done))
        await inside.wait()
        seen = manager.call("scale", None)
        done.set()
        await task
        return str(seen)

    assert asyncio.run(main()) == "default.flagos"


def test_to_thread_carries_the_block_along(manager: OpManager) -> None:
    async def main() -> str:
        with with_preference("reference"):
            return str(await asyncio.to_thread(manager.call, "scale", None))

    assert asyncio.run(main()) == "reference.torch"

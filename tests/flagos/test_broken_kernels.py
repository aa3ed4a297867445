"""If a kernel does not compile, the next implementation serves, even if the operator mutates."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from typing import Any

import pytest
import torch

from transformer_engine_fl import ops
from transformer_engine_fl.backends import flagos, reference
from transformer_engine_fl.backends.flagos import _arguments, _launch
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.core.manager import OpManager
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.testing.arguments import clone

WRITING = [it.name for it in ops.CATALOGUE.values() if it.mutates]


def _manager() -> OpManager:
    """A manager with this set and the reference after it."""
    registry = OpRegistry()
    flagos.register(registry)
    reference.register(registry)
    return OpManager(registry, builtins=False, plugins=False)


def _tensors(call: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(call)
    return [it.double() for it in leaves if isinstance(it, torch.Tensor)]


def breaking(monkeypatch: pytest.MonkeyPatch, which: int) -> list[str]:
    """Make the ``which``-th kernel fail to compile; returns the names of the kernels compiled."""
    monkeypatch.setattr(_arguments, "_LAUNCHES", {})
    gemm = importlib.import_module(f"{flagos.__name__}.gemm")
    for name, plans in vars(gemm).copy().items():
        if name.endswith("PLANS") and isinstance(plans, dict):
            monkeypatch.setattr(gemm, name, {})
    load, names = _launch.Launch._load, []

    def loading(launch: _launch.Launch, *what: Any) -> None:
        names.append(launch._kernel.__name__)
        if len(names) == which:
            refusal = RuntimeError("PassManager::run failed")
            raise _launch.KernelCompileError(launch._kernel, launch._device, refusal)
        load(launch, *what)

    monkeypatch.setattr(_launch.Launch, "_load", loading)
    return names


@pytest.mark.parametrize("op", WRITING)
def test_the_next_serves_whichever_kernel_of_a_call_does_not_compile(
    op: str, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contract = ops.CATALOGUE[op]
    family = importlib.import_module(f"{reference.__name__}.{contract.family}")
    most = 0
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    for sample in itertools.islice(contract.samples(contract.dtypes[0], device), 12):
        args, kwargs = sample.args, sample.kwargs
        expected = clone((args, kwargs))
        wanted = getattr(family, op)(*expected[0], **expected[1])
        for which in itertools.count(1):
            given = clone((args, kwargs))
            with monkeypatch.context() as patch:
                compiled = breaking(patch, which)
                caplog.clear()
                result = _manager().call(op, *given[0], **given[1])
            most = max(most, len(compiled))
            if len(compiled) < which:
                break
            torch.testing.assert_close(_tensors(result), _tensors(wanted), **exactly)
            torch.testing.assert_close(_tensors(given), _tensors(expected), **exactly)
            assert f"kernel {compiled[-1]!r} does not compile for" in caplog.text
            assert "PassManager::run failed" in caplog.text
            assert "'reference.torch' served" in caplog.text
    assert most


class Refused:
    """A kernel that fails to compile."""

    __name__ = "refused"
    arg_names = ("a_ptr", "n")

    def __init__(self) -> None:
        self.launched = 0

    def warmup(self, *args: Any, **options: Any) -> None:
        raise AssertionError("no lowering")

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.launched += 1

        return launch


def test_what_the_compiler_raises_says_that_nothing_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    launch = _launch.Launch(kernel := Refused(), torch.device("cuda:0"), threads=None)
    for _ in range(2):
        with pytest.raises(_launch.KernelCompileError, match=r"'refused' .*: no lowering"):
            launch((1, 1), (torch.zeros(4),), (3,))
    assert not kernel.launched


def test_what_has_no_address_is_left_to_others_before_anything_is_compiled() -> None:
    launch = _launch.Launch(Refused(), torch.device("cpu"), threads=None)

    def loading(x: torch.Tensor) -> torch.Tensor:
        launch.load((x,), (3,))
        return x

    with pytest.raises(NotSupportedError, match="no memory of its own"):
        torch.vmap(loading)(torch.zeros(2, 4))

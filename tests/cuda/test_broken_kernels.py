"""If a kernel does not compile, the next implementation serves, even if the operator mutates."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import cuda_emulation
import pytest
import torch

from transformer_engine_fl import ops
from transformer_engine_fl.backends import reference
from transformer_engine_fl.backends.vendor.cuda import _launch, normalization, optimizer
from transformer_engine_fl.backends.vendor.cuda._arguments import Plans
from transformer_engine_fl.backends.vendor.cuda._compile import KernelCompileError, Specialisation
from transformer_engine_fl.core.manager import OpManager
from transformer_engine_fl.testing.arguments import clone


def _manager() -> OpManager:
    """A manager with this set and the reference after it, on any device."""
    registry = cuda_emulation.registry_for_any_device()
    reference.register(registry)
    return OpManager(registry, builtins=False, plugins=False)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _mixed() -> list[torch.Tensor]:
    """Tensors of two dtypes, which need two kernels."""
    return [torch.ones(40), torch.ones(40, dtype=torch.float64)]


CALLS: dict[str, Callable[[], Arguments]] = {
    "rmsnorm_fwd": lambda: ((torch.randn(4, 64), torch.ones(64)), {}),
    "multi_tensor_scale": lambda: (
        (_mixed(), _mixed(), 3.0),
        {"noop_flag": torch.zeros(1, dtype=torch.int32)},
    ),
    "multi_tensor_l2norm": lambda: (
        (_mixed(),),
        {"noop_flag": torch.zeros(1, dtype=torch.int32)},
    ),
    "multi_tensor_adam": lambda: ((_mixed(), _mixed(), _mixed(), _mixed(), 0.1, 1), {}),
    "multi_tensor_sgd": lambda: ((_mixed(), _mixed(), _mixed(), 0.1), {"momentum": 0.9}),
}
"""An operator that writes no argument, and some that write lists by several kernels."""


def breaking(monkeypatch: pytest.MonkeyPatch, which: int) -> list[str]:
    """Make the ``which``-th kernel fail to compile; returns the names of the kernels loaded."""
    for family in (normalization, optimizer):
        for plans in vars(family).values():
            if isinstance(plans, Plans):
                plans.clear()
    load, names = _launch.load, []

    def loading(specialisation: Specialisation, *args: Any) -> Any:
        names.append(specialisation.kernel)
        if len(names) == which:
            said = f'{specialisation.path}(7): error: identifier "nowhere" is undefined'
            raise KernelCompileError(specialisation, "sm_90a", said)
        return load(specialisation, *args)

    monkeypatch.setattr(_launch, "load", loading)
    return names


@pytest.mark.parametrize("op", CALLS)
def test_the_next_serves_whichever_kernel_of_a_call_does_not_compile(
    op: str, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args, kwargs = CALLS[op]()
    expected = clone((args, kwargs))
    family = importlib.import_module(f"{reference.__name__}.{ops.CATALOGUE[op].family}")
    wanted = getattr(family, op)(*expected[0], **expected[1])
    for which in itertools.count(1):
        given = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda it: it.to(device), clone((args, kwargs))
        )
        manager = _manager()
        with monkeypatch.context() as patch:
            loaded = breaking(patch, which)
            caplog.clear()
            result = manager.call(op, *given[0], **given[1])
        torch.testing.assert_close(result, wanted, check_device=False)
        torch.testing.assert_close(given, expected, check_device=False)
        if len(loaded) < which:
            break
        assert f"{loaded[-1]!r} does not compile for sm_90a" in caplog.text
        assert ".cu:7: " in caplog.text
        assert 'identifier "nowhere" is undefined' in caplog.text
        assert "'reference.torch' served" in caplog.text
    assert which > 1
    assert not caplog.records

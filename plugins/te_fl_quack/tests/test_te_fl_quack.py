"""quack's kernels held to the contracts where they run, and elsewhere what leads to them."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest
import te_fl_quack
import torch
from stand_in import MODULES

from transformer_engine_fl import NotSupportedError, OpManager, OpRegistry
from transformer_engine_fl.testing import cases, verify
from transformer_engine_fl.vendors.taking import Taker

HERE = te_fl_quack.is_available()


def planned() -> OpRegistry:
    registry = OpRegistry()
    te_fl_quack.register(registry)
    return registry


@pytest.fixture
def kernels() -> Iterator[ModuleType]:
    """The adapters over the stand-in, taking tensors of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "quack", ModuleType("quack"))
        for name, functions in MODULES.items():
            module = ModuleType(f"quack.{name}")
            vars(module).update(functions)
            patch.setitem(sys.modules, module.__name__, module)
        patch.delitem(sys.modules, "te_fl_quack.kernels", raising=False)
        kernels = importlib.import_module("te_fl_quack.kernels")
        patch.setattr(kernels, "TAKER", Taker("quack's kernels", {"cpu"}))
        yield kernels
    sys.modules.pop("te_fl_quack.kernels")


@pytest.fixture
def on_cpu(kernels: ModuleType) -> OpManager:
    """A manager with the adapters over the stand-in, as ``stand_in.quack``."""
    manager = OpManager(OpRegistry(), plugins=False)
    manager.registry.register_many(
        dataclasses.replace(
            impl,
            impl_id="stand_in.quack",
            fn=getattr(kernels, name),
            devices=frozenset({"cpu"}),
            min_arch=None,
            is_available=None,
        )
        for name in te_fl_quack.OPERATORS
        for impl in planned().get_implementations(name)
    )
    return manager


@pytest.mark.skipif(HERE is not True, reason=str(HERE))
@pytest.mark.parametrize("op_name", te_fl_quack.OPERATORS)
def test_on_a_gpu_it_keeps_the_contract(op_name: str) -> None:
    assert not verify("vendor.quack", operators=[op_name]).failures


@pytest.mark.parametrize("op_name", te_fl_quack.OPERATORS)
def test_what_leads_to_quack_and_back_keeps_the_contract(on_cpu: OpManager, op_name: str) -> None:
    found = list(cases("stand_in.quack", operators=[op_name], device="cpu", manager=on_cpu))
    served = [case for case in found if case.run().declined is None]
    assert len(served) > len(found) / 2


def test_unaligned_and_strided_tensors_are_copied_before_they_get_to_quack(
    kernels: ModuleType,
) -> None:
    x = torch.randn(4 * 8 + 1)[1:].view(4, 8).t()
    output, _ = kernels.rmsnorm_fwd(x, torch.randn(5)[1:])  # the stand-in asserts it
    assert output.is_contiguous()


def test_the_parameters_of_another_dtype_that_quack_has_not_are_declined(
    kernels: ModuleType,
) -> None:
    with pytest.raises(NotSupportedError, match=r"'weight' is torch\.float64"):
        kernels.rmsnorm_fwd(torch.ones(2, 8), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("op_name", te_fl_quack.LIMITED)
def test_dtypes_in_which_quack_breaks_the_contract_are_not_offered(op_name: str) -> None:
    (impl,) = planned().get_implementations(op_name)
    assert impl.supported_dtypes == te_fl_quack.LIMITED[op_name][0]


@pytest.mark.skipif(find_spec("quack") is not None, reason="quack is installed")
def test_without_quack_another_serves_and_the_reason_says_what_to_install() -> None:
    manager = OpManager(OpRegistry())
    te_fl_quack.register(manager.registry)
    output, _ = manager.call("rmsnorm_fwd", torch.ones(2, 8), torch.ones(8))
    assert output.shape == (2, 8)
    assert te_fl_quack.is_available() == (
        "quack-kernels is not installed: pip install quack-kernels"
    )

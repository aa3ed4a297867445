"""Tests quack's kernels against the contracts where they run, and elsewhere their adapters."""

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
from stand_in import COMPILER, MODULES

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
    """The adapters over the stand-in, with CPU tensors allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "quack", ModuleType("quack"))
        for name, functions in MODULES.items():
            module = ModuleType(f"quack.{name}")
            vars(module).update(functions)
            patch.setitem(sys.modules, module.__name__, module)
        compiler = ModuleType("cutlass.base_dsl.common")
        vars(compiler).update(COMPILER)
        for name in ("cutlass", "cutlass.base_dsl"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, compiler.__name__, compiler)
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


def a_call(op_name: str, rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Arguments of a norm's or a softmax's operator."""
    x, weight, statistic = torch.ones(rows, width, dtype=dtype), torch.ones(width), torch.ones(rows)
    return {
        "layernorm_bwd": (x, x, statistic, statistic, weight),
        "layernorm_fwd": (x, weight),
        "rmsnorm_bwd": (x, x, statistic, weight),
        "rmsnorm_bwd_add": (x, x, x, statistic, weight),
        "rmsnorm_fwd": (x, weight),
        "rmsnorm_fwd_add": (x, x, weight),
        "scaled_softmax_backward": (x, x),
        "scaled_softmax_forward": (x,),
    }[op_name]


NORMS = [name for name in te_fl_quack.OPERATORS if "norm" in name]
SOFTMAXES = [name for name in te_fl_quack.OPERATORS if "softmax" in name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op_name", NORMS)
def test_norms_of_odd_rows_of_2_bytes_are_declined(
    kernels: ModuleType, op_name: str, dtype: torch.dtype
) -> None:
    with pytest.raises(NotSupportedError, match="at least 4 bytes"):
        getattr(kernels, op_name)(*a_call(op_name, 2, 33, dtype))
    getattr(kernels, op_name)(*a_call(op_name, 2, 34, dtype))  # the stand-in asserts it


def test_norms_of_odd_rows_of_4_bytes_are_served(kernels: ModuleType) -> None:
    for op_name in NORMS:
        getattr(kernels, op_name)(*a_call(op_name, 2, 33, torch.float32))


def test_an_odd_gradient_of_2_bytes_is_declined_for_an_input_of_4(kernels: ModuleType) -> None:
    dy, x, rsigma, gamma = a_call("rmsnorm_bwd", 2, 33, torch.float32)
    with pytest.raises(NotSupportedError, match=r"'dy' has rows of 33 elements of torch\.bfloat16"):
        kernels.rmsnorm_bwd(dy.bfloat16(), x, rsigma, gamma)


@pytest.mark.parametrize("op_name", [name for name in NORMS if "bwd" in name])
def test_gradients_for_which_shared_memory_is_too_small_are_declined(
    kernels: ModuleType, op_name: str
) -> None:
    with pytest.raises(NotSupportedError, match="131072 elements"):
        getattr(kernels, op_name)(*a_call(op_name, 1, 131_073, torch.float32))
    getattr(kernels, op_name)(*a_call(op_name, 1, 131_074, torch.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "declined", "served"),
    [(torch.float32, (1, 7, 34), (4, 36)), (torch.float16, (1, 7, 36), (8, 40))],
)
@pytest.mark.parametrize("op_name", SOFTMAXES)
def test_the_softmax_of_rows_that_are_not_whole_accesses_is_declined(
    kernels: ModuleType,
    op_name: str,
    dtype: torch.dtype,
    declined: tuple[int, ...],
    served: tuple[int, ...],
) -> None:
    for width in declined:
        with pytest.raises(NotSupportedError, match="a multiple of 16 bytes"):
            getattr(kernels, op_name)(*a_call(op_name, 2, width, dtype))
    for width in served:
        getattr(kernels, op_name)(*a_call(op_name, 2, width, dtype))


def test_what_does_not_compile_is_declined_and_not_tried_again(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = kernels.RMSNORM.rmsnorm_fwd
    tried = []

    def fails_for_8(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        tried.append(x.shape[-1])
        if x.shape[-1] == 8:
            raise COMPILER["DSLRuntimeError"]("cannot build IR")
        return served(x, *args, **kwargs)

    monkeypatch.setattr(kernels.RMSNORM, "rmsnorm_fwd", fails_for_8)
    for width in (8, 8, 16):
        arguments = a_call("rmsnorm_fwd", 2, width, torch.float32)
        if width == 8:
            with pytest.raises(NotSupportedError, match=r"not compile for torch\.float32, 8 wide"):
                kernels.rmsnorm_fwd(*arguments)
        else:
            kernels.rmsnorm_fwd(*arguments)
    assert tried == [8, 16]


def test_a_failure_of_the_device_is_not_declined(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> object:
        raise COMPILER["DSLCudaRuntimeError"]("illegal address")

    monkeypatch.setattr(kernels.RMSNORM, "rmsnorm_fwd", fails)
    with pytest.raises(COMPILER["DSLCudaRuntimeError"]):
        kernels.rmsnorm_fwd(*a_call("rmsnorm_fwd", 2, 8, torch.float32))


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

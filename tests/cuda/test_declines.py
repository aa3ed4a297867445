"""Tensors without memory on a CUDA device are declined before anything is launched."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from transformer_engine_fl import ops
from transformer_engine_fl.backends import _driver
from transformer_engine_fl.backends.vendor import cuda
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.core.registry import OpRegistry


def _operators() -> dict[str, Callable[..., Any]]:
    registry = OpRegistry()
    cuda.register(registry)
    modules = {
        family: importlib.import_module(f"{cuda.__name__}.{family}") for family in cuda.FAMILIES
    }
    return {
        name: getattr(modules[ops.CATALOGUE[name].family], name)
        for name in registry.list_operators()
    }


OPERATORS = _operators()


def _meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _fake(device: str) -> Callable[[Tensor], Tensor]:
    def convert(tensor: Tensor) -> Tensor:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    return convert


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda tensor: tensor,
    "meta": _meta,
    "fake": _fake("cpu"),
    "fake cuda": _fake("cuda"),
}


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPERATORS)
def test_tensors_without_device_memory_are_declined(op: str, kind: str) -> None:
    contract = getattr(ops, op)
    dtype = "bfloat16" if "bfloat16" in contract.tolerance else next(iter(contract.tolerance))
    sample = next(iter(contract.samples(dtype, "cpu")))
    args, kwargs = pytree.tree_map_only(Tensor, KINDS[kind], (sample.args, sample.kwargs))
    with pytest.raises(NotSupportedError):
        OPERATORS[op](*args, **kwargs)


def test_a_number_larger_than_its_parameter_is_declined_before_the_launch() -> None:
    kernel = object.__new__(_launch.Kernel)
    kernel.name, kernel.device, kernel._device_now = "spread", 0, lambda: 0
    kernel._idle = [_driver.Prepared(_launch.Geometry(32, "Pi"), ctypes.c_void_p(77))]
    with pytest.raises(NotSupportedError, match="spread: a size is too large"):
        kernel.launch(1, 1, 0, 2**31)


@pytest.mark.parametrize(
    ("op", "option"),
    [
        ("rmsnorm_fwd", "eps"),
        ("layernorm_fwd", "eps"),
        ("scaled_softmax_forward", "scale"),
        ("scaled_softmax_backward", "scale"),
        ("clamped_swiglu", "limit"),
        ("clamped_dswiglu", "alpha"),
        ("cross_entropy_fwd", "z_loss"),
    ],
)
def test_integers_of_more_than_64_bits_are_refused(op: str, option: str, device: str) -> None:
    sample = next(iter(ops.CATALOGUE[op].samples("float32", device)))
    OPERATORS[op](*sample.args, **sample.kwargs | {option: 2**62})
    with pytest.raises(ArgumentError) as raised:
        OPERATORS[op](*sample.args, **sample.kwargs | {option: 2**63})
    assert raised.value.argument == option

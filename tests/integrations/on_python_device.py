"""Which implementations serve ATen operators on a PrivateUse1 device, forward and backward.

Run by test_aten_on_python_device.py in a separate process.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.backend_registration

from transformer_engine_fl import (
    OpImpl,
    get_default_manager,
    with_denied_vendors,
    with_preference,
)
from transformer_engine_fl.integrations import aten
from transformer_engine_fl.integrations.aten import use_aten_ops
from transformer_engine_fl.vendors import VendorInfo, register_vendor

if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch cannot have a device in Python", allow_module_level=True)

import python_device

python_device.bring_up()
INFO = VendorInfo("zeta", python_device.NAME)
ran: list[tuple[str, int]] = []


def note(name: str) -> None:
    ran.append((name, threading.get_ident()))


def silu(input: torch.Tensor) -> torch.Tensor:
    note("silu")
    return input * input.sigmoid()


def gelu_backward(grad_output: Any, self: Any, *, approximate: str = "none") -> torch.Tensor:
    note("gelu_backward")
    return torch.ops.aten.gelu_backward(grad_output, self, approximate=approximate)


@pytest.fixture(autouse=True)
def zeta() -> None:
    """Zeta has a kernel for an operator of the catalogue, and one under an ATen name."""
    ran.clear()
    register_vendor(INFO, {"silu": silu})
    get_default_manager().registry.register_impl(
        OpImpl(
            "aten::gelu_backward",
            "vendor.zeta",
            "vendor",  # type: ignore[arg-type]
            gelu_backward,
            vendor="zeta",
            devices=(python_device.NAME,),
            mutates=(),
        )
    )


def on_chip(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(python_device.NAME)


def names() -> list[str]:
    return [name for name, _ in ran]


def test_the_vendor_serves_an_unmodified_function_on_its_device_alone() -> None:
    x = on_chip(3, 4)
    with use_aten_ops():
        output = F.silu(x)
        F.silu(x.cpu())
        with with_denied_vendors("zeta"):
            F.silu(x)
    assert names() == ["silu"]
    assert output.device.type == "chip"
    torch.testing.assert_close(output.cpu(), F.silu(x.cpu()))


def test_a_backward_in_the_devices_own_thread_is_routed_under_the_same_policy() -> None:
    x = on_chip(3, 4).requires_grad_()
    with use_aten_ops(), with_preference("vendor:zeta"):
        F.gelu(x).sum().backward()
    assert names() == ["gelu_backward"]
    assert ran[0][1] != threading.get_ident()
    exact = x.detach().cpu().double().requires_grad_()
    F.gelu(exact).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu().double(), exact.grad, rtol=1e-5, atol=1e-6)
    ran.clear()
    x.grad = None
    with use_aten_ops(), with_preference("impl:native.aten"):
        F.gelu(x).sum().backward()
    F.gelu(x).sum().backward()
    assert names() == []


def test_operators_without_a_kernel_for_the_device_fall_back_on_it() -> None:
    x, w = on_chip(3, 8).requires_grad_(), on_chip(8).requires_grad_()
    served: list[tuple[str, str]] = []
    undo = get_default_manager().monitor(lambda name, impl: served.append((name, impl.impl_id)))
    with use_aten_ops():
        outputs = (
            F.rms_norm(x, (8,), w),
            F.layer_norm(x, (8,), w),
            F.softmax(x, -1),
            F.linear(x, on_chip(5, 8)),
            F.gelu(x),
        )
        sum(it.sum() for it in outputs).backward()  # type: ignore[union-attr]
    undo()
    assert all(it.device.type == "chip" for it in outputs)
    a, b = (it.detach().cpu().double().requires_grad_() for it in (x, w))
    expected = F.rms_norm(a, (8,), b), F.layer_norm(a, (8,), b), F.softmax(a, -1)
    for output, value in zip(outputs, expected, strict=False):
        torch.testing.assert_close(output.cpu().double(), value, rtol=1e-4, atol=1e-5)
    assert x.grad is not None
    assert ("aten::rms_norm", "reference.torch") in served
    assert ("aten::gelu", "native.aten") in served


def test_attention_and_cross_entropy_are_served_whole() -> None:
    q = on_chip(1, 2, 4, 8).requires_grad_()
    target = torch.tensor([1, 0, 3])
    logits = on_chip(3, 5).requires_grad_()
    with use_aten_ops():
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        loss = F.cross_entropy(logits, target.to("chip"))
        (out.sum() + loss).backward()
    exact = q.detach().cpu().double()
    value = F.scaled_dot_product_attention(exact, exact, exact, is_causal=True)
    torch.testing.assert_close(out.cpu().double(), value, rtol=1e-4, atol=1e-5)
    expected = F.cross_entropy(logits.detach().cpu().double(), target)
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    assert q.grad is not None
    assert logits.grad is not None


def test_explain_names_the_vendor_and_its_supported_device() -> None:
    decision = aten.explain("silu", on_chip(2))
    assert decision.selected is not None
    assert decision.selected.vendor == "zeta"
    assert "device 'cpu' is not supported; supported: chip" in str(
        aten.explain("silu", torch.ones(2))
    )

"""Which implementations serve calls on a PrivateUse1 device with a vendor's kernels.

Run by test_python_device.py in a separate process.
"""

from __future__ import annotations

import math
from pathlib import Path

import flaggems_folders
import pytest
import torch
import torch.utils.backend_registration
from flaggems_folders import declaration
from liger_packages import impl_info, write

from transformer_engine_fl import (
    NotSupportedError,
    StrictModeError,
    functional,
    get_default_manager,
    ops,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from transformer_engine_fl.vendors import (
    BackendRegistry,
    VendorInfo,
    get_current_backend,
    get_op,
    infer_device,
    list_overridden_ops,
    load_flaggems_folder,
    load_liger_package,
    register_vendor,
)

if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch cannot have a device in Python", allow_module_level=True)

import python_device

python_device.bring_up()
INFO = VendorInfo("zeta", python_device.NAME)
ran: list[str] = []


def silu(input: torch.Tensor) -> torch.Tensor:
    """The vendor's kernel, which takes tensors of its device only."""
    if not python_device.is_chip(input):
        raise NotSupportedError("silu: not a tensor of this device")
    ran.append("silu")
    return input.detach() * input.detach().sigmoid()


@pytest.fixture(autouse=True)
def zeta() -> None:
    """Register vendor Zeta with a kernel for the device."""
    ran.clear()
    register_vendor(INFO, {"silu": silu})


def on_chip(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(python_device.NAME)


def test_torch_has_the_device_and_its_memory_is_its_own() -> None:
    x = torch.arange(6.0).view(2, 3).to(python_device.NAME)
    assert (x.device.type, x.t().is_contiguous()) == ("chip", False)
    x[0].add_(1)
    assert x.cpu().tolist() == [[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]
    with pytest.raises(RuntimeError):
        x + torch.ones(2, 3)


def test_its_vendor_serves_it_and_no_other_device() -> None:
    assert infer_device() == "chip"
    assert list_overridden_ops() == ("silu",)
    output = ops.silu(on_chip(0.0, 1.0))
    assert output.device.type == "chip"
    expected = [0.0, 1 / (1 + math.exp(-1))]
    assert output.cpu().tolist() == pytest.approx(expected, rel=1e-6)
    assert ran == ["silu"]
    ops.silu(torch.ones(2))
    assert ran == ["silu"]


def test_what_the_vendor_has_not_falls_back_to_plain_torch_on_the_device() -> None:
    input = on_chip(3.0, 4.0, 1.0, 1.0).view(1, 4)
    output = ops.geglu(input)
    assert output.device.type == "chip"
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    expected = torch.nn.functional.gelu(exact, approximate="tanh")
    torch.testing.assert_close(output.cpu().double().view(-1), expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_taken_on_the_device_vendor_and_fallback_together() -> None:
    x = on_chip(-1.0, 0.5, 2.0).requires_grad_()
    functional.silu(x).sum().backward()
    exact = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    torch.nn.functional.silu(exact).sum().backward()
    assert ran == ["silu"]  # Zeta has no backward
    assert x.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(x.grad.cpu().double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_a_denied_vendor_leaves_its_device_to_the_fallback() -> None:
    with with_denied_vendors("zeta"):
        output = ops.silu(on_chip(0.0, 1.0))
        assert get_current_backend() is None
    assert ran == []
    assert output.device.type == "chip"


def test_a_vendors_kernel_that_fails_there_is_set_aside_for_that_device() -> None:
    def broken(input: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such core")

    register_vendor(INFO, {"gelu": broken})
    assert ops.gelu(on_chip(0.0)).cpu().tolist() == [0.0]
    text = str(get_default_manager().explain("gelu", on_chip(0.0)))
    assert "in quarantine after a fault: RuntimeError: no such core" in text


def test_a_kernel_for_another_device_is_refused_and_strict_mode_says_why() -> None:
    with with_preference("impl:vendor.zeta"), with_strict_mode():
        with pytest.raises(StrictModeError, match="device 'cpu' is not supported; supported: chip"):
            ops.silu(torch.ones(2))
        ops.silu(on_chip(1.0))


def test_the_device_is_not_started_by_looking_for_it() -> None:
    before = python_device.Chip.asked
    infer_device()
    get_op("silu")
    backend = get_current_backend()
    assert backend is not None
    backend.calculate_settings(100)
    assert python_device.Chip.asked == before
    assert backend.multiprocessor_count == python_device.MULTIPROCESSORS
    assert python_device.Chip.asked == before + 1


def test_a_liger_style_package_for_the_device_serves_it(no_vendors: Path) -> None:
    write(no_vendors, "omega_liger", impl_info("omega", ("chip",)))
    load_liger_package("omega_liger")
    x = torch.randn(2, 8).to("chip")
    with with_preference("vendor:omega"), with_strict_mode():
        output = ops.geglu(x)
    assert output.device.type == "chip"
    torch.testing.assert_close(output.cpu(), ops.geglu(x.cpu()), rtol=1e-5, atol=1e-6)


def test_a_folder_in_flaggems_style_for_the_device_serves_it(no_vendors: Path) -> None:
    load_flaggems_folder(flaggems_folders.write(no_vendors, init=declaration("omega", "chip")))
    x = torch.randn(2, 8).to("chip")
    with with_preference("vendor:omega"), with_strict_mode():
        outputs = {"gelu": ops.gelu(x), "aten": get_default_manager().call("aten::gelu", x)}
        with pytest.raises(StrictModeError):
            ops.gelu(x.cpu())
    assert {it.device.type for it in outputs.values()} == {"chip"}
    torch.testing.assert_close(outputs["gelu"].cpu(), ops.gelu(x.cpu()), rtol=1e-5, atol=1e-6)
    expected = torch.nn.functional.gelu(x.cpu())
    torch.testing.assert_close(outputs["aten"].cpu(), expected, rtol=1e-5, atol=1e-6)


def test_vendors_are_listed_with_those_that_only_have_operators() -> None:
    from transformer_engine_fl import OpImpl

    manager = get_default_manager()
    manager.registry.register_impl(
        OpImpl("silu", "mu.silu", "vendor", silu, vendor="mu", devices=("chip",))  # type: ignore[arg-type]
    )
    found = {info.vendor: info.device for info in BackendRegistry.vendors()}
    assert found["mu"] == found["zeta"] == "chip"
    assert BackendRegistry.get_backend("MU").info == VendorInfo("mu", "chip")

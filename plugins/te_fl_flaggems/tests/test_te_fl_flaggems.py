"""Tests FlagGems' operators against the contracts, over a stand-in for its functions."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stand_in
import te_fl_flaggems
import torch
from te_fl_flaggems import kernels, untuned

from transformer_engine_fl import (
    NotSupportedError,
    OpRegistry,
    PluginError,
    ops,
    reset_default_manager,
    with_preference,
    with_strict_mode,
)
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.testing import cases


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the plugin, on the CPU and over the stand-in."""
    stand_in.install(monkeypatch)
    monkeypatch.setattr(te_fl_flaggems, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(te_fl_flaggems, "is_available", lambda: True)
    reset_default_manager()
    manager = get_default_manager()
    manager.ensure_initialized()
    if not any(
        impl.impl_id == "vendor.flaggems" and "cpu" in (impl.devices or ())
        for impl in manager.registry.get_implementations("silu")
    ):
        registry = manager.registry
        if any(it.impl_id == "vendor.flaggems" for it in registry.get_implementations("silu")):
            pytest.skip("registered by its entry point, for devices that are not here")
        te_fl_flaggems.register(registry)


KEPT = [(op, dtype) for op in te_fl_flaggems.OPERATORS for dtype in te_fl_flaggems.dtypes(op)]


@pytest.mark.parametrize(("op_name", "dtype"), sorted(KEPT))
def test_it_keeps_the_contract(op_name: str, dtype: str) -> None:
    outcomes = [
        case.run() for case in cases("vendor.flaggems", operators=(op_name,), dtypes=(dtype,))
    ]
    assert sum(it.declined is None for it in outcomes) > len(outcomes) / 2


def test_a_call_is_served_by_it() -> None:
    x = torch.linspace(-2, 2, 8)
    with with_preference("vendor:flaggems"), with_strict_mode():
        torch.testing.assert_close(ops.silu(x), torch.nn.functional.silu(x))


ATEN_CALLS = {
    "_log_softmax": ((torch.ones(2, 3), -1, False), {}),
    "_log_softmax_backward_data": ((torch.ones(2, 3), torch.zeros(2, 3), -1, torch.float32), {}),
    "_softmax": ((torch.ones(2, 3), -1, False), {}),
    "_softmax_backward_data": ((torch.ones(2, 3), torch.ones(2, 3), -1, torch.float32), {}),
    "addmm": ((torch.ones(3), torch.ones(2, 4), torch.ones(4, 3)), {"beta": 2, "alpha": 3}),
    "bmm": ((torch.ones(2, 2, 3), torch.ones(2, 3, 2)), {}),
    "gelu": ((torch.ones(3),), {"approximate": "tanh"}),
    "gelu_backward": ((torch.ones(3), torch.ones(3)), {"approximate": "tanh"}),
    "mm": ((torch.ones(2, 3), torch.ones(3, 2)), {}),
    "native_dropout": ((torch.ones(3), 0.0, True), {}),
    "native_dropout_backward": ((torch.ones(3), torch.ones(3, dtype=torch.bool), 2.0), {}),
    "relu": ((torch.ones(3),), {}),
    "silu": ((torch.ones(3),), {}),
    "silu_backward": ((torch.ones(3), torch.ones(3)), {}),
}


@pytest.mark.parametrize("name", te_fl_flaggems.ATEN)
def test_aten_operators_give_what_torchs_own_do(name: str) -> None:
    args, kwargs = ATEN_CALLS[name]
    with with_preference("vendor:flaggems"), with_strict_mode():
        given = get_default_manager().call(f"aten::{name}", *args, **kwargs)
    torch.testing.assert_close(given, getattr(torch.ops.aten, name)(*args, **kwargs))


def test_what_it_does_not_serve_is_said_with_the_reason() -> None:
    registry = OpRegistry()
    te_fl_flaggems.register(registry)
    named = set(te_fl_flaggems.UNSUPPORTED)
    assert not named & set(registry.list_operators())
    assert {it for it in named if not it.startswith("aten::")} <= set(ops.CATALOGUE)


def test_the_gradient_of_gelu_is_left_out_because_it_is_nan() -> None:
    x = torch.tensor([1e25, -1e25])
    # FlagGems' formula in float32: the derivative of tanh is 0, times infinity.
    t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x.square()))
    slope = 0.5 * x * ((1 - t.square()) * (0.79788456 + 0.1070322243 * x.square())) + 0.5 * (1 + t)
    assert slope.isnan().all()
    assert not ops.dgelu(torch.ones(2), x).isnan().any()
    # torch's own ATen operator is NaN there as well.
    assert torch.ops.aten.gelu_backward(torch.ones(2), x, approximate="tanh").isnan().all()


def operands(of: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Operands of products that TMA on Hopper cannot read directly."""
    a, b, start = torch.randn(16, 32).to(of), torch.randn(32, 24).to(of), torch.randn(513).to(of)
    return {
        "a starts elsewhere": (start[1:].view(16, 32), b),
        "b starts elsewhere": (a, start[1:].view(32, 16)),
        "a of 7 rows, transposed": (torch.randn(32, 7).to(of).t(), b),
        "a expanded from one element": (a[:1, :1].expand(16, 32), b),
        "a expanded from one row": (a[:1].expand(16, 32), b),
        "b with gaps": (a, torch.randn(32, 27).to(of)[:, :24]),
        "every second of both": (torch.randn(32, 64).to(of)[::2, ::2], b[:, ::3]),
        "one row, of any stride": (a.as_strided((1, 32), (1, 1)), b),
        "no whole accesses": (torch.randn(8, 33).to(of)[1:].t(), torch.randn(7, 5).to(of)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", operands(torch.float32))
def test_what_hoppers_copies_cannot_read_is_copied(case: str, dtype: torch.dtype) -> None:
    a, b = operands(dtype)[case]
    torch.testing.assert_close(kernels.aten.mm(a, b), a @ b)


def test_what_hoppers_copies_can_read_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        given.extend((a, b))
        return a @ b

    mm.__module__ = "hopper.ops.mm"
    stand_in.install(monkeypatch, mm=mm)
    transposed, uneven = torch.randn(32, 16).t(), torch.randn(32, 7)
    kernels.function("mm")(transposed, torch.randn(32, 24))
    kernels.function("mm")(torch.randn(16, 32), torch.randn(24, 32).t())
    kernels.function("mm")(transposed, uneven)
    assert given[0] is transposed
    assert given[3].stride() == (1, 32)
    assert given[5] is uneven  # a copy would not help


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_column_is_left_to_others_but_in_float32(dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 32), torch.randn(32, 1)
    with pytest.raises(NotSupportedError, match=f"one column multiplies and adds in {dtype}"):
        kernels.generic_gemm(b.to(dtype).t(), a.to(dtype))
    with pytest.raises(NotSupportedError, match="one column"):
        kernels.aten.mm(a.to(dtype), b.to(dtype))
    torch.testing.assert_close(kernels.aten.mm(a, b), a @ b)
    with pytest.raises(NotSupportedError, match="not support empty tensors"):
        kernels.aten.mm(a[:0], b)


def test_products_of_other_devices_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch, mm=torch.mm)
    assert kernels.function("mm") is torch.mm


def test_a_makers_own_function_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch, "zeta", relu=lambda x: x * 0 + 7)
    assert kernels.relu(torch.ones(2)).tolist() == [7.0, 7.0]
    assert kernels.gelu(torch.zeros(2)).tolist() == [0.0, 0.0]


def test_what_a_maker_leaves_unused_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(kernels.silu)
    stand_in.install(monkeypatch, "zeta")
    with pytest.raises(PluginError, match="zeta leaves 'silu' unused"):
        kernels.silu  # noqa: B018
    with pytest.raises(PluginError, match="zeta leaves 'mm' unused"):
        kernels.aten.mm  # noqa: B018


def test_what_a_loaded_folder_leaves_unused_is_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in.install(monkeypatch, device="chip")
    unused = {"chip": frozenset({"gelu"})}
    monkeypatch.setattr(kernels, "unused_ops", lambda device: unused.get(device, frozenset()))
    with pytest.raises(PluginError, match="leaves 'gelu' unused"):
        kernels.gelu  # noqa: B018
    assert callable(kernels.relu)


def test_a_function_that_this_release_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["flag_gems.ops"], "relu")
    with pytest.raises(PluginError, match=r"flag_gems 5\.0\.2 has no function 'relu'"):
        kernels.relu  # noqa: B018


def tuned(triton: Any, count: int) -> Any:
    """A kernel decorated as in FlagGems: an autotuner inside FlagGems' own decorator."""

    class Entry(triton.KernelInterface):  # type: ignore[misc]
        def __init__(self, fn: Any) -> None:
            self.fn = fn

    @triton.jit
    def kernel(x_ptr, BLOCK: triton.language.constexpr):  # type: ignore[no-untyped-def]
        pass

    configs = [triton.Config({"BLOCK": 2**it}) for it in range(count)]
    return Entry(triton.autotune(configs, key=[])(kernel))


def test_untuned_leaves_the_first_configuration_to_flaggems_kernels_and_to_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    flag_gems = stand_in.install(monkeypatch)
    flag_gems.__file__ = str(tmp_path / "flag_gems" / "__init__.py")
    makers, others = ModuleType("_nvidia.ops.mm"), ModuleType("somebody")  # a vendor's, by file
    makers.__file__ = str(tmp_path / "flag_gems" / "runtime" / "_nvidia" / "ops" / "mm.py")
    others.__file__ = str(tmp_path / "flag_gems_too" / "ops.py")
    for module in (makers, others):
        module.kernel, module.alone = tuned(triton, 3), tuned(triton, 1)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with warnings.catch_warnings():
        assert untuned.gelu(torch.zeros(2)).tolist() == [0.0, 0.0]
        assert callable(untuned.aten.mm)
    assert [it.kwargs for it in makers.kernel.fn.configs] == [{"BLOCK": 1}]
    assert len(makers.alone.fn.configs) == 1
    assert len(others.kernel.fn.configs) == 3
    assert untuned.take_first_configurations(flag_gems) == 0


def test_untuned_registers_the_same_operators() -> None:
    registries = OpRegistry(), OpRegistry()
    te_fl_flaggems.register(registries[0])
    untuned.register(registries[1])
    assert registries[0].list_operators() == registries[1].list_operators()


@pytest.mark.parametrize("module", ["te_fl_flaggems", "te_fl_flaggems.untuned"])
def test_registering_loads_neither_torch_nor_flag_gems(module: str) -> None:
    code = (
        f"import sys, {module} as plugin\nfrom transformer_engine_fl import OpRegistry\n"
        "plugin.register(OpRegistry())\n"
        "assert not {'torch', 'flag_gems', 'triton'} & set(sys.modules), sorted(sys.modules)"
    )
    paths = f"import sys; sys.path[:0] = {sys.path!r}\n"
    done = subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_its_entry_point_names_this_module() -> None:
    try:
        points = distribution("te_fl_flaggems").entry_points
    except PackageNotFoundError:
        pytest.skip("te_fl_flaggems is not installed, only on the path")
    (point,) = [it for it in points if it.group == "te_fl.plugin"]
    assert point.load() is te_fl_flaggems

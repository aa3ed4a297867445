"""Packages in Liger-Kernel's style, loaded without changes."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from core_faults import LEFT, deep
from liger_packages import KERNELS, OPS, impl_info, vendor_info, write
from serving_implementation import served

from transformer_engine_fl import (
    NoImplementationError,
    PluginError,
    RegistrationError,
    functional,
    get_default_manager,
    ops,
    policy_context,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from transformer_engine_fl.testing import cases
from transformer_engine_fl.vendors import list_overridden_ops, load_liger_package, namespace
from transformer_engine_fl.vendors.liger import shim
from transformer_engine_fl.vendors.liger.package import as_function

BRIDGED = {"geglu", "dgeglu", "rmsnorm_fwd", "rmsnorm_bwd"}
OWN = {
    "LigerFancyFunction",
    "LigerGELUMulFunction",
    "LigerRMSNormFunction",
    "fancy_forward",
    "rms_norm_backward",
}


@pytest.fixture
def acme(no_vendors: Path) -> str:
    write(no_vendors, "acme_liger", impl_info("Acme"))
    load_liger_package("acme_liger")
    return "acme_liger"


@pytest.mark.parametrize("declaration", [impl_info("acme"), vendor_info("acme")])
def test_a_package_is_loaded_as_it_is_in_both_forms_of_declaration(
    no_vendors: Path, declaration: str
) -> None:
    write(no_vendors, "acme_liger", declaration)
    (package,) = load_liger_package("acme_liger")
    assert (package.name, package.devices, package.module_path) == (
        "acme",
        ("cpu",),
        "acme_liger.ops",
    )
    assert set(package.exports) == OWN
    with with_preference("vendor:acme"):
        assert served("geglu", torch.ones(2, 4)) == "liger.acme"


@pytest.mark.parametrize("name", ["_acme", "acme"])
def test_a_folder_is_loaded_as_if_it_were_inside_liger(no_vendors: Path, name: str) -> None:
    folder = write(no_vendors, name, impl_info("acme"))
    parent = "backends._acme" if name == "_acme" else "acme"
    absolute = f"from liger_kernel.ops.{parent}.ops.kernels import"
    text = (folder / "ops" / "__init__.py").read_text().replace("from .kernels import", absolute)
    (folder / "ops" / "__init__.py").write_text(text)
    load_liger_package(folder)
    try:
        with with_preference("vendor:acme"), with_strict_mode():
            assert served("geglu", torch.ones(2, 4)) == "liger.acme"
    finally:
        for module in [it for it in sys.modules if it.startswith(shim.LIGER)]:
            del sys.modules[module]


def test_its_ops_are_imported_when_one_is_first_chosen(acme: str) -> None:
    assert f"{acme}.ops" not in sys.modules
    with with_preference("reference"):
        ops.geglu(torch.ones(2, 4))
    with with_denied_vendors("acme"), with_preference("vendor"):
        ops.geglu(torch.ones(2, 4))
    assert f"{acme}.ops" not in sys.modules
    with with_preference("vendor:acme"):
        ops.geglu(torch.ones(2, 4))
    assert sys.modules[f"{acme}.ops.kernels"].CALLS == ["LigerGELUMulFunction"]


def test_nothing_of_liger_is_left_to_find_when_it_has_loaded(acme: str) -> None:
    with with_preference("vendor:acme"):
        ops.geglu(torch.ones(2, 4))
    with pytest.raises(ModuleNotFoundError):
        __import__("liger_kernel")
    assert not [it for it in sys.modules if it.startswith("liger_kernel")]


def test_only_what_it_has_is_overridden(acme: str) -> None:
    assert set(list_overridden_ops("cpu", vendor="acme")) == BRIDGED | OWN
    with with_preference("vendor:acme"):
        assert served("swiglu", torch.ones(2, 4)) != "liger.acme"


def test_it_is_preferred_denied_and_explained(acme: str) -> None:
    x = torch.ones(2, 4)
    with with_preference("vendor:ACME"):
        assert served("geglu", x) == "liger.acme"
        with with_denied_vendors("acme"):
            assert served("geglu", x) != "liger.acme"
            assert "vendor 'Acme' is denied" in str(get_default_manager().explain("geglu", x))


@pytest.mark.parametrize("op_name", sorted(BRIDGED))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_bridged_keeps_the_contract(acme: str, op_name: str, dtype: str) -> None:
    found = cases("liger.acme", operators=(op_name,), dtypes=(dtype,))
    outcomes = [case.run() for case in found]
    assert sum(it.declined is None for it in outcomes) > len(outcomes) / 2


def test_a_gradient_is_taken_in_inference_mode_too(acme: str) -> None:
    x, grad = torch.randn(3, 8), torch.randn(3, 4)
    with with_preference("vendor:acme"):
        expected = ops.dgeglu(grad, x)
        with torch.inference_mode():
            made_there = x.clone(), grad.clone()
            assert served("dgeglu", grad, x) == "liger.acme"
            torch.testing.assert_close(ops.dgeglu(*made_there[::-1]), expected)
        assert served("dgeglu", *made_there[::-1]) == "liger.acme"
    assert not get_default_manager().quarantine.held()


NORM = """\
import torch
from liger_kernel.ops.utils import ensure_contiguous


def _plain(*tensors):
    assert not any(it.is_neg() for it in tensors)  # a kernel would read what is in memory


class LigerLayerNormFunction(torch.autograd.Function):
    @staticmethod
    @ensure_contiguous
    def forward(ctx, X, W, B, eps):
        _plain(X, W, B)
        return torch.nn.functional.layer_norm(X, X.shape[-1:], W, B, eps)


def layer_norm_backward(dY, X, W, B, Mean, RSTD):
    _plain(dY, X, W, B, Mean, RSTD)
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        dY.view(X.shape), X, X.shape[-1:], Mean[:, None], RSTD[:, None], W, B, [True] * 3
    )
    return dx, dw, db
"""


def test_every_tensor_of_a_norm_comes_to_a_kernel_as_it_is_in_memory(no_vendors: Path) -> None:
    exports = '__all__ = ["LigerLayerNormFunction", "layer_norm_backward"]'
    text = f"from .kernels import *\n\n{exports}\n"
    write(no_vendors, "acme_liger", impl_info("acme"), ops=text, kernels=NORM)
    load_liger_package("acme_liger")
    negated, x = torch._neg_view(-torch.ones(4)), torch.randn(3, 4)
    with with_preference("vendor:acme"):
        assert served("layernorm_fwd", x, negated, negated) == "liger.acme"
        statistics = torch.zeros(3), torch.ones(3)
        assert served("layernorm_bwd", x, x, *statistics, negated) == "liger.acme"


def test_a_new_operator_is_added_and_callable(acme: str) -> None:
    manager, x = get_default_manager(), torch.ones(3, requires_grad=True)
    assert manager.call("fancy_forward", torch.ones(2), times=3).tolist() == [3.0, 3.0]
    manager.call("LigerFancyFunction", x, times=5).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0] * 3


def test_the_namespace_follows_the_policy_after_it_was_imported(acme: str) -> None:
    from transformer_engine_fl.vendors.namespace import LigerGELUMulFunction

    a, b = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).unbind()
    expected = torch.nn.functional.gelu(a.double(), approximate="tanh") * b.double()
    calls = f"{acme}.ops.kernels"
    with with_preference("reference"):
        by_base = LigerGELUMulFunction.apply(a, b)
        assert repr(LigerGELUMulFunction) == "<LigerGELUMulFunction by reference.torch>"
    assert calls not in sys.modules
    with with_preference("vendor:acme"):
        by_vendor = LigerGELUMulFunction.apply(a, b)
        assert repr(LigerGELUMulFunction) == "<LigerGELUMulFunction by liger.acme>"
    assert sys.modules[calls].CALLS == ["LigerGELUMulFunction"]
    for output in (by_base, by_vendor):
        torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_namespace_shows_the_names_that_there_are(acme: str) -> None:
    assert {*OWN, "LigerLayerNormFunction", "LigerRopeFunction"} <= set(dir(namespace))
    with pytest.raises(AttributeError, match="did you mean 'LigerFancyFunction'"):
        namespace.LigerFancyFuncton  # noqa: B018


X, W = torch.linspace(-2, 2, 24).view(2, 3, 4), torch.linspace(0.5, 1.5, 4)


def _rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (1 + w)


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin

    return torch.cat([turned(q), turned(k)])


ANGLES = torch.linspace(0, 3, 3)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
HEADS = torch.linspace(-1, 1, 24).view(1, 2, 3, 4)

BASE = {
    "LigerRMSNormFunction": ((X, W), (1e-5, 1.0), _rms),
    "LigerLayerNormFunction": (
        (X, W, W - 1),
        (1e-5,),
        lambda x, w, b: torch.nn.functional.layer_norm(x, (4,), w, b),
    ),
    "LigerSiLUMulFunction": (
        (X, X.flip(0)),
        (2.0, 3.0),
        lambda a, b: 3 * torch.nn.functional.silu(2 * a) * b,
    ),
    "LigerGELUMulFunction": (
        (X, X.flip(0)),
        (),
        lambda a, b: torch.nn.functional.gelu(a, approximate="tanh") * b,
    ),
    "LigerSoftmaxFunction": ((X,), (), lambda x: x.softmax(-1)),
    "LigerRopeFunction": (
        (HEADS, HEADS.flip(0, 1)),
        (ANGLES.cos(), ANGLES.sin()),
        lambda q, k: _rope(q, k, ANGLES.double().cos(), ANGLES.double().sin()),
    ),
    "LigerCrossEntropyFunction": (
        (X.view(6, 4),),
        (torch.tensor([0, 1, 2, 3, -100, 1]),),
        lambda x: torch.nn.functional.cross_entropy(x, torch.tensor([0, 1, 2, 3, -100, 1])),
    ),
}


@pytest.mark.parametrize("name", BASE)
def test_a_default_name_without_a_vendor_is_this_projects_own_with_its_gradient(name: str) -> None:
    tensors, others, formula = BASE[name]
    leaves = [it.clone().requires_grad_() for it in tensors]
    output = getattr(namespace, name).apply(*leaves, *others)
    output = torch.cat(output) if name == "LigerRopeFunction" else output
    output = output[0] if isinstance(output, tuple) else output
    exact = [it.double().requires_grad_() for it in tensors]
    expected = formula(*exact)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
    output.square().sum().backward()
    expected.square().sum().backward()
    for leaf, value in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), value.grad, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_model_go_through_the_vendors_kernels(acme: str) -> None:
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    expected = torch.autograd.grad(functional.rms_norm(x, w).square().sum(), (x, w))
    with with_preference("vendor:acme"), with_strict_mode():
        found = torch.autograd.grad(functional.rms_norm(x, w).square().sum(), (x, w))
    torch.testing.assert_close(found, expected)


def test_what_is_default_nowhere_serves_only_where_it_is_named(no_vendors: Path) -> None:
    write(no_vendors, "extra_liger", impl_info("extra", ("cpu", "xpu"), ("xpu",)))
    load_liger_package("extra_liger")
    x, manager = torch.ones(2, 4), get_default_manager()
    with with_preference("vendor"):
        assert not served("geglu", x).startswith("liger.extra")
        text = str(manager.explain("geglu", x))
        assert "serves only if the policy names it, as vendor:extra or impl:liger.extra" in text
    for name in ("vendor:extra", "impl:liger.extra.opt_in"):
        with with_preference(name):
            assert served("geglu", x) == "liger.extra.opt_in"


@pytest.mark.parametrize(
    ("ops_text", "said"),
    [
        ("import no_such_sdk\n__all__ = ['LigerGELUMulFunction']\n", "no_such_sdk"),
        ("__all__ = ['LigerGELUMulFunction']\n\nraise RuntimeError('no chip')\n", "no chip"),
    ],
)
def test_an_import_error_is_reported_once_and_raised_if_the_vendor_is_named(
    no_vendors: Path, caplog: pytest.LogCaptureFixture, ops_text: str, said: str
) -> None:
    write(no_vendors, "broken_liger", impl_info("broken"), ops=ops_text)
    load_liger_package("broken_liger")
    x, manager = torch.ones(2, 4), get_default_manager()
    with with_preference("vendor"):
        for op_name in ("geglu", "geglu", "LigerGELUMulFunction"):
            args = (x,) if op_name == "geglu" else (x, x)
            assert not served(op_name, *args).startswith("liger")
    told = [it.getMessage() for it in caplog.records if "broken" in it.getMessage()]
    assert len(told) == 1
    line = 1 if "import" in ops_text else 3
    assert f"{no_vendors}/broken_liger/ops/__init__.py:{line}: " in told[0]
    assert said in told[0]
    assert said in str(manager.explain("geglu", x))
    for name in ("vendor:broken", "impl:liger.broken"):
        with with_preference(name):
            with pytest.raises(PluginError, match=said) as raised:
                manager.call("geglu", x)
            assert repr(name) in str(raised.value)
    ops.geglu(x)  # the other implementations serve


@pytest.mark.parametrize(
    ("line", "lacks"),
    [
        ("from liger_kernel.ops.utils import no_such_helper\n", True),
        ("import liger_kernel.transformers.functional\n", True),
        ("import no_such_sdk\n", False),
        ("from torch import no_such_function\n", False),
    ],
)
def test_an_import_error_says_whether_the_stand_in_for_liger_lacks_the_name(
    no_vendors: Path, caplog: pytest.LogCaptureFixture, line: str, lacks: bool
) -> None:
    write(no_vendors, "acme_liger", impl_info("acme"))
    file = no_vendors / "acme_liger" / "ops" / "__init__.py"
    file.write_text(line + file.read_text())
    load_liger_package("acme_liger")
    get_default_manager().call("geglu", torch.ones(2, 4))
    (said,) = caplog.messages
    assert (
        said.endswith("; liger_kernel is not installed, and its stand-in here lacks that") is lacks
    )


def test_a_name_of_ligers_in_other_letters_is_found_by_the_doctor(no_vendors: Path) -> None:
    """The misspelt name registers another operator; the intended one lacks this implementation."""
    from transformer_engine_fl.cli.doctor import examine

    texts = {"ops": OPS, "kernels": KERNELS}
    misspelt = {it: text.replace("GELUMul", "GeluMul") for it, text in texts.items()}
    write(no_vendors, "acme_liger", impl_info("acme"), **misspelt)
    load_liger_package("acme_liger")
    found = [it["what"] for it in examine()["findings"]]
    slip = "liger.acme: registered for 'LigerGeluMulFunction', an operator without a contract"
    assert found == [f"{slip}; did you mean 'LigerGELUMulFunction'?"]


def test_ops_that_the_caller_left_no_stack_to_import_are_imported_later(
    no_vendors: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(no_vendors, "acme_liger", impl_info("acme"))
    file = no_vendors / "acme_liger" / "ops" / "__init__.py"
    file.write_text(f"from core_faults import climb\nclimb({2 * LEFT})\n{file.read_text()}")
    load_liger_package("acme_liger")
    x, manager = torch.ones(2, 4), get_default_manager()
    with with_preference("vendor:acme"):
        with pytest.raises(RecursionError):
            deep(lambda: manager.call("geglu", x))
        assert served("geglu", x) == "liger.acme"
    assert not caplog.records


BAD = {
    "raise RuntimeError('not today')\n": (PluginError, "__init__.py:1: RuntimeError: not today"),
    "x = = 1\n": (PluginError, "__init__.py:1: SyntaxError"),
    "import sys\nsys.exit(3)\n": (PluginError, "__init__.py:2: SystemExit"),
    "": (PluginError, r"declares nothing: .* of liger_kernel\.ops\.backends\.registry$"),
    "def register(registry): ...": (PluginError, "plugin of this project, .* name: 'bad_liger'"),
    impl_info("acme").replace('f"{__name__}.ops"', '"elsewhere.ops"'): (
        PluginError,
        "'acme' with the module path 'elsewhere.ops', which must be 'bad_liger' or a module inside",
    ),
    impl_info("acme", ()): (PluginError, "devices is empty"),
    impl_info("acme").replace("('cpu',)", "'cpu'", 1): (PluginError, "devices must be a tuple"),
    impl_info("acme", ("cpu",), ("xpu",)): (PluginError, r"default_devices has \['xpu'\]"),
    impl_info("acme").replace("}.ops", "}.nothing"): (PluginError, "no module named"),
    impl_info("not a name"): (RegistrationError, "must be a name"),
    vendor_info(""): (PluginError, "__init__.py:3: ValueError: VendorInfo: vendor"),
}


@pytest.mark.parametrize("declaration", BAD)
def test_a_package_that_is_wrong_is_named_with_the_line(no_vendors: Path, declaration: str) -> None:
    kind, said = BAD[declaration]
    write(no_vendors, "bad_liger", declaration)
    before = get_default_manager().registry.snapshot().operators
    with pytest.raises(kind, match=said):
        load_liger_package("bad_liger")
    registered = get_default_manager().registry.list_operators()
    assert not before or set(registered) - set(before) <= set(BASE)
    ops.geglu(torch.ones(2, 4))


def test_a_name_that_another_package_has_is_refused_with_both(acme: str, no_vendors: Path) -> None:
    write(no_vendors, "other_liger", impl_info("ACME"))
    with pytest.raises(RegistrationError, match=r"acme_liger\.ops.*other_liger\.ops"):
        load_liger_package("other_liger")


def test_an_export_that_is_missing_or_no_operator_is_reported(no_vendors: Path) -> None:
    text = OPS.replace("]", '    "LigerSoftmaxFunction",\n    "BLOCK",\n]\nBLOCK = 3\n')
    write(no_vendors, "acme_liger", impl_info("acme"), ops=text)
    load_liger_package("acme_liger")
    with with_preference("vendor:acme"):
        for op_name, said in (
            ("scaled_softmax_forward", "which is missing"),
            ("BLOCK", "of type int"),
        ):
            with pytest.raises(PluginError, match=said):
                get_default_manager().call(op_name, torch.ones(2, 4))


def test_a_backward_with_parameters_that_liger_has_not_is_not_guessed_at(no_vendors: Path) -> None:
    text = KERNELS.replace("in_place, row_mode\n):", "in_place, row_mode, turbo=False\n):")
    write(no_vendors, "acme_liger", impl_info("acme"), kernels=text)
    load_liger_package("acme_liger")
    x = torch.ones(2, 4)
    args = (x, x, torch.ones(2), torch.ones(4))
    with with_preference("vendor"):
        assert served("rmsnorm_bwd", *args) != "liger.acme"
        assert "the parameter 'turbo'" in str(get_default_manager().explain("rmsnorm_bwd", *args))


def test_a_function_that_cannot_be_called_as_ligers_is_reported_once_with_its_line(
    no_vendors: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = KERNELS.replace("def forward(ctx, a, b):", "def forward(ctx, ab, *, b=None):")
    write(no_vendors, "acme_liger", impl_info("acme"), kernels=text)
    load_liger_package("acme_liger")
    x = torch.ones(2, 4)
    line = text[: text.index("def forward(ctx, ab")].count("\n")  # the line before is reported
    said = f"acme_liger/ops/kernels.py:{line - 1}: LigerGELUMulFunction(ab, *, b=None) is called "
    with with_preference("vendor"):
        for op_name, args in (("geglu", (x,)), ("dgeglu", (torch.ones(2, 2), x))):
            assert served(op_name, *args) != "liger.acme"
        assert served("rmsnorm_fwd", x, torch.ones(4)) == "liger.acme"
    (warned,) = [it for it in caplog.messages if "LigerGELUMulFunction" in it]
    assert said in warned
    assert "with (a, b): too many positional arguments" in warned
    with with_preference("vendor:acme"), pytest.raises(PluginError, match="is called with"):
        ops.geglu(x)


def test_a_device_that_is_absent_is_the_reason(no_vendors: Path) -> None:
    write(no_vendors, "far_liger", impl_info("far", ("npu",)))
    load_liger_package("far_liger")
    text = str(get_default_manager().explain("geglu", torch.ones(2, 4)))
    assert "torch sees no 'npu' device here" in text


@pytest.mark.parametrize("kernel", ["raise RuntimeError('boom')", "return a * 0 + undefined"])
def test_one_that_fails_at_call_is_set_aside_and_its_line_named(
    no_vendors: Path, kernel: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = KERNELS.replace('CALLS.append("LigerGELUMulFunction")', kernel)
    write(no_vendors, "acme_liger", impl_info("acme"), kernels=text)
    load_liger_package("acme_liger")
    x = torch.ones(2, 4)
    with with_preference("vendor:acme"):
        assert served("geglu", x) != "liger.acme"
        line = text[: text.index(kernel)].count("\n") + 1
        assert f"acme_liger/ops/kernels.py:{line})" in caplog.text
        assert "in quarantine after a fault" in str(get_default_manager().explain("geglu", x))
        with with_strict_mode(), pytest.raises(Exception, match=r"boom|undefined"):
            ops.geglu(x)


def test_an_export_with_the_name_of_a_contract_is_left_out(no_vendors: Path) -> None:
    text = OPS.replace("]", '    "swiglu",\n]\nswiglu = fancy_forward\n')
    write(no_vendors, "acme_liger", impl_info("acme"), ops=text)
    load_liger_package("acme_liger")
    ids = [it.impl_id for it in get_default_manager().registry.get_implementations("swiglu")]
    assert "liger.acme" not in ids


def test_a_second_manager_gets_it_too_and_a_second_load_changes_nothing(acme: str) -> None:
    from transformer_engine_fl import reset_default_manager

    count = len(get_default_manager().registry.get_implementations("geglu"))
    load_liger_package(acme)
    assert len(get_default_manager().registry.get_implementations("geglu")) == count
    reset_default_manager()
    load_liger_package(acme)
    with with_preference("vendor:acme"):
        assert served("geglu", torch.ones(2, 4)) == "liger.acme"


PROBE = """\
import json, sys, torch
import transformer_engine_fl as t
m, served = t.get_default_manager(), []
m.monitor(lambda op, impl: served.append(impl.impl_id))
m.call("geglu", torch.ones(2, 4))
print(json.dumps([served, [it.error for it in m.plugins if it.error]]))
"""


@pytest.mark.parametrize("liger", [False, True])
def test_named_as_a_plugin_module_it_is_picked_with_and_without_liger(
    no_vendors: Path, liger: bool
) -> None:
    write(no_vendors, "acme_liger", impl_info("acme") if not liger else vendor_info("acme"))
    if liger:  # its modules are used; a module that it lacks is provided
        registry = no_vendors / "liger_kernel" / "ops" / "backends"
        registry.mkdir(parents=True)
        for folder in (registry, registry.parent, registry.parent.parent):
            (folder / "__init__.py").write_text("")
        (registry / "registry.py").write_text("IMPL_REGISTRY = {}\n")
        utils = "from transformer_engine_fl.vendors.liger.served.{} import *\nREAL = True\n"
        (registry.parent.parent / "utils.py").write_text(utils.format("utils"))
        (registry.parent / "utils.py").write_text(utils.format("ops_utils"))
        text = (no_vendors / "acme_liger/ops/kernels.py").read_text()
        check = "from liger_kernel.utils import REAL\n"
        (no_vendors / "acme_liger/ops/kernels.py").write_text(check + text)
    variables = {
        "TE_FL_PLUGIN_MODULES": "acme_liger",
        "TE_FL_PREFER": "vendor:acme",
        "PYTHONPATH": os.pathsep.join([str(no_vendors), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["liger.acme"], []]


@pytest.mark.parametrize(
    ("declaration", "ops_text", "said"),
    [
        (impl_info("Torn"), "def f(:\n", "ops/__init__.py:1: SyntaxError"),
        (vendor_info("Torn").replace("}.ops", "}.nothing"), "def f(:\n", "SyntaxError"),
        (impl_info("Torn").replace("}.ops", "}.nothing"), OPS, "no module named"),
    ],
)
def test_preferring_the_vendor_of_a_package_that_is_left_out_is_an_error(
    no_vendors: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    declaration: str,
    ops_text: str,
    said: str,
) -> None:
    write(no_vendors, "torn_liger", declaration, ops=ops_text)
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "torn_liger")
    x = torch.ones(2, 4)
    geglu = get_default_manager().bind("geglu")
    for orders in (
        {"prefer": "vendor:torn"},
        {"per_op_order": {"geglu": ["vendor:torn", "reference"]}},
    ):
        with policy_context(**orders), pytest.raises(PluginError, match=said) as raised:
            geglu(x)
        assert "the policy names 'vendor:torn'" in str(raised.value)
        with policy_context(**orders):
            decision = get_default_manager().explain("geglu", x)
            with pytest.raises(PluginError, match=said):
                get_default_manager().resolve("geglu", x)
        assert decision.selected is None
        assert decision.note == f"a call raises PluginError: {raised.value}"
    for orders in (
        {"prefer": "vendor"},
        {"prefer": "vendor:torn", "deny_vendors": ["torn"]},
        {"per_op_order": {"geglu": ["reference", "vendor:torn"]}},
    ):
        with policy_context(**orders):
            geglu(x)
    (told,) = [it for it in caplog.messages if "torn" in it.lower()]
    assert "is left out" in told


def test_a_module_that_is_no_package_of_any_style_is_named(
    no_vendors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_vendors / "nothing_here.py").write_text("x = 1\n")
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "nothing_here")
    manager = get_default_manager()
    manager.ensure_initialized()
    (report,) = [it for it in manager.plugins if it.error]
    assert "nothing_here" in report.name
    assert "has neither register(registry)" in str(report.error)


def test_a_vendor_that_was_named_and_does_not_serve_is_an_error_of_get_op(acme: str) -> None:
    from transformer_engine_fl.vendors import get_op

    assert get_op("geglu", "cpu", vendor="acme")(torch.ones(2, 4)).shape == (2, 2)
    with pytest.raises(NoImplementationError, match="'swiglu'"):
        get_op("swiglu", "cpu", vendor="acme")
    assert get_op("swiglu", "cpu")(torch.ones(2, 4)).shape == (2, 2)  # another set's


IMPORTED = "from .kernels import LigerGELUMulFunction, fancy_forward as _hidden\n"


@pytest.mark.parametrize(
    ("ops_text", "lazy"),
    [
        (IMPORTED, True),
        (IMPORTED + "__all__: list[str] = ['LigerGELUMulFunction']\n", True),
        ("from .kernels import *\n__all__ = ['LigerGELUMulFunction']\n", True),
        (IMPORTED + "__all__ = ['Liger' + 'GELUMulFunction']\n", False),
        (IMPORTED + "__all__ = []\n__all__ += ['LigerGELUMulFunction']\n", False),
        ("from . import kernels\n" + IMPORTED + "__all__ = kernels.NAMES\n", False),
        ("try:\n    " + IMPORTED + "except ImportError:\n    pass\n", False),
    ],
)
def test_exports_are_read_from_the_source_and_imported_only_if_necessary(
    no_vendors: Path, ops_text: str, lazy: bool
) -> None:
    kernels = KERNELS + "\n\nNAMES = ['LigerGELUMulFunction']\n"
    write(no_vendors, "acme_liger", impl_info("acme"), ops=ops_text, kernels=kernels)
    (package,) = load_liger_package("acme_liger")
    assert [it for it in package.exports if it != "kernels"] == ["LigerGELUMulFunction"]
    assert ("acme_liger.ops" not in sys.modules) is lazy


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_a_source_is_read_in_the_encoding_that_python_reads_it_in(
    no_vendors: Path, encoding: str
) -> None:
    write(no_vendors, "acme_liger", impl_info("acme"))
    file = no_vendors / "acme_liger" / "ops" / "__init__.py"
    cookie = "# coding: latin-1\n" if encoding == "latin-1" else ""
    file.write_text(f"{cookie}# for Zürich\n{file.read_text()}", encoding=encoding)
    (package,) = load_liger_package("acme_liger")
    assert "LigerGELUMulFunction" in package.exports


class Apart(torch.autograd.Function):
    """A function with ``setup_context`` separate from ``forward``."""

    @staticmethod
    def forward(x: torch.Tensor, times: float = 2.0) -> torch.Tensor:
        return x * times

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.times = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.times, None


def test_functions_classes_and_modules_are_called_as_what_they_are() -> None:
    x = torch.ones(2, requires_grad=True)
    as_function(Apart)(x, times=3.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    assert str(inspect.signature(as_function(Apart))).startswith("(x: ")
    assert as_function(torch.nn.ReLU) is torch.nn.ReLU

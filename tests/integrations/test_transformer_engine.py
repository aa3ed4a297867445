"""Plugins written for TransformerEngine-FL's plugin core, loaded unchanged."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_engine_fl import (
    ConfigurationError,
    NotSupportedError,
    OpManager,
    get_default_manager,
    ops,
    reset_global_policy,
    testing,
    with_preference,
    with_strict_mode,
)
from transformer_engine_fl.integrations import transformer_engine
from transformer_engine_fl.integrations.transformer_engine import (
    alias_plugin_core,
    unalias_plugin_core,
)

PLUGIN = '''
"""As the guide of that project has it: one file, unaware of any other."""
import functools
import torch
from transformer_engine.plugin.core import OpImpl, BackendImplKind
from transformer_engine.plugin.core.ops import TEFLBackendBase, FlashAttentionBase, DType
from transformer_engine.plugin.core.logger_manager import get_logger

seen = []


def my_rmsnorm_fwd(input, weight, eps=1e-5, **kwargs):
    seen.append("rmsnorm_fwd")
    rsigma = torch.rsqrt(input.pow(2).mean(-1) + eps)
    return input * rsigma.unsqueeze(-1) * weight, rsigma.flatten()


my_rmsnorm_fwd._is_available = lambda: True


def absent(input, quantizer):
    raise AssertionError("never asked")


absent._is_available = lambda: False


def other(A, transA, B, transB, D, quantizer):
    raise AssertionError("never called")


class Attention(FlashAttentionBase):
    pass


class Backend(TEFLBackendBase):
    def is_available(self):
        return True

    def gelu(self, input, quantizer):
        seen.append(("gelu", quantizer))
        return torch.nn.functional.gelu(input, approximate="tanh")

    def layernorm_fwd(
        self, input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma
    ):
        seen.append(("layernorm_fwd", otype))
        assert input.ndim == 2 and ln_out is None and quantizer is None
        variance, mean = torch.var_mean(input.float(), -1, correction=0)
        rsigma = torch.rsqrt(variance + eps)
        gamma = weight + 1 if zero_centered_gamma else weight
        output = (input - mean[:, None]) * rsigma[:, None] * gamma
        return [output if bias is None else output + bias, mean, rsigma]


def _bind_is_available(fn, is_available_fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    wrapper._is_available = is_available_fn
    return wrapper


def register(registry):
    get_logger().info("registering")
    backend = Backend()
    common = {"impl_id": "vendor.myvendor", "kind": BackendImplKind.VENDOR, "vendor": "myvendor"}
    registry.register_impl(
        OpImpl(op_name="rmsnorm_fwd", fn=my_rmsnorm_fwd, priority=200, **common)
    )
    registry.register_many(
        [
            OpImpl(
                op_name=name,
                fn=_bind_is_available(getattr(backend, name), backend.is_available),
                supported_dtypes={"float32"},
                **common,
            )
            for name in ("gelu", "layernorm_fwd")
        ]
        + [OpImpl(op_name="relu", fn=absent, **common)]
        + [OpImpl(op_name=name, fn=other, **common) for name in ("generic_gemm", "clamped_swiglu")]
    )
'''


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the plugin onto ``sys.path`` and name it; remove the test's aliases afterwards."""
    (tmp_path / "my_vendor_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "my_vendor_plugin")
    yield
    unalias_plugin_core()
    sys.modules.pop("my_vendor_plugin", None)


def seen() -> list[Any]:
    found: list[Any] = sys.modules["my_vendor_plugin"].seen
    return found


def test_a_plugin_loads_unchanged_and_serves() -> None:
    assert alias_plugin_core()
    assert alias_plugin_core()
    x, w = torch.randn(3, 4), torch.randn(4)
    with with_preference("vendor:myvendor"), with_strict_mode():
        output, rsigma = ops.rmsnorm_fwd(x, w)
    assert seen() == ["rmsnorm_fwd"]
    exact = x.double().square().mean(-1).add(1e-5).rsqrt()
    wanted = x.double() * exact[:, None] * w.double()
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rsigma.double(), exact, rtol=1e-5, atol=1e-6)


def test_functions_with_transformer_engines_signatures_are_bridged() -> None:
    alias_plugin_core()
    x, w = torch.randn(2, 3, 4), torch.randn(4)
    with with_preference("vendor:myvendor"), with_strict_mode():
        output = ops.gelu(x)
        y, mu, rsigma = ops.layernorm_fwd(x, w, w, 1e-3, zero_centered_gamma=True)
    kinds = importlib.import_module("transformer_engine.plugin.core.ops").DType
    assert seen() == [("gelu", None), ("layernorm_fwd", kinds.kFloat32)]
    torch.testing.assert_close(output, ops.gelu.oracle(x).float())
    exact = ops.layernorm_fwd.oracle(x, w, w, 1e-3, zero_centered_gamma=True)
    for given, value in zip((y, mu, rsigma), exact, strict=True):
        assert given.shape == value.shape
        torch.testing.assert_close(given.double(), value, rtol=1e-5, atol=1e-5)


def test_the_availability_and_dtypes_that_a_plugin_declares_apply() -> None:
    alias_plugin_core()
    text = str(get_default_manager().explain("relu"))
    assert "not available: is_available() says no" in text
    x = torch.ones(2, dtype=torch.bfloat16)
    assert "dtype 'bfloat16' is not supported; supported: float32" in str(
        get_default_manager().explain("gelu", x)
    )


@pytest.mark.parametrize("op_name", ["generic_gemm", "clamped_swiglu"])
def test_what_is_not_bridged_says_so_and_keeps_nothing_else_from_serving(op_name: str) -> None:
    alias_plugin_core()
    manager = get_default_manager()
    for asked in (manager.explain(op_name), manager.explain_for(op_name, device="cuda")):
        (verdict,) = [it for it in asked.verdicts if it.impl.impl_id == "vendor.myvendor"]
        assert not verdict.accepted
        assert "it is not bridged: " in verdict.reason
        assert "implementation (A, transA, B, transB, D, quantizer)" in verdict.reason
    x = torch.ones(2, 4)
    with with_preference("vendor:myvendor"):
        getattr(ops, op_name)(*(x,) * (1 + (op_name == "generic_gemm")))
        with with_strict_mode():
            ops.gelu(x)


def test_what_is_not_bridged_is_named_in_the_scorecard_and_fails_nothing() -> None:
    alias_plugin_core()
    some = {"dtypes": ["float32"], "on": ["cpu"], "every": 20}
    card = testing.verify("vendor.myvendor", operators=["gelu", "clamped_swiglu"], **some)
    assert (card.passed, card.operators) == (True, ("gelu",))
    assert card.switched_off["clamped_swiglu"].startswith("it is not bridged: ")
    assert "| `clamped_swiglu` | it is not bridged: " in card.to_markdown()
    whole = testing.verify("vendor.myvendor", **{**some, "every": 1000})
    assert set(whole.switched_off) == {"generic_gemm", "clamped_swiglu"}
    assert not set(whole.switched_off) & {*whole.operators, *(whole.missing or ())}
    with pytest.raises(ConfigurationError, match="it is not bridged: "):
        testing.verify("vendor.myvendor", operators=["generic_gemm"], on=["cpu"])


def test_without_the_alias_the_plugin_is_left_out_and_the_reason_said() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    (report,) = [it for it in manager.plugins if "my_vendor_plugin" in it.name]
    assert "No module named 'transformer_engine'" in str(report.error)
    assert "my_vendor_plugin.py:5" in str(report.error)
    assert f"name {transformer_engine.__name__!r} in TE_FL_PLUGIN_MODULES" in str(report.error)


@pytest.mark.parametrize("installed", [False, True])
def test_named_as_a_plugin_module_it_aliases_before_the_others_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    modules = f"my_vendor_plugin,{transformer_engine.__name__}"
    if installed:
        metadata = tmp_path / "my_vendor-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_vendor\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(
            "[te_fl.plugin]\nmine = my_vendor_plugin:register\n"
        )
        modules = transformer_engine.__name__
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", modules)
    reset_global_policy()
    with with_preference("vendor:myvendor"), with_strict_mode():
        ops.gelu(torch.ones(2))
    assert seen()
    assert not [it for it in get_default_manager().plugins if it.error]


def test_an_installed_transformer_engine_is_not_shadowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("real = True\n")
    assert not alias_plugin_core()
    assert "Transformer Engine is installed" in caplog.text
    assert "is not replaced" in caplog.text
    try:
        assert importlib.import_module("transformer_engine").real
        assert not alias_plugin_core()
    finally:
        sys.modules.pop("transformer_engine")


def test_the_alias_is_taken_back() -> None:
    alias_plugin_core()
    importlib.import_module(transformer_engine.PATH)
    unalias_plugin_core()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(transformer_engine.PATH)


def test_nothing_is_aliased_on_import() -> None:
    """Runs in a fresh interpreter: in this one, an earlier test may have removed an alias."""
    code = (
        f"import sys, {transformer_engine.__name__}\n"
        "assert 'transformer_engine' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


PUBLIC = """
BackendImplKind OpImpl match_token TEFLBackendBase TEFLModule get_tefl_module reset_tefl_module
get_registry get_manager reset_registry Logger LoggerManager SelectionPolicy PolicyManager
get_policy set_global_policy reset_global_policy policy_context policy_from_env get_policy_epoch
bump_policy_epoch with_strict_mode with_preference with_allowed_vendors with_denied_vendors
PREFER_DEFAULT PREFER_VENDOR PREFER_REFERENCE VALID_PREFER_VALUES OpManager get_default_manager
reset_default_manager OpRegistry discover_plugin discover_from_entry_points
discover_from_env_modules get_discovered_plugin clear_discovered_plugin PLUGIN_GROUP
PLUGIN_MODULES_ENV
"""


def test_every_public_name_is_there() -> None:
    alias_plugin_core()
    core = importlib.import_module(transformer_engine.PATH)
    assert [name for name in PUBLIC.split() if not hasattr(core, name)] == []


def test_what_differs_says_so_when_it_is_used() -> None:
    alias_plugin_core()
    core: Any = importlib.import_module(transformer_engine.PATH)
    with pytest.raises(NotSupportedError, match="a change of policy takes effect by itself"):
        core.bump_policy_epoch()
    with pytest.raises(NotSupportedError, match="fused_attn_fwd"):
        core.ops.FlashAttentionBase(softmax_scale=1.0)
    with pytest.raises(AttributeError, match="has no equivalent"):
        _ = core.ops.NVTE_QKV_Layout
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine.pytorch")


def test_policies_and_registries_are_made_as_they_are_there() -> None:
    alias_plugin_core()
    core: Any = importlib.import_module(transformer_engine.PATH)
    policy = core.SelectionPolicy.from_dict(
        prefer="vendor", per_op_order={"gelu": ["reference"]}, deny_vendors={"zeta"}
    )
    core.set_global_policy(policy)
    assert core.get_policy().prefer == "vendor"
    assert core.get_policy().deny_vendors == {"zeta"}
    core.set_global_policy(core.SelectionPolicy(prefer="vendor"))
    registry = core.OpRegistry()
    kinds = core.BackendImplKind
    impl = core.OpImpl(
        op_name="gelu", impl_id="default.mine", kind=kinds.DEFAULT, fn=lambda input: input * 2
    )
    registry.register_impl(impl)
    assert core.match_token(impl, "flagos")
    assert not core.match_token(impl, "vendor")
    manager = OpManager(registry, builtins=False, plugins=False)
    assert manager.call("gelu", torch.ones(1)).tolist() == [2.0]

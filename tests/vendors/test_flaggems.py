"""Vendors' folders in FlagGems' style, loaded without changes."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from flaggems_folders import CONFIGS, GELU, HEURISTICS, NEW, OLD, POINTWISE, declaration, write
from serving_implementation import served

from transformer_engine_fl import (
    BackendImplKind,
    ConfigurationError,
    NoImplementationError,
    OpImpl,
    PartialMutationError,
    PluginError,
    RegistrationError,
    get_default_manager,
    ops,
    reset_default_manager,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from transformer_engine_fl.testing import cases
from transformer_engine_fl.vendors import (
    BackendRegistry,
    VendorInfo,
    list_overridden_ops,
    load_flaggems_folder,
    namespace,
    register_vendor,
)
from transformer_engine_fl.vendors.flaggems import configs, names, unused_ops

PACKAGE = "flag_gems.runtime.backend._zeta"
X = torch.linspace(-3, 3, 24).view(4, 6)


def calls(module: str) -> list[str]:
    """The kernels of one of the folder's modules that have run."""
    found: list[str] = sys.modules[f"{PACKAGE}.{module}"].CALLS
    return found


# -------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("utils", ["backend_utils", "flag_gems.runtime.backend.backend_utils"])
@pytest.mark.parametrize(
    ("form", "functions"),
    [
        (NEW, {"add", "gelu", "silu", "layer_norm", "zeta_norm", "silu_and_mul"}),
        (OLD, {"add", "gelu", "silu_and_mul"}),
    ],
)
def test_a_folder_is_loaded_as_it_is_in_both_forms(
    no_vendors: Path, form: str, functions: set[str], utils: str
) -> None:
    folder = load_flaggems_folder(
        write(no_vendors, init=declaration(backend_utils=utils), ops=form)
    )
    assert (folder.name, folder.info) == ("zeta", VendorInfo("zeta", "cpu", "true"))
    assert set(folder.kernels) == functions
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"
        assert served("swiglu", X) == "flaggems.zeta"
    expected = torch.nn.functional.gelu(X.double(), approximate="tanh")
    with with_preference("vendor:zeta"):
        torch.testing.assert_close(ops.gelu(X).double(), expected, rtol=1e-5, atol=1e-6)


def test_its_operators_are_imported_when_one_is_first_chosen(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors, ops=OLD))
    with with_preference("reference"):
        ops.gelu(X)
    assert not [it for it in sys.modules if it.startswith(f"{PACKAGE}.")]
    with with_preference("vendor:zeta"):
        ops.gelu(X)
    assert calls("ops.gelu") == ["gelu"]


def test_nothing_of_flag_gems_is_left_to_find_when_it_has_loaded(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors))
    with with_preference("vendor:zeta"):
        ops.gelu(X)
    left = [it for it in sys.modules if it.split(".")[0] in ("flag_gems", "backend_utils", "_zeta")]
    assert not [it for it in left if not f"{it}.".startswith(f"{PACKAGE}.")]
    for name in ("flag_gems", "backend_utils"):
        with pytest.raises(ModuleNotFoundError):
            __import__(name)


def test_it_finds_itself_by_both_of_its_names(no_vendors: Path) -> None:
    own = GELU + "import _zeta\nimport flag_gems.runtime.backend._zeta as itself\n"
    own += "assert _zeta is itself\nfrom _zeta.ops.add import add\n"
    load_flaggems_folder(write(no_vendors, gelu=own))
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"


def test_aten_operators_keep_their_names_and_arguments(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors))
    manager = get_default_manager()
    assert {"aten::add.Tensor", "aten::gelu", "aten::native_layer_norm"} <= set(
        list_overridden_ops("cpu", vendor="zeta")
    )
    x = X.clone().requires_grad_()
    total = manager.call("aten::add.Tensor", x, x, alpha=3)
    torch.testing.assert_close(total, 4 * X)
    assert not total.requires_grad
    # Arguments have ATen's names, whatever the vendor's are; default values are not passed on.
    output = manager.call("aten::gelu", self=X, approximate="tanh")
    torch.testing.assert_close(output, torch.nn.functional.gelu(X, approximate="tanh"))
    y, mean, rstd = manager.call("aten::native_layer_norm", X, [6], None, None, 1e-5)
    native = torch.native_layer_norm(X, [6], None, None, 1e-5)
    for mine, expected in zip((y, mean, rstd), native, strict=True):
        torch.testing.assert_close(mine, expected)
    signature = str(inspect.signature(manager.bind("aten::gelu")))
    assert "self" in signature
    assert "approximate" in signature


WHOLE = """\
import torch


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = (it.detach().requires_grad_() for it in ctx.saved_tensors)
        with torch.enable_grad():
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
        return torch.autograd.grad(y, (x, weight), dy)


def rms_norm(x, normalized_shape, weight, eps=1e-5):
    return Norm.apply(x, weight)


def cosine_embedding_loss(x, y, target):
    with torch.no_grad():
        return (x * y).sum()


__all__ = ["rms_norm", "cosine_embedding_loss"]
"""


def test_of_an_operator_that_torch_takes_apart_it_brings_the_gradient_or_declines(
    no_vendors: Path,
) -> None:
    load_flaggems_folder(write(no_vendors, ops=WHOLE))
    call, x = get_default_manager().call, X.clone().requires_grad_()
    call("aten::rms_norm", x, [6], torch.ones(6)).sum().backward()
    y = X.clone().requires_grad_()
    torch.nn.functional.rms_norm(y, [6], torch.ones(6), 1e-5).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    with torch.no_grad():
        call("aten::cosine_embedding_loss", x, X, torch.ones(4))
    with pytest.raises(NoImplementationError, match="cosine_embedding_loss is not differentiable"):
        call("aten::cosine_embedding_loss", x, X, torch.ones(4))


def test_a_gradient_that_it_brings_is_taken_in_inference_mode_too(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors, ops=OLD))
    with with_preference("vendor:zeta"):
        expected = ops.dgelu(X, X)
        with torch.inference_mode():
            made_there = X.clone()
            assert served("dgelu", made_there, X) == "flaggems.zeta"
        torch.testing.assert_close(ops.dgelu(made_there, made_there), expected)
    assert not get_default_manager().quarantine.held()


OUT = """\
from backend_utils import Autograd


def clamp_tensor_out(x, low, high, *, out):
    out[0] = 7
    raise RuntimeError("kernel failed")


def get_specific_ops():
    return (("clamp.Tensor_out", clamp_tensor_out, Autograd.disable),)
"""


def test_what_an_operator_writes_follows_from_its_schema(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors, ops=OUT))
    get_default_manager().registry.register_impl(
        OpImpl(
            "aten::clamp.Tensor_out",
            "reference.clamp",
            BackendImplKind.REFERENCE,
            lambda x, low, high, *, out: out.copy_(torch.clamp(x, low, high)),
        )
    )
    x = X.clone()
    with with_preference("vendor:zeta"), pytest.raises(PartialMutationError) as caught:
        get_default_manager().call("aten::clamp.Tensor_out", x, X, X, out=x)
    assert caught.value.tensors == ("out",)
    assert x[1:].equal(X[1:])
    assert names.mutates("gelu") == names.mutates("sum.dim_IntList") == ()
    assert names.mutates("native_batch_norm") is names.mutates("no_such_operator") is None


def test_a_models_own_aten_calls_reach_it_with_their_gradients(no_vendors: Path) -> None:
    routing = pytest.importorskip("transformer_engine_fl.integrations.aten")
    load_flaggems_folder(write(no_vendors))

    def gradient() -> torch.Tensor:
        x = X.clone().requires_grad_()
        y = torch.nn.functional.layer_norm(torch.nn.functional.gelu(x), [6])
        (y * torch.arange(6) + y).sum().backward()
        assert x.grad is not None
        return x.grad

    with with_preference("vendor:zeta"), routing.use_aten_ops():
        routed = gradient()
    assert (calls("ops.gelu"), calls("ops.norm")) == (["gelu"], ["layer_norm"])
    torch.testing.assert_close(routed, gradient(), rtol=1e-4, atol=1e-4)


def test_a_function_of_its_own_is_added_under_flag_gems_names(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors))
    manager = get_default_manager()
    assert manager.call("flag_gems::zeta_norm", X, factor=3.0).equal(3 * X)
    assert namespace.zeta_norm(X).equal(2 * X)
    assert {"zeta_norm", "silu_and_mul", "gelu"} <= set(dir(namespace))
    with with_denied_vendors("zeta"), pytest.raises(NoImplementationError, match="is denied"):
        namespace.zeta_norm(X)


def test_it_is_preferred_denied_and_explained(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors))
    with with_preference("vendor:ZETA"):
        assert served("silu", X) == "flaggems.zeta"
        with with_denied_vendors("zeta"):
            assert served("silu", X) != "flaggems.zeta"
            assert "vendor 'zeta' is denied" in str(get_default_manager().explain("silu", X))


@pytest.mark.parametrize(
    ("form", "op_names"),
    [(OLD, ["gelu", "dgelu"]), (NEW, ["gelu", "silu", "swiglu", "layernorm_fwd"])],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_bridged_keeps_the_contract(
    no_vendors: Path, form: str, op_names: list[str], dtype: str
) -> None:
    load_flaggems_folder(write(no_vendors, ops=form))
    for op_name in op_names:
        outcomes = [
            it.run() for it in cases("flaggems.zeta", operators=(op_name,), dtypes=(dtype,))
        ]
        assert sum(it.declined is None for it in outcomes) > len(outcomes) / 2


def test_a_gradient_is_bridged_only_where_the_function_declares_it(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors))  # a form that does not declare gelu's gradient
    assert "dgelu" not in list_overridden_ops("cpu", vendor="zeta")


def test_what_the_vendor_leaves_unused_is_not_registered(no_vendors: Path) -> None:
    folder = load_flaggems_folder(
        write(no_vendors, init=declaration(unused=("add", "cos", "native_layer_norm")))
    )
    found = set(list_overridden_ops("cpu", vendor="zeta"))
    assert not {"aten::add.Tensor", "aten::native_layer_norm", "layernorm_fwd"} & found
    assert unused_ops("cpu") == folder.unused == {"add", "cos", "native_layer_norm"}
    assert unused_ops("cuda") == frozenset()


def test_the_list_of_the_older_form_counts_too(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors, init=declaration(unused=["sort"]), ops=OLD))
    assert unused_ops("cpu") == {"sort", "cumsum", "silu"}
    assert "silu" not in list_overridden_ops("cpu", vendor="zeta")


@pytest.mark.parametrize(
    "form",
    [
        "def get_specific_ops():\n    from . import gelu\n    rows = [('gelu', gelu.gelu)]\n"
        "    return tuple(rows)\n",
        "from .gelu import gelu as it\n__all__ = [name for name in ('gelu',)]\ngelu = it\n",
    ],
)
def test_exports_that_only_execution_reveals_are_found_by_import(
    no_vendors: Path, form: str
) -> None:
    folder = load_flaggems_folder(write(no_vendors, ops=form))
    assert set(folder.kernels) == {"gelu", "silu_and_mul"}
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"


FLAG_GEMS = {
    "__init__.py": "from flag_gems import runtime\ndef fancy(x): return x\n"
    "_FULL_CONFIG = (('asinh', fancy), )\n",
    "runtime/__init__.py": "import torch\ntorch_device_fn = torch.cpu\n"
    "torch_device_fn.device = lambda it: __import__('contextlib').nullcontext()\ndevice = None\n",
    "runtime/backend/__init__.py": "",
    "runtime/backend/backend_utils.py": "from dataclasses import dataclass\n"
    "@dataclass\nclass VendorInfoBase:\n    vendor_name: str\n    device_name: str\n"
    "    device_query_cmd: str\n    dispatch_key: str = None\n",
}


def _install(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / "flag_gems" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_where_flag_gems_is_installed_it_serves_its_own_modules(
    no_vendors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "device", None, raising=False)
    _install(no_vendors, FLAG_GEMS)
    own = GELU + "import flag_gems.runtime\nREAL = flag_gems.runtime.__file__\n"
    own += "def fancy(x): return x.asinh()\n"
    form = NEW.replace("import silu", "import silu, fancy").replace('"silu",', '"silu", "fancy",')
    load_flaggems_folder(write(no_vendors, gelu=own, ops=form.replace("silu, f", "f")))
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"
        # FlagGems' own list maps the function to its ATen operator.
        torch.testing.assert_close(get_default_manager().call("aten::asinh", X), X.asinh())
    real = no_vendors / "flag_gems" / "runtime" / "__init__.py"
    assert Path(sys.modules[f"{PACKAGE}.ops.gelu"].REAL) == real


def test_where_it_is_installed_and_broken_it_is_stood_in_for(
    no_vendors: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _install(no_vendors, FLAG_GEMS | {"runtime/__init__.py": "raise RuntimeError('no device')"})
    load_flaggems_folder(write(no_vendors))
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"
    (said,) = [it for it in caplog.messages if "flag_gems" in it]
    assert "cannot be imported (RuntimeError: no device)" in said


@pytest.mark.slow
def test_named_as_a_plugin_module_its_path_is_enough(no_vendors: Path) -> None:
    write(no_vendors, init=declaration("Zeta"))
    code = (
        "import torch\nfrom transformer_engine_fl import ops, get_default_manager\n"
        "print(get_default_manager().explain('gelu', torch.ones(2)).selected.impl_id)\n"
    )
    env = os.environ | {
        "TE_FL_PLUGIN_MODULES": str(no_vendors / "_zeta"),
        "TE_FL_PREFER": "vendor:zeta",
        "TE_FL_STRICT": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("flaggems.zeta\n", "")


def test_a_plugin_path_of_a_folder_of_either_style_is_registered(
    no_vendors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from liger_packages import impl_info
    from liger_packages import write as write_liger

    folders = [write(no_vendors), write_liger(no_vendors, "acme", impl_info("acme"))]
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", ",".join(map(str, folders)))
    _again()
    ids = {it.impl_id for it in get_default_manager().registry.get_implementations("geglu")}
    assert "liger.acme" in ids
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"


def _again() -> None:
    from transformer_engine_fl import reset_global_policy

    reset_global_policy()
    reset_default_manager()
    get_default_manager().ensure_initialized()


def test_a_folder_without_tuning_is_known_by_what_it_describes(
    no_vendors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(no_vendors)
    for name in ("tune_configs.yaml", "heuristics_config_utils.py"):
        (path / name).unlink()
    monkeypatch.setenv("HOME", str(no_vendors))
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "~/_zeta")
    _again()
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"
    assert load_flaggems_folder(path).tuning_not_used() == {}


def test_a_module_that_describes_a_vendor_is_one_of_them(
    no_vendors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(no_vendors, "zeta_gems")
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "zeta_gems")
    _again()
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"


def test_a_second_manager_gets_it_too_and_a_second_load_changes_nothing(no_vendors: Path) -> None:
    path = write(no_vendors)
    first = load_flaggems_folder(path)
    assert load_flaggems_folder(str(path)) is first
    reset_default_manager()
    load_flaggems_folder(path)
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"


# -------------------------------------------------------------------------------- helpers


INTERPRETED = """\
import sys, torch
from transformer_engine_fl import get_default_manager, ops, with_preference, with_strict_mode
from transformer_engine_fl.testing import cases
from transformer_engine_fl.vendors import load_flaggems_folder

load_flaggems_folder(sys.argv[1])
call = get_default_manager().call
x = torch.linspace(-3, 3, 1500)
assert call("flag_gems::double", x).equal(2 * x)
total, above = call("flag_gems::scaled_sum", x[:, None], x[:3].half(), 0.5)
torch.testing.assert_close(total, (x[:, None] + x[:3].half()) * 0.5)
assert above.equal(x[:, None] > x[:3].half()) and total.dtype is torch.float32
out = torch.empty(1500)[::2]
(package,) = [it for name, it in sys.modules.items() if name.endswith("._zeta.ops")]
package.silu_forward(x[:750], out0=out)
torch.testing.assert_close(out, torch.nn.functional.silu(x[:750]))
assert package.silu_forward(x[:0]).shape == (0,)
outcomes = [it.run() for it in cases("flaggems.zeta", operators=("silu",), dtypes=("float32",))]
assert outcomes
print("done")
"""


def test_helpers_of_kernels_are_served_and_right(no_vendors: Path) -> None:
    path = write(no_vendors, ops=POINTWISE)
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == "done\n", done.stderr


def test_a_helper_that_is_not_served_is_named(
    no_vendors: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gelu = "from flag_gems.ops.topk import argsort\n" + GELU
    path = write(no_vendors, gelu=gelu)
    load_flaggems_folder(path)
    with with_preference("vendor:zeta"), pytest.raises(PluginError, match=r"gelu\.py:1: Module"):
        ops.gelu(X)
    (said,) = [it for it in caplog.messages if "cannot be imported" in it]
    assert "'zeta'" in said
    assert "No module named 'flag_gems.ops" in said
    assert said.endswith("; flag_gems is not installed, and its stand-in here lacks that")


# --------------------------------------------------------------------------------- tuning


def _tile(name: str, *key: int) -> Any:
    from transformer_engine_fl.backends.flagos.tuning import CHOICES

    __import__("transformer_engine_fl.backends.flagos.loss")
    __import__("transformer_engine_fl.backends.flagos.activation")
    return CHOICES[name](torch.device("cpu"), *key)


def test_configurations_are_what_the_rule_of_a_kernel_keeps_to(no_vendors: Path) -> None:
    before = _tile("cross_entropy_fwd", 4096, 4)
    load_flaggems_folder(write(no_vendors))
    from transformer_engine_fl.backends.flagos.tuning import forget

    forget()
    listed = {(128, 1024), (128, 512), (256, 512), (128, 2048), (256, 2048)}
    assert tuple(before) not in listed
    after = _tile("cross_entropy_fwd", 4096, 4)
    assert tuple(after) == (128, 1024)  # nearest to the rule's choice
    assert tuple(_tile("cross_entropy_bwd", 4096, 4)) in listed


def test_what_a_configuration_does_not_say_stays_as_the_rule_has_it(no_vendors: Path) -> None:
    attention = (
        "attention:\n"
        "- META: {BLOCK_M: 16, BLOCK_N: 16, PRE_LOAD_V: false}\n  num_warps: 1\n  num_stages: 7\n"
        "- META: {BLOCK_M: 256, BLOCK_N: 256, PRE_LOAD_V: true}\n  num_warps: 16\n"
    )
    __import__("transformer_engine_fl.backends.flagos.attention")
    before = _tile("attention_forward", 128, 2)
    load_flaggems_folder(write(no_vendors, configs=attention))
    from transformer_engine_fl.backends.flagos.tuning import forget

    forget()
    after = _tile("attention_forward", 128, 2)
    # The other configuration preloads V; this project's kernel does not.
    assert after == before._replace(rows=16, columns=16, threads=32, stages=7)


@pytest.mark.parametrize(
    ("size", "said"),
    [("'1024'", "elements must be a whole number, got '1024'"), ("3000", "must be powers of two")],
)
def test_a_list_of_which_nothing_can_be_run_leaves_it_to_the_rule_and_says_so(
    no_vendors: Path, caplog: pytest.LogCaptureFixture, size: str, said: str
) -> None:
    before = _tile("cross_entropy_fwd", 4096, 4)
    path = write(
        no_vendors, configs=f"cross_entropy_loss:\n- META: {{BLOCK_C: {size}, BLOCK_D: 1}}\n"
    )
    load_flaggems_folder(path)
    from transformer_engine_fl.backends.flagos.tuning import forget

    forget()
    assert _tile("cross_entropy_fwd", 4096, 4) == before
    assert f"{path}/tune_configs.yaml: cross_entropy_loss: no configuration is valid" in caplog.text
    assert said in caplog.text


def test_a_list_with_the_rules_own_value_changes_nothing(no_vendors: Path) -> None:
    threads, elements = before = _tile("cross_entropy_fwd", 4096, 4)
    meta = f"{{BLOCK_C: {elements}, BLOCK_D: 1}}"
    more = f"- META: {meta}\n  num_warps: {threads // 32}\n"
    load_flaggems_folder(
        write(no_vendors, configs=CONFIGS.replace("softmax_inner:", f"{more}softmax_inner:"))
    )
    from transformer_engine_fl.backends.flagos.tuning import forget

    forget()
    assert _tile("cross_entropy_fwd", 4096, 4) == before


def test_heuristics_of_the_folder_choose_tiles(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors))
    from transformer_engine_fl.backends.flagos.tuning import forget

    forget()
    assert tuple(_tile("activation_fwd", 4)) == (256, 1024)


def test_a_heuristic_that_needs_unknown_arguments_leaves_it_to_the_rule(
    no_vendors: Path,
) -> None:
    before = _tile("activation_fwd", 4)
    asking = HEURISTICS.replace("return 1024", "return args['n_elements']")
    folder = load_flaggems_folder(write(no_vendors, heuristics=asking))
    from transformer_engine_fl.backends.flagos.tuning import forget

    forget()
    assert _tile("activation_fwd", 4) == before
    said = folder.tuning_not_used()["heuristics_config_utils.py: elementwise_generic"]
    assert said == "it asks for 'n_elements', which the choice here does not know"


def test_unused_tuning_is_reported(no_vendors: Path) -> None:
    said = load_flaggems_folder(write(no_vendors)).tuning_not_used()
    assert said == dict.fromkeys(
        (
            "tune_configs.yaml: softmax_inner",
            "heuristics_config_utils.py: double",
            "heuristics_config_utils.py: dropout",
        ),
        "no choice here corresponds to it",
    )


def test_tuning_of_a_vendor_that_is_not_here_says_nothing_of_this_machine(
    no_vendors: Path,
) -> None:
    before = _tile("cross_entropy_fwd", 4096, 4)
    folder = load_flaggems_folder(write(no_vendors, init=declaration(command="false")))
    from transformer_engine_fl.backends.flagos.tuning import forget

    forget()
    assert _tile("cross_entropy_fwd", 4096, 4) == before
    said = "zeta's query command 'false' fails here"
    assert folder.tuning_not_used()["tune_configs.yaml: cross_entropy_loss"] == said


def test_the_query_command_of_a_shared_device_runs_at_the_first_lookup(
    no_vendors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_engine_fl.backends.flagos.tuning import forget
    from transformer_engine_fl.vendors import detection

    asked: list[str] = []
    monkeypatch.setattr(detection, "answers", lambda info: asked.append(info.vendor) or True)
    load_flaggems_folder(write(no_vendors))
    assert asked == []
    forget()
    for name in ("activation_fwd", "activation_bwd"):
        assert tuple(_tile(name, 4)) == (256, 1024)
    assert asked == ["zeta"]


def test_a_vendor_whose_tuning_is_known_keeps_its_devices(no_vendors: Path) -> None:
    from transformer_engine_fl.backends.flagos.tuning.lookup import VENDORS, vendor_of

    load_flaggems_folder(write(no_vendors, init=declaration("nvidia", "cuda", "false")))
    assert VENDORS["nvidia"].devices == ["sm_*"]
    assert VENDORS["nvidia"].folders
    assert "cross_entropy_fwd" in VENDORS["nvidia"].heuristics
    found = vendor_of("sm_90")
    assert found is not None
    assert found.name == "nvidia"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("softmax:\n- META: {TILE_N: 8}\n  num_warp: 4\n", 3, "softmax.0.num_warp: unknown key"),
        (
            "softmax:\n- META: {TILE_N: 8}\n  num_warps: four\n",
            3,
            "softmax.0.num_warps: must be int",
        ),
        ("softmax:\n- META: {TILE_N: [8]}\n", 2, "softmax.0.META.TILE_N: must be bool or int"),
        ("softmax:\n- META: {TILE_N: 8}\n  num_warps: -4\n", 3, "must not be negative, got -4"),
        ("softmax:\n- num_warps: 4\n", 2, "softmax.0: META is missing"),
        ("softmax:\n  META: {TILE_N: 8}\n", 2, "softmax: must be a list, got dict"),
        ("- softmax\n", 1, "must be a mapping, got list"),
        ("softmax: [\n", 2, "invalid YAML: "),
        ("softmax:\n- META: {A: 1, A: 2}\n", 2, "softmax.0.META.A: duplicate key"),
        ("1: []\n", 1, "'1' is not a name"),
        ("softmax:\n- gen: true\n", 2, "softmax.0: param_map is missing"),
        ("softmax:\n- gen: 1\n", 2, "softmax.0.gen: must be bool, got int 1"),
        (
            "softmax:\n- gen: true\n  param_map: {META: {T: tile}}\n  tiles: [8]\n",
            3,
            "softmax.0.param_map.META.T: 'tile' is not a key of the entry",
        ),
        (
            "softmax:\n- gen: true\n  param_map: {META: {T: tile}}\n  tile: [8]\n  tiles: [8]\n",
            5,
            "softmax.0.tiles: unknown key",
        ),
        (
            "softmax:\n- gen: true\n  param_map: {META: {}, num_warps: warps}\n  warps: [4, x]\n",
            4,
            "softmax.0.warps.1: must be int, got str 'x'",
        ),
        (
            "softmax:\n- gen: true\n  param_map: {META: {}, warps: warps}\n  warps: [4]\n",
            3,
            "softmax.0.param_map.warps: unknown key",
        ),
    ],
)
def test_a_broken_tuning_file_is_named_with_line_and_key_and_operators_serve(
    no_vendors: Path, caplog: pytest.LogCaptureFixture, text: str, line: int, said: str
) -> None:
    path = write(no_vendors, configs=text)
    folder = load_flaggems_folder(path)
    (warned,) = caplog.messages
    assert warned.startswith(f"folder '_zeta': {path / 'tune_configs.yaml'}:{line}: ")
    assert said in warned
    assert folder.problems
    assert folder.problems[0] in warned
    assert not folder.configs
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"


def test_a_generated_entry_stands_for_each_combination(tmp_path: Path) -> None:
    (tmp_path / "tune_configs.yaml").write_text(
        "attention:\n- gen: true\n  param_map: {META: {M: m, N: 16}, num_warps: w, num_stages: 3}\n"
        "  m: [32, 64]\n  w: [4, 8]\n"
        "- gen: true\n  param_map: {META: whole, num_warps: w}\n"
        "  whole: [{A: 1}, {A: 2, B: 3}]\n  w: [1]\n"
    )
    found = configs.read(tmp_path / "tune_configs.yaml", "folder")["attention"]
    assert [(dict(it.meta), dict(it.launch)) for it in found] == [
        ({"N": 16, "M": m}, {"num_warps": w, "num_stages": 3}) for m in (32, 64) for w in (4, 8)
    ] + [({"A": 1}, {"num_warps": 1}), ({"A": 2, "B": 3}, {"num_warps": 1})]


# ------------------------------------------------------------------------------ bad input


GOOD = declaration()
BAD = {
    "raise RuntimeError('no driver')": r"_zeta/__init__\.py:1: RuntimeError: no driver",
    "import torch_zeta": r"_zeta/__init__\.py:1: ModuleNotFoundError: No module named 'torch_zeta'",
    "import sys\nsys.exit('bye')": r"_zeta/__init__\.py:2: SystemExit: bye",
    "def f(:": r"_zeta/__init__\.py:1: SyntaxError",
    "x = 1": r"_zeta/__init__\.py: vendor_info must be a VendorInfoBase\(vendor_name=",
    "vendor_info = 'zeta'": r"vendor_info must be a VendorInfoBase.*, got str",
    GOOD.replace('"zeta"', "5"): r"vendor_info: vendor_name must be a string, got 5",
    GOOD.replace('"cpu"', '"cpu:0"'): r"VendorInfo.device must be a name, got 'cpu:0'",
    GOOD.replace('"true"', "'\"'"): r"device_query_cmd must be a command",
    declaration(unused="add"): r"CUSTOMIZED_UNUSED_OPS must be a tuple of names, got 'add'",
}


@pytest.mark.parametrize("init", BAD)
def test_a_folder_that_is_wrong_is_named_with_the_line(no_vendors: Path, init: str) -> None:
    path = write(no_vendors, init=init)
    with pytest.raises(PluginError, match=BAD[init]) as caught:
        load_flaggems_folder(path)
    assert str(path) in str(caught.value)
    assert PACKAGE not in sys.modules or "Error" not in BAD[init]
    assert not [it for it in list_overridden_ops("cpu") if it.startswith("aten::")]


@pytest.mark.parametrize("path", ["/nowhere/_zeta", "{0}/empty"])
def test_a_path_without_a_folder_is_named(no_vendors: Path, path: str) -> None:
    (no_vendors / "empty").mkdir()
    with pytest.raises(PluginError, match=r"no such folder: '/nowhere|has no __init__\.py"):
        load_flaggems_folder(path.format(no_vendors))


def test_a_path_to_a_file_says_how_a_module_is_named(no_vendors: Path) -> None:
    file = no_vendors / "good.py"
    file.write_text("")
    said = f"'{file}' is a file; add its folder to PYTHONPATH and name the module: 'good'"
    with pytest.raises(PluginError, match=said):
        load_flaggems_folder(str(file))


def test_a_plugin_path_without_a_folder_is_named(
    no_vendors: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", f"{no_vendors}/_nowhere")
    _again()
    assert f"no such folder: '{no_vendors}/_nowhere'" in caplog.text


def test_an_import_error_is_reported_once_and_raised_if_the_vendor_is_preferred(
    no_vendors: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(no_vendors, gelu="import torch\nraise OSError('no compiler')\n")
    load_flaggems_folder(path)
    with with_preference("vendor"):
        assert served("gelu", X) != "flaggems.zeta"
        assert served("swiglu", X) == "flaggems.zeta"  # from another module
    for _ in range(2):
        with with_preference("vendor:zeta"), pytest.raises(PluginError, match=r"gelu\.py:2: OSErr"):
            ops.gelu(X)
    assert len([it for it in caplog.messages if "no compiler" in it]) == 1


def test_one_that_cannot_be_called_as_flag_gems_is_reported_with_its_line(
    no_vendors: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = GELU.replace('def gelu(A, *, approximate="none"):', "def gelu(A, approx):")
    load_flaggems_folder(write(no_vendors, gelu=wrong.replace("(A, approximate)", "(A, approx)")))
    with with_preference("vendor"):
        assert served("gelu", X) != "flaggems.zeta"
        assert served("silu", X) == "flaggems.zeta"
    line = wrong[: wrong.index("def gelu(")].count("\n") + 1
    (said,) = [it for it in caplog.messages if "gelu(A, approx)" in it]
    assert f"ops/gelu.py:{line}: gelu(A, approx) is called with (A, approximate=)" in said
    with with_preference("vendor:zeta"), pytest.raises(PluginError, match=r"gelu\.py:\d+: gelu\("):
        ops.gelu(X)


def test_one_that_raises_when_it_is_called_is_set_aside_and_named(
    no_vendors: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = GELU.replace('CALLS.append("gelu")', "raise RuntimeError('kernel failed')")
    load_flaggems_folder(write(no_vendors, gelu=broken))
    with with_preference("vendor:zeta"):
        expected = torch.nn.functional.gelu(X, approximate="tanh")
        torch.testing.assert_close(ops.gelu(X), expected, rtol=1e-5, atol=1e-6)
        assert served("silu", X) == "flaggems.zeta"
    (said,) = [it for it in caplog.messages if "kernel failed" in it]
    assert "flaggems.zeta" in said


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (NEW.replace('"silu"', '"missing"'), "exports 'missing', which is missing"),
        (NEW + "zeta_norm = 5\n", "which is not callable but of type int"),
    ],
)
def test_an_export_that_is_missing_or_no_operator_is_reported(
    no_vendors: Path, form: str, said: str
) -> None:
    load_flaggems_folder(write(no_vendors, ops=form))
    name = "missing" if "missing" in said else "zeta_norm"
    with with_preference("vendor:zeta"), pytest.raises(PluginError, match=said):
        get_default_manager().call(f"flag_gems::{name}", X)


@pytest.mark.parametrize(
    "rows", ["(('add.Tensor',),)", "((5, None),)", "(('no name', len),)", "('gelu',)"]
)
def test_rows_of_get_specific_ops_that_are_none_are_shown(no_vendors: Path, rows: str) -> None:
    path = write(no_vendors, ops=f"def get_specific_ops():\n    return {rows}\n")
    with pytest.raises(
        PluginError, match=r"_zeta/ops/__init__\.py: get_specific_ops\(\) must give"
    ):
        load_flaggems_folder(path)


def test_an_operator_that_torch_has_not_is_named(no_vendors: Path) -> None:
    form = OLD.replace('"add.Tensor"', '"addition.Tensor"')
    load_flaggems_folder(write(no_vendors, ops=form))
    with (
        with_preference("vendor:zeta"),
        pytest.raises(PluginError, match=r"aten::addition\.Tensor"),
    ):
        get_default_manager().call("aten::addition.Tensor", X, X)


def test_a_device_that_is_absent_is_the_reason(no_vendors: Path) -> None:
    load_flaggems_folder(write(no_vendors, init=declaration(device="zpu")))
    said = str(get_default_manager().explain("gelu", X))
    assert "flaggems.zeta" in said
    assert "torch sees no 'zpu' device here" in said


def test_a_failing_query_command_rules_out_the_vendor_on_a_shared_device(
    no_vendors: Path,
) -> None:
    load_flaggems_folder(write(no_vendors, init=declaration(command="no-such-program --list")))
    with with_preference("vendor:zeta"):
        assert served("gelu", X) != "flaggems.zeta"
    said = "zeta's query command 'no-such-program --list' fails here"
    assert said in str(get_default_manager().explain("gelu", X))


def test_a_query_command_that_hangs_is_ended_and_named(
    no_vendors: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_engine_fl.vendors import detection

    monkeypatch.setattr(detection, "QUERY_SECONDS", 0.2)
    start = time.monotonic()
    load_flaggems_folder(write(no_vendors, init=declaration(command="sleep 60")))
    with with_preference("vendor:zeta"):
        assert served("gelu", X) != "flaggems.zeta"
    assert time.monotonic() - start < 30
    (said,) = [it for it in caplog.messages if "did not finish" in it]
    assert "'zeta'" in said
    assert "'sleep 60'" in said


@pytest.mark.slow
def test_a_vendor_of_a_set_here_keeps_its_set(no_vendors: Path) -> None:
    path = write(no_vendors, init=declaration("nvidia", "cuda", "nvidia-smi"))
    code = (
        "from transformer_engine_fl import get_default_manager\n"
        "from transformer_engine_fl.vendors import load_flaggems_folder\n"
        f"load_flaggems_folder({str(path)!r})\n"
        "impls = get_default_manager().registry.get_implementations('gelu')\n"
        "print({it.impl_id for it in impls if it.vendor == 'nvidia'} == "
        "{'vendor.cuda', 'flaggems.nvidia'})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr
    assert "is left out" not in done.stderr


FLAG_GEMS_FOLDER = next(
    (path for it in sys.path if (path := Path(it) / "flag_gems" / "runtime" / "backend").is_dir()),
    None,
)


@pytest.mark.slow
@pytest.mark.skipif(FLAG_GEMS_FOLDER is None, reason="flag_gems is not installed")
def test_each_folder_of_flag_gems_is_loaded_or_refused_with_the_line(
    no_vendors: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert FLAG_GEMS_FOLDER is not None
    folders = [it for it in sorted(FLAG_GEMS_FOLDER.glob("_*")) if (it / "__init__.py").is_file()]
    assert len(folders) > 10
    loaded, refused = 0, {}
    for folder in folders:
        try:
            found = load_flaggems_folder(folder)
        except PluginError as error:
            refused[folder] = str(error)
        else:
            loaded += 1
            assert found.configs
            assert not found.problems
            assert not {it.function for it in found.kernels.values()} & found.unused
    for folder, said in refused.items():
        assert re.search(rf"{folder}/\S+\.py:\d+: \w+Error: ", said), said
    assert loaded > 5


def test_a_vendor_that_is_known_for_its_device_is_not_described_twice(no_vendors: Path) -> None:
    register_vendor(VendorInfo("zeta", "cpu", "zeta-smi"))
    load_flaggems_folder(write(no_vendors))
    assert BackendRegistry.get_backend("zeta").info.device_query_cmd == ("zeta-smi",)


def test_a_vendor_that_is_known_for_another_device_is_refused_with_both(no_vendors: Path) -> None:
    register_vendor(VendorInfo("zeta", "zpu"))
    with pytest.raises(RegistrationError, match=r"already registered.*zpu.*'cpu'"):
        load_flaggems_folder(write(no_vendors))


@pytest.mark.parametrize("name", ["_zeta", "_other"])
def test_a_folder_or_a_vendor_of_a_name_that_is_taken_is_refused_with_both(
    no_vendors: Path, name: str
) -> None:
    first = write(no_vendors)
    load_flaggems_folder(first)
    second = write(no_vendors / "more", name)
    with pytest.raises(RegistrationError) as caught:
        load_flaggems_folder(second)
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)


def test_a_broken_folder_among_plugins_is_left_out_and_the_others_serve(
    no_vendors: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = write(no_vendors, "_broken", "import torch_zeta\n")
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", f"{broken},{write(no_vendors)}")
    with caplog.at_level(logging.WARNING):
        _again()
    (said,) = [it for it in caplog.messages if "is left out" in it]
    assert f"folder {broken}" in said
    assert "_broken/__init__.py:1: ModuleNotFoundError" in said
    with with_preference("vendor:zeta"), with_strict_mode():
        assert served("gelu", X) == "flaggems.zeta"


def test_preferring_the_vendor_of_a_folder_that_is_left_out_is_an_error(
    no_vendors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(no_vendors)
    (folder / "ops" / "__init__.py").write_text("def f(:\n")
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", str(folder))
    _again()
    said = r"'vendor:zeta': .*ops/__init__\.py:1: SyntaxError"
    with with_preference("vendor:zeta"), pytest.raises(PluginError, match=said):
        get_default_manager().call("gelu", X)


def test_what_is_neither_a_module_nor_a_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "_zeta-folder")
    with pytest.raises(
        ConfigurationError, match="'_zeta-folder' is neither a module name nor a path"
    ):
        _again()

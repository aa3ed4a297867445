"""plugins/te_fl_acme, installed by pip into a fresh environment and steered by variables.

Each case is a process of that environment that calls one operator. For CHOICES, a plugin module
of this test adds a flagos implementation and another vendor's, so that each variable can change
the choice.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from plugin_environments import environment, install, run, run_own_tests

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "te_fl_acme"

RIVALS = """\
from transformer_engine_fl import OpImpl, ops


def serve(input, weight, eps=1e-5, *, zero_centered_gamma=False, out_dtype=None):
    return ops.rmsnorm_fwd.shapes(input, weight, eps)


def register(registry):
    common = {"op_name": "rmsnorm_fwd", "fn": serve, "traits": {"deterministic", "traceable"}}
    registry.register_many(
        [
            OpImpl(**common, impl_id="rival.flagos", kind="flagos", priority=999),
            OpImpl(**common, impl_id="rival.vendor", kind="vendor", vendor="Rival", priority=90),
        ]
    )
"""

POLICY_FILES = {
    "prefer.toml": 'prefer = "vendor:acme"',
    "deny.toml": 'prefer = "vendor"\ndeny_vendors = ["Acme"]',
    "order.toml": '[per_op_order]\nrmsnorm_fwd = ["vendor:acme", "reference"]',
}

# One process loads torch, then forks for each case. The child sets the variables before it imports
# the package, as if it had been started with them.
PROBE = """\
import json, os, sys, traceback
import torch

def call(dtype):
    from transformer_engine_fl import TeFlError, get_default_manager

    manager, served = get_default_manager(), []
    manager.monitor(lambda op_name, impl: served.append(impl.impl_id))
    x = torch.tensor([[3.0, 4.0]], dtype=getattr(torch, dtype))
    try:
        output, rsigma = manager.call("rmsnorm_fwd", x, torch.ones_like(x[0]), 0.0)
    except TeFlError as error:
        return {"error": type(error).__name__, "said": str(error)}
    return {"served": served, "output": output.tolist()}

for variables, dtype in json.load(sys.stdin):
    if os.fork() == 0:
        try:
            os.environ.update(dict(said.split("=", 1) for said in variables.split()))
            print(json.dumps(call(dtype)), flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.wait()
"""

CHOICES = {
    "": "rival.flagos",
    "TE_FL_PREFER=vendor": "vendor.acme",
    "TE_FL_PREFER=vendor:acme": "vendor.acme",
    "TE_FL_PREFER=vendor:Acme": "vendor.acme",
    "TE_FL_PREFER=vendor:rival": "rival.vendor",
    "TE_FL_PREFER=impl:vendor.acme": "vendor.acme",
    "TE_FL_PREFER=reference": "reference.torch",
    "TE_FL_PREFER_VENDOR=1": "vendor.acme",
    "TE_FL_PREFER_VENDOR=0": "rival.flagos",
    "TE_FL_PREFER_VENDOR=1 TE_FL_PREFER=reference": "reference.torch",
    "TE_FL_PREFER=vendor TE_FL_DENY_VENDORS=acme": "rival.vendor",
    "TE_FL_PREFER=vendor TE_FL_DENY_VENDORS=rival,ACME": "rival.flagos",
    "TE_FL_PREFER=impl:vendor.acme TE_FL_DENY_VENDORS=acme": "rival.flagos",
    "TE_FL_PREFER=vendor TE_FL_ALLOW_VENDORS=rival": "rival.vendor",
    "TE_FL_PREFER=vendor:rival TE_FL_ALLOW_VENDORS=acme": "vendor.acme",
    "TE_FL_PREFER=vendor TE_FL_ALLOW_VENDORS=": "vendor.acme",
    "TE_FL_PER_OP=rmsnorm_fwd=vendor:acme|reference": "vendor.acme",
    "TE_FL_PER_OP=rmsnorm_fwd=reference TE_FL_PREFER=vendor": "reference.torch",
    "TE_FL_STRICT=1 TE_FL_PREFER=vendor:acme": "vendor.acme",
    "TE_FL_POLICY_FILE=prefer.toml": "vendor.acme",
    "TE_FL_POLICY_FILE=deny.toml": "rival.vendor",
    "TE_FL_POLICY_FILE=order.toml": "vendor.acme",
    "TE_FL_POLICY_FILE=prefer.toml TE_FL_PREFER=reference": "reference.torch",
}


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the plugin and this environment's packages."""
    interpreter = environment(tmp_path_factory.mktemp("acme") / "environment")
    install(interpreter, PLUGIN)
    return interpreter


@pytest.fixture(scope="session")
def choices(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of each case of CHOICES, with the rivals registered."""
    folder = tmp_path_factory.mktemp("rivals")
    for name, text in {"acme_rivals.py": RIVALS, **POLICY_FILES}.items():
        (folder / name).write_text(text)
    rivals = {"PYTHONPATH": str(folder), "TE_FL_PLUGIN_MODULES": "acme_rivals"}
    cases = json.dumps([(variables, "float32") for variables in CHOICES])
    done = run(python, "-c", PROBE, env=rivals, cwd=folder, stdin=cases)
    answers = map(json.loads, done.stdout.splitlines())
    return dict(zip(CHOICES, answers, strict=True))


def _call(
    interpreter: Path | str, variables: str = "", dtype: str = "float32", **env: str
) -> tuple[dict[str, Any], str]:
    """(the result of the call, its stderr)."""
    done = run(interpreter, "-c", PROBE, env=env, stdin=json.dumps([(variables, dtype)]))
    return json.loads(done.stdout), done.stderr


def test_installing_it_is_enough_to_be_served_by_it(python: Path) -> None:
    answer, said = _call(python)
    assert answer["served"] == ["vendor.acme"]
    rms = 12.5**0.5
    assert answer["output"] == [pytest.approx([3.0 / rms, 4.0 / rms], rel=1e-6)]
    assert said == ""


def test_where_it_is_not_installed_the_reference_serves() -> None:
    assert _call(sys.executable)[0]["served"] == ["reference.torch"]


def test_its_selection_is_logged(python: Path) -> None:
    _, said = _call(python, "TEFL_LOG_LEVEL=INFO")
    assert "INFO] Op 'rmsnorm_fwd' using 'vendor.acme' (kind=vendor, vendor=acme)" in said


@pytest.mark.parametrize("variables", CHOICES)
def test_each_variable_moves_the_choice(choices: dict[str, Any], variables: str) -> None:
    assert choices[variables].get("served") == [CHOICES[variables]], choices[variables]


def test_an_unsupported_dtype_falls_back_and_is_an_error_in_strict_mode(
    python: Path,
) -> None:
    answer, _ = _call(python, "TE_FL_PREFER=vendor:acme", "float64")
    assert answer["served"] == ["reference.torch"]
    answer, _ = _call(python, "TE_FL_PREFER=vendor:acme TE_FL_STRICT=1", "float64")
    assert answer["error"] == "StrictModeError"
    assert "vendor.acme" in answer["said"]
    assert "dtype 'float64' is not supported; supported: bfloat16, float32" in answer["said"]


def test_not_installed_but_named_by_a_variable_it_serves() -> None:
    answer, said = _call(
        sys.executable, "TE_FL_PLUGIN_MODULES=te_fl_acme", PYTHONPATH=str(PLUGIN / "src")
    )
    assert answer["served"] == ["vendor.acme"]
    assert said == ""


def test_installed_and_named_by_a_variable_it_is_registered_once_without_a_word(
    python: Path,
) -> None:
    answer, said = _call(python, "TE_FL_PLUGIN_MODULES=te_fl_acme")
    assert answer["served"] == ["vendor.acme"]
    assert said == ""


def test_its_own_tests_pass_where_it_is_installed(python: Path) -> None:
    assert " passed" in run_own_tests(python, PLUGIN)

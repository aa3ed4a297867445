"""The kit as a vendor runs it: ``pytest --te-fl-impl`` and ``te-fl verify``, from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit_broken import FAULTS
from kit_processes import Vendor

from transformer_engine_fl import ops

FAST = ("--te-fl-op", "rmsnorm_fwd", "--te-fl-dtype", "bfloat16")


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    return Vendor(tmp_path)


def _ids(out: str) -> list[str]:
    return re.findall(r"^te-fl/\S+::[^\n]*?(?= PASSED| FAILED| SKIPPED|$)", out, flags=re.M)


# -------------------------------------------------------------------- the whole catalogue


def test_the_loopback_passes_in_te_fl_verify_whose_scorecard_has_every_operator_and_dtype(
    vendor: Vendor,
) -> None:
    options = ("--case", "*/values/*typical*", "--case", "*/repeated/*", "--output", "cards")
    ran = vendor.te_fl("verify", "vendor.loopback", *options)
    assert ran.code == 0, ran.out[-2000:]
    card = json.loads((vendor.folder / "cards" / "scorecard-vendor.loopback.json").read_text())
    assert (card["passed"], card["failures"]) == (True, [])
    found = {(row["operator"], row["dtype"]) for row in card["results"]}
    assert found == {(it.name, dtype) for it in ops.CATALOGUE.values() for dtype in it.dtypes}
    assert card["source"] == "module kit_loopback (TE_FL_PLUGIN_MODULES)"


def test_the_loopback_passes_in_pytest_which_has_cases_of_every_operator(vendor: Vendor) -> None:
    options = ("--te-fl-dtype", "float32", "-v", "-k", "values and typical")
    ran = vendor.pytest("--te-fl-impl", "vendor.loopback", *options)
    assert ran.code == 0, ran.out[-2000:]
    listed = {re.split("[/:]+", name)[3] for name in _ids(ran.out)}
    assert listed == {it.name for it in ops.CATALOGUE.values() if "float32" in it.dtypes}


# ---------------------------------------------------------------------------- the faults


def test_every_fault_is_caught_in_te_fl_verify(vendor: Vendor) -> None:
    ran = vendor.te_fl(
        "verify", "vendor.broken", "--dtype", "float32", "--json", plugin="kit_broken"
    )
    assert ran.code == 1
    card = json.loads(ran.out)
    failed = {row["operator"] for row in card["results"] if row["failed"]}
    assert failed == set(FAULTS)
    for operator, (_, words) in FAULTS.items():
        said = [it["said"] for it in card["failures"] if it["case"].startswith(f"{operator}/")]
        assert any(words in it for it in said), said


def test_every_fault_is_caught_in_pytest(vendor: Vendor) -> None:
    arguments = ("--te-fl-impl", "vendor.broken", "--te-fl-dtype", "float32", "-q")
    ran = vendor.pytest(*arguments, plugin="kit_broken")
    assert ran.code == 1
    failed = re.findall(r"^FAILED te-fl/vendor\.broken/cpu/(\w+)::", ran.out, flags=re.M)
    assert set(failed) == set(FAULTS)
    for _, words in FAULTS.values():
        assert words in ran.out


def test_the_commands_that_reproduce_a_failure_do_so_alone(vendor: Vendor) -> None:
    plugin = {"plugin": "kit_broken"}
    asked = ("vendor.broken", "--op", "silu", "--dtype", "float32")
    (failure, *_) = json.loads(vendor.te_fl("verify", *asked, "--json", **plugin).out)["failures"]
    again = vendor.run(failure["reproduce"])
    assert again.code == 1, again.err
    assert f"fails: {failure['case']}" in again.out
    assert "1 of 1 cases fail" in again.out
    assert list(vendor.folder.iterdir()) == []

    options = ("--te-fl-impl", "vendor.broken", "--te-fl-op", "silu", "--te-fl-dtype", "float32")
    ran = vendor.pytest(*options, "-x", "-q", **plugin)
    (command,) = set(re.findall(r"^to reproduce: (.*)$", ran.out, flags=re.M))
    again = vendor.run(f"{sys.executable} -m {command}", **plugin)
    assert again.code == 1, again.out
    assert re.search(r"= 1 failed in ", again.out)


# ------------------------------------------------------------------------- pytest's part


def test_cases_run_together_with_other_tests_and_by_themselves(vendor: Vendor) -> None:
    (vendor.folder / "test_own.py").write_text("def test_own():\n    pass\n")
    (vendor.folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n"
    )
    both = vendor.pytest("--te-fl-impl", "vendor.loopback", *FAST, "-v")
    assert both.code == 0, both.out
    assert "test_own.py::test_own PASSED" in both.out
    ids = _ids(both.out)
    assert len(set(ids)) == len(ids) > 50
    assert "te-fl/vendor.loopback/cpu/rmsnorm_fwd::bfloat16/values/unaligned start" in ids
    assert f"collected {len(ids) + 1} items" in both.out
    alone = vendor.pytest("--te-fl-impl", "vendor.loopback", *FAST, "-v", "-m", "te_fl")
    assert _ids(alone.out) == ids
    assert f"{len(ids)} passed, 1 deselected" in alone.out


def test_k_selects_and_xdist_distributes(vendor: Vendor) -> None:
    options = ("--te-fl-impl", "vendor.loopback", *FAST, "-q")
    ran = vendor.pytest(*options, "-n", "2", "-k", "values and (typical or expanded)")
    assert ran.code == 0, ran.out
    assert re.search(r"^2 passed", ran.out, flags=re.M)


def test_sets_and_the_other_options_may_be_given_several_times(vendor: Vendor) -> None:
    ran = vendor.pytest(
        *("--te-fl-impl", "vendor.loopback", "--te-fl-impl", "reference.torch"),
        *("--te-fl-op", "silu", "--te-fl-op", "relu", "--te-fl-device", "cpu"),
        *("--te-fl-dtype", "float32", "--te-fl-dtype", "float16", "-k", "values and typical"),
        "-v",
    )
    assert sorted(_ids(ran.out)) == sorted(
        f"te-fl/{impl_id}/cpu/{op}::{dtype}/values/typical"
        for impl_id in ("vendor.loopback", "reference.torch")
        for op in ("silu", "relu")
        for dtype in ("float32", "float16")
    )
    assert "te-fl: vendor.loopback on cpu, reference.torch on cpu" in ran.out


OFF = """
from transformer_engine_fl import OpImpl
from transformer_engine_fl.backends.reference import activation


def register(registry):
    for name, reason in {"silu": None, "gelu": "needs a licence\\nof Acme's"}.items():
        registry.register_impl(
            OpImpl(name, "vendor.acme", "vendor", getattr(activation, name), vendor="acme",
                   switched_off=lambda reason=reason: reason)
        )
"""


def test_an_operator_that_is_switched_off_is_named_and_one_alone_is_refused(
    vendor: Vendor,
) -> None:
    (vendor.folder / "off.py").write_text(OFF)
    asked = ("vendor.acme", "--dtype", "float32", "--every", "20")
    ran = vendor.te_fl("verify", *asked, plugin="off")
    assert ran.code == 0, ran.out
    assert "\nnot run: gelu: needs a licence\nof Acme's\n" in ran.out
    card = json.loads((vendor.folder / "scorecard-vendor.acme.json").read_text())
    assert card["switched_off"] == {"gelu": "needs a licence\nof Acme's"}
    assert card["operators"] == ["silu"]
    assert "gelu" not in card["missing"]
    shared = vendor.te_fl("verify", *asked, "--jobs", "2", "--json", plugin="off")
    assert json.loads(shared.out)["switched_off"] == card["switched_off"]
    alone = vendor.te_fl("verify", "vendor.acme", "--op", "gelu", plugin="off")
    assert (alone.code, alone.out) == (2, "")
    assert "needs a licence" in alone.err
    ran = vendor.pytest(
        "--te-fl-impl", "vendor.acme", "-k", "values and typical and float32", plugin="off"
    )
    assert ran.code == 0, ran.out
    assert "te-fl: not run: vendor.acme: gelu: needs a licence" in ran.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--te-fl-impl", "vendor.lopback"), "did you mean 'vendor.loopback'?"),
        (("--te-fl-impl", "vendor.loopback", "--te-fl-op", "sillu"), "did you mean 'silu'?"),
        (("--te-fl-op", "silu"), "--te-fl-op needs --te-fl-impl"),
    ],
)
def test_a_mistake_is_a_usage_error(vendor: Vendor, options: tuple[str, ...], said: str) -> None:
    ran = vendor.pytest(*options)
    assert ran.code == pytest.ExitCode.USAGE_ERROR
    assert said in ran.err
    assert "Traceback" not in ran.out + ran.err


def test_a_set_that_a_conftest_registers_is_found(vendor: Vendor) -> None:
    (vendor.folder / "conftest.py").write_text(
        "import kit_loopback\n"
        "from transformer_engine_fl import get_default_manager\n\n"
        "def pytest_configure(config):\n"
        "    kit_loopback.register(get_default_manager().registry)\n"
    )
    ran = vendor.pytest("--te-fl-impl", "vendor.loopback", *FAST, "-q", plugin="")
    assert ran.code == 0, ran.out + ran.err


def test_without_the_option_nothing_is_loaded(vendor: Vendor) -> None:
    program = (
        "import sys, pytest\n"
        "code = pytest.main(['-q', '-p', 'no:cacheprovider'])\n"
        "loaded = [name for name in ('torch', 'transformer_engine_fl.ops',\n"
        "    'transformer_engine_fl.testing.case', 'typer') if name in sys.modules]\n"
        "present = 'transformer_engine_fl.testing.pytest_plugin' in sys.modules\n"
        "print('RESULT', int(code), present, loaded)\n"
    )
    ran = vendor.run(sys.executable, "-c", program)
    assert "RESULT 5 True []" in ran.out, ran.out + ran.err


def test_importing_the_kit_loads_no_torch() -> None:
    program = "import sys, transformer_engine_fl.testing.pytest_plugin as p; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "torch" not in done.stdout.split()

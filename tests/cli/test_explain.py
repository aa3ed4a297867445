"""te-fl explain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_answers_for_this_machine_with_a_reason_for_each(te_fl):
    document = te_fl("explain", "rmsnorm_fwd", "--json", TE_FL_SKIP_CUDA="1").document
    assert set(document) >= {"op", "selected", "device", "arch", "dtype", "policy", "candidates"}
    assert document["selected"] is not None
    by_id = {it["impl_id"]: it for it in document["candidates"]}
    assert not by_id["vendor.cuda"]["accepted"]
    assert "TE_FL_SKIP_CUDA" in by_id["vendor.cuda"]["reason"]


def test_shows_the_environment_variable_that_decided(te_fl):
    ran = te_fl("explain", "rmsnorm_fwd", TE_FL_PREFER="reference", COLUMNS="120")
    assert ran.code == 0
    assert "'reference.torch' serves" in ran.out
    assert "policy: prefer is 'reference' (TE_FL_PREFER=reference)" in ran.out


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_what_stdout_has_no_letters_for_is_shown_escaped(te_fl_process, tmp_path, encoding):
    name = {"ascii": "caf\xe9.toml", "utf-8": "caf\udce9.toml"}[encoding]
    (tmp_path / name).write_text('prefer = "reference"')
    settings = {"TE_FL_POLICY_FILE": str(tmp_path / name), "PYTHONIOENCODING": encoding}
    ran = te_fl_process("explain", "rmsnorm_fwd", **settings, COLUMNS="300")
    assert ran.code == 0, ran.err
    assert name.encode("ascii", "backslashreplace").decode() in ran.out


@pytest.mark.parametrize(
    ("arch", "selected"), [("sm_80", "vendor.cuda"), ("sm_75", "reference.torch")]
)
def test_answers_for_another_machine(te_fl, arch, selected):
    options = ("--device", "cuda", "--arch", arch, "--dtype", "bfloat16")
    order = "rmsnorm_fwd=vendor:nvidia|reference"
    ran = te_fl("explain", "rmsnorm_fwd", *options, "--json", TE_FL_PER_OP=order)
    assert ran.document["selected"] == selected
    assert (ran.document["device"], ran.document["arch"]) == ("cuda", arch)
    assert ran.document["dtype"] == "bfloat16"


@pytest.mark.parametrize("op", ["rmsnorm_fwd", "aten::gelu"])
def test_what_the_environment_switches_off_serves_on_no_machine(te_fl, op):
    options = ("explain", op, "--device", "cuda", "--json")
    for switch, accepted in (("1", False), ("0", True)):
        document = te_fl(*options, TE_FL_SKIP_CUDA=switch, TE_FL_PREFER="vendor").document
        by_id = {it["impl_id"]: it for it in document["candidates"]}
        assert by_id["vendor.cuda"]["accepted"] is accepted
        assert ("TE_FL_SKIP_CUDA" in by_id["vendor.cuda"]["reason"]) is not accepted


def test_arch_alone_means_a_gpu(te_fl):
    ran = te_fl("explain", "rmsnorm_fwd", "--arch", "sm_90", "--json")
    assert ran.document["device"] == "cuda"


def test_plugin_is_a_candidate(te_fl, acme):
    ran = te_fl("explain", "rmsnorm_fwd", "--json", TE_FL_PREFER="vendor:acme")
    assert ran.document["selected"] == "vendor.acme"


SCRIPT = [str(Path(sys.executable).with_name("te-fl"))]
MODULE = [sys.executable, "-m", "transformer_engine_fl"]


@pytest.mark.parametrize("program", [SCRIPT, MODULE], ids=["te-fl", "python -m"])
@pytest.mark.parametrize("safe", ["", "1"], ids=["", "PYTHONSAFEPATH"])
def test_a_module_in_the_folder_at_hand_is_found_as_python_finds_it(program, safe, tmp_path):
    (tmp_path / "here_kernels.py").write_text(
        "from transformer_engine_fl import OpImpl\n"
        "def register(registry):\n"
        "    registry.register_impl(OpImpl('here_abs', 'here.plain', 'reference', abs))\n"
    )
    named = {"TE_FL_PLUGIN_MODULES": "here_kernels", "PYTHONSAFEPATH": safe}
    done = subprocess.run(
        [*program, "explain", "here_abs", "--device", "cpu"],
        cwd=tmp_path,
        env={**os.environ, **named},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == (2 if safe else 0)
    assert ("here.plain" in done.stdout) != bool(safe)
    missing = "No module named 'here_kernels'; searched sys.path"
    assert (missing in done.stderr) is bool(safe)


def test_exit_code_is_1_where_no_implementation_serves(te_fl):
    ran = te_fl("explain", "rmsnorm_fwd", TE_FL_PER_OP="rmsnorm_fwd=vendor:nobody")
    assert ran.code == 1
    assert "no implementation serves" in ran.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rmsnorm_fwdd",), "did you mean 'rmsnorm_fwd'?"),
        (("rmsnorm_fwd", "--device", "cuda", "--dtype", "bf16"), "did you mean 'bfloat16'?"),
        (("rmsnorm_fwd", "--device", "cuda", "--dtype", ""), "'' is not a dtype of 'rmsnorm_fwd'"),
        (("rmsnorm_fwd", "--dtype", "bfloat16"), "--device"),
        (("rmsnorm_fwd", "--arch", "hopper"), "sm_90"),
        (("rmsnorm_fwd", "--device", "a gpu"), "'a gpu' is not a device type"),
        (("rmsnorm_fwd", "--device", "cpu", "--arch", "sm_90"), "is a GPU architecture"),
    ],
)
def test_mistake_is_one_message(te_fl, arguments, said):
    ran = te_fl("explain", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("te-fl: ")
    assert said in ran.err
    assert ran.err.count("\n") == 1


def test_a_device_that_no_implementation_names_is_noted(te_fl):
    ran = te_fl("explain", "rmsnorm_fwd", "--device", "cdua")
    assert ran.code == 0
    assert "no implementation supports the device type 'cdua'" in ran.err
    assert "did you mean 'cuda'?" in ran.err
    assert te_fl("explain", "rmsnorm_fwd", "--device", "cuda").err == ""
    for device in ("gpu", "hip"):
        ran = te_fl("explain", "rmsnorm_fwd", "--device", device, COLUMNS="200")
        assert ran.err.endswith("; torch's device type of GPUs is 'cuda'\n")


@pytest.mark.parametrize("command", ["list", "explain", "demo"])
def test_malformed_environment_is_one_message(te_fl, command):
    arguments = ("rmsnorm_fwd",) if command == "explain" else ()
    ran = te_fl(command, *arguments, "--json", TE_FL_PREFER="vendro")
    assert (ran.code, ran.out) == (2, "")
    assert "TE_FL_PREFER" in ran.err
    assert "did you mean 'vendor'?" in ran.err
    assert ran.err.count("\n") == 1

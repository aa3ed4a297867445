"""te-fl list."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from transformer_engine_fl.cli._output import fitted

OPERATORS = {"rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd"}

LOADED = """
import sys
from transformer_engine_fl.cli import main
try:
    main(["list"])
finally:
    slow = ("torch", "triton", "cuda", "pydantic", "rich")
    print([name for name in slow if name in sys.modules], file=sys.stderr)
"""


def _implementations(document, op_name):
    operator = next(it for it in document["operators"] if it["name"] == op_name)
    return {it["impl_id"]: it for it in operator["implementations"]}


def _processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.usefixtures("with_bytecode")
def test_answers_in_half_a_second(te_fl_process):
    # CPU time, so that the machine's other work does not count.
    taken = []
    for _ in range(3):
        start = _processor_seconds()
        assert te_fl_process("list").code == 0
        taken.append(_processor_seconds() - start)
    assert min(taken) < 0.5, taken


def test_loads_neither_torch_nor_a_compiler_nor_what_draws_tables(te_fl_process):
    ran = te_fl_process(program=LOADED)
    assert "reference.torch" in ran.out
    assert ran.err.strip() == "[]"


def test_json_has_every_operator_and_what_there_is_to_know_of_its_implementations(te_fl):
    document = te_fl("list", "--json").document
    assert set(document) == {"probed", "operators", "sources"}
    assert {it["name"] for it in document["operators"]} >= OPERATORS
    reference = _implementations(document, "rmsnorm_fwd")["reference.torch"]
    assert set(reference) == {
        *("impl_id", "kind", "vendor", "priority", "devices", "dtypes", "min_arch"),
        *("traits", "available", "reason"),
    }
    assert (reference["kind"], reference["vendor"], reference["priority"]) == (
        "reference",
        None,
        50,
    )
    assert reference["available"] is None  # no availability check has run


def test_a_reason_that_holds_for_a_whole_set_names_no_operator(te_fl):
    ran = te_fl("list", "--probe", TE_FL_SKIP_CUDA="1", COLUMNS="120")
    assert "\nvendor.cuda is not available: switched off by TE_FL_SKIP_CUDA\n" in ran.out


def test_the_version_is_that_of_the_package(te_fl):
    from transformer_engine_fl import __version__

    assert te_fl("--version").out == f"te-fl {__version__}\n"


def test_where_no_script_is_on_the_path_python_runs_it():
    asked = [sys.executable, "-m", "transformer_engine_fl", "list", "--json"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)
    wrong = subprocess.run([*asked[:3], "lst"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("Usage: te-fl ")


def test_best_priority_comes_first(te_fl):
    for operator in te_fl("list", "--json").document["operators"]:
        priorities = [it["priority"] for it in operator["implementations"]]
        assert priorities == sorted(priorities, reverse=True)


def test_installed_plugin_is_named_and_not_loaded(te_fl, install):
    install("raise RuntimeError('loaded')")
    ran = te_fl("list", "--json")
    plugin = next(it for it in ran.document["sources"] if it["name"] == "entry point acme")
    assert plugin == {
        "name": "entry point acme",
        "origin": "acme-kernels",
        "loaded": False,
        "registered": [],
        "error": None,
    }
    assert "entry point acme (acme-kernels) is not loaded yet" in te_fl("list").out


def test_a_module_that_may_not_be_there_is_not_called_installed(te_fl, monkeypatch):
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "no_such_module")
    assert "module no_such_module (TE_FL_PLUGIN_MODULES) is not loaded yet" in te_fl("list").out


def test_probe_loads_plugins_and_shows_what_they_registered(te_fl, acme):
    document = te_fl("list", "--probe", "--json").document
    assert document["probed"]
    found = _implementations(document, "rmsnorm_fwd")["vendor.acme"]
    assert (found["vendor"], found["available"]) == ("Acme", True)
    plugin = next(it for it in document["sources"] if it["name"] == "entry point acme")
    assert plugin["registered"] == ["rmsnorm_fwd/vendor.acme", "rmsnorm_bwd/vendor.acme"]


def test_probe_shows_why_a_plugin_is_left_out(te_fl, install):
    install("raise RuntimeError('no licence')")
    ran = te_fl("list", "--probe")
    assert ran.code == 0
    assert "entry point acme (acme-kernels) is left out: RuntimeError: no licence" in ran.out


def test_probe_gives_the_reason_of_what_is_not_available(te_fl):
    document = te_fl("list", "--probe", "--json", TE_FL_SKIP_CUDA="1").document
    found = _implementations(document, "rmsnorm_fwd")
    assert found["reference.torch"]["available"] is True
    assert found["vendor.cuda"]["available"] is False
    assert "TE_FL_SKIP_CUDA" in found["vendor.cuda"]["reason"]


@pytest.mark.parametrize("arguments", [("list",), ("explain", "rmsnorm_fwd"), ("doctor",)])
def test_text_fits_a_narrow_terminal_and_is_not_cut(te_fl, arguments):
    ran = te_fl(*arguments, COLUMNS="80")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "…" not in ran.out
    assert "reference.torch" in ran.out


def test_a_reason_is_one_line_where_there_is_no_terminal(te_fl_process):
    ran = te_fl_process("explain", "rmsnorm_fwd", COLUMNS="")
    (line,) = [it for it in ran.out.splitlines() if "default.flagos" in it]
    assert "TRITON_INTERPRET=1 runs the kernels on the CPU, slowly" in line


def test_reasons_are_broken_into_lines_at_spaces(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    reason = "default.flagos is not available: " + "the device-side library is too old, " * 3
    lines = fitted(f"{reason}\nsee its page").splitlines()
    assert max(map(len, lines)) <= 70
    assert " ".join(lines[:-1]) == reason.strip()
    assert lines[-1] == "see its page"


def test_the_error_of_a_misspelt_command_suggests_the_nearest(te_fl):
    ran = te_fl("verfy")
    assert ran.code == 2
    assert "Did you mean 'verify'?" in ran.err


def test_help_names_every_command(te_fl):
    ran = te_fl("--help")
    named = {line.split()[0] for line in ran.out.partition("Commands:\n")[2].splitlines()}
    assert {"list", "explain", "doctor", "verify", "tune", "new-plugin", "demo"} <= named


def test_no_column_is_lost_on_a_terminal_that_is_too_narrow(te_fl):
    ran = te_fl("explain", "rmsnorm_fwd", TE_FL_PREFER="reference", COLUMNS="30")
    (row,) = (line for line in ran.out.splitlines() if line.startswith("serves"))
    assert row.split()[:5] == ["serves", "reference.torch", "reference", "50", "choice"]


@pytest.mark.parametrize("arguments", [("list",), ("explain", "rmsnorm_fwd"), ("doctor",)])
def test_log_lines_stay_out_of_the_document(te_fl_process, arguments):
    ran = te_fl_process(*arguments, "--json", TEFL_LOG_LEVEL="DEBUG")
    assert json.loads(ran.out)


LOUD = """\
import os
from transformer_engine_fl import OpImpl

print("loaded")
os.write(1, b"the library's own line\\n")


def silu(input):
    return input * input.sigmoid()


def register(registry):
    registry.register_impl(OpImpl("silu", "vendor.loud", "vendor", silu, vendor="loud"))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--probe"),
        ("explain", "silu"),
        ("verify", "vendor.loud", "--every", "20", "--jobs", "2"),
    ],
    ids=lambda it: it[0],
)
def test_what_a_plugin_prints_stays_out_of_the_document(te_fl_process, tmp_path, arguments):
    (tmp_path / "loud_kernels.py").write_text(LOUD)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    ran = te_fl_process(*arguments, "--json", TE_FL_PLUGIN_MODULES="loud_kernels", PYTHONPATH=path)
    assert ran.document
    assert "loaded\n" in ran.err
    assert "the library's own line\n" in ran.err


FULL = """\
import os
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
from transformer_engine_fl.cli import main
main()
"""


@pytest.mark.parametrize("arguments", [("list",), ("explain", "silu", "--json")])
def test_a_full_disk_is_one_line(te_fl_process, arguments):
    ran = te_fl_process(*arguments, program=FULL)
    assert ran.code == 1
    assert ran.err.splitlines()[0].startswith("te-fl: the output is incomplete: [Errno 28]")
    assert "te-fl" not in "".join(ran.err.splitlines()[1:])

"""te-fl doctor."""

from __future__ import annotations

import os

import pytest

from transformer_engine_fl.ops import CATALOGUE

BROKEN_PROBE = """
from transformer_engine_fl import OpImpl


def is_available():
    raise OSError("driver too old")


def register(registry):
    registry.register_impl(
        OpImpl(
            op_name="rmsnorm_fwd", impl_id="vendor.acme", kind="vendor", vendor="acme",
            fn="acme_kernels:nothing", is_available=is_available,
        )
    )
"""
MISSING_FUNCTION = BROKEN_PROBE.replace("raise OSError", "return True or OSError")


def _broken(ran):
    return [it for it in ran.document["findings"] if it["severity"] == "broken"]


def test_healthy_installation(te_fl):
    ran = te_fl("doctor", "--json")
    assert ran.code == 0
    document = ran.document
    assert set(document) == {
        *("healthy", "findings", "versions", "devices", "environment", "policy"),
        *("sources", "operators", "quarantine", "cache"),
    }
    assert (document["healthy"], document["findings"]) == (True, [])
    assert document["versions"]["torch"]
    assert document["devices"][0]["device"] == "cpu"
    assert {it["name"]: it["serving"] for it in document["operators"]}["rmsnorm_fwd"]
    assert "healthy" in te_fl("doctor").out


def test_says_where_each_part_of_the_policy_comes_from(te_fl, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('deny_vendors = ["nvidia"]')
    ran = te_fl("doctor", "--json", TE_FL_PREFER="reference", TE_FL_POLICY_FILE=str(path))
    policy = ran.document["policy"]
    assert policy["prefer"] == {"value": "reference", "origin": "TE_FL_PREFER=reference"}
    assert policy["deny_vendors"]["value"] == ["nvidia"]
    assert str(path) in policy["deny_vendors"]["origin"]
    assert policy["strict"] == {"value": False, "origin": "default"}


def test_every_malformed_variable_is_a_finding_and_the_rest_is_still_judged(te_fl):
    ran = te_fl(
        "doctor", "--json", TE_FL_PREFER="vendro", TE_FL_STRICT="maybe", TE_FL_DENY_VENDORS="nvidia"
    )
    assert ran.code == 1
    said = " ".join(it["what"] for it in _broken(ran))
    assert "TE_FL_PREFER: 'vendro'" in said
    assert "TE_FL_STRICT: 'maybe'" in said
    assert ran.document["policy"]["deny_vendors"]["value"] == ["nvidia"]
    assert ran.document["policy"]["prefer"]["origin"] == "default"


def test_a_malformed_variable_is_shown_among_those_that_are_set(te_fl):
    said = te_fl("doctor", TE_FL_STRICT="maybe", TE_FL_PREFER="vendor").out
    assert "\nTE_FL_PREFER=vendor\nTE_FL_STRICT=maybe\n" in said


def test_environment_is_left_as_it_was(te_fl, monkeypatch):
    monkeypatch.setenv("TE_FL_PREFER", "vendro")
    te_fl("doctor")
    assert os.environ["TE_FL_PREFER"] == "vendro"


def test_slips_are_warnings(te_fl):
    ran = te_fl("doctor", "--json", TE_FL_PREFFER="flagos", TE_FL_DENY_VENDORS="nvidai")
    assert ran.code == 0
    assert ran.document["healthy"]
    said = " ".join(it["what"] for it in ran.document["findings"])
    assert "unknown environment variable TE_FL_PREFFER; did you mean 'TE_FL_PREFER'?" in said
    assert "did you mean 'nvidia'?" in said


def test_an_unknown_variable_is_reported_once_along_with_a_malformed_one(te_fl):
    ran = te_fl("doctor", "--json", TE_FL_PREFFER="flagos", TE_FL_STRICT="maybe")
    said = [it["what"] for it in ran.document["findings"] if "TE_FL_PREFFER" in it["what"]]
    assert len(said) == 1


def test_a_tuning_path_that_names_nothing_is_broken(te_fl, tmp_path):
    ran = te_fl("doctor", "--json", TE_FL_TUNING_PATH=str(tmp_path / "nowhere"))
    assert ran.code == 1
    assert "TE_FL_TUNING_PATH: no such file or folder" in _broken(ran)[0]["what"]
    assert te_fl("doctor", "--json", TE_FL_TUNING_PATH=str(tmp_path)).code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format: 2\n", ":1: format: "),
        ("choice: {}\n", "unknown key; valid: format, device, choices; did you mean 'choices'?"),
        (
            "choices:\n  cross_entropy_fw: []\n",
            ":2: choices.cross_entropy_fw: unknown choice; did you mean 'cross_entropy_fwd'?",
        ),
    ],
)
def test_a_broken_tuning_file_is_broken_where_every_call_raises_it(te_fl, tmp_path, text, said):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    ran = te_fl("doctor", "--json", TE_FL_TUNING_PATH=str(path))
    assert ran.code == 1
    (finding,) = _broken(ran)
    assert finding["what"].startswith(f"TE_FL_TUNING_PATH: {path}:")
    assert said in finding["what"]


def test_a_broken_tuning_file_that_is_passed_over_is_a_warning(te_fl, tmp_path):
    path = tmp_path / "transformer_engine_fl" / "tuning" / "default.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("format: 2\n")
    ran = te_fl("doctor", "--json", XDG_CONFIG_HOME=str(tmp_path))
    assert ran.code == 0
    assert [it["severity"] for it in ran.document["findings"] if str(path) in it["what"]] == [
        "warning"
    ]


def test_a_tuning_path_in_the_home_of_an_unknown_user_is_broken(te_fl):
    ran = te_fl("doctor", "--json", TE_FL_TUNING_PATH="~no such user/tuning")
    assert ran.code == 1
    assert "no such file or folder '~no such user/tuning'" in _broken(ran)[0]["what"]


def test_an_interruption_names_the_plugin_that_was_loading(te_fl, install):
    install("raise KeyboardInterrupt  # as Ctrl-C does where a plugin hangs\n")
    ran = te_fl("doctor")
    assert (ran.code, ran.out) == (130, "")
    assert "interrupted while loading entry point acme (acme-kernels)" in ran.err
    assert "acme_kernels.py:1)" in ran.err


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("rmsnorm_fw", "rmsnorm_fwd"), ("swigul", "swiglu"), ("gleu", "gelu"), ("SwiGLU", "swiglu")],
)
def test_an_implementation_of_a_misspelt_operator_is_a_warning(te_fl, install, misspelt, meant):
    install(
        "from transformer_engine_fl import OpImpl\n\n\n"
        "def register(registry):\n"
        f"    for name in ({misspelt!r}, 'zeta_scale'):\n"
        "        fn = lambda input: input\n"
        "        registry.register_impl(OpImpl(name, 'vendor.acme', 'vendor', fn, vendor='acme'))\n"
    )
    ran = te_fl("doctor", "--json")
    assert ran.code == 0
    (said,) = (it["what"] for it in ran.document["findings"])
    assert said.startswith(f"vendor.acme: registered for {misspelt!r}")
    assert said.endswith(f"did you mean {meant!r}?")


def test_operators_are_grouped_by_serving_implementation(te_fl):
    ran = te_fl("doctor", TE_FL_PREFER="reference", TE_FL_PER_OP="gelu=vendor:nobody")
    lines = [" ".join(line.split()) for line in ran.out.splitlines()]
    others = len(CATALOGUE) - 1
    assert {"none 1 gelu", f"reference.torch {others} all others"} <= {*lines}


@pytest.mark.parametrize("group", ["te_fl.plugins", "te-fl.plugin", "TE_FL.plugin"])
def test_entry_points_of_a_misspelt_group_are_a_warning(te_fl, install, group):
    folder = install("def register(registry):\n    raise RuntimeError('not read')")
    points = folder / "acme_kernels-1.0.dist-info" / "entry_points.txt"
    points.write_text(f"[{group}]\nacme = acme_kernels\n")
    ran = te_fl("doctor", "--json")
    said = [it["what"] for it in ran.document["findings"]]
    assert (
        f"acme-kernels: unknown entry-point group {group!r}; did you mean 'te_fl.plugin'?" in said
    )
    assert ran.code == 0


def test_broken_plugin_is_shown_with_its_traceback_and_operators_are_served(te_fl, install):
    install("def register(registry):\n    raise RuntimeError('no licence')")
    ran = te_fl("doctor", "--json")
    assert ran.code == 1
    (finding,) = _broken(ran)
    assert (
        "entry point acme (acme-kernels) is left out: RuntimeError: no licence" in (finding["what"])
    )
    assert "Traceback" in finding["detail"]
    assert "acme_kernels.py" in finding["detail"]
    assert "acme_kernels.py" in te_fl("doctor").out
    assert {it["name"]: it["serving"] for it in ran.document["operators"]}["rmsnorm_fwd"]


def test_probe_that_raises_is_broken(te_fl, install):
    install(BROKEN_PROBE)
    ran = te_fl("doctor", "--json")
    assert ran.code == 1
    assert "driver too old" in _broken(ran)[0]["what"]


def test_function_that_cannot_be_imported_is_broken(te_fl, install):
    install(MISSING_FUNCTION)
    ran = te_fl("doctor", "--json")
    assert ran.code == 1
    assert "acme_kernels:nothing" in _broken(ran)[0]["what"]


def test_what_is_only_not_available_is_not_broken(te_fl):
    ran = te_fl("doctor", "--json", TE_FL_SKIP_CUDA="1")
    assert ran.code == 0
    operator = next(it for it in ran.document["operators"] if it["name"] == "rmsnorm_fwd")
    assert "TE_FL_SKIP_CUDA" in operator["unavailable"]["vendor.cuda"]


def test_operator_that_nothing_serves_is_broken(te_fl):
    ran = te_fl("doctor", "--json", TE_FL_PER_OP="rmsnorm_fwd=vendor:nobody")
    assert ran.code == 1
    assert "no implementation serves 'rmsnorm_fwd'" in _broken(ran)[0]["what"]


def test_warnings_logged_while_loading_are_findings_listed_once(te_fl_process, tmp_path):
    folder = tmp_path / "_zeta"
    (folder / "ops").mkdir(parents=True)
    (folder / "__init__.py").write_text(
        "from backend_utils import VendorInfoBase\n"
        "vendor_info = VendorInfoBase('zeta', 'cpu', 'sleep 60')\n"
    )
    (folder / "ops" / "__init__.py").write_text(
        "def silu(A):\n    return A\n\n\n__all__ = ['silu']\n"
    )
    (folder / "tune_configs.yaml").write_text("softmax:\n- META: {}\n  num_wraps: 8\n")
    ran = te_fl_process("doctor", "--json", TE_FL_PLUGIN_MODULES=f"{folder},no_such_module")
    findings = {it["severity"]: [] for it in ran.document["findings"]}
    for it in ran.document["findings"]:
        findings[it["severity"]].append(it["what"])
    assert set(findings) == {"broken", "warning"}
    assert "no_such_module" in " ".join(findings["broken"])
    tuning, command = findings["warning"]
    assert "tune_configs.yaml:3: softmax.0.num_wraps: unknown key" in tuning
    assert "its query command 'sleep 60' did not finish" in command
    assert "WARNING" not in ran.err


def test_an_aten_operator_that_torch_has_not_is_a_slip(te_fl, tmp_path, monkeypatch):
    registration = """
from transformer_engine_fl import OpImpl


def register(registry):
    for name in ("aten::sillu", "aten::silu", "aten::add.Tensor"):
        impl = OpImpl(name, "vendor.acme", "vendor", lambda self: self, vendor="acme")
        registry.register_impl(impl)
"""
    (tmp_path / "acme_aten.py").write_text(registration)
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = te_fl("doctor", "--json", TE_FL_PLUGIN_MODULES="acme_aten").document["findings"]
    said = "vendor.acme: registered for 'aten::sillu', an operator that torch does not have; "
    assert finding["what"] == said + "did you mean 'aten::silu'?"


def test_shows_the_compiled_kernels_on_disk_and_clears_them(te_fl, tmp_path):
    folder = tmp_path / "transformer_engine_fl" / "cuda"
    folder.mkdir(parents=True)
    (folder / "one.cubin").write_bytes(bytes(2**20))
    (folder / "other.cubin").write_bytes(bytes(2**19))
    (folder / ".interrupted.tmp").write_bytes(bytes(7))
    here = {"XDG_CACHE_HOME": str(tmp_path)}
    shown = te_fl("doctor", "--json", **here).document["cache"]
    kept = [{"name": "cuda", "entries": 2, "bytes": 3 * 2**19}]
    assert shown == {"path": str(folder.parent), "folders": kept, "deleted": None}
    assert f"cuda: kernels cached: 2, 1.5 MiB in {folder.parent}" in te_fl("doctor", **here).out

    cleared = te_fl("doctor", "--json", "--clear-cache", **here)
    assert cleared.code == 0
    assert cleared.document["cache"] == {"path": str(folder.parent), "folders": [], "deleted": 2}
    assert list(folder.iterdir()) == []
    out = te_fl("doctor", "--clear-cache", **here).out
    assert "kernels deleted: 0" in out
    assert f"no kernel is cached in {folder.parent}" in out


def test_an_unwritable_cache_folder_is_a_warning_and_clearing_it_fails(te_fl, tmp_path):
    blocked = tmp_path / "a file, not a folder"
    blocked.write_text("")
    here = {"XDG_CACHE_HOME": str(blocked)}
    ran = te_fl("doctor", "--json", **here)
    assert ran.code == 0
    (finding,) = ran.document["findings"]
    assert finding["severity"] == "warning"
    assert f"{blocked} is not a writable folder; set XDG_CACHE_HOME" in finding["what"]
    assert te_fl("doctor", "--clear-cache", **here).code == 1


def test_an_unwritable_cache_folder_of_one_set_is_reported(te_fl, tmp_path, monkeypatch):
    sets = tmp_path / "transformer_engine_fl"
    (sets / "other").mkdir(parents=True)
    (sets / "cuda").write_text("")
    here = {"XDG_CACHE_HOME": str(tmp_path)}
    (finding,) = te_fl("doctor", "--json", **here).document["findings"]
    assert f"{sets / 'cuda'} is not a writable folder; set XDG_CACHE_HOME" in finding["what"]
    (sets / "cuda").unlink()
    assert te_fl("doctor", "--json", **here).document["findings"] == []
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != sets / "other" and may(path, mode))
    (finding,) = te_fl("doctor", "--json", **here).document["findings"]
    assert f"{sets / 'other'} is not a writable folder;" in finding["what"]


def test_a_cache_entry_that_cannot_be_deleted_fails_the_clearing(te_fl, tmp_path):
    inner = tmp_path / "transformer_engine_fl" / "cuda" / "folder"
    inner.mkdir(parents=True)
    for name in ("before", "from behind"):
        (inner.parent / name).write_bytes(b"")
    ran = te_fl("doctor", "--json", "--clear-cache", XDG_CACHE_HOME=str(tmp_path))
    assert ran.code == 1
    assert list(inner.parent.iterdir()) == [inner]  # the rest is deleted
    (finding,) = ran.document["findings"]
    assert finding["what"].startswith("compiled kernels cannot be deleted: ")
    assert str(inner) in finding["what"]

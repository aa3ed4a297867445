"""te-fl verify."""

from __future__ import annotations

import json
import signal

import pytest

BOTH = ("--op", "rmsnorm_fwd", "--op", "rmsnorm_bwd")
RAISING = """
from transformer_engine_fl import OpImpl, ops


def silu(input):
    ops.silu.check(input)
    raise RuntimeError("the [kernel] is | gone")


def register(registry):
    registry.register_impl(
        OpImpl(op_name="silu", impl_id="vendor.acme", kind="vendor", vendor="acme", fn=silu)
    )
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current directory, to which scorecards are written."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def test_a_right_set_passes_and_its_scorecard_is_written_twice(te_fl, acme, folder):
    ran = te_fl("verify", "vendor.acme", COLUMNS="80")
    assert ran.code == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "scorecard-vendor.acme.json",
        "scorecard-vendor.acme.md",
    ]
    assert ran.out.splitlines()[-1].startswith("vendor.acme: all ")
    assert max(map(len, ran.out.splitlines())) <= 80


def test_the_scorecard_has_operators_dtypes_errors_versions_and_devices(te_fl, acme, folder):
    te_fl("verify", "vendor.acme")
    card = json.loads((folder / "scorecard-vendor.acme.json").read_text())
    assert card["operators"] == ["rmsnorm_bwd", "rmsnorm_fwd"]
    assert "silu" in card["missing"]
    assert card["source"] == "entry point acme (acme-kernels 1.0)"
    assert card["versions"]["torch"]
    assert card["devices"][0]["device"] == "cpu"
    rows = {(it["operator"], it["device"], it["dtype"]): it for it in card["results"]}
    row = rows["rmsnorm_fwd", "cpu", "bfloat16"]
    assert 0.4 < row["ulps"] < 4
    assert 1e-4 < row["relative"] < 0.1
    assert 0 < row["of_allowed"] <= 1
    assert row["worst_case"].startswith("rmsnorm_fwd/vendor.acme/bfloat16/values/")
    assert sum(it["passed"] for it in card["results"]) == card["cases"]["passed"]
    page = (folder / "scorecard-vendor.acme.md").read_text()
    assert (
        f"| `rmsnorm_fwd` | cpu | bfloat16 | {row['passed']} | 0 | 0 | {row['ulps']:.3g} |" in page
    )
    assert "## Failures" not in page
    assert "`silu`" in page.split("## Not implemented")[1]


def test_a_wrong_set_fails_and_each_failure_can_be_reproduced(te_fl, wrong_acme, folder):
    ran = te_fl("verify", "vendor.acme", *BOTH, "--dtype", "float32")
    assert ran.code == 1
    card = json.loads((folder / "scorecard-vendor.acme.json").read_text())
    assert card["failures"]
    assert {it["case"].split("/")[0] for it in card["failures"]} == {"rmsnorm_bwd"}
    first = card["failures"][0]
    assert "times the allowed error" in first["said"]
    assert f"fails: {first['case']}" in ran.out
    assert first["reproduce"] in ran.out
    assert first["reproduce"] in (folder / "scorecard-vendor.acme.md").read_text()
    row = next(it for it in card["results"] if it["failed"])
    assert row["of_allowed"] > 1
    alone = te_fl("verify", "vendor.acme", "--device", "cpu", "--case", first["case"], "--json")
    assert [it["case"] for it in alone.document["failures"]] == [first["case"]]
    assert sum(alone.document["cases"].values()) == 1


def test_what_an_implementation_raises_is_shown_with_its_traceback(te_fl, install, folder):
    install(RAISING)
    ran = te_fl("verify", "vendor.acme", "--case", "silu/vendor.acme/float32/values/typical")
    assert ran.code == 1
    assert "raised RuntimeError: the [kernel] is | gone" in ran.out
    assert "acme_kernels.py" in ran.out
    assert list(folder.iterdir()) == []  # a run of one case writes no scorecard
    ran = te_fl("verify", "vendor.acme")
    assert "acme_kernels.py" not in ran.out
    assert "\nand " in ran.out
    assert " more\n" in ran.out


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_kernel_that_ends_the_program_is_a_failure_and_the_others_are_run(
    te_fl, install, folder, jobs
):
    install(
        RAISING.replace(
            'raise RuntimeError("the [kernel] is | gone")',
            "if input.ndim == 1:\n"
            "        raise SystemExit(0)\n"
            "    from transformer_engine_fl.backends.reference import activation\n\n"
            "    return activation.silu(input)",
        )
    )
    ran = te_fl("verify", "vendor.acme", "--dtype", "float32", "--jobs", jobs)
    assert ran.code == 1
    card = json.loads((folder / "scorecard-vendor.acme.json").read_text())
    assert card["failures"]
    assert {it["said"] for it in card["failures"]} == {"raised SystemExit: 0"}
    assert card["cases"]["passed"] > card["cases"]["failed"]


def test_a_sigterm_ends_the_command_and_is_no_failure_of_the_kernel_it_comes_in(
    te_fl, install, folder
):
    install(
        RAISING.replace(
            'raise RuntimeError("the [kernel] is | gone")',
            "import signal\n\n    signal.raise_signal(signal.SIGTERM)",
        )
    )
    ran = te_fl("verify", "vendor.acme", "--dtype", "float32")
    assert (ran.code, ran.out) == (128 + signal.SIGTERM, "")
    assert list(folder.iterdir()) == []


def test_a_star_stands_for_anything_in_the_name_of_a_case(te_fl, acme):
    ran = te_fl("verify", "vendor.acme", "--case", "rmsnorm_*/float32/values/typical", "--json")
    assert ran.document["operators"] == ["rmsnorm_bwd", "rmsnorm_fwd"]
    assert ran.document["cases"] == {"passed": 2, "declined": 0, "failed": 0}
    assert ran.document["missing"] is None


def test_json_writes_nothing_unless_a_folder_is_given(te_fl, acme, folder):
    document = te_fl("verify", "vendor.acme", *BOTH, "--json").document
    assert document["passed"]
    assert list(folder.iterdir()) == []
    ran = te_fl("verify", "vendor.acme", *BOTH, "--json", "--output", "new/folder")
    assert ran.code == 0, ran.err
    written = json.loads((folder / "new" / "folder" / "scorecard-vendor.acme.json").read_text())
    assert written["cases"] == document["cases"]


def test_the_verdict_is_shown_even_if_the_scorecard_cannot_be_written(te_fl, acme, folder):
    (folder / "scorecard-vendor.acme.md").mkdir()
    asked = ("verify", "vendor.acme", "--op", "rmsnorm_fwd", "--dtype", "float32")
    ran = te_fl(*asked)
    assert (ran.code, ran.out.splitlines()[-1][:16]) == (2, "vendor.acme: all")
    assert "--output: [Errno 21] Is a directory" in ran.err
    ran = te_fl(*asked, "--output", str(folder), "--json")
    assert (ran.code, ran.document["passed"]) == (2, True)


def test_what_is_named_twice_is_run_once(te_fl, acme):
    name = "rmsnorm_fwd/vendor.acme/float32/values/*"
    asked = ("--device", "cpu", "--case", name)
    once = te_fl("verify", "vendor.acme", *asked, "--json").document["cases"]
    twice = te_fl("verify", "vendor.acme", *asked, *asked, "--json").document["cases"]
    assert twice == once
    assert once["passed"] > 1


def test_quiet_leaves_the_verdict(te_fl, acme):
    ran = te_fl("verify", "vendor.acme", *BOTH, "--quiet")
    (line,) = ran.out.splitlines()
    assert line.startswith("vendor.acme: all ")
    assert all(said.startswith("written: ") for said in ran.err.splitlines())


def test_the_bar_and_the_log_stay_out_of_the_document(te_fl_process):
    options = ("--op", "relu", "--dtype", "float16", "--json")
    ran = te_fl_process("verify", "reference.torch", *options, TEFL_LOG_LEVEL="DEBUG")
    assert json.loads(ran.out)["passed"]
    assert "reference.torch" in ran.err


def test_declined_samples_are_counted_with_their_reason(te_fl, install, folder):
    install(
        RAISING.replace(
            'raise RuntimeError("the [kernel] is | gone")',
            "if input.ndim != 2:\n"
            '        raise NotSupportedError("two dimensions | only")\n'
            "    from transformer_engine_fl.backends.reference import activation\n\n"
            "    return activation.silu(input)",
        ).replace("import OpImpl", "import NotSupportedError, OpImpl")
    )
    ran = te_fl("verify", "vendor.acme", "--dtype", "float32")
    assert ran.code == 0, ran.out
    card = json.loads((folder / "scorecard-vendor.acme.json").read_text())
    (row,) = card["results"]
    assert row["declined"] == row["declined_because"]["two dimensions | only"] > 0
    assert f"{row['declined']} declined" in ran.out
    page = (folder / "scorecard-vendor.acme.md").read_text()
    assert f"| `silu` | {row['declined']} | two dimensions \\| only |" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("vendor.acm",), "did you mean 'vendor.acme'?"),
        (("Nvidia",), "; vendor 'Nvidia' has 'vendor.cuda'"),
        (("",), ", vendor.cuda\n"),
        (("vendor.acme", "--op", "rmsnorm_fw"), "did you mean 'rmsnorm_fwd'?"),
        (("vendor.acme", "--dtype", "bf16"), "did you mean 'bfloat16'?"),
        (("vendor.acme", "--device", "toaster"), "'toaster' cannot be used"),
        (
            ("vendor.acme", "--case", "rmsnorm_fwd/vendor.acme/float32/values/typicl"),
            "did you mean 'rmsnorm_fwd/vendor.acme/float32/values/typical'?",
        ),
        (("vendor.acme", "--case", "typical"), "operator/impl_id/dtype/what/sample"),
        (("vendor.acme", "--output", "/dev/null/x"), "--output: /dev/null is not a folder"),
    ],
)
def test_mistake_is_one_message(te_fl, acme, folder, arguments, said):
    ran = te_fl("verify", *arguments, "--quiet")
    assert ran.code == 2
    assert ran.err.startswith("te-fl: ")
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert list(folder.iterdir()) == []


def test_a_set_for_another_device_says_what_this_machine_has(te_fl):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ran = te_fl("verify", "vendor.cuda")
    assert (ran.code, ran.out) == (2, "")
    assert "'vendor.cuda' runs on cuda only; this machine has: cpu; " in ran.err


def test_a_set_that_does_not_run_here_is_refused_with_what_would_make_it_run(te_fl, install):
    install(
        "from transformer_engine_fl import OpImpl\n\n\n"
        "def register(registry):\n"
        "    registry.register_many(\n"
        "        OpImpl(name, 'vendor.acme', 'vendor', lambda input: input, vendor='acme',\n"
        "               devices=('npu',), is_available=lambda: 'buy an NPU')\n"
        "        for name in ('silu', 'gelu')\n"
        "    )\n"
    )
    ran = te_fl("verify", "vendor.acme")
    assert ran.code == 2
    assert "runs on npu only" in ran.err
    assert ran.err.count("buy an NPU") == 1


PAGE = "# Acme\n\n<!-- scorecard -->\nan older one\n<!-- end of scorecard -->\n\nThe end.\n"


def test_a_page_gets_the_scorecard_between_its_markers_and_keeps_the_rest(te_fl, acme, folder):
    page = folder / "README.md"
    page.write_text(PAGE)
    for _ in range(2):
        ran = te_fl("verify", "vendor.acme", *BOTH, "--dtype", "float32", "--readme", str(page))
        assert ran.code == 0
        assert ran.err.endswith(f"\nwritten: {page}\n")
    text = page.read_text()
    assert text.startswith("# Acme\n\n<!-- scorecard -->\n\n**vendor.acme: all ")
    assert text.endswith("\n<!-- end of scorecard -->\n\nThe end.\n")
    assert "an older one" not in text
    assert text.count("| `rmsnorm_fwd` | cpu | float32 |") == 1
    assert [it.name for it in folder.iterdir()] == ["README.md"]


def test_a_page_that_cannot_be_written_stays_as_it_was(te_fl, acme, folder, monkeypatch):
    page, link = folder / "docs" / "README.md", folder / "README.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    page.chmod(0o640)
    link.symlink_to(page)
    asked = ("verify", "vendor.acme", "--op", "rmsnorm_fwd", "--dtype", "float32", "--every", "50")
    with monkeypatch.context() as full:
        full.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        ran = te_fl(*asked, "--readme", str(link))
    assert ran.code == 2
    assert "--readme: [Errno 28] No space left" in ran.err
    assert page.read_text() == PAGE
    assert te_fl(*asked, "--readme", str(link)).code == 0
    assert "vendor.acme: all " in page.read_text()
    assert (link.is_symlink(), page.stat().st_mode & 0o777) == (True, 0o640)
    assert [it.name for it in page.parent.iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("# Acme\n", "lacks the lines <!-- scorecard --> and")],
)
def test_a_page_without_a_place_for_the_scorecard_is_refused_before_the_work(
    te_fl, acme, folder, text, said
):
    page = folder / "README.md"
    if text is not None:
        page.write_text(text)
    ran = te_fl("verify", "vendor.acme", "--readme", str(page))
    assert ran.code == 2
    assert ran.err.startswith("te-fl: --readme: ")
    assert said in ran.err
    assert ran.out == ""


def test_several_processes_find_what_one_finds(te_fl, wrong_acme, folder):
    options = (*BOTH, "--dtype", "float32", "--dtype", "bfloat16", "--json")
    alone = te_fl("verify", "vendor.acme", *options)
    shared = te_fl("verify", "vendor.acme", *options, "--jobs", "2")
    assert (alone.code, shared.code) == (1, 1)
    assert alone.document["failures"]
    for part in ("results", "cases", "operators", "source"):
        assert shared.document[part] == alone.document[part]
    for one, other in zip(shared.document["failures"], alone.document["failures"], strict=True):
        assert (one["case"], one["reproduce"]) == (other["case"], other["reproduce"])


def test_one_case_in_so_many_can_be_run(te_fl, acme, folder):
    options = ("--op", "rmsnorm_fwd", "--dtype", "float32")
    whole = te_fl("verify", "vendor.acme", *options, "--json").document["cases"]["passed"]
    ran = te_fl("verify", "vendor.acme", *options, "--every", "10")
    assert ran.out.splitlines()[-1].endswith("; 1 case in 10 was run")
    card = json.loads((folder / "scorecard-vendor.acme.json").read_text())
    assert card["every"] == 10
    assert card["cases"]["passed"] == -(-whole // 10)


@pytest.mark.parametrize("also", [("--case", "*"), ("--jobs", "0")])
def test_processes_that_cannot_share_the_cases_are_refused(te_fl, acme, also):
    ran = te_fl("verify", "vendor.acme", "--jobs", "2", *also)
    assert ran.code == 2
    assert "jobs" in ran.err


def test_a_process_that_dies_is_reported(te_fl, install, folder):
    install(
        RAISING.replace('raise RuntimeError("the [kernel] is | gone")', "import os; os._exit(3)")
    )
    ran = te_fl("verify", "vendor.acme", "--op", "silu", "--dtype", "float32", "--jobs", "2")
    assert ran.code == 1
    assert "a process that ran cases of vendor.acme died; not finished: silu" in ran.err


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_set_that_supports_no_tested_dtype_does_not_pass(te_fl, install, folder, jobs):
    install(RAISING.replace("fn=silu", "fn=silu, supported_dtypes={'float8_e5m2'}"))
    ran = te_fl("verify", "vendor.acme", "--jobs", jobs)
    assert ran.code == 2
    assert (
        "supports none of the dtypes to be tested (bfloat16, float16, float32, float64)" in ran.err
    )
    assert "its supported_dtypes are float8_e5m2" in ran.err
    assert list(folder.iterdir()) == []


def test_many_operators_that_a_set_lacks_are_counted(te_fl, acme, folder):
    ran = te_fl("verify", "vendor.acme", "--dtype", "float32", "--every", "50")
    (line,) = (it for it in ran.out.splitlines() if it.startswith("not implemented: "))
    missing = json.loads((folder / "scorecard-vendor.acme.json").read_text())["missing"]
    assert line == f"not implemented: {len(missing)} of {len(missing) + 2} operators"


def test_long_names_of_operators_are_not_broken_in_a_narrow_terminal(te_fl, folder):
    name = "fused_amax_and_scale_update_after_reduction"
    ran = te_fl("verify", "reference.torch", "--op", name, "--every", "50", COLUMNS="80")
    above, row = ran.out.splitlines()[1:3]
    assert above == name
    assert row.split()[0] == "cpu"
    assert max(map(len, ran.out.splitlines())) <= 80


def test_an_operator_without_a_contract_is_named_with_the_nearest_that_has_one(te_fl, install):
    install(
        "from transformer_engine_fl import OpImpl\n\n\n"
        "def register(registry):\n"
        "    fn = abs\n"
        "    registry.register_impl(OpImpl('sillu', 'vendor.acme', 'vendor', fn, vendor='acme'))\n"
    )
    ran = te_fl("verify", "vendor.acme")
    assert ran.code == 2
    assert "has a contract to test against: 'sillu'; did you mean 'silu'?" in ran.err

"""te-fl tune: wrong options, machines that cannot measure, and the check of files.

Measuring is tested in tests/flagos/test_tuning.py, beside the kernels.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

GOOD = """\
format: 1
device: sm_90
choices:
  cross_entropy_fwd:
  - key: {columns: 32768, itemsize: 2}
    value: {threads: 128, elements: 4096}
    ms: 0.5
"""


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
    """The user's folder of tuning files, empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "transformer_engine_fl" / "tuning"
    (folder / "nvidia").mkdir(parents=True)
    return folder


def test_a_machine_without_a_gpu_gives_a_one_line_error(te_fl, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = te_fl("tune")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "te-fl: tuning needs a GPU, and torch sees none on this machine\n"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--op", "cross_entropy_fw"], "did you mean 'cross_entropy_fwd'?"),
        (["--shapes", "8192*4096"], "'8192*4096' is not a shape"),
        (["--shapes", "0x4096"], "'0x4096' is not a shape"),
        (["--shapes", "8x8,"], "'' is not a shape"),
        (["--op", "cross_entropy_fwd", "--shapes", "8x8x8"], "which needs rows x vocabulary"),
        (["--shapes", "8x8"], "select operators with --op"),
        (["--dtype", "bfloat"], "did you mean 'bfloat16'?"),
        (["--output", ""], "'--output': the path is empty"),
        (["--check", "--op", "gelu"], "leave out --op, --shapes and --dtype"),
        (["--check", "--output", "nowhere"], "no such file or folder: nowhere"),
    ],
)
def test_a_wrong_question_is_answered_with_what_is_right(te_fl, asked, said):
    ran = te_fl("tune", *asked)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_what_the_package_brings_is_good(te_fl):
    ran = te_fl("tune", "--check", "--json")
    assert ran.code == 0
    assert ran.document["problems"] == []


def test_the_check_finds_the_users_files_and_says_what_is_wrong(te_fl, user):
    good, wrong = user / "nvidia" / "sm_90.yaml", user / "default.yaml"
    good.write_text(GOOD)
    ran = te_fl("tune", "--check")
    assert ran.code == 0
    assert f"good: {good}, entries: 1" in ran.out.splitlines()
    wrong.write_text("choices:\n  cross_entropy: []\n  cross_entropy_bwd: {}\n")
    ran = te_fl("tune", "--check")
    assert ran.code == 1
    assert f"good: {good}" in ran.out
    assert f"broken: {wrong}:3: choices.cross_entropy_bwd: input should be a valid list" in ran.out
    wrong.write_text("choices:\n  cross_entropy_fw: []\n")
    ran = te_fl("tune", "--check", "--json")
    assert ran.document["good"] == {**ran.document["good"], str(good): 1}
    (problem,) = ran.document["problems"]
    assert problem.startswith(f"{wrong}:2: choices.cross_entropy_fw: unknown choice; did you mean")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "1: the file: must be a mapping, valid keys: format, device, choices; got 'x'"),
        (
            "choices:\n  cross_entropy_fwd:\n  - x\n",
            "3: choices.cross_entropy_fwd.0: must be a mapping, valid keys: key, value, ms, "
            "heuristic_ms, call, measured_on; got 'x'",
        ),
    ],
)
def test_the_check_says_what_stands_where_a_mapping_must(te_fl, tmp_path, text, said):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text)
    ran = te_fl("tune", "--check", "--output", str(wrong))
    assert (ran.code, ran.out) == (1, f"broken: {wrong}:{said}\n")


def test_the_check_of_a_folder_looks_at_that_alone(te_fl, user, tmp_path):
    (user / "default.yaml").write_text("broken")
    mine = tmp_path / "mine" / "nvidia" / "sm_80.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(GOOD)
    ran = te_fl("tune", "--check", "--output", str(tmp_path / "mine"))
    assert ran.code == 1
    assert ran.out == f"broken: {mine}: its name says 'sm_80', but it is for 'sm_90'\n"
    mine.rename(mine.with_name("sm_90.yaml"))
    assert te_fl("tune", "--check", "--output", str(tmp_path / "mine")).code == 0


@pytest.mark.parametrize(
    ("device", "meant"),
    [("sm90", "sm_90"), ("SM-100a", "sm_100a"), ("GFX942", "gfx942"), ("ax_2", None)],
)
def test_the_check_reports_a_device_that_is_spelt_otherwise(te_fl, tmp_path, device, meant):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace("sm_90", device))
    ran = te_fl("tune", "--check", "--output", str(path))
    if meant is None:  # perhaps of a vendor that is not installed here
        assert (ran.code, ran.out) == (0, f"good: {path}, entries: 1\n")
    else:
        told = f"device: {device!r} is no device's name; did you mean {meant!r}?"
        assert (ran.code, ran.out) == (1, f"broken: {path}: {told}\n")


def test_the_check_reports_a_folder_named_after_an_unknown_vendor(te_fl, user, tmp_path):
    mine = tmp_path / "mine"
    for path in (user / "nvidai" / "sm_90.yaml", mine / "nvidai" / "sm_90.yaml"):
        path.parent.mkdir(parents=True)
        path.write_text(GOOD)
        asked = ["--output", str(mine)] if path.is_relative_to(mine) else []
        ran = te_fl("tune", "--check", *asked)
        assert ran.code == 1
        told = "its folder names the unknown vendor 'nvidai'; did you mean 'nvidia'?"
        assert f"broken: {path}: {told}" in ran.out.splitlines()
    assert te_fl("tune", "--check", "--output", str(mine / "nvidai")).code == 0


def test_the_check_reports_files_that_are_never_read(te_fl, user, monkeypatch):
    unread = {
        user / "default.yml": "read there: default.yaml",
        user / "sm_90.yaml": "read there: default.yaml",
        user / "nvidia" / "sm_90.yml": "read there: default.yaml, sm_*.yaml",
        user / "nvidia" / "h200.yaml": "read there: default.yaml, sm_*.yaml",
        user / "nvidia" / "sm_90" / "default.yaml": "nothing is read there",
    }
    for path in (*unread, user / "nvidia" / "default.yaml"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(GOOD)
    ran = te_fl("tune", "--check", "--json")
    assert ran.code == 1
    told = [f"{path}: is never read; {unread[path]}" for path in sorted(unread)]
    assert ran.document["problems"] == told
    monkeypatch.setenv("TE_FL_TUNING_PATH", str(user / "nvidia" / "h200.yaml"))
    assert "h200.yaml: is never read" not in te_fl("tune", "--check").out
    assert te_fl("tune", "--check", "--output", str(user / "nvidia" / "h200.yaml")).code == 0


def test_the_check_knows_the_heuristics_of_plugins(te_fl, install, monkeypatch):
    from transformer_engine_fl.backends.flagos.tuning import lookup

    monkeypatch.setattr(lookup, "VENDORS", dict(lookup.VENDORS))
    install(
        "from transformer_engine_fl.backends.flagos.tuning import register_tuning\n\n"
        "def register(registry):\n"
        "    register_tuning('acme', devices=['ax_*'], heuristics={'cross_entropy_fw': print})\n"
    )
    ran = te_fl("tune", "--check")
    assert ran.code == 1
    assert "broken: vendor acme: heuristic for the unknown choice 'cross_entropy_fw'" in ran.out

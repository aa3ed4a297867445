"""Tuning: what files may contain, the order of look-up, vendors' rules, measuring."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from transformer_engine_fl import OpImpl, get_default_manager, with_preference
from transformer_engine_fl.backends.flagos import tuning
from transformer_engine_fl.backends.flagos.tuning import Choice, files, lookup, register_tuning
from transformer_engine_fl.backends.flagos.tuning.choice import rounded_up
from transformer_engine_fl.core.errors import ConfigurationError, RegistrationError
from transformer_engine_fl.core.policy import reset_global_policy

CPU = torch.device("cpu")
CALLED = "cpu"  # files name it by its type, as it has no architecture


class Tile(NamedTuple):
    threads: int
    wide: bool = False


BY_RULE = Tile(1)


def wrong(tile: Tile) -> str | None:
    return None if tile.threads > 0 else "threads must be positive"


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[Choice[Tile]]:
    """A choice of the test's own, for a key of columns (rounded) and itemsize."""
    made = Choice(
        "of_a_test",
        Tile,
        key=("columns", "itemsize"),
        rounded=("columns",),
        candidates=lambda columns, itemsize: [Tile(64), Tile(96), Tile(128), Tile(256)],
        heuristic=lambda device, columns, itemsize: BY_RULE,
        wrong=wrong,
    )
    yield made
    del tuning.CHOICES["of_a_test"]


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder, empty; no vendors but those that the test registers; nothing read yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(lookup, "VENDORS", {})
    tuning.forget()
    yield lookup.user_folder()
    tuning.forget()


def write(path: Path, threads: int, columns: int = 64, **more: Any) -> Path:
    """A file with one entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"key": {"columns": columns, "itemsize": 2}, "value": {"threads": threads}}
    path.write_text(yaml.safe_dump({"choices": {"of_a_test": [entry]}, **more}))
    return path


def name_path(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv("TE_FL_TUNING_PATH", str(path))
    reset_global_policy()


# ------------------------------------------------------------------------------ looking up


def test_what_was_not_measured_is_chosen_by_rule(choice: Choice[Tile]) -> None:
    assert choice(CPU, 64, 2) == BY_RULE


def test_entries_of_a_device_precede_those_of_its_vendor_and_of_all_devices(
    choice: Choice[Tile], user: Path
) -> None:
    def rule(device: str, columns: int, itemsize: int) -> dict[str, int]:
        assert (device, columns, itemsize) == (CALLED, 64, 2)
        return {"threads": 30}

    register_tuning("Acme", devices=[CALLED], heuristics={"of_a_test": rule})
    for path, threads in (
        (user / "acme" / f"{CALLED}.yaml", 10),
        (user / "acme" / "default.yaml", 20),
        (None, 30),  # the vendor's rule
        (user / "default.yaml", 40),
    ):
        if path is not None:
            write(path, threads)
    for expected, path in (
        (10, user / "acme" / f"{CALLED}.yaml"),
        (20, user / "acme" / "default.yaml"),
        (30, None),
        (40, user / "default.yaml"),
        (BY_RULE.threads, None),
    ):
        assert choice(CPU, 64, 2).threads == expected
        if path is None:
            lookup.VENDORS.clear()
        else:
            path.unlink()
        tuning.forget()


def test_the_named_path_goes_before_the_users_and_that_before_a_vendors(
    choice: Choice[Tile], user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = write(tmp_path / "named" / "acme" / f"{CALLED}.yaml", 10)
    own = write(user / "acme" / f"{CALLED}.yaml", 20)
    write(tmp_path / "later" / f"{CALLED}.yaml", 30)
    write(tmp_path / "packaged" / f"{CALLED}.yaml", 40)
    for folder in ("packaged", "later"):
        register_tuning("acme", devices=[CALLED], folder=tmp_path / folder)
    name_path(monkeypatch, tmp_path / "named")
    assert choice(CPU, 64, 2).threads == 10
    for expected, path in ((20, named), (30, own), (40, tmp_path / "later" / f"{CALLED}.yaml")):
        path.unlink()
        tuning.forget()
        assert choice(CPU, 64, 2).threads == expected


def test_a_named_file_needs_no_vendor(
    choice: Choice[Tile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_path(monkeypatch, write(tmp_path / "mine.yaml", 7))
    assert choice(CPU, 64, 2).threads == 7


def test_a_file_for_another_device_is_passed_over(
    choice: Choice[Tile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_path(monkeypatch, write(tmp_path / "mine.yaml", 7, device="sm_90"))
    assert choice(CPU, 64, 2) == BY_RULE


def test_columns_count_rounded_up_and_other_numbers_exactly(
    choice: Choice[Tile], user: Path
) -> None:
    write(user / "default.yaml", 7)
    assert [choice(CPU, *key).threads for key in ((33, 2), (64, 2))] == [7, 7]
    assert [choice(CPU, *key) for key in ((65, 2), (32, 2), (64, 4))] == [BY_RULE] * 3


@pytest.mark.parametrize(
    ("steps", "number", "rounded"),
    [
        *((1, number, rounded) for number, rounded in ((0, 1), (1, 1), (2, 2), (5, 8), (64, 64))),
        *((4, number, rounded) for number, rounded in ((1, 1), (3, 3), (9, 10), (64, 64))),
        *((4, number, rounded) for number, rounded in ((65, 80), (81, 96), (97, 112), (113, 128))),
    ],
)
def test_numbers_are_rounded_up_to_steps_between_powers_of_two(
    steps: int, number: int, rounded: int
) -> None:
    assert rounded_up(number, steps) == rounded


def test_files_are_read_again_only_when_all_is_forgotten(choice: Choice[Tile], user: Path) -> None:
    path = write(user / "default.yaml", 7)
    assert choice(CPU, 64, 2).threads == 7
    write(path, 8)
    assert [choice(CPU, columns, 2).threads for columns in (64, 63)] == [7, 7]
    tuning.forget()
    assert choice(CPU, 64, 2).threads == 8


def test_plans_made_with_an_answer_go_when_it_changes(choice: Choice[Tile]) -> None:
    plans = {"a": 1}
    choice._plans = (plans,)
    with choice.trial(Tile(5)) as keys:
        assert plans == {}
        assert choice(CPU, 50, 2) == Tile(5)
        plans["b"] = 2
    assert plans == {}
    assert keys == {(64, 2)}
    assert choice(CPU, 50, 2) == BY_RULE


def test_the_vendors_of_the_package_have_their_architectures() -> None:
    program = (
        "import sys, transformer_engine_fl.backends.flagos.tuning as tuning\n"
        "heavy = [it for it in ('torch', 'triton', 'pydantic', 'yaml') if it in sys.modules]\n"
        "names = [tuning.lookup.vendor_of(it).name for it in ('sm_90', 'sm_100', 'gfx942')]\n"
        "assert tuning.lookup.vendor_of('cpu') is None\n"
        "print(heavy, names)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[] ['nvidia', 'nvidia', 'amd']", done.stderr


# ------------------------------------------------------------------------------ wrong files

ENTRY = "choices:\n  of_a_test:\n  - key: {columns: 64, itemsize: 2}\n    value: "
WRONG = {
    "a: [1\n": r":2: invalid YAML: ",
    "- 1\n": r":1: the file: ",
    "format: 2\n": r":1: format: input should be 1, got 2",
    "format: 1\nchoice: {}\n": r":2: choice: unknown key; .*did you mean 'choices'\?",
    ENTRY + "{threads: 1}\n    mss: 2\n": r":5: .*0\.mss: unknown key; .*did you mean 'ms'\?",
    ENTRY + "{threads: 1}\n    ms: fast\n": r":5: .*0\.ms: .*number.*'fast'",
    ENTRY + "{thread: 1}\n": r":4: .*value\.thread: unknown key; .*did you mean 'threads'\?",
    ENTRY + "{wide: true}\n": r":4: .*value\.threads: is missing",
    ENTRY + "{threads: 1.5}\n": r":4: .*value\.threads: .*integer, got 1\.5",
    ENTRY + "{threads: 1, wide: 1}\n": r":4: .*value\.wide: .*boolean, got 1",
    ENTRY + "{threads: 0}\n": r":4: .*value: threads must be positive",
    ENTRY + "{threads: 1}\n  - key: {columns: 64, itemsize: 2}\n    value: {threads: 2}\n": (
        r":5: .*1\.key: duplicate key"
    ),
    ENTRY.replace("columns: 64", "columns: 65") + "{threads: 1}\n": (
        r":3: .*key\.columns: 65 rounds to 128; write 128"
    ),
    ENTRY.replace("columns", "column") + "{threads: 1}\n": (
        r":3: .*key\.column: unknown field; .*did you mean 'columns'\?"
    ),
    ENTRY.replace(", itemsize: 2", "") + "{threads: 1}\n": r":3: .*key: 'itemsize' is missing",
    ENTRY + "{threads: '256'}\n": r":4: .*value\.threads: .*be a number or a boolean, got '256'",
    ENTRY
    + "{threads: 2026-13-45}\n": r":4: invalid YAML: threads: '2026-13-45' is not a valid time",
    ENTRY + "{threads: 0x_}\n": r":4: invalid YAML: threads: '0x_' is not a valid int",
    ENTRY
    + f"{{threads: 0x1{'0' * 5000}}}\n": r":4: invalid YAML: threads: '0x1.*' is not a valid int",
    ENTRY + "{threads: !!int ''}\n": r":4: invalid YAML: threads: '' is not a valid int",
    ENTRY + "{threads: !!bool x}\n": r":4: invalid YAML: threads: 'x' is not a valid bool",
    ENTRY
    + "{threads: !!timestamp x}\n": r":4: invalid YAML: threads: 'x' is not a valid timestamp",
    ENTRY + "{threads: 1}\nchoices: {}\n": r":5: .*choices: duplicate key, first in line 1",
    ENTRY + "{threads: 1, threads: 2}\n": r":4: .*threads: duplicate key, first in line 4",
    ENTRY + "{threads: 1}\n  of_a_test: []\n": r":5: .*of_a_test: duplicate key, .* line 2",
    ENTRY.replace("64", "wide") + "{threads: 1}\n": r":3: .*key\.columns: .*integer, got 'wide'",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_broken_file_that_the_user_named_is_an_error_with_file_line_and_key(
    text: str, choice: Choice[Tile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    name_path(monkeypatch, path)
    with pytest.raises(ConfigurationError, match=WRONG[text]) as caught:
        choice(CPU, 64, 2)
    assert str(caught.value).startswith(f"TE_FL_TUNING_PATH: {path}:")


MISSPELT = "choices:\n  cross_entropy_fw: []\n"


def test_an_unknown_choice_in_a_file_that_the_user_named_is_an_error(
    choice: Choice[Tile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MISSPELT)
    name_path(monkeypatch, path)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r":2: .*did you mean 'cross_entropy_fwd'\?"):
            choice(CPU, 64, 2)


def test_a_named_file_may_be_for_families_that_are_not_loaded_yet(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("choices:\n  softmax_fwd: []\n  fused_rope: []\n")
    program = (
        "import torch\n"
        "from transformer_engine_fl.backends.flagos.tuning import CHOICES\n"
        "from transformer_engine_fl.backends.flagos import loss\n"
        "assert 'fused_rope' not in CHOICES\n"
        "CHOICES['cross_entropy_fwd'](torch.device('cpu'), 64, 2)\n"
    )
    environ = {**os.environ, "TE_FL_TUNING_PATH": str(path)}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=120)


def test_an_unknown_choice_in_another_file_is_one_warning_and_the_rest_counts(
    choice: Choice[Tile], user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(user / "default.yaml", 7)
    path.write_text(path.read_text() + "  cross_entropy_fw: []\n")
    with caplog.at_level(logging.WARNING, "TE-FL"):
        assert [choice(CPU, columns, 2).threads for columns in (64, 128)] == [7, BY_RULE.threads]
    (record,) = caplog.records
    assert "choices.cross_entropy_fw: unknown choice" in record.getMessage()


@pytest.mark.parametrize(
    "text", [next(iter(WRONG)), ENTRY + "{threads: 0}\n", ENTRY + "{threads: 2026-13-45}\n"]
)
def test_another_broken_file_is_one_warning_and_the_rule_stands_in(
    text: str, choice: Choice[Tile], user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user.mkdir(parents=True)
    (user / "default.yaml").write_text(text)
    with caplog.at_level(logging.WARNING, "TE-FL"):
        assert [choice(CPU, columns, 2) for columns in (64, 128, 256)] == [BY_RULE] * 3
    (record,) = caplog.records
    assert f"{user / 'default.yaml'}:" in record.getMessage()
    assert "te-fl tune --check" in record.getMessage()


def test_without_a_home_the_rule_stands_in(
    choice: Choice[Tile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert choice(CPU, 64, 2) == BY_RULE
    with pytest.raises(ConfigurationError, match="XDG_CONFIG_HOME"):
        lookup.user_folder()


def test_a_folder_that_may_not_be_looked_into_is_one_warning(
    choice: Choice[Tile],
    user: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exists = Path.exists

    def denied(path: Path) -> bool:
        if path.is_relative_to(user):
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", denied)
    with caplog.at_level(logging.WARNING, "TE-FL"):
        assert [choice(CPU, columns, 2) for columns in (64, 128)] == [BY_RULE] * 2
    (record,) = caplog.records
    assert "Permission denied" in record.getMessage()


def test_one_broken_choice_leaves_the_others_of_a_file(choice: Choice[Tile], user: Path) -> None:
    content = yaml.safe_load(write(user / "default.yaml", 7).read_text())
    content["choices"]["another"] = [{"key": {"a": 1}, "value": {"b": 1}}]
    (user / "default.yaml").write_text(yaml.safe_dump(content))
    assert choice(CPU, 64, 2).threads == 7


def test_a_named_path_that_is_not_there_is_an_error(
    choice: Choice[Tile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_path(monkeypatch, tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"TE_FL_TUNING_PATH: .*no such file.*nowhere"):
        choice(CPU, 64, 2)


def test_an_error_of_a_named_file_is_raised_and_quarantines_nothing(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_path(monkeypatch, tmp_path / "nowhere.yaml")
    logits, target = torch.randn(2, 8, device=device), torch.zeros(2, dtype=int, device=device)
    manager = get_default_manager()
    with with_preference("flagos"):
        with pytest.raises(ConfigurationError, match="TE_FL_TUNING_PATH"):
            manager.call("cross_entropy_fwd", logits, target)
        monkeypatch.delenv("TE_FL_TUNING_PATH")
        reset_global_policy()
        manager.call("cross_entropy_fwd", logits, target)
        assert "default.flagos" in manager.explain("cross_entropy_fwd", logits, target).headline()


def test_what_an_entry_merges_it_may_say_again(choice: Choice[Tile], user: Path) -> None:
    user.mkdir(parents=True)
    other = "\n  - key: {columns: 128, itemsize: 2}\n    value: {<<: *usual, threads: 2}\n"
    (user / "default.yaml").write_text(f"{ENTRY}&usual {{threads: 1, wide: true}}{other}")
    assert choice(CPU, 128, 2) == Tile(2, wide=True)


# --------------------------------------------------------------------------------- vendors


def test_a_vendor_that_registers_again_changes_nothing(tmp_path: Path) -> None:
    def rule(device: str, **key: int) -> None: ...

    for _ in range(2):
        register_tuning("acme", devices=["ax_*"], folder=tmp_path, heuristics={"of_a_test": rule})
    vendor = lookup.vendor_of("ax_1")
    assert vendor is not None
    assert (vendor.devices, vendor.folders) == (["ax_*"], [tmp_path])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"vendor": "a/b"}, "the vendor's name is invalid"),
        ({"vendor": "acme", "devices": "ax_*"}, "must be a list"),
        ({"vendor": "acme", "devices": ["ax_*", 3]}, "3 is not a device-name pattern"),
        ({"vendor": "acme", "folder": "nowhere"}, "nowhere is not a folder"),
        ({"vendor": "acme", "heuristics": {"of_a_test": print}}, "already has a heuristic"),
        ({"vendor": "beta", "folder": "."}, r"needs devices, .* types: devices=\['sm_90'\]"),
        ({"vendor": "beta", "devices": [], "heuristics": {"of_a_test": max}}, "needs devices"),
    ],
)
def test_a_registration_that_cannot_be_is_an_error(arguments: dict[str, Any], said: str) -> None:
    register_tuning("acme", devices=["ax_*"], heuristics={"of_a_test": max})
    with pytest.raises(RegistrationError, match=said):
        register_tuning(**arguments)
    assert lookup.VENDORS["acme"].heuristics == {"of_a_test": max}
    assert "beta" not in lookup.VENDORS


def test_a_later_registration_needs_no_devices_of_its_own(tmp_path: Path) -> None:
    register_tuning("acme", devices=["ax_*"])
    register_tuning("acme", folder=tmp_path)
    vendor = lookup.vendor_of("ax_1")
    assert vendor is not None
    assert (vendor.devices, vendor.folders) == (["ax_*"], [tmp_path])


def test_a_rule_that_answers_none_leaves_it_to_the_general_one(choice: Choice[Tile]) -> None:
    rules = {"of_a_test": lambda device, columns, itemsize: None}
    register_tuning("acme", devices=[CALLED], heuristics=rules)
    assert choice(CPU, 64, 2) == BY_RULE


def _failing(device: str, columns: int, itemsize: int) -> dict[str, Any]:
    raise ZeroDivisionError("in the rule")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (_failing, "ZeroDivisionError: in the rule"),
        (lambda device, columns, itemsize: {"thread": 1}, "thread"),
        (lambda device, columns, itemsize: {"threads": 0}, "threads must be positive"),
        (lambda device, columns, itemsize: 5, "5 is not a mapping"),
        (lambda device, columns, itemsize: sys.exit("no licence"), "SystemExit: no licence"),
    ],
)
def test_a_rule_that_fails_is_one_warning_and_the_general_one_stands_in(
    rule: Callable[..., Any],
    said: str,
    choice: Choice[Tile],
    caplog: pytest.LogCaptureFixture,
) -> None:
    register_tuning("acme", devices=[CALLED], heuristics={"of_a_test": rule})
    with caplog.at_level(logging.WARNING, "TE-FL"):
        assert [choice(CPU, columns, 2) for columns in (64, 128)] == [BY_RULE] * 2
    (record,) = caplog.records
    assert "the heuristic of acme for 'of_a_test'" in record.getMessage()
    assert said in record.getMessage()


def test_an_is_here_that_raises_is_one_warning_and_counts_as_absent(
    choice: Choice[Tile], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "default.yaml", 64)
    register_tuning("acme", devices=[CALLED], folder=tmp_path, is_here=lambda: bool(1 / 0))
    with caplog.at_level(logging.WARNING, "TE-FL"):
        assert [choice(CPU, columns, 2) for columns in (64, 128)] == [BY_RULE] * 2
    (record,) = caplog.records
    assert "acme's is_here raised ZeroDivisionError" in record.getMessage()


def test_a_plugin_without_kernels_brings_tuning(
    choice: Choice[Tile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "tuning" / f"{CALLED}.yaml", 9)
    (tmp_path / "acme_tuning.py").write_text(
        "from pathlib import Path\n"
        "from transformer_engine_fl.backends.flagos.tuning import register_tuning\n\n"
        "def register(registry):\n"
        f"    folder = Path(__file__).parent / 'tuning'\n"
        f"    register_tuning('acme', devices=['{CALLED}'], folder=folder)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "acme_tuning")
    reset_global_policy()
    get_default_manager().ensure_initialized()
    assert choice(CPU, 64, 2).threads == 9


# --------------------------------------------------------------------------------- writing


def entry(columns: int, threads: int) -> files.Entry:
    return files.Entry(key={"columns": columns, "itemsize": 2}, value={"threads": threads})


def holding(**choices: list[files.Entry]) -> files.TuningFile:
    return files.TuningFile(device=CALLED, choices=choices)


def test_a_new_measurement_replaces_its_key_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "acme" / f"{CALLED}.yaml"
    files.write(path, holding(of_a_test=[entry(64, 1), entry(128, 2)], another=[entry(64, 3)]))
    files.write(path, holding(of_a_test=[entry(64, 4), entry(32, 5)]))
    assert files.read(path) == holding(
        of_a_test=[entry(32, 5), entry(64, 4), entry(128, 2)], another=[entry(64, 3)]
    )


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"{CALLED}.yaml"
    files.write(path, holding(of_a_test=[entry(64, 1)]))
    before = path.read_bytes()

    def full(*paths: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(ConfigurationError, match=r"cpu\.yaml: cannot be written: no space left"):
        files.write(path, holding(of_a_test=[entry(64, 2)]))
    assert path.read_bytes() == before
    assert set(tmp_path.iterdir()) == {path, tmp_path / f".{path.name}.lock"}


def test_of_two_writers_neither_loses_what_the_other_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from transformer_engine_fl.backends.flagos.tuning import files\n"
        "entry = files.Entry(key={'columns': 128, 'itemsize': 2}, value={'threads': 2})\n"
        "print('ready', flush=True)\n"
        f"files.write(Path({str(path)!r}), files.TuningFile(choices={{'of_a_test': [entry]}}))\n"
    )
    merged = files.merged
    others: list[subprocess.Popen[str]] = []

    def meanwhile(*both: files.TuningFile) -> files.TuningFile:
        command = [sys.executable, "-c", program]
        others.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert others[0].stdout is not None
        others[0].stdout.readline()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for this process
            others[0].wait(1)
        return merged(*both)

    monkeypatch.setattr(files, "merged", meanwhile)
    files.write(path, files.TuningFile(choices={"of_a_test": [entry(64, 1)]}))
    others[0].communicate(timeout=60)
    assert others[0].returncode == 0
    assert files.read(path).choices == {"of_a_test": [entry(64, 1), entry(128, 2)]}


def test_a_link_stays_one_and_the_file_keeps_its_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "real" / "mine.yaml", tmp_path / "mine.yaml"
    files.write(path, holding(of_a_test=[entry(64, 1)]))
    path.chmod(0o664)
    link.symlink_to(path)
    files.write(link, holding(of_a_test=[entry(128, 2)]))
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o664
    assert files.read(path) == holding(of_a_test=[entry(64, 1), entry(128, 2)])


def test_what_holds_for_every_device_does_not_become_one_devices(tmp_path: Path) -> None:
    path = write(tmp_path / "default.yaml", 64)
    before = path.read_text()
    with pytest.raises(
        ConfigurationError, match=r"default\.yaml:1: choices: the file is for every device"
    ):
        files.write(path, holding(of_a_test=[entry(128, 2)]))
    assert path.read_text() == before
    named_after_it = path.rename(tmp_path / f"{CALLED}.yaml")
    files.write(named_after_it, holding(of_a_test=[entry(128, 2)]))
    assert len(files.read(named_after_it).choices["of_a_test"]) == 2


def test_nothing_is_merged_into_a_broken_file_or_another_devices(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("format: 1\ndevice: sm_90\n")
    with pytest.raises(ConfigurationError, match=r"mine\.yaml:2: device: the file is for 'sm_90'"):
        files.write(path, holding())
    path.write_text("formats: 1\n")
    with pytest.raises(ConfigurationError, match="unknown key"):
        files.write(path, holding())
    assert path.read_text() == "formats: 1\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    path.unlink()
    path.symlink_to(pipe)
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        files.write(path, holding())
    assert pipe.is_fifo()


# ------------------------------------------------------------------------------- measuring


def silu_by(choice: Choice[Tile]) -> Callable[..., Any]:
    """SiLU that fails with 96 threads and is wrong with 256."""

    def silu(input: torch.Tensor) -> torch.Tensor:
        tile = choice(input.device, input.shape[-1], input.element_size())
        if tile.threads == 96:
            raise RuntimeError("out of resource: shared memory")
        output = torch.nn.functional.silu(input.detach())
        return output * 1.5 if tile.threads == 256 else output

    return silu


@pytest.fixture
def job(choice: Choice[Tile], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job that measures the choice: SiLU of 4 rows."""
    pytest.importorskip("triton")
    from transformer_engine_fl import ops
    from transformer_engine_fl.backends.flagos.tuning.calls.call import Calls, call, normal
    from transformer_engine_fl.cli.tune import measuring
    from transformer_engine_fl.core.registry import Entry

    impl = OpImpl("silu", "default.flagos", "flagos", silu_by(choice))
    monkeypatch.setattr(
        measuring, "_entry", lambda op: Entry(impl, "a test", ops.CATALOGUE["silu"])
    )
    calls = Calls(
        op="silu",
        choices=(choice.name,),
        make=lambda shape, dtype, device: call(normal(shape, dtype, device, 1)),
        shapes=((4, 50),),
        axes="rows x columns",
        check_shape=lambda shape: (2, shape[1]),
    )
    (made,) = measuring.jobs([calls], [], ["bfloat16"])
    return made


def timed(choice: Choice[Tile], **ms: float) -> Callable[[Callable[[], Any]], float]:
    """A timer that returns the given time for the number of threads on trial."""

    def timer(work: Callable[[], Any]) -> float:
        work()
        assert choice._trial is not None
        return ms[f"of{choice(CPU, 1, 1).threads}"]

    return timer


def test_the_fastest_candidate_whose_values_are_right_is_chosen(
    job: Any, choice: Choice[Tile]
) -> None:
    from transformer_engine_fl.cli.tune import measuring

    # The wrong candidates would be fastest, if they were timed.
    timer = timed(choice, of1=3.0, of64=1.0, of128=2.0, of96=0.1, of256=0.1)
    told: list[str] = []
    result = measuring.measure(job, CPU, timer, told.append)
    assert result.key == {"columns": 64, "itemsize": 2}
    assert (result.value, result.ms) == (Tile(64)._asdict(), 1.0)
    assert (result.heuristic, result.heuristic_ms) == (BY_RULE._asdict(), 3.0)
    assert result.tried == 5
    assert [it.endswith(" (again)") for it in told] == [False] * 5 + [True] * 3
    out = {it.value["threads"]: it.reason for it in result.discarded}
    assert "out of resource" in out[96]
    assert "times the allowed error" in out[256]
    assert len(out) == 2
    assert json.dumps(result.to_dict())
    assert choice(CPU, 50, 2) == BY_RULE


def test_candidates_are_compared_fairly_on_a_device_that_slows_down(
    job: Any, choice: Choice[Tile]
) -> None:
    from transformer_engine_fl.cli.tune import measuring

    usual = timed(choice, of1=1.0, of64=0.95, of128=1.0)
    asked = itertools.count()
    result = measuring.measure(
        job, CPU, lambda work: usual(work) * (1 + 0.1 * next(asked)), lambda said: None
    )
    assert result.value == Tile(64)._asdict()
    assert result.ms == pytest.approx(0.95 * 1.25)
    assert result.heuristic_ms == pytest.approx(1.25)


def test_a_candidate_that_fails_the_second_time_is_discarded(
    job: Any, choice: Choice[Tile]
) -> None:
    from transformer_engine_fl.cli.tune import measuring

    usual = timed(choice, of1=3.0, of64=1.0, of128=2.0)
    seen: list[int] = []

    def timer(work: Callable[[], Any]) -> float:
        assert choice._trial is not None
        seen.append(choice(CPU, 1, 1).threads)
        if seen.count(64) == 2 and seen[-1] == 64:
            raise RuntimeError("no")
        return usual(work)

    result = measuring.measure(job, CPU, timer, lambda said: None)
    assert seen == [1, 64, 128, 128, 64, 1]
    assert result.value == Tile(128)._asdict()
    assert {"threads": 64, "wide": False} in [it.value for it in result.discarded]


def test_what_is_hardly_faster_than_the_rule_is_not_chosen(job: Any, choice: Choice[Tile]) -> None:
    from transformer_engine_fl.cli.tune import measuring

    timer = timed(choice, of1=1.0, of64=0.995, of128=2.0)
    result = measuring.measure(job, CPU, timer, lambda said: None)
    assert (result.value, result.ms) == (BY_RULE._asdict(), 1.0)


def test_a_choice_of_which_no_candidate_is_right_has_no_value(
    job: Any, choice: Choice[Tile]
) -> None:
    from transformer_engine_fl.cli.tune import measuring

    choice.candidates = lambda columns, itemsize: [Tile(256)]
    choice.heuristic = lambda device, columns, itemsize: Tile(256)
    result = measuring.measure(job, CPU, timed(choice), lambda said: None)
    assert (result.value, result.ms, len(result.discarded)) == (None, None, 1)


def test_a_call_that_does_not_ask_for_the_choice_is_an_error(
    job: Any, choice: Choice[Tile], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_engine_fl import TeFlError, ops
    from transformer_engine_fl.cli.tune import measuring
    from transformer_engine_fl.core.registry import Entry

    impl = OpImpl("silu", "default.flagos", "flagos", torch.nn.functional.silu)
    monkeypatch.setattr(
        measuring, "_entry", lambda op: Entry(impl, "a test", ops.CATALOGUE["silu"])
    )
    with pytest.raises(TeFlError, match="looks 'of_a_test' up 0 times"):
        measuring.measure(job, CPU, timed(choice), lambda said: None)


# ------------------------------------------------------------------------- of the families


@pytest.fixture
def families() -> dict[str, Choice[Any]]:
    pytest.importorskip("triton")
    from transformer_engine_fl.cli.tune import measuring

    measuring.load_families()
    return {name: it for name, it in tuning.CHOICES.items() if name != "of_a_test"}


NUMBERS = {
    "itemsize": (2, 4, 8),
    "singly": (0, 1),
    "tensors": (1, 3),
    "height": (1, 16, 32, 128),
    "halves": (1, 2),
    "features": (32, 128, 512),
}
POWERS = [2**power for power in (4, 10, 17, 28)]


def test_every_value_that_a_family_offers_may_stand_in_a_file(
    families: dict[str, Choice[Any]],
) -> None:
    assert {"cross_entropy_fwd", "cross_entropy_bwd", "multi_tensor_adam"} <= families.keys()
    for choice in families.values():
        for key in itertools.product(*(NUMBERS.get(field, POWERS) for field in choice.key)):
            offered = [choice.heuristic(CPU, *key), *choice.candidates(*key)]
            assert [files.made(choice, it._asdict()) for it in offered] == offered, choice.name


@pytest.mark.parametrize(
    ("name", "cut", "said"),
    [
        ("rmsnorm_fwd", {"programs": 2}, "programs must be 0 for whole rows"),
        ("rmsnorm_bwd", {"programs": 0}, "programs must be from 1 to 12"),
        ("softmax_fwd", {"programs": 13}, "programs must be from 0 to 12"),
        ("softmax_fwd", {"programs": 0, "shared": True}, "programs must be from 1 to 12"),
        ("rmsnorm_fwd", {"width": 3000}, "width must be a power of two"),
        ("layernorm_bwd", {"stages": 0}, "stages must be from 1 to 8"),
        ("layernorm_fwd", {"programs": 0, "resident": 13}, "resident must be at most 12"),
        ("softmax_fwd", {"programs": 2, "resident": 2}, "resident must be 0 where"),
    ],
)
def test_a_cut_of_rows_that_no_kernel_can_run_with_is_refused(
    name: str, cut: dict[str, Any], said: str, families: dict[str, Choice[Any]]
) -> None:
    fields = {"threads": 128, "width": 4096, "programs": 1, "stages": 1} | cut
    with pytest.raises(ValueError, match=said):
        files.made(families[name], fields)


def small(calls: Any) -> tuple[int, ...]:
    """A small shape, for which every call is fast."""
    if calls.op.startswith("moe"):
        return (32, 48, 4, 2)
    return (32, *(2,) * (len(calls.shapes[0]) - 2), 128)


def test_no_two_calls_of_rows_are_measured_for_the_same_key(families: dict[str, Any]) -> None:
    from transformer_engine_fl.backends.flagos.tuning.calls import CALLS

    seen = set()
    for calls in CALLS:
        for name, dtype in itertools.product(calls.choices, calls.dtypes):
            if families[name].key != ("columns", "itemsize", "singly"):
                continue
            for _, columns in calls.shapes_of(dtype):
                size = getattr(torch, dtype).itemsize
                key = families[name].round((columns, size, int(size == 2 and columns % 2)))
                assert (name, key) not in seen, (name, dtype, columns)
                seen.add((name, key))
    assert {key[2] for _, key in seen} == {0, 1}


def test_every_choice_has_calls_and_every_call_keeps_its_contract(families: dict[str, Any]) -> None:
    from transformer_engine_fl import ops
    from transformer_engine_fl.backends.flagos.tuning.calls import CALLS

    assert {name for calls in CALLS for name in calls.choices} == families.keys()
    for calls in CALLS:
        contract = ops.CATALOGUE[calls.op]
        for dtype in calls.dtypes:
            sample = calls.make(small(calls), getattr(torch, dtype), "cpu")
            contract.check(*sample.args, **sample.kwargs)
        for shape in calls.shapes:
            assert len(calls.check_shape(shape)) == len(shape)


def test_every_call_asks_for_its_choices_once(device: str, families: dict[str, Any]) -> None:
    from transformer_engine_fl.backends.flagos.tuning.calls import CALLS

    manager = get_default_manager()
    for calls in CALLS:
        shapes = [(2, 16) if calls.op.startswith("multi_tensor") else small(calls)]
        shapes += [(32, 127)] if calls.odd_shapes else []
        for shape, name in itertools.product(shapes, calls.choices):
            sample = calls.make(shape, getattr(torch, calls.dtypes[0]), device)
            with families[name].trial() as keys, with_preference("flagos"):
                manager.call(calls.op, *sample.args, **sample.kwargs)
            assert len(keys) == 1, (calls.op, name)


def test_an_odd_number_of_columns_of_half_precision_is_chosen_for_by_itself(
    device: str, families: dict[str, Any]
) -> None:
    for dtype, columns, singly in (
        (torch.bfloat16, 40, 0),
        (torch.bfloat16, 39, 1),
        (torch.float32, 39, 0),
    ):
        x = torch.ones(2, columns, dtype=dtype, device=device)
        with families["rmsnorm_fwd"].trial() as keys, with_preference("flagos"):
            get_default_manager().call("rmsnorm_fwd", x, x[0])
        assert keys == {(40, dtype.itemsize, singly)}


def tune(*arguments: str) -> int:
    from transformer_engine_fl.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["tune", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def measured(
    device: str, families: dict[str, Choice[Any]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], torch.device]:
    """Prepares a choice with few candidates, of which the one with 32 threads is fastest."""
    from transformer_engine_fl.cli.tune import command, measuring

    where = torch.device(device, 0) if device == "cuda" else CPU

    def prepare(name: str) -> torch.device:
        choice = families[name]

        def candidates(*key: int) -> list[Any]:
            usual = choice.heuristic(where, *key)
            return [usual._replace(threads=64), usual._replace(threads=32)]

        def timer(work: Callable[[], Any]) -> float:
            work()
            return choice._trial._value.threads + 0.25  # type: ignore[union-attr, no-any-return]

        monkeypatch.setattr(choice, "candidates", candidates)
        monkeypatch.setattr(command, "_device", lambda: where)
        monkeypatch.setattr(measuring, "median_ms", timer)
        return where

    return prepare


ROPE = {"tensors": 1, "interleaved": 0, "features": 32, "itemsize": 4}


@pytest.mark.parametrize(
    ("op", "shape", "name", "key"),
    [
        ("cross_entropy_fwd", "6x40", "", {"columns": 64, "itemsize": 4}),
        ("cross_entropy_bwd", "6x40", "", {"columns": 64, "itemsize": 4}),
        ("rmsnorm_fwd", "6x40", "", {"columns": 40, "itemsize": 4, "singly": 0}),
        ("layernorm_fwd", "6x41", "", {"columns": 48, "itemsize": 4, "singly": 0}),
        ("layernorm_bwd", "6x40", "", {"columns": 40, "itemsize": 4, "singly": 0}),
        (
            "scaled_softmax_backward",
            "6x40",
            "softmax_bwd",
            {"columns": 40, "itemsize": 4, "singly": 0},
        ),
        ("multi_tensor_scale", "1x8", "", {"elements": 512, "itemsize": 4}),
        ("multi_tensor_l2norm", "1x8", "", {"elements": 512, "itemsize": 4}),
        ("multi_tensor_sgd", "1x8", "", {"elements": 512, "itemsize": 4}),
        ("multi_tensor_adam", "1x8", "", {"elements": 512, "itemsize": 4}),
        ("gelu", "6x40", "activation_fwd", {"itemsize": 4}),
        ("dswiglu", "6x40", "gated_activation_bwd", {"itemsize": 4}),
        ("dbias_dgelu", "6x40", "activation_bwd_with_bias", {"columns": 64, "itemsize": 4}),
        ("dropout_bwd", "6x40", "", {"itemsize": 4}),
        ("moe_permute_fwd", "6x40x4x2", "moe_spread", {"itemsize": 4}),
        ("bgrad_quantize", "32x64", "cast_strips", {"halves": 1, "itemsize": 4}),
        ("dswiglu_quantize", "32x64", "cast_strips", {"halves": 2, "itemsize": 4}),
        ("compute_amax", "32x64", "amax", {"itemsize": 4}),
        ("swap_first_dims", "6x2x40", "", {"itemsize": 4}),
        ("fused_rope_forward", "6x1x2x20", "fused_rope", ROPE),
        ("fused_qkv_rope_forward", "6x1x2x20", "fused_rope", {**ROPE, "tensors": 3}),
    ],
)
def test_what_the_command_measures_is_what_is_chosen_then(
    op: str,
    shape: str,
    name: str,
    key: dict[str, int],
    measured: Callable[[str], torch.device],
    families: dict[str, Choice[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = name or op
    where, choice, path = measured(name), families[name], tmp_path / "mine.yaml"
    usual = choice.heuristic(where, *key.values())
    asked = ("--op", op, "--shapes", shape, "--dtype", "float32", "--output", str(path))
    assert tune(*asked, "--json") == 0
    said = capsys.readouterr()
    (result,) = json.loads(said.out)["results"]
    assert (result["key"], result["value"]["threads"], result["ms"]) == (key, 32, 32.25)
    assert result["heuristic_ms"] == usual.threads + 0.25
    assert result["tried"] == len({usual.threads, 64, 32})
    assert choice(where, *key.values()) == usual
    name_path(monkeypatch, path)
    tuning.forget()
    assert choice(where, *key.values()) == usual._replace(threads=32)


def test_the_command_shows_a_table_and_a_bar_and_writes_to_the_users_folder(
    measured: Callable[[str], torch.device],
    user: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    name = lookup.name_of(measured("cross_entropy_fwd"))
    register_tuning("acme", devices=[name])
    assert tune("--op", "cross_entropy_fwd", "--shapes", "6x40,2x8", "--dtype", "float32") == 0
    said = capsys.readouterr()
    heads, *rows = said.out.splitlines()
    assert heads.split() == ["choice", "call", "chosen", "ms", "by", "rule", "ms", "by", "rule"]
    assert rows[0].split()[1:6] == ["6x40", "float32", "threads=32", "elements=1024", "32.25"]
    assert len(rows) == 2
    path = user / "acme" / f"{name}.yaml"
    assert "tuning" in said.err
    assert f"written: {path}" in said.err
    assert tune("--check") == 0
    assert f"good: {path}, entries: 2" in capsys.readouterr().out
    content = yaml.safe_load(path.read_text())
    (first, second) = content["choices"]["cross_entropy_fwd"]
    assert content["device"] == name
    assert (first["key"]["columns"], second["key"]["columns"]) == (8, 64)
    assert second["call"] == "cross_entropy_fwd 6x40 float32"
    assert "triton" in second["measured_on"]


def test_every_candidate_is_run_elsewhere_before_it_is_measured(
    device: str, families: dict[str, Choice[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    from transformer_engine_fl.backends.flagos.tuning.calls import CALLS
    from transformer_engine_fl.cli.tune import measuring

    told: list[tuple[int, int, str]] = []
    wanted = [it for it in CALLS if it.op == "dropout_bwd"]
    measuring.compile_all(
        wanted, [(6, 40), (2, 8)], ["float32"], torch.device(device), 2, lambda *it: told.append(it)
    )
    assert [it[:2] for it in told] == [(1, 2), (2, 2)]
    assert {it[2] for it in told} == {"dropout_bwd 6x40 float32", "dropout_bwd 2x8 float32"}


def test_what_was_measured_before_an_error_is_kept(
    measured: Callable[[str], torch.device],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformer_engine_fl.cli.tune import measuring

    measured("cross_entropy_fwd")
    timer = measuring.median_ms
    calls: list[float] = []

    def failing(work: Callable[[], Any]) -> float:
        calls.append(timer(work))
        if len(calls) > 6:  # the first timing of the second call
            raise torch.OutOfMemoryError("40 GiB")
        return calls[-1]

    monkeypatch.setattr(measuring, "median_ms", failing)
    path = tmp_path / "mine.yaml"
    asked = ("--op", "cross_entropy_fwd", "--dtype", "float32", "--output", str(path))
    assert tune(*asked, "--shapes", "6x40,6x80") == 1
    (kept,) = files.read(path).choices["cross_entropy_fwd"]
    assert kept.key["columns"] == 64
    assert f"written: {path}" in capsys.readouterr().err


def test_the_value_that_ends_the_measuring_is_named(job: Any, choice: Choice[Tile]) -> None:
    from transformer_engine_fl import TeFlError
    from transformer_engine_fl.cli.tune import measuring

    usual = timed(choice, of1=3.0, of64=1.0)

    def timer(work: Callable[[], Any]) -> float:
        assert choice._trial is not None
        if choice._trial._value == Tile(128):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return usual(work)

    said = "silu 4x50 bfloat16: threads=128 wide=False: RuntimeError: CUDA error: an illegal memory"
    with pytest.raises(TeFlError, match=f"^{said}"):
        measuring.measure(job, CPU, timer, lambda said: None)


def test_a_call_for_which_there_is_no_memory_is_no_traceback(
    measured: Callable[[str], torch.device],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformer_engine_fl.cli.tune import measuring

    def sample(self: Any, shape: Any, device: str) -> Any:
        raise torch.OutOfMemoryError("40 GiB")

    measured("cross_entropy_fwd")
    monkeypatch.setattr(measuring.Job, "sample", sample)
    path = tmp_path / "mine.yaml"
    assert tune("--op", "cross_entropy_fwd", "--output", str(path)) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("te-fl: cross_entropy_fwd ")
    assert (
        "40 GiB; measuring has stopped; if the device is out of memory, give smaller --shapes"
        in said
    )


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("- key: {columns: 64, itemsize: 4}\n    value: {threads: 64, stages: 3}", "6: .*stages"),
        ("- key: {columns: 64, size: 4}\n    value: {threads: 64, elements: 512}", "5: .*size"),
        ("- key: {columns: 64, itemsize: 4}\n    value: {threads: 33, elements: 64}", "6: .*power"),
    ],
    ids=["a field", "a name of the key", "a value"],
)
def test_an_outdated_entry_that_would_hide_measurements_is_an_error(
    old: str,
    said: str,
    measured: Callable[[str], torch.device],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured("cross_entropy_fwd")
    path = tmp_path / "mine.yaml"
    path.write_text(f"format: 1\ndevice: cpu\nchoices:\n  cross_entropy_fwd:\n  {old}\n")
    monkeypatch.setattr(lookup, "name_of", lambda device: "cpu")
    before = path.read_text()
    asked = ("--shapes", "6x80", "--dtype", "float32", "--output", str(path))
    assert tune("--op", "cross_entropy_fwd", *asked) == 2
    told = capsys.readouterr().err
    assert re.search(f"mine.yaml:{said}.*measurements of 'cross_entropy_fwd'", told)
    assert path.read_text() == before
    measured("cross_entropy_bwd")  # the file hides nothing of another choice
    assert tune("--op", "cross_entropy_bwd", *asked) == 0


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("mine.yaml", "mine.yaml:2: device: the file is for 'sm_10'"),
        ("mine.yaml/other.yaml", "mine.yaml is not a folder"),
        ("closed/new/other.yaml", "closed is not writable"),
    ],
)
def test_a_file_that_cannot_be_written_is_an_error_before_any_work(
    output: str,
    said: str,
    measured: Callable[[str], torch.device],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformer_engine_fl.cli.tune import measuring

    measured("cross_entropy_fwd")
    for work in ("compile_all", "measure"):
        monkeypatch.setattr(measuring, work, None)  # must not be called
    (tmp_path / "mine.yaml").write_text("format: 1\ndevice: sm_10\n")
    (tmp_path / "closed").mkdir()
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "closed" and may(path, mode))
    asked = ("--op", "cross_entropy_fwd", "--output", str(tmp_path / output))
    assert tune(*asked, "--jobs", "2") == 2
    assert f"{tmp_path}/{said}" in capsys.readouterr().err


def test_a_device_that_no_vendor_has_needs_a_file_by_name(
    measured: Callable[[str], torch.device], capsys: pytest.CaptureFixture[str]
) -> None:
    measured("cross_entropy_fwd")
    assert tune("--op", "cross_entropy_fwd", "--shapes", "6x40") == 2
    assert "--output FILE.yaml" in capsys.readouterr().err


# ------------------------------------------------------------------------------- the page

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.M | re.S)


def test_the_registration_of_the_page_chooses_for_its_devices(
    families: dict[str, Choice[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tuning").mkdir()
    (block,) = (it for it in blocks("python") if "register_tuning" in it)
    scope: dict[str, Any] = {"__file__": str(tmp_path / "acme.py")}
    exec(compile(block, "docs/tuning.md", "exec"), scope)
    scope["register"](None)
    monkeypatch.setattr(lookup, "name_of", lambda device: "ax_2")
    choice = families["cross_entropy_fwd"]
    choice.forget()
    assert tuple(choice(CPU, 100_000, 2)) == (512, 8192)
    assert choice(CPU, 100, 2) == choice.heuristic(CPU, 128, 2)


def test_the_file_of_the_page_is_good(families: dict[str, Choice[Any]], tmp_path: Path) -> None:
    (block,) = blocks("yaml")
    path = tmp_path / "sm_90.yaml"
    path.write_text(block)
    assert tune("--check", "--output", str(path)) == 0


def test_the_declaration_of_the_page_is_a_choice() -> None:
    (block,) = (it for it in blocks("python") if "Choice(" in it)
    exec(compile(block, "docs/tuning.md", "exec"), {"__name__": "the_page"})
    choice: Choice[Any] = tuning.CHOICES.pop("my_loss_fwd")
    assert tuple(choice(CPU, 5, 2)) == (128, 4096)

"""The TE-FL logger: what it says, when, how it looks, and how little it interferes."""

from __future__ import annotations

import io
import logging
import logging.handlers
import queue
import re
import subprocess
import sys

import pytest
from core_helpers import StubTensor, impl, make_manager, one_of_each

from transformer_engine_fl import (
    ConfigurationError,
    SelectionPolicy,
    reset_global_policy,
    set_global_policy,
    with_preference,
)
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.policy import get_environment


@pytest.fixture
def at_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEFL_LOG_LEVEL", "INFO")
    reset_global_policy()


def selections(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages so far that name the implementation that serves."""
    return [it.getMessage() for it in caplog.records if it.getMessage().startswith("Op ")]


@pytest.mark.usefixtures("at_info")
def test_lines_on_stderr_look_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    manager = make_manager(
        impl("vendor.mybackend", "vendor", op_name="rmsnorm_fwd", vendor="mybackend"),
        impl("reference.torch", op_name="rmsnorm_fwd"),
        impl("default.flagos", "flagos"),
        impl("reference.torch"),
    )
    with with_preference("vendor"):
        manager.call("rmsnorm_fwd", StubTensor())
    printed = capsys.readouterr()
    assert printed.out == ""
    first, second = printed.err.splitlines()
    assert re.fullmatch(
        r"\[TE-FL manager\.py:\d+ INFO\] Registered impl_ids: "
        r"\['default\.flagos', 'reference\.torch', 'vendor\.mybackend'\]",
        first,
    )
    assert re.fullmatch(
        r"\[TE-FL manager\.py:\d+ INFO\] Op 'rmsnorm_fwd' using 'vendor\.mybackend' "
        r"\(kind=vendor, vendor=mybackend\)",
        second,
    )


@pytest.mark.usefixtures("at_info")
def test_an_implementation_without_a_vendor_shows_its_kind_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_manager(impl("plain")).call("scale", StubTensor())
    assert selections(caplog) == ["Op 'scale' using 'plain' (kind=reference)"]


@pytest.mark.usefixtures("at_info")
def test_a_selection_is_logged_when_first_used_and_when_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = make_manager(*one_of_each())
    bound = manager.bind("scale")
    flagos = "Op 'scale' using 'default.flagos' (kind=flagos)"
    reference = "Op 'scale' using 'reference.torch' (kind=reference)"
    assert selections(caplog) == []  # nothing has been used yet
    for _ in range(3):
        manager.call("scale", StubTensor())
        bound(StubTensor())
        manager.call("scale", StubTensor(dtype="bfloat16"))
    assert selections(caplog) == [flagos]
    set_global_policy(SelectionPolicy(prefer="reference"))
    for _ in range(3):
        manager.call("scale", StubTensor())
    assert selections(caplog) == [flagos, reference]
    set_global_policy(SelectionPolicy(prefer="impl:reference.torch"))
    manager.call("scale", StubTensor())
    assert selections(caplog) == [flagos, reference]  # the same implementation serves
    set_global_policy(None)
    manager.call("scale", StubTensor())
    assert selections(caplog) == [flagos, reference, flagos]


@pytest.mark.usefixtures("at_info")
def test_kinds_of_tensor_that_take_turns_are_not_logged_at_each_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = make_manager(impl("half", "flagos", supported_dtypes={"float16"}), impl("plain"))
    for _ in range(3):
        assert manager.call("scale", StubTensor(dtype="float16")) == "half"
        assert manager.call("scale", StubTensor(dtype="float32")) == "plain"
    assert selections(caplog) == [
        "Op 'scale' using 'half' (kind=flagos)",
        "Op 'scale' using 'plain' (kind=reference)",
    ]


@pytest.mark.usefixtures("at_info")
def test_the_registered_ids_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(*one_of_each())
    for _ in range(2):
        manager.ensure_initialized()
        manager.call("scale", StubTensor())
    lines = [it.getMessage() for it in caplog.records if "Registered" in it.getMessage()]
    assert lines == [
        "Registered impl_ids: ['default.flagos', 'reference.torch', 'vendor.acme', 'vendor.zeta']"
    ]


def test_questions_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "TE-FL")
    manager = make_manager(*one_of_each())
    manager.explain("scale", StubTensor())
    manager.get_selected_impl_id("scale")
    manager.explain_for("scale", device="cuda")
    assert selections(caplog) == []


def test_without_a_level_nothing_is_said_of_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    make_manager(*one_of_each()).call("scale", StubTensor())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("DEBUG", logging.DEBUG),
        ("info", logging.INFO),
        ("Warning", logging.WARNING),
        ("ERROR", logging.ERROR),
        ("critical", logging.CRITICAL),
        ("", logging.WARNING),
    ],
)
def test_the_variable_sets_the_level(
    text: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEFL_LOG_LEVEL", text)
    get_environment()
    assert logger.level == level


def test_a_wrong_level_is_an_error_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEFL_LOG_LEVEL", "vrebose")
    with pytest.raises(ConfigurationError, match="TEFL_LOG_LEVEL: 'vrebose' is not a level"):
        make_manager(*one_of_each()).call("scale", StubTensor())


def test_a_level_is_reset_when_its_variable_is_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEFL_LOG_LEVEL", "DEBUG")
    get_environment()
    monkeypatch.delenv("TEFL_LOG_LEVEL")
    reset_global_policy()
    get_environment()
    assert logger.level == logging.WARNING


def test_a_level_that_the_application_has_set_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("ERROR", "TE-FL")
    get_environment()
    assert logger.level == logging.ERROR


def test_records_still_reach_the_applications_handlers(caplog: pytest.LogCaptureFixture) -> None:
    assert logger.name == "TE-FL"
    assert logger.propagate is True
    logger.warning("hello")
    assert caplog.record_tuples == [("TE-FL", logging.WARNING, "hello")]


def test_what_the_application_shows_is_not_shown_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, elsewhere = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", now)
    own, beside = logging.StreamHandler(now), logging.StreamHandler(elsewhere)
    own.setLevel("ERROR")
    monkeypatch.setattr(logging.root, "handlers", [beside])
    logger.warning("to a file")
    assert now.getvalue().count("to a file") == elsewhere.getvalue().count("to a file") == 1
    monkeypatch.setattr(logging.root, "handlers", [beside, own])
    logger.warning("hushed there")
    logger.error("shown there")
    assert now.getvalue().count("hushed there") == now.getvalue().count("shown there") == 1


def test_what_goes_into_a_queue_is_left_to_its_listener(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(records)
    monkeypatch.setattr(logging.root, "handlers", [handler])
    logger.warning("once")
    assert records.get_nowait().getMessage() == "once"
    assert capsys.readouterr().err == ""
    handler.setLevel("ERROR")
    logger.warning("not for the queue")
    assert "not for the queue" in capsys.readouterr().err


def test_a_closed_stderr_ends_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    logger.warning("hello")


def test_a_level_set_before_the_import_is_kept() -> None:
    code = (
        "import logging; logging.getLogger('TE-FL').setLevel('ERROR')\n"
        "import transformer_engine_fl; transformer_engine_fl.get_policy()\n"
        "print(logging.getLogger('TE-FL').level)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["40"]


def test_a_record_goes_to_whatever_stderr_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        now = io.StringIO()
        monkeypatch.setattr(sys, "stderr", now)
        logger.warning("hello")
        assert now.getvalue().startswith("[TE-FL test_logging.py:")
        assert now.getvalue().endswith(" WARNING] hello\n")

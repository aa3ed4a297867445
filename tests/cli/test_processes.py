"""Work in several processes: what happens when one of them dies or the program is terminated."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest

from transformer_engine_fl.cli import _processes

PROGRAM = """
import os, time
from transformer_engine_fl.cli._processes import run_in_processes
run_in_processes({work}, {calls}, 2, lambda *told: print(told, flush=True))
print("and on")
"""


@pytest.fixture
def start():
    """Starts a program that runs ``work`` in two processes; at the end, kills its process group."""
    programs = []

    def started(work: str, calls: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM.format(work=work, calls=calls)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        programs.append(subprocess.Popen(command, text=True, start_new_session=True, **pipes))
        return programs[-1]

    yield started
    for program in programs:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


def test_every_call_is_made_however_many_they_are(start):
    out, err = start("str", "range(40)").communicate(timeout=120)
    *told, last = out.splitlines()
    dones, gave = zip(*map(ast.literal_eval, told), strict=True)
    assert (list(dones), last) == ([*range(1, 41)], "and on"), err
    assert sorted(gave, key=int) == [str(it) for it in range(40)]


def test_a_process_that_dies_ends_the_work_and_not_the_program(start):
    out, err = start("os._exit", "[1] * 5").communicate(timeout=120)
    assert out == "and on\n", err
    assert "a compiling process was killed after 0 of 5 calls" in err


def test_a_process_may_die_while_calls_are_handed_out(monkeypatch, caplog):
    handed = []

    def submit(pool, work, call):
        if len(handed) == 19:
            raise BrokenProcessPool("one of them has died")
        handed.append(call)
        future = Future()
        future.set_result(work(call))
        return future

    monkeypatch.setattr(_processes.ProcessPoolExecutor, "submit", submit)
    monkeypatch.setattr(_processes.logger, "propagate", True)
    told = []
    _processes.run_in_processes(str, range(40), 2, lambda *it: told.append(it))
    assert len(told) == 16
    assert "a compiling process was killed after 16 of 40 calls" in caplog.text


@pytest.mark.parametrize("whole_group", [True, False])
def test_worker_processes_end_with_the_program(start, whole_group):
    program = start("time.sleep", "[0, 600]")
    assert program.stdout.readline() == "(1, None)\n"  # one process is idle now
    os.killpg(program.pid, signal.SIGTERM) if whole_group else program.terminate()
    program.communicate(timeout=60)  # returns when no process holds the pipes
    assert program.returncode == 128 + signal.SIGTERM

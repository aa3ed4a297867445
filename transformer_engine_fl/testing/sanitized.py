"""What a process under compute-sanitizer does: announce each call, and make it.

``sanitizer`` starts the process, writes the calls that it wants to the process's input, and
reads its output, which has the tool's lines between the announcements.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import torch

from transformer_engine_fl.core.blame import error_text
from transformer_engine_fl.testing.case import calls
from transformer_engine_fl.testing.checks import Declined

__all__ = ["ANNOUNCED", "main"]

ANNOUNCED: Final = "te-fl: "
"""What a line of this process begins with; others come from kernels, libraries or the tool."""

_LONGEST: Final = 600
"""Characters of a message, short enough for a line to be written to the pipe in one piece."""

_PAUSE: Final = 0.01
"""Seconds to wait after a call on a device: the tool's lines come from another process."""


def main() -> None:
    """Make the calls that each line of the input asks for, until it ends."""
    for line in sys.stdin:
        _make(**json.loads(line))


def _make(
    impl_id: str,
    operator: str,
    dtype: str,
    device: str,
    names: list[str] | None,
    every: int,
    after: int,
    poisoned: bool,
) -> None:
    """Make calls of an operator's dtype.

    Of the calls with these ``names``, one in ``every``; of those, not the first ``after``.
    """
    every_call = calls(impl_id, operator, dtype, device)
    found = [it for it in every_call if names is None or it[0] in names]
    for name, run in found[::every][after:]:
        _announce(call=name)
        outcome: dict[str, Any] = {"served": True}
        try:
            run.only_called(poisoned=poisoned)
        except Declined as declined:
            outcome = {"declined": str(declined)[:_LONGEST]}
        except Exception as error:  # noqa: BLE001  # any error is reported
            outcome = {"failed": error_text(error)[:_LONGEST]}
        if device != "cpu":
            time.sleep(_PAUSE)
        _announce(**outcome)
        if device != "cpu" and "failed" in outcome:
            torch.accelerator.synchronize(device)  # raises if it is lost: then a new process runs
    _announce(done=True)


def _announce(**what: Any) -> None:
    sys.stdout.write(f"\n{ANNOUNCED}{json.dumps(what)}\n")
    sys.stdout.flush()

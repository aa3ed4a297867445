"""What a process under compute-sanitizer does: calls, each announced before it is made.

``sanitizer`` starts it, writes the calls that it wants to its input and reads its output,
where the tool's lines stand between the announcements.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

import torch

from transformer_engine_fl.core.blame import worded
from transformer_engine_fl.testing.case import calls
from transformer_engine_fl.testing.checks import Declined

__all__ = ["ANNOUNCED", "main"]

ANNOUNCED: Final = "te-fl: "
"""What a line of this process begins with; any other is a kernel's, a library's, the tool's."""

_LONGEST: Final = 600
"""Characters of a message: a line is written at once, whoever else writes to the pipe."""

_PAUSE: Final = 0.01
"""Seconds after a call on a device: the tool's lines come by way of another process."""


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
    """Make calls of an operator's dtype: of those names, one in so many, after the first few."""
    every_call = calls(impl_id, operator, dtype, device)
    found = [it for it in every_call if names is None or it[0] in names]
    for name, run in found[::every][after:]:
        _announce(call=name)
        outcome: dict[str, Any] = {"served": True}
        try:
            run.only_called(poisoned=poisoned)
        except Declined as declined:
            outcome = {"declined": str(declined)[:_LONGEST]}
        except Exception as error:  # noqa: BLE001  # whatever it is, it is told
            outcome = {"failed": worded(error)[:_LONGEST]}
        if device != "cpu":
            time.sleep(_PAUSE)
        _announce(**outcome)
        if device != "cpu" and "failed" in outcome:
            torch.accelerator.synchronize(device)  # raises where it is lost: another process then
    _announce(done=True)


def _announce(**what: Any) -> None:
    sys.stdout.write(f"\n{ANNOUNCED}{json.dumps(what)}\n")
    sys.stdout.flush()

"""The ``TE-FL`` logger: standard library logging, to stderr, one line per message.

The level comes from ``TEFL_LOG_LEVEL`` (policy.py reads it with the other variables).
``propagate`` is left alone, so an application's own handlers and pytest's caplog see
every record.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO

__all__ = ["LEVELS", "logger", "set_level"]

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEFAULT_LEVEL: Final = "WARNING"

logger: Final = logging.getLogger("TE-FL")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever ``sys.stderr`` is at the moment of the message."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(
            logging.Formatter("[%(name)s %(filename)s:%(lineno)d %(levelname)s] %(message)s")
        )

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("this handler always writes to sys.stderr")


logger.addHandler(_StderrHandler())
logger.setLevel(DEFAULT_LEVEL)

_set_by_us = DEFAULT_LEVEL


def set_level(level: str | None) -> None:
    """Apply the level that the environment asks for; None restores the default.

    A level that the application has set itself since is left alone when the
    environment says nothing.
    """
    global _set_by_us
    if level is None and logger.level != logging.getLevelName(_set_by_us):
        return
    _set_by_us = level or DEFAULT_LEVEL
    logger.setLevel(_set_by_us)

"""The ``TE-FL`` logger: standard library logging, to stderr, one line per message.

The level comes from ``TEFL_LOG_LEVEL`` (policy.py reads it with the other variables).
``propagate`` is left alone, so an application's own handlers and pytest's caplog see
every record. A record that one of those shows on the console is not written there again; nor
is one that goes into a queue, as it is not known where the queue's listener writes it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Final, TextIO

__all__ = ["LEVELS", "logger", "set_level"]

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DEFAULT_LEVEL: Final = "WARNING"

logger: Final = logging.getLogger("TE-FL")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever ``sys.stderr`` is at the moment of the message, unless another
    handler shows it there.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(
            logging.Formatter("[%(name)s %(filename)s:%(lineno)d %(levelname)s] %(message)s")
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Write it; or leave that to the application, if it shows the record itself."""
        others = [it for it in logger.handlers if it is not self]
        if logger.propagate:
            others += logging.root.handlers
        if not any(record.levelno >= it.level and _shows(it) for it in others):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A stderr that is closed, say, is no reason for a call to fail."""
        with contextlib.suppress(Exception):
            super().handleError(record)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("this handler always writes to sys.stderr")


def _shows(handler: logging.Handler) -> bool:
    """Whether a handler writes to the console, or may have a queue's listener do so.

    rich's handler has its stream in its console. A handler can be a QueueHandler only if
    ``logging.handlers`` is imported.
    """
    queued = sys.modules.get("logging.handlers")
    if queued is not None and isinstance(handler, queued.QueueHandler):
        return True
    stream = getattr(handler, "stream", None)
    if stream is None:
        stream = getattr(getattr(handler, "console", None), "file", None)
    consoles = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return stream is not None and any(stream is it for it in consoles)


logger.addHandler(_StderrHandler())
if logger.level == logging.NOTSET:  # otherwise the application has set it before
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

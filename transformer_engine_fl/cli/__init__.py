"""The command line, ``te-fl``: what is registered, what serves and why, what is right, a demo.

Exit codes: 0, the answer is good; 1, it is not (something is broken, nothing serves, a set
breaks a contract, losses disagree); 2, the question was wrong (an unknown name, a malformed
setting).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from transformer_engine_fl import __version__
from transformer_engine_fl.cli._output import console
from transformer_engine_fl.core.errors import ConfigurationError, TeFlError, UnknownOperatorError
from transformer_engine_fl.core.late import load_attribute

__all__ = ["app", "main"]

COMMANDS = {
    "list": "listing:list_operators",
    "explain": "explain:explain",
    "doctor": "doctor:doctor",
    "verify": "verify:verify",
    "tune": "tune.command:tune",
    "new-plugin": "new_plugin:new_plugin",
    "demo": "demo.command:demo",
}
"""Command -> its ``module:function``; a module is imported when its command is run."""

OPTIONS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    # typer's own --help has no default, and typer imports pydantic to convert None to a bool: a
    # quarter of the time of `te-fl list`.
    "context_settings": {"default_map": {"help": False}},
}


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # For an unknown name all are loaded, so that typer can suggest the one that was meant.
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                self.commands[name] = self._load(name)
        return self.commands.get(cmd_name)

    def _load(self, name: str) -> Any:
        alone = typer.Typer(**OPTIONS)
        alone.command(name)(load_attribute(f"{__name__}.{COMMANDS[name]}"))
        return typer.main.get_command(alone)


app = typer.Typer(
    name="te-fl",
    help="Operator dispatch for transformer models: which implementations there are, which one "
    "serves each operator, and why.",
    cls=_Commands,
    no_args_is_help=True,
    **OPTIONS,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"te-fl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``te-fl``; a mistake of the user gives one message and no traceback.

    Args:
        arguments: the program's unless given; then modules in the current folder can be
            imported, too, as with ``python -m``.
    """
    if arguments is None:
        _find_modules_here()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path or a reason may have any character
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr
    try:
        app(args=arguments, prog_name="te-fl")
    except TeFlError as error:
        console(stderr=True).print(f"te-fl: {error}", soft_wrap=True)
        is_usage_error = isinstance(error, ConfigurationError | UnknownOperatorError)
        raise SystemExit(2 if is_usage_error else 1) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        console(stderr=True).print(f"te-fl: the output is incomplete: {error}", soft_wrap=True)
        raise SystemExit(1) from None


def _find_modules_here() -> None:
    """Put the current folder on ``sys.path``, as ``python -m`` does; a script has its own there."""
    with contextlib.suppress(OSError):  # the folder is gone
        here = os.getcwd()
        if not sys.flags.safe_path and not {here, ""}.intersection(sys.path):
            sys.path.insert(0, here)

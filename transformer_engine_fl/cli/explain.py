"""``te-fl explain OP``: which implementation serves an operator, and why each other does not."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from transformer_engine_fl.cli._output import Json, console, print_json, table
from transformer_engine_fl.core.errors import ConfigurationError, suggestion
from transformer_engine_fl.core.manager import OpManager, get_default_manager
from transformer_engine_fl.core.selection import Decision
from transformer_engine_fl.core.types import MISTAKEN_DEVICES

__all__ = ["explain"]


def explain(
    op: Annotated[str, typer.Argument(metavar="OP", help="The operator, by name or alias.")],
    device: Annotated[
        str | None, typer.Option(help="Answer for this device type (cuda), present or not.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="The device's architecture: sm_90, gfx942 (implies --device cuda)."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="The tensors' dtype: bfloat16 (needs --device).")
    ] = None,
    json: Json = False,
) -> None:
    """Say which implementation serves OP, and why no other does.

    Without --device: on this machine, before any tensor is seen. The policy comes from the
    environment: TE_FL_PREFER=reference te-fl explain rmsnorm_fwd. The exit code is 1 if
    no implementation serves.
    """
    manager = _manager(op)
    decision = _decide(manager, op, device, arch, dtype)
    if json:
        print_json(decision.to_dict())
    else:
        _show(decision)
        if device is not None and (hint := _unknown_device(manager, device)):
            console(stderr=True).print(hint, soft_wrap=True)
    raise typer.Exit(0 if decision.selected else 1)


def _manager(op: str) -> OpManager:
    """The default manager; for an ATen operator, one with the ATen operators registered."""
    if op.startswith("aten::"):
        from transformer_engine_fl.integrations.aten import prepared

        return prepared()
    return get_default_manager()


def _decide(
    manager: OpManager, op: str, device: str | None, arch: str | None, dtype: str | None
) -> Decision:
    if device is None and arch is not None:
        device = "cuda"
    if device is None:
        if dtype is not None:
            raise ConfigurationError("--dtype needs --device")
        return manager.explain(op)
    return manager.explain_for(op, device=device, arch=arch, dtype=dtype)


def _unknown_device(manager: OpManager, device: str) -> str | None:
    """A note on a device type that no implementation names, most likely a misspelt one."""
    named = {"cpu"}
    for op_name in manager.registry.list_operators():
        for impl in manager.registry.get_implementations(op_name):
            named.update(impl.devices or ())
    kind = device.partition(":")[0]
    if kind in named:
        return None
    gpu = MISTAKEN_DEVICES.get(kind) == "cuda"
    hint = "; torch's device type of GPUs is 'cuda'" if gpu else suggestion(kind, named)
    return (
        f"note: no implementation supports the device type {kind!r}; supported: "
        f"{', '.join(sorted(named))}{hint}"
    )


_MARKS = {"*": ("serves", "bold green"), "+": ("next", ""), "-": ("no", "yellow")}


def _show(decision: Decision) -> None:
    out = console()
    out.print(decision.headline(), style="bold")
    headings = ("", "implementation", "kind", "priority", "reason")
    rows: list[list[str | Text]] = [
        [Text(*_MARKS[mark]), *cells] for mark, *cells in decision.rows()
    ]
    if rows:
        out.print(table(headings, rows, numbers=("priority",), wrapped=("reason",)))
    else:
        out.print("no implementation is registered")
    if decision.note:
        out.print(decision.note)
    origins = decision.policy.origins
    for field, value in decision.policy.policy.to_dict().items():
        if origins[field] != "default":
            out.print(f"policy: {field} is {value!r} ({origins[field]})")

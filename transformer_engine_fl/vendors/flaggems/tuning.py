"""Applies a folder's tuning to this project's Triton kernels, where the parameters correspond.

FlagGems lists configurations, of which its autotuner picks one in the first call.
Here no call measures anything: if the value from the kernels' own rule is on the vendor's list, it
is kept; otherwise the nearest value on the list is used. Heuristics are evaluated; a heuristic
that needs an argument that the choice here does not have is not used.

This module lists the entries that correspond. The others are not used, and
``FlagGemsFolder.tuning_not_used()`` gives the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transformer_engine_fl.core.blame import error_text
from transformer_engine_fl.core.errors import PluginError
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.vendors import detection
from transformer_engine_fl.vendors.flaggems.configs import FILE

if TYPE_CHECKING:
    from transformer_engine_fl.vendors.flaggems.configs import Config
    from transformer_engine_fl.vendors.flaggems.folder import FlagGemsFolder

__all__ = ["not_used", "register"]

_ARCHITECTURES: Final = {"cuda": ("sm_*", "gfx*")}
"""The architecture patterns by which tuning matches devices of a type."""

_WARP: Final = 32
"""Threads in a warp, as choices count them, whatever the device's warp size is."""


class _Tuned(NamedTuple):
    """How configurations of FlagGems are converted to values of a choice.

    Attributes:
        choice: its name.
        fields: the choice's fields that a configuration determines; None if it does not
            correspond.
    """

    choice: str
    fields: Callable[[Config], Mapping[str, int] | None]


def _cross_entropy(config: Config) -> Mapping[str, int] | None:
    """A program processes one row of logits, BLOCK_C elements at a time."""
    if config.meta.get("BLOCK_D") != 1 or "BLOCK_C" not in config.meta:
        return None
    return {
        "threads": _WARP * config.launch.get("num_warps", 4),
        "elements": config.meta["BLOCK_C"],
    }


def _attention(config: Config) -> Mapping[str, int] | None:
    """A program processes BLOCK_M queries, BLOCK_N keys at a time, and does not preload V."""
    if config.meta.get("PRE_LOAD_V") or not {"BLOCK_M", "BLOCK_N"} <= set(config.meta):
        return None
    return {
        "rows": config.meta["BLOCK_M"],
        "columns": config.meta["BLOCK_N"],
        "threads": _WARP * config.launch.get("num_warps", 4),
        "stages": config.launch.get("num_stages", 2),
    }


_TUNED: Final = {
    "attention": (_Tuned("attention_forward", _attention),),
    "cross_entropy_loss": (
        _Tuned("cross_entropy_fwd", _cross_entropy),
        _Tuned("cross_entropy_bwd", _cross_entropy),
    ),
}
"""The conversions by the name in tune_configs.yaml."""


class _Rule(NamedTuple):
    """How a heuristic of FlagGems is converted to a heuristic of a choice.

    Attributes:
        choice: its name.
        given: FlagGems' argument -> the field of the choice's key that it corresponds to.
        fields: computes the choice's fields from the heuristic's results.
    """

    choice: str
    given: Mapping[str, str]
    fields: Callable[[Mapping[str, Any]], Mapping[str, int]]


def _elementwise(given: Mapping[str, Any]) -> Mapping[str, int]:
    return {"threads": _WARP * given["num_warps"], "elements": given["BLOCK_SIZE"]}


_RULES: Final = {
    "elementwise_generic": tuple(
        _Rule(name, {}, _elementwise) for name in ("activation_fwd", "activation_bwd", "dequantize")
    ),
}
"""The conversions by the name in HEURISTICS_CONFIGS."""


def register(folder: FlagGemsFolder) -> None:
    """Register a folder's tuning for the kernels on its vendor's device."""
    from transformer_engine_fl.backends.flagos.tuning import lookup

    heuristics: dict[str, Callable[..., Mapping[str, Any] | None]] = {}
    for name, tuned, configs in _used_configs(folder):
        where = f"{folder.path / FILE}: {name}"
        heuristics[tuned.choice] = _nearest(where, tuned, configs)
    if (folder.path / "heuristics_config_utils.py").is_file():
        for name, rules in _RULES.items():
            for rule in rules:
                heuristics.setdefault(rule.choice, _vendor_heuristic(folder, name, rule))
    if not heuristics:
        return
    known = lookup.VENDORS.get(folder.info.key)
    if known is not None:  # registered already, with the vendor's devices
        lookup.register_tuning(
            folder.name,
            heuristics={it: rule for it, rule in heuristics.items() if it not in known.heuristics},
        )
        return
    device = folder.info.device
    lookup.register_tuning(
        folder.name,
        devices=_ARCHITECTURES.get(device, (device,)),
        heuristics=heuristics,
        is_here=lambda: _not_here(folder) is None,
    )


def not_used(folder: FlagGemsFolder) -> dict[str, str]:
    """The parts of a folder's tuning that no kernel here uses, with the reasons."""
    away = _not_here(folder)
    used = {name for name, rows in _TUNED.items() if any(True for _ in rows)}
    said: dict[str, str] = {}
    for name in folder.configs:
        if name not in used:
            said[f"tune_configs.yaml: {name}"] = "no choice here corresponds to it"
        elif not any(it.fields(config) for it in _TUNED[name] for config in folder.configs[name]):
            said[f"tune_configs.yaml: {name}"] = "none of its configurations has an equivalent here"
        elif away:
            said[f"tune_configs.yaml: {name}"] = away
    try:
        names = list(folder.heuristics)
    except PluginError as error:
        return said | {"heuristics_config_utils.py": str(error)}
    for name in names:
        reason = away or next((_unfit(folder, name, it) for it in _RULES.get(name, ())), None)
        if name not in _RULES:
            reason = "no choice here corresponds to it"
        if reason:
            said[f"heuristics_config_utils.py: {name}"] = reason
    return said


def _not_here(folder: FlagGemsFolder) -> str | None:
    """Why its tuning does not apply on this machine: a device type that several vendors use, and
    this vendor's device is missing; else None.
    """
    shared = folder.info.device in (*_ARCHITECTURES, "cpu")
    return detection.missing(folder.info) if shared else None


def _used_configs(
    folder: FlagGemsFolder,
) -> Iterator[tuple[str, _Tuned, list[Mapping[str, int]]]]:
    for name, rows in _TUNED.items():
        for tuned in rows:
            made = [tuned.fields(config) for config in folder.configs.get(name, ())]
            if values := [it for it in made if it is not None]:
                yield name, tuned, values


def _nearest(
    where: str, tuned: _Tuned, values: list[Mapping[str, int]]
) -> Callable[..., Mapping[str, Any] | None]:
    """A heuristic that gives the value on the list nearest to that of the kernels' own rule.

    It raises PluginError if no value on the list can be used.
    """

    def heuristic(device: str, **key: int) -> Mapping[str, Any] | None:
        from transformer_engine_fl.backends.flagos.tuning import CHOICES

        choice = CHOICES[tuned.choice]
        own: dict[str, Any] = choice.heuristic(None, *(key[name] for name in choice.key))._asdict()
        whole = [own | dict(it) for it in values]  # fields that FlagGems does not set stay
        wrong = [_no_number(it) or choice.wrong(choice.value(**it)) for it in whole]
        right = [it for it, reason in zip(whole, wrong, strict=True) if reason is None]
        if not right:
            raise PluginError(f"{where}: no configuration is valid here: {wrong[0]}")
        if own in right:
            return None
        return min(right, key=lambda it: _distance(it, own))

    heuristic.__qualname__ = f"{tuned.choice} of tune_configs.yaml"
    return heuristic


def _no_number(value: Mapping[str, Any]) -> str | None:
    """The complaint about a field that is not an integer; META may contain anything."""
    wrong = (name for name, it in value.items() if not isinstance(it, int))
    return next((f"{name} must be a whole number, got {value[name]!r}" for name in wrong), None)


def _distance(value: Mapping[str, int], other: Mapping[str, int]) -> float:
    said = [name for name in value if value[name] != other[name]]
    return sum(abs(math.log2(value[name] / other[name])) for name in said)


def _vendor_heuristic(
    folder: FlagGemsFolder, name: str, rule: _Rule
) -> Callable[..., Mapping[str, Any] | None]:
    """A heuristic that gives the result of the vendor's own."""
    reported: list[str] = []

    def heuristic(device: str, **key: int) -> Mapping[str, Any] | None:
        if name not in folder.heuristics or reported:
            return None
        try:
            return rule.fields(_given(folder, name, rule, key))
        except _UnknownError as error:
            reported.append(str(error))
            logger.debug("%s: %s", folder.path / "heuristics_config_utils.py", error)
            return None

    heuristic.__qualname__ = f"{name} of {folder.path}"
    return heuristic


class _UnknownError(Exception):
    """A heuristic needs an argument that the choice does not have."""


class _Arguments(dict[str, Any]):
    """The arguments that a choice has, under FlagGems' names."""

    def __missing__(self, name: str) -> Any:
        raise _UnknownError(f"it asks for {name!r}, which the choice here does not know")


def _given(
    folder: FlagGemsFolder, name: str, rule: _Rule, key: Mapping[str, int]
) -> Mapping[str, Any]:
    arguments = _Arguments({theirs: key[ours] for theirs, ours in rule.given.items()})
    for constant, heuristic in folder.heuristics[name].items():
        arguments[constant] = heuristic(arguments)
    return arguments


def _unfit(folder: FlagGemsFolder, name: str, rule: _Rule) -> str | None:
    """Why a heuristic is not used; None if it is."""
    try:
        rule.fields(_given(folder, name, rule, dict.fromkeys(rule.given.values(), 1024)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a vendor's code; what it said is told
        return error_text(error).removeprefix("_UnknownError: ")
    return None

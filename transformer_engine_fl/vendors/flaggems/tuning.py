"""A folder's tuning for the Triton kernels of this project, where the two mean the same.

FlagGems lists configurations to be tried, one of which its autotuner picks in the first call.
Here nothing is tried in a call: where the kernels' own rule gives a value that is on the
vendor's list it stays, and otherwise the nearest one on the list is taken. Heuristics are
asked for what they give; one that asks for what a choice here does not know is not used.

What means the same is said here, entry by entry. The rest is not used, and
``FlagGemsFolder.tuning_not_used()`` tells why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transformer_engine_fl.core.blame import worded
from transformer_engine_fl.core.errors import PluginError
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.vendors import detection
from transformer_engine_fl.vendors.flaggems.configs import FILE

if TYPE_CHECKING:
    from transformer_engine_fl.vendors.flaggems.configs import Config
    from transformer_engine_fl.vendors.flaggems.folder import FlagGemsFolder

__all__ = ["not_used", "register"]

_ARCHITECTURES: Final = {"cuda": ("sm_*", "gfx*")}
"""What tuning calls devices of a type, where it goes by their architecture."""

_WARP: Final = 32
"""Threads of a warp, as choices count them, whatever the device's own have."""


class _Tuned(NamedTuple):
    """How configurations of FlagGems become values of a choice.

    Attributes:
        choice: its name.
        fields: those that one configuration says; None where it means something else here.
    """

    choice: str
    fields: Callable[[Config], Mapping[str, int] | None]


def _cross_entropy(config: Config) -> Mapping[str, int] | None:
    """A row of logits in pieces of BLOCK_C, one row to a program."""
    if config.meta.get("BLOCK_D") != 1 or "BLOCK_C" not in config.meta:
        return None
    return {
        "threads": _WARP * config.launch.get("num_warps", 4),
        "elements": config.meta["BLOCK_C"],
    }


def _attention(config: Config) -> Mapping[str, int] | None:
    """BLOCK_M queries to a program, BLOCK_N keys at a time, and V loaded when it is needed."""
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
"""By the name in tune_configs.yaml."""


class _Rule(NamedTuple):
    """How a heuristic of FlagGems becomes one of a choice.

    Attributes:
        choice: its name.
        given: by FlagGems' names, the fields of the choice's key that they are.
        fields: of the choice, made of what the heuristic gives.
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
"""By the name in HEURISTICS_CONFIGS."""


def register(folder: FlagGemsFolder) -> None:
    """Hand a folder's tuning to the kernels that run on its vendor's device."""
    from transformer_engine_fl.backends.flagos.tuning import lookup

    heuristics: dict[str, Callable[..., Mapping[str, Any] | None]] = {}
    for name, tuned, configs in _used_configs(folder):
        where = f"{folder.path / FILE}: {name}"
        heuristics[tuned.choice] = _nearest(where, tuned, configs)
    if (folder.path / "heuristics_config_utils.py").is_file():
        for name, rules in _RULES.items():
            for rule in rules:
                heuristics.setdefault(rule.choice, _asked(folder, name, rule))
    if not heuristics:
        return
    known = lookup.VENDORS.get(folder.info.key)
    if known is not None:  # its devices say which of their kind are the vendor's
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
    """What of a folder's tuning no kernel here has a use for, with the reason."""
    away = _not_here(folder)
    used = {name for name, rows in _TUNED.items() if any(True for _ in rows)}
    said: dict[str, str] = {}
    for name in folder.configs:
        if name not in used:
            said[f"tune_configs.yaml: {name}"] = "no choice here means the same"
        elif not any(it.fields(config) for it in _TUNED[name] for config in folder.configs[name]):
            said[f"tune_configs.yaml: {name}"] = "none of its configurations means the same here"
        elif away:
            said[f"tune_configs.yaml: {name}"] = away
    try:
        names = list(folder.heuristics)
    except PluginError as error:
        return said | {"heuristics_config_utils.py": str(error)}
    for name in names:
        reason = away or next((_unfit(folder, name, it) for it in _RULES.get(name, ())), None)
        if name not in _RULES:
            reason = "no choice here means the same"
        if reason:
            said[f"heuristics_config_utils.py: {name}"] = reason
    return said


def _not_here(folder: FlagGemsFolder) -> str | None:
    """Why its tuning says nothing of this machine: of types that makers share, one is here."""
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
    """A heuristic: the value on the list that is nearest to the kernels' own rule.

    It raises PluginError if no kernel can run with any of the list.
    """

    def heuristic(device: str, **key: int) -> Mapping[str, Any] | None:
        from transformer_engine_fl.backends.flagos.tuning import CHOICES

        choice = CHOICES[tuned.choice]
        own: dict[str, Any] = choice.heuristic(None, *(key[name] for name in choice.key))._asdict()
        whole = [own | dict(it) for it in values]  # what FlagGems does not say stays
        wrong = [_no_number(it) or choice.wrong(choice.value(**it)) for it in whole]
        right = [it for it, reason in zip(whole, wrong, strict=True) if reason is None]
        if not right:
            raise PluginError(f"{where}: no configuration can be run here: {wrong[0]}")
        if own in right:
            return None
        return min(right, key=lambda it: _distance(it, own))

    heuristic.__qualname__ = f"{tuned.choice} of tune_configs.yaml"
    return heuristic


def _no_number(value: Mapping[str, Any]) -> str | None:
    """What of a value is no number; META may have anything."""
    wrong = (name for name, it in value.items() if not isinstance(it, int))
    return next((f"{name} must be a whole number, got {value[name]!r}" for name in wrong), None)


def _distance(value: Mapping[str, int], other: Mapping[str, int]) -> float:
    said = [name for name in value if value[name] != other[name]]
    return sum(abs(math.log2(value[name] / other[name])) for name in said)


def _asked(
    folder: FlagGemsFolder, name: str, rule: _Rule
) -> Callable[..., Mapping[str, Any] | None]:
    """A heuristic: what the vendor's own gives."""
    told: list[str] = []

    def heuristic(device: str, **key: int) -> Mapping[str, Any] | None:
        if name not in folder.heuristics or told:
            return None
        try:
            return rule.fields(_given(folder, name, rule, key))
        except _UnknownError as error:
            told.append(str(error))
            logger.debug("%s: %s", folder.path / "heuristics_config_utils.py", error)
            return None

    heuristic.__qualname__ = f"{name} of {folder.path}"
    return heuristic


class _UnknownError(Exception):
    """A heuristic asks for what a choice does not know."""


class _Arguments(dict[str, Any]):
    """What a choice knows of a call, in FlagGems' words."""

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
        return worded(error).removeprefix("_UnknownError: ")
    return None

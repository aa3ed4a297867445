"""Stand-ins for the names of TransformerEngine-FL's plugin core, module by module.

Most are this package's own objects. ``OpImpl``, ``SelectionPolicy`` and the kinds accept the
arguments of TransformerEngine-FL's: a function's attribute ``_is_available`` says whether it can
run, and a function with Transformer Engine's signature is bridged by the adapter for that
signature. A name whose meaning there has no counterpart here raises an explanation when used.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import transformer_engine_fl as ours
from transformer_engine_fl.core import types
from transformer_engine_fl.core.contract import fit
from transformer_engine_fl.core.discovery import ENTRY_POINT_GROUP
from transformer_engine_fl.core.errors import NotSupportedError, SignatureMismatchError
from transformer_engine_fl.core.log import logger
from transformer_engine_fl.core.policy import get_environment
from transformer_engine_fl.ops import CATALOGUE

__all__ = ["MODULES", "names"]


_NUMBERED: Final = (
    *("Byte", "Int16", "Int32", "Int64", "Float32", "Float16", "BFloat16"),
    *("Float8E4M3", "Float8E5M2", "Float8E8M0", "Float4E2M1", "NumTypes"),
)
DType: Final = enum.IntEnum("DType", {f"k{name}": place for place, name in enumerate(_NUMBERED)})  # type: ignore[misc]
"""Transformer Engine's dtype numbers."""

_DTYPES: Final = {
    "float32": DType["kFloat32"],
    "float16": DType["kFloat16"],
    "bfloat16": DType["kBFloat16"],
}


class BackendImplKind(enum.StrEnum):
    """The kinds of implementation; ``DEFAULT`` is TransformerEngine-FL's name for ``flagos``."""

    DEFAULT = "flagos"
    FLAGOS = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


class OpImpl(types.OpImpl):
    """An implementation, with the arguments that plugins for TransformerEngine-FL pass."""

    __slots__ = ()

    def __init__(
        self,
        op_name: str,
        impl_id: str,
        kind: Any,
        fn: Callable[..., Any],
        vendor: str | None = None,
        priority: int = 0,
        supported_dtypes: Collection[str] | None = None,
        min_arch: str | None = None,
    ) -> None:
        function, unbridged = _function(op_name, fn)
        super().__init__(
            op_name=op_name,
            impl_id=impl_id,
            kind=kind,
            fn=function,
            vendor=vendor,
            priority=priority,
            supported_dtypes=supported_dtypes,
            min_arch=min_arch,
            is_available=_available(fn),
            switched_off=(lambda: unbridged) if unbridged else None,
        )


def _function(op_name: str, fn: Callable[..., Any]) -> tuple[Callable[..., Any], str]:
    """(a function for the contract that calls ``fn``, ""), or (a placeholder, why it cannot).

    A vendor registers everything that Transformer Engine has. Functions that are not bridged,
    such as matrix products, must not keep the others from being registered.
    """
    from transformer_engine_fl.integrations import tex

    contract = next((it for it in CATALOGUE.values() if op_name in (it.name, *it.aliases)), None)
    if tex.has_signature(op_name, fn):
        return tex.adapted(op_name, fn, _named), ""
    if contract is None:
        return fn, ""
    try:
        fit(contract.signature, fn, op_name)
    except SignatureMismatchError as error:
        said = f"it is not bridged: {error}"
    else:
        return fn, ""

    def unbridged(*args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(said)

    unbridged.__signature__ = contract.signature  # type: ignore[attr-defined]
    return unbridged, said


def _named(dtype: Any) -> enum.IntEnum:
    return _DTYPES[str(dtype).removeprefix("torch.")]


def _available(fn: Callable[..., Any]) -> Callable[[], bool | str] | None:
    asked = getattr(fn, "_is_available", None)
    if asked is None:
        return None
    if not callable(asked):
        return lambda: bool(asked)
    return lambda: bool(asked())


def match_token(impl: types.OpImpl, token: str) -> bool:
    """Whether a selector token names an implementation."""
    return types.Selector.parse(token, "match_token").matches(impl)


class SelectionPolicy(ours.SelectionPolicy):
    """A policy with TransformerEngine-FL's constructors; ``per_op_order`` may be pairs."""

    __slots__ = ()

    def __init__(
        self,
        prefer: str | None = None,
        strict: bool | None = None,
        per_op_order: Any = None,
        **vendors: Any,
    ) -> None:
        orders = dict(per_op_order) if per_op_order else None
        super().__init__(prefer, strict, orders, **vendors)

    @classmethod
    def from_dict(
        cls,
        prefer: str = "flagos",
        strict: bool = False,
        per_op_order: Mapping[str, Any] | None = None,
        deny_vendors: Collection[str] | None = None,
        allow_vendors: Collection[str] | None = None,
    ) -> SelectionPolicy:
        """A policy from plain values; an empty collection means no restriction."""
        return cls(
            prefer=prefer.lower(),
            strict=strict,
            per_op_order=per_op_order,
            deny_vendors=frozenset(deny_vendors) if deny_vendors else None,
            allow_vendors=frozenset(allow_vendors) if allow_vendors else None,
        )


def policy_from_env() -> ours.SelectionPolicy:
    """The policy that environment variables set."""
    return get_environment().policy


def get_registry() -> ours.OpRegistry:
    """The default manager's registry."""
    return ours.get_default_manager().registry


class TEFLBackendBase:
    """Base class of a vendor's backend; operators it does not define are missing attributes."""

    def is_available(self) -> bool:
        """Whether this machine can run it; the backend must define it."""
        raise NotImplementedError(f"{type(self).__name__} must implement is_available()")


class FlashAttentionBase:
    """A base class to derive from, but not to instantiate: here attention is an operator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _other(
            "FlashAttentionBase",
            "attention is the operator 'fused_attn_fwd' here, not a class",
        )


class Logger:
    """TransformerEngine-FL's logger class, writing to this package's logger."""

    def __init__(self, name: str = "TE-FL", *args: Any, **kwargs: Any) -> None:
        self.logger = logger if name == "TE-FL" else logger.getChild(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logger, name)


def get_logger(*args: Any, **kwargs: Any) -> logging.Logger:
    """This package's logger."""
    return logger


def _other(name: str, instead: str) -> NotSupportedError:
    return NotSupportedError(
        f"transformer_engine_fl has no transformer_engine.plugin.core.{name}: {instead}"
    )


def _refused(name: str, instead: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise _other(name, instead)

    refused.__name__ = name
    return refused


_PLANS: Final = "a change of policy takes effect by itself; there is no epoch"
_DISCOVERY: Final = (
    "plugins are loaded when a manager starts; name one in TE_FL_PLUGIN_MODULES or in the "
    f"entry-point group {ENTRY_POINT_GROUP}; `te-fl doctor` lists them"
)
_MODULE: Final = "no module holds all operators; get one by name from get_default_manager()"

_OWN: Final = (
    *("get_policy", "set_global_policy", "reset_global_policy", "policy_context"),
    *("with_strict_mode", "with_preference", "with_allowed_vendors", "with_denied_vendors"),
)

MODULES: Final[dict[str, dict[str, Any]]] = {
    "types": {"BackendImplKind": BackendImplKind, "OpImpl": OpImpl, "match_token": match_token},
    "ops": {
        "TEFLBackendBase": TEFLBackendBase,
        "FlashAttentionBase": FlashAttentionBase,
        "DType": DType,
        "get_registry": get_registry,
        "get_manager": ours.get_default_manager,
        "reset_registry": ours.reset_default_manager,
        "TEFLModule": _refused("TEFLModule", _MODULE),
        "get_tefl_module": _refused("get_tefl_module", _MODULE),
        "reset_tefl_module": _refused("reset_tefl_module", _MODULE),
    },
    "logger_manager": {
        "Logger": Logger,
        "LoggerManager": _refused("LoggerManager", "the logger is logging.getLogger('TE-FL')"),
        "get_logger": get_logger,
    },
    "policy": {
        "SelectionPolicy": SelectionPolicy,
        **{name: getattr(ours, name) for name in _OWN},
        "policy_from_env": policy_from_env,
        "PREFER_DEFAULT": "flagos",
        "PREFER_VENDOR": "vendor",
        "PREFER_REFERENCE": "reference",
        "VALID_PREFER_VALUES": frozenset({"flagos", "vendor", "reference"}),
        "PolicyManager": _refused("PolicyManager", "policies have no manager; see policy_context"),
        "get_policy_epoch": _refused("get_policy_epoch", _PLANS),
        "bump_policy_epoch": _refused("bump_policy_epoch", _PLANS),
    },
    "manager": {
        "OpManager": ours.OpManager,
        "get_default_manager": ours.get_default_manager,
        "reset_default_manager": ours.reset_default_manager,
    },
    "registry": {"OpRegistry": ours.OpRegistry},
    "discovery": {
        "discover_plugin": _refused("discover_plugin", _DISCOVERY),
        "discover_from_entry_points": _refused("discover_from_entry_points", _DISCOVERY),
        "discover_from_env_modules": _refused("discover_from_env_modules", _DISCOVERY),
        "get_discovered_plugin": _refused("get_discovered_plugin", _DISCOVERY),
        "clear_discovered_plugin": _refused("clear_discovered_plugin", _DISCOVERY),
        "PLUGIN_GROUP": ENTRY_POINT_GROUP,
        "PLUGIN_MODULES_ENV": "TE_FL_PLUGIN_MODULES",
    },
}
"""The modules under the plugin core, each with its names."""

_LOWER: Final = ("DType", "FlashAttentionBase", "get_logger")
"""Names that modules have and the plugin core itself does not export."""


def names(module: str) -> dict[str, Any]:
    """The names of a module; ``"core"`` has those of all modules but :data:`_LOWER`."""
    if module != "core":
        return dict(MODULES[module])
    every = {name: it for content in MODULES.values() for name, it in content.items()}
    return {name: it for name, it in every.items() if name not in _LOWER}

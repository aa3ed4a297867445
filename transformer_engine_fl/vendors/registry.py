"""Vendors by name, and what each implements: a view of the operator registry.

A vendor's operators are ordinary implementations of kind ``vendor`` in the default
manager's registry; there is no second list of them here. This module keeps only the
descriptions of devices, which that registry does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from transformer_engine_fl.core.errors import (
    NoImplementationError,
    RegistrationError,
    UnknownOperatorError,
    suggestion,
)
from transformer_engine_fl.core.locks import LOADING
from transformer_engine_fl.core.manager import get_default_manager
from transformer_engine_fl.core.policy import (
    EffectivePolicy,
    SelectionPolicy,
    effective_policy,
    policy_context,
)
from transformer_engine_fl.core.registry import OpRegistry
from transformer_engine_fl.core.tensors import Facts
from transformer_engine_fl.core.types import DEFAULT_PRIORITY, BackendImplKind, OpImpl, Selector
from transformer_engine_fl.core.vetting import unknown_names
from transformer_engine_fl.vendors import detection
from transformer_engine_fl.vendors.info import BackendInfo, VendorInfo

__all__ = [
    "BackendRegistry",
    "described",
    "get_current_backend",
    "get_op",
    "infer_device",
    "list_overridden_ops",
    "register_vendor",
]

Ops = Mapping[str, Callable[..., Any] | str]

_BACKENDS: Final[dict[str, BackendInfo]] = {}
"""Vendors' descriptions of their devices, by lower-case name, in order of registration."""


class BackendRegistry:
    """Vendors and their operators."""

    @staticmethod
    def register(
        info: VendorInfo,
        ops: Ops | None = None,
        *,
        backend: BackendInfo | type[BackendInfo] = BackendInfo,
        registry: OpRegistry | None = None,
        **fields: Any,
    ) -> BackendInfo:
        """Describe a vendor, and register what it implements.

        Repeating a vendor's description changes nothing; operators are registered in each call
        that gives them.

        Args:
            info: the vendor and its device.
            ops: operator -> its implementation, a callable or ``"module:attribute"``.
            backend: the properties of its device that kernels ask for.
            registry: where the operators go; the default manager's registry unless given.
                A plugin passes on the one it was given.
            fields: fields of every :class:`OpImpl`, to replace the defaults.

        Raises:
            RegistrationError: the name is taken by a vendor with another description, or an
                argument has the wrong type.
        """
        if not isinstance(info, VendorInfo):
            raise RegistrationError(f"expected a VendorInfo, got {type(info).__name__}")
        if ops is not None and not isinstance(ops, Mapping):
            raise RegistrationError(
                f"vendor {info.vendor!r}: ops must be a mapping, operator to implementation; "
                f"got {type(ops).__name__}"
            )
        made = _made(info, backend)
        with LOADING:
            known = _BACKENDS.get(info.key)
            if known is not None and known.info != replace(info, vendor=known.info.vendor):
                raise RegistrationError(
                    f"vendor {info.vendor!r} is already registered as {known.info}, not as {info}"
                )
            if ops:
                into = get_default_manager().registry if registry is None else registry
                into.register_many(_impls(info, ops, fields))
            if known is None or type(known) is BackendInfo:
                _BACKENDS[info.key] = known = made
        return known

    @staticmethod
    def vendors() -> tuple[VendorInfo, ...]:
        """Every vendor: first those with a description, then those that only have operators."""
        found = dict(_described())
        for impl in _implementations():
            for device in sorted(impl.devices or ()):
                if impl.vendor and impl.vendor.lower() not in found:
                    info = VendorInfo(impl.vendor, device)
                    found[info.key] = BackendInfo(info)
        return tuple(backend.info for backend in found.values())

    @staticmethod
    def get_backend(vendor: str) -> BackendInfo:
        """The properties of a vendor's device that kernels ask for.

        Raises:
            UnknownOperatorError: there is no such vendor; names the nearest.
        """
        if (made := _described().get(vendor.lower())) is not None:
            return made
        known = {info.key: info for info in BackendRegistry.vendors()}
        if vendor.lower() not in known:
            names = ", ".join(info.vendor for info in known.values()) or "none"
            raise UnknownOperatorError(
                f"unknown vendor {vendor!r}; known: {names}{suggestion(vendor, known)}"
            )
        return BackendInfo(known[vendor.lower()])

    @staticmethod
    def get_op(
        op_name: str, device: str | None = None, *, vendor: str | None = None
    ) -> Callable[..., Any]:
        """See :func:`get_op`."""
        return get_op(op_name, device, vendor=vendor)


register_vendor = BackendRegistry.register


def described(info: VendorInfo) -> None:
    """Describe a vendor, unless it has a description for the same device already.

    Raises:
        RegistrationError: the vendor is described with another device.
    """
    known = _BACKENDS.get(info.key)
    if known is None or known.info.device != info.device:
        register_vendor(info)


def infer_device() -> str:
    """The type of this machine's device; ``"cpu"`` where there is no other."""
    return detection.device_of(BackendRegistry.vendors())


def get_current_backend(device: str | None = None) -> BackendInfo | None:
    """The vendor of a device type, this machine's unless given; None if no vendor has it.

    If several vendors have the type, the one that the policy prefers is returned, otherwise the
    first whose query command succeeds. Vendors that the policy denies are ignored.
    """
    device = _type_of(device)
    policy = effective_policy().policy
    denied = policy.deny_vendors or frozenset()
    allowed = policy.allow_vendors
    sharing = [
        info
        for info in BackendRegistry.vendors()
        if info.device == device
        and info.key not in denied
        and (allowed is None or info.key in allowed)
    ]
    if not sharing:
        return None
    preferred = [info for info in sharing if f"vendor:{info.key}" == policy.prefer]
    ranked = preferred or sharing
    if len(ranked) > 1:
        ranked = [info for info in ranked if detection.answers(info)] or ranked
    return BackendRegistry.get_backend(ranked[0].vendor)


def list_overridden_ops(device: str | None = None, *, vendor: str | None = None) -> tuple[str, ...]:
    """Operators that a vendor (any, unless given) implements for a device, sorted."""
    device = _type_of(device)
    registry = get_default_manager().registry
    found = {
        registry.canonical(impl.op_name)
        for impl in _implementations()
        if (impl.devices is None or device in impl.devices)
        and (vendor is None or (impl.vendor or "").lower() == vendor.lower())
    }
    return tuple(sorted(found))


def get_op(
    op_name: str, device: str | None = None, *, vendor: str | None = None
) -> Callable[..., Any]:
    """An operator's implementation for a device: the vendor's, or the base if it has none.

    Args:
        op_name: the operator.
        device: its type; this machine's unless given.
        vendor: the vendor that must implement it; unless given, that of
            :func:`get_current_backend` is preferred.

    Raises:
        UnknownOperatorError: there is no such operator.
        NoImplementationError: no implementation serves it on this device, or none of the named
            vendor; says why for each.
    """
    device = _type_of(device)
    manager = get_default_manager()
    manager.ensure_initialized()
    preference = SelectionPolicy(prefer=_preferred_token(device, vendor))
    of_vendor = f" of vendor {vendor!r}" if vendor else ""
    said = f"no implementation{of_vendor} serves {op_name!r} on {device!r}"
    # Checked here: for an unknown name in a with block, the manager would warn about a block that
    # the user did not write.
    unknown = next(
        unknown_names(EffectivePolicy(preference, {"prefer": said}), manager.registry), None
    )
    with policy_context(prefer="vendor" if unknown else preference.prefer):
        plan = manager.plan(op_name)
        decision = plan.explain(Facts(device=device, judged=frozenset({"device"})), None)
        chosen = decision.selected
        if chosen is None or (vendor and (chosen.vendor or "").lower() != vendor.lower()):
            if not vendor or vendor.lower() in _BACKENDS:  # described, but without operators
                unknown = None
            raise NoImplementationError(unknown or said, decision)
        return plan.runnable(chosen, decision.facts)


def _preferred_token(device: str, vendor: str | None) -> str | None:
    """The policy's token for the vendor, or else the device's; None if the policy names one."""
    if vendor is not None:
        return str(Selector.parse(f"vendor:{vendor}", "get_op"))
    said = Selector.parse(effective_policy().policy.prefer or "vendor", "prefer")
    if said.form != "kind":
        return None
    current = get_current_backend(device)
    return f"vendor:{current.info.key}" if current is not None else "vendor"


def _type_of(device: str | None) -> str:
    return infer_device() if device is None else str(device).partition(":")[0]


def _described() -> Mapping[str, BackendInfo]:
    get_default_manager().ensure_initialized()  # in-tree vendors describe themselves during it
    return dict(_BACKENDS)


def _implementations() -> list[OpImpl]:
    """Every implementation of kind ``vendor``."""
    manager = get_default_manager()
    manager.ensure_initialized()
    operators = manager.registry.snapshot().operators.values()
    entries = (entry for of_one in operators for entry in of_one)
    return [entry.impl for entry in entries if entry.impl.kind is BackendImplKind.VENDOR]


def _made(info: VendorInfo, backend: BackendInfo | type[BackendInfo]) -> BackendInfo:
    """The vendor's :class:`BackendInfo`.

    Raises:
        RegistrationError: it is not a BackendInfo, or it is another vendor's.
    """
    kind = backend if isinstance(backend, type) else type(backend)
    if not issubclass(kind, BackendInfo):
        raise RegistrationError(
            f"vendor {info.vendor!r}: backend must be a BackendInfo or a subclass of it; "
            f"got {backend!r}"
        )
    made = backend(info) if isinstance(backend, type) else backend
    found = getattr(made, "info", None)
    if found != info:
        said = f"is for {found}" if found else "has no info: its __init__ must call BackendInfo's"
        raise RegistrationError(
            f"vendor {info.vendor!r} is {info}; its backend, a {kind.__name__}, {said}"
        )
    return made


def _impls(info: VendorInfo, ops: Ops, fields: Mapping[str, Any]) -> list[OpImpl]:
    common: dict[str, Any] = {
        "impl_id": f"vendor.{info.key}",
        "kind": BackendImplKind.VENDOR,
        "vendor": info.vendor,
        "priority": DEFAULT_PRIORITY[BackendImplKind.VENDOR],
        "devices": frozenset({info.device}),
        "is_available": lambda: detection.missing(info) or True,
    }
    return [OpImpl(op_name=name, fn=fn, **common | dict(fields)) for name, fn in ops.items()]

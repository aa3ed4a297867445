"""The value types of dispatch: kinds, implementations, selector tokens.

Plain immutable values with their own validation. registry.py holds them, selection.py
ranks them, and the manager calls them.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from transformer_engine_fl.core.contract import signature_of
from transformer_engine_fl.core.errors import (
    ConfigurationError,
    RegistrationError,
    nearest,
    suggestion,
)

__all__ = [
    "DEFAULT_PRIORITY",
    "MISTAKEN_DEVICES",
    "NAME",
    "OP_NAME",
    "TRAITS",
    "BackendImplKind",
    "OpImpl",
    "Selector",
    "mistaken_device",
    "parse_arch",
]


NAME: Final = r"[A-Za-z0-9_.+-]+"
"""What a vendor's name or an impl id looks like."""

OP_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*(::[A-Za-z0-9_]+)?(\.[A-Za-z0-9_]+)?"
"""What an operator's name looks like; ATen's have a namespace, ``aten::gelu``."""


class BackendImplKind(enum.StrEnum):
    """Where an implementation comes from; the coarsest thing a policy can prefer."""

    FLAGOS = "flagos"
    """Triton kernels, wherever Triton runs."""
    VENDOR = "vendor"
    """A chip maker's own kernels."""
    REFERENCE = "reference"
    """Plain PyTorch, readable as the definition."""


DEFAULT_PRIORITY: Final = {
    BackendImplKind.FLAGOS: 150,
    BackendImplKind.VENDOR: 100,
    BackendImplKind.REFERENCE: 50,
}
"""Priorities of the built-in sets."""

TRAITS: Final = frozenset({"deterministic", "batch_invariant", "graph_safe", "traceable"})
"""What an implementation may claim.

``deterministic``: the same bits from run to run on the same inputs.
``batch_invariant``: a row's result does not depend on the other rows of the call.
``graph_safe``: may be captured in a CUDA graph.
``traceable``: plain torch operations, which torch.compile may look into (the
reference kind always is).
"""

# Checked for every implementation, and a set's have the same dtypes and devices: hence the caches.
_is_dtype: Final = functools.cache(
    re.compile(
        r"bool|bfloat16|float(16|32|64)|b?complex(32|64|128)|u?int([1-8]|16|32|64)|qu?int\w+"
        r"|float[468]_\w+|bits\w+"
    ).fullmatch
)
"""Matches torch's names of dtypes, and likely future ones; not ``bf16`` or ``half``."""
_is_device: Final = functools.cache(re.compile(r"[a-z][a-z0-9_]*").fullmatch)
MISTAKEN_DEVICES: Final = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "hip": "cuda",
    "rocm": "cuda",
    "ascend": "npu",
}
"""Names that no tensor has for its device -> the name that it has; with ROCm, too, ``cuda``."""


def mistaken_device(name: str) -> str:
    """The message for a device name that no tensor has; empty for other names."""
    meant = MISTAKEN_DEVICES.get(name)
    said = f"no tensor has the device type {name!r}; did you mean {meant!r}?"
    return said if meant else ""


_USUAL_DTYPES: Final = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
"""Other common names of dtypes -> torch's."""

_KINDS: Final = tuple(kind.value for kind in BackendImplKind)


@dataclass(frozen=True, slots=True)
class OpImpl:
    """One implementation of one operator.

    Args:
        op_name: the operator, by name or alias.
        impl_id: unique within the operator, e.g. ``"vendor.acme"``.
        kind: a :class:`BackendImplKind` or its name.
        fn: a callable with the operator's signature, or ``"module:attribute"``,
            imported when it is first chosen.
        vendor: the maker's name; required for kind ``vendor``. Compared without case.
        priority: higher is tried first within the same selector token.
        supported_dtypes: dtype names without the ``torch.`` prefix (``"bfloat16"``),
            or torch dtypes; None for any. Checked on the dispatch tensor.
        min_arch: oldest architecture that can run it (``"sm_90"``, ``"gfx942"``).
        devices: device types (``"cuda"``); None for any. Checked on the dispatch tensor.
        supports: called with the operator's arguments; returns True, or a string that says
            why not. It must read no environment and no global state.
        is_available: called once: whether this machine can run it at all. Returns True, or
            False, or a string that says why not.
        switched_off: returns why the environment switches it off everywhere, or None. Called
            before ``is_available``, also for a question about another machine, and again after
            every change of the global policy.
        traits: claims from :data:`TRAITS`.
        mutates: for operators without a contract: the arguments it writes, ``()`` if none.
            None means unknown, and is treated as mutating. A contract's own statement wins.
        opt_in: serves only where a policy names its vendor or its id; its kind is not enough.
        stand_in: gives way to any other implementation that is registered under its id.

    Raises:
        RegistrationError: the description contradicts itself.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any] | str
    vendor: str | None = None
    priority: int = 0
    supported_dtypes: Collection[str] | None = None
    min_arch: str | None = None
    devices: Collection[str] | None = None
    supports: Callable[..., bool | str] | None = None
    is_available: Callable[[], bool | str] | None = None
    switched_off: Callable[[], str | None] | None = None
    traits: Collection[str] = frozenset()
    mutates: tuple[str, ...] | None = None
    opt_in: bool = False
    stand_in: bool = False

    def __post_init__(self) -> None:
        named = (("op_name", OP_NAME), ("impl_id", NAME)) + (("vendor", NAME),) * bool(self.vendor)
        for name, pattern in named:
            value = getattr(self, name)
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise RegistrationError(f"OpImpl.{name} must be a name, got {value!r}")
        normalized: dict[str, object] = {
            "kind": self._checked_kind(),
            "supported_dtypes": _names(self, "supported_dtypes", strip="torch."),
            "devices": _names(self, "devices"),
            "traits": _names(self, "traits") or frozenset(),
        }
        for name, value in normalized.items():
            object.__setattr__(self, name, value)
        self._check()

    def _checked_kind(self) -> BackendImplKind:
        try:
            return BackendImplKind(self.kind)
        except ValueError:
            raise RegistrationError(
                f"{self.label}: unknown kind {self.kind!r}; valid kinds: {', '.join(_KINDS)}"
                f"{suggestion(str(self.kind), _KINDS)}"
            ) from None

    def _check(self) -> None:
        if self.kind is BackendImplKind.VENDOR and not self.vendor:
            raise RegistrationError(f"{self.label}: kind 'vendor' needs a vendor name")
        if isinstance(self.fn, str):
            if not re.fullmatch(r"[\w.]+:[\w.]+", self.fn):
                raise RegistrationError(
                    f"{self.label}: fn must be a callable or 'module:attribute', got {self.fn!r}"
                )
        elif not callable(self.fn):
            raise RegistrationError(
                f"{self.label}: fn must be a callable or 'module:attribute', "
                f"got {type(self.fn).__name__}"
            )
        if self.min_arch is not None and parse_arch(self.min_arch) is None:
            raise RegistrationError(
                f"{self.label}: min_arch {self.min_arch!r} is not an architecture name; "
                "examples: 'sm_90', 'gfx942'"
            )
        self._check_tensors()
        unknown = sorted(set(self.traits) - TRAITS)
        if unknown:
            raise RegistrationError(
                f"{self.label}: unknown trait {unknown[0]!r}; valid: {', '.join(sorted(TRAITS))}"
                f"{suggestion(unknown[0], TRAITS)}"
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise RegistrationError(f"{self.label}: priority must be an int, got {self.priority!r}")
        for name in ("supports", "is_available", "switched_off"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise RegistrationError(f"{self.label}: {name} must be callable")
        self._check_mutates()

    def _check_mutates(self) -> None:
        """Check that ``mutates`` names arguments of ``fn``."""
        given: Any = self.mutates
        if given is None:
            return
        listed = isinstance(given, Collection) and not isinstance(given, str)
        if not listed or not all(isinstance(it, str) for it in given):
            raise RegistrationError(
                f"{self.label}: mutates must be a collection of argument names, got {given!r}"
            )
        object.__setattr__(self, "mutates", tuple(given))
        if not given or "::" in self.op_name:  # the names are those of torch's schema
            return
        signature = None if isinstance(self.fn, str) else signature_of(self.fn)
        if signature is None:  # it is not imported yet, or in C
            return
        parameters = signature.parameters
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if any(it.kind in variadic for it in parameters.values()):
            return
        for name in given:
            if name not in parameters:
                raise RegistrationError(
                    f"{self.label}: mutates: fn has no argument {name!r}"
                    f"{suggestion(name, parameters)}; it has {', '.join(parameters) or 'none'}"
                )

    def _check_tensors(self) -> None:
        """Check that its dtypes and devices are ones that a tensor can have."""
        for name in sorted(self.supported_dtypes or ()):
            if not _is_dtype(name):
                meant = _USUAL_DTYPES.get(name.lower())
                names = dict.fromkeys(_USUAL_DTYPES.values())
                hint = f"; did you mean {meant!r}?" if meant else suggestion(name, names)
                raise RegistrationError(
                    f"{self.label}: supported_dtypes: {name!r} is not a torch dtype name; "
                    f"examples: {', '.join(names)}{hint}"
                )
        for field in ("devices", "supported_dtypes"):
            if getattr(self, field) == frozenset():
                raise RegistrationError(
                    f"{self.label}: {field} is empty, so it can never serve; use None for any"
                )
        for name in sorted(self.devices or ()):
            if not _is_device(name):
                raise RegistrationError(
                    f"{self.label}: devices: {name!r} is not a device type (lower case, without "
                    "an index); examples: cpu, cuda, npu"
                )
            if mistaken := mistaken_device(name):
                raise RegistrationError(f"{self.label}: devices: {mistaken}")

    @property
    def label(self) -> str:
        """``operator/impl_id``, for messages."""
        return f"{self.op_name}/{self.impl_id}"

    @property
    def origin(self) -> str:
        """``kind=..., vendor=...``, as log lines show it."""
        vendor = f", vendor={self.vendor}" if self.vendor else ""
        return f"kind={self.kind.value}{vendor}"

    @property
    def unconditional(self) -> bool:
        """Whether it states no condition on tensors, and so takes any.

        That includes fake tensors, so a raw kernel must state at least the devices it runs on.
        """
        conditions = (self.devices, self.supported_dtypes, self.min_arch, self.supports)
        return all(condition is None for condition in conditions)

    @property
    def traceable(self) -> bool:
        """Whether torch.compile may look into it."""
        return self.kind is BackendImplKind.REFERENCE or "traceable" in self.traits


def _names(impl: OpImpl, attribute: str, strip: str = "") -> frozenset[str] | None:
    """A field given as any iterable of names (or of torch dtypes) as a frozen set of names."""
    value: Iterable[object] | None = getattr(impl, attribute)
    if value is None:
        return None
    if isinstance(value, str):
        raise RegistrationError(
            f"{impl.label}: {attribute} must be a collection of names, got the string {value!r}"
        )
    return frozenset(str(item).removeprefix(strip) for item in value)


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed selector token: ``flagos``, ``vendor``, ``reference``, ``vendor:NAME``, ``impl:ID``.

    Attributes:
        form: ``"kind"``, ``"vendor"`` or ``"impl"``.
        value: the kind, the vendor's name in lower case, or the impl id.
    """

    form: str
    value: str

    @classmethod
    def parse(cls, text: str, where: str) -> Selector:
        """Parse one token; ``where`` names the setting it stands in, for the error."""
        token = text.strip()
        head, colon, rest = token.partition(":")
        head, rest = head.strip().lower(), rest.strip()
        if not colon and head in _KINDS:
            return cls("kind", head)
        if colon and head in ("vendor", "impl") and re.fullmatch(NAME, rest):
            return cls(head, rest.lower() if head == "vendor" else rest)
        if colon:
            close = nearest(head, ("vendor", "impl"))
            hint = f"; did you mean {f'{close}:{rest}'!r}?" if close else ""
            if close and not re.fullmatch(NAME, rest):
                hint = f"; {rest!r} after the colon is not a valid name"
        elif head == "impl":
            hint = "; for an implementation, write its id after 'impl:'"
        else:
            hint = suggestion(head, _KINDS)
            if not hint and re.fullmatch(NAME, token):
                hint = f"; for a vendor, write {f'vendor:{token}'!r}"
        raise ConfigurationError(
            f"{where}: {token!r} is not a selector; valid: {', '.join(_KINDS)}, "
            f"vendor:NAME, impl:ID{hint}"
        )

    def matches(self, impl: OpImpl) -> bool:
        """Whether this token names ``impl``."""
        if self.form == "kind":
            return impl.kind.value == self.value and not impl.opt_in
        if self.form == "vendor":
            return impl.vendor is not None and impl.vendor.lower() == self.value
        return impl.impl_id == self.value

    def __str__(self) -> str:
        return self.value if self.form == "kind" else f"{self.form}:{self.value}"


def parse_arch(name: str) -> tuple[str, tuple[int, ...], str] | None:
    """An architecture name as (family, version, variant), comparable within one family.

    ``"sm_90a"`` -> ``("sm", (9, 0), "a")``; ``"gfx90a"`` -> ``("gfx9", (9, 0, 10), "")``.
    None if the name follows neither scheme, or is not a name, such as torch's ``(9, 0)``.
    """
    name = str(name)
    if match := re.fullmatch(r"sm_?(\d+)(\d)([af]?)", name):
        return "sm", (int(match[1]), int(match[2])), match[3]
    if match := re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", name):
        # gfx9 and gfx11 are different families of chips, not older and newer ones.
        return f"gfx{match[1]}", (int(match[1]), int(match[2], 16), int(match[3], 16)), ""
    return None

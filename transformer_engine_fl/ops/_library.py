"""The operators in ``torch.library``: opaque to compilers, with the contract's shape rule.

``torch.ops.te_fl.rmsnorm_fwd(x, w, 1e-5, impl="vendor.acme")`` runs exactly that
implementation. Compiled code and exported programs call raw kernels this way; eager
dispatch does not come here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from transformer_engine_fl.core.contract import Contract
from transformer_engine_fl.core.locks import ForkSafeLock
from transformer_engine_fl.core.registry import Entry

__all__ = ["NAMESPACE", "operator", "reference_to", "schema"]

NAMESPACE: Final = "te_fl"

_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_lock: Final = ForkSafeLock()
_operators: weakref.WeakKeyDictionary[Contract[..., Any], Callable[..., Any]] = (
    weakref.WeakKeyDictionary()
)
_contracts_of: Final[dict[str, int]] = {}
"""Operator -> how many contracts of that name were defined; torch cannot remove a definition."""
_entries: weakref.WeakValueDictionary[str, Entry] = weakref.WeakValueDictionary()

_SCHEMA_TYPES: Final = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "list[Tensor]": "Tensor[]",
    "list[Tensor] | None": "Tensor[]?",
    "list[int]": "int[]",
    "list[int] | None": "int[]?",
    "Sequence[int]": "int[]",
    "int": "SymInt",
    "int | None": "int?",
    "float": "float",
    "float | None": "float?",
    "bool": "bool",
    "str": "str",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
}


def schema(contract: Contract[..., Any]) -> str:
    """The ``torch.library`` schema of an operator, derived from its signature.

    Raises:
        TypeError: an annotation has no counterpart; give the contract a ``schema``.
    """
    if contract.schema is not None:
        return contract.schema
    parameters: list[str] = []
    for parameter in contract.signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        kind = _schema_type(contract, str(parameter.annotation))
        if parameter.name in contract.mutates:
            # Each written argument has its own alias set; the items of a list share one.
            kind = kind.replace("Tensor", f"Tensor(a{contract.mutates.index(parameter.name)}!)")
        default = ""
        if parameter.default is not parameter.empty:
            text = isinstance(parameter.default, str)
            default = f'="{parameter.default}"' if text else f"={parameter.default}"
        parameters.append(f"{kind} {parameter.name}{default}")
    if "*" not in parameters:
        parameters.append("*")
    returned = str(contract.signature.return_annotation)
    inner = returned.removeprefix("tuple[").removesuffix("]") if "tuple[" in returned else returned
    # A result is never optional in a schema: an operator may return None for any tensor.
    parts = [part.strip().removesuffix(" | None") for part in inner.split(",") if part != "None"]
    results = [_schema_type(contract, part) for part in parts]
    return f"{contract.name}({', '.join(parameters)}, str impl) -> ({', '.join(results)})"


def _schema_type(contract: Contract[..., Any], annotation: str) -> str:
    try:
        return _SCHEMA_TYPES[annotation]
    except KeyError:
        raise TypeError(
            f"{contract.name}: no schema type for the annotation {annotation!r}; "
            "give the contract an explicit schema"
        ) from None


def operator(contract: Contract[..., Any]) -> Callable[..., Any]:
    """The ``torch.library`` operator of a contract, defined when first asked for."""
    found = _operators.get(contract)
    if found is None:
        with _lock:
            found = _operators.get(contract)
            if found is None:
                found = _operators[contract] = _define(contract)
    return found


def _define(contract: Contract[..., Any]) -> Callable[..., Any]:
    """Define a contract's operator; as a new overload if the name is already defined."""
    _, _, signature = schema(contract).partition("(")
    number = _contracts_of.get(contract.name, 0) + 1
    overload = "default" if number == 1 else f"contract_{number}"
    name = contract.name if number == 1 else f"{contract.name}.{overload}"
    _library.define(f"{name}({signature}", tags=(torch.Tag.pt2_compliant_tag,))
    _contracts_of[contract.name] = number
    alive = weakref.ref(contract)  # torch keeps the functions defined here for ever

    def run(*args: Any, impl: str, **kwargs: Any) -> Any:
        return _entry(_held(alive, name), impl).fn(*args, **kwargs)

    def shapes(*args: Any, impl: str, **kwargs: Any) -> Any:
        return _held(alive, name).shapes(*args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    # Operators are not differentiable: gradients are the business of ``functional``.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_library)
    packet = getattr(getattr(torch.ops, NAMESPACE), contract.name)
    found: Callable[..., Any] = getattr(packet, overload)
    return found


def _held(alive: weakref.ref[Contract[..., Any]], name: str) -> Contract[..., Any]:
    contract = alive()
    if contract is None:
        raise RuntimeError(
            f"{NAMESPACE}::{name}: its contract was deleted; keep it as long as the traced code"
        )
    return contract


def reference_to(entry: Entry) -> str:
    """The text by which an operator's ``impl`` argument names a loaded entry.

    It is the impl id; a number is added if another registry in the process uses the same id for
    a different entry.
    """
    assert entry.contract is not None  # invariant: an entry without a contract has no operator
    base = entry.impl.impl_id
    with _lock:
        for number in range(1, 1_000):
            name = base if number == 1 else f"{base}#{number}"
            held = _entries.setdefault(f"{entry.contract.name}/{name}", entry)
            if held is entry:
                return name
    raise RuntimeError(f"{entry.impl.label}: too many registries have an implementation of that id")


def _entry(contract: Contract[..., Any], impl: str) -> Entry:
    entry = _entries.get(f"{contract.name}/{impl}")
    if entry is None:
        entry = _from_default_manager(contract, impl)
    return entry


def _from_default_manager(contract: Contract[..., Any], impl: str) -> Entry:
    """An implementation that is named by a program traced in another process."""
    from transformer_engine_fl.core.manager import get_default_manager

    manager = get_default_manager()
    manager.ensure_initialized()
    manager.registry.get_implementation(contract.name, impl)
    found = next(it for it in manager.registry.entries(contract.name) if it.impl.impl_id == impl)
    reason = found.unavailable() or found.load()
    if reason is not None:
        raise RuntimeError(f"{found.impl.label} cannot run here: {reason}")
    reference_to(found)
    return found

"""OpRegistry: duplicates, all or nothing, snapshots, sharing, nearest names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from core_faults import Kernel, contract_of
from core_helpers import SCALE, impl, make_manager

from transformer_engine_fl import (
    DuplicateImplError,
    OpImpl,
    OpManager,
    OpRegistry,
    RegistrationError,
    SignatureMismatchError,
    UnknownOperatorError,
)
from transformer_engine_fl.backends._register import register_set
from transformer_engine_fl.core.types import BackendImplKind


@pytest.fixture
def registry() -> OpRegistry:
    return OpRegistry({"scale": SCALE})


def ids(registry: OpRegistry, op_name: str = "scale") -> list[str]:
    return [it.impl_id for it in registry.get_implementations(op_name)]


def test_each_broken_probe_of_one_line_is_warned_of(
    registry: OpRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    def no_driver() -> bool:
        raise OSError("no driver")

    def no_license() -> bool:
        raise OSError("no license")

    probes = {"one": no_driver, "other": no_license, "same": no_license}
    registry.register_many(
        impl(name, "flagos", is_available=probe) for name, probe in probes.items()
    )
    OpManager(registry, builtins=False, plugins=False).explain("scale")
    said = [it.getMessage() for it in caplog.records if "is_available() raised" in it.getMessage()]
    assert [it.split(":")[0] for it in said] == ["one", "other"]


def test_a_duplicate_names_both_and_where_each_was_registered(registry: OpRegistry) -> None:
    frame = inspect.currentframe()
    assert frame is not None
    registry.register_impl(impl("mine", "vendor", vendor="acme"))
    first = frame.f_lineno - 1
    with pytest.raises(DuplicateImplError) as caught:
        registry.register_impl(impl("mine", "reference"))
    second = frame.f_lineno - 1
    text = str(caught.value)
    assert "scale/mine is registered twice" in text
    places = [int(line) for line in re.findall(rf"{re.escape(__file__)}:(\d+)", text)]
    assert places == [first, second]
    assert text.index("vendor=acme") < text.index("kind=reference")
    assert ids(registry) == ["mine"]


def test_a_duplicate_is_found_under_an_alias_and_within_one_batch(registry: OpRegistry) -> None:
    registry.register_impl(impl("mine"))
    with pytest.raises(DuplicateImplError):
        registry.register_impl(impl("mine", op_name="fused_scale"))
    with pytest.raises(DuplicateImplError):
        registry.register_many([impl("other"), impl("other")])
    assert ids(registry) == ["mine"]


def test_the_same_id_may_serve_different_operators(registry: OpRegistry) -> None:
    registry.register_many([impl("mine"), impl("mine", op_name="other")])
    assert registry.list_operators() == ("other", "scale")


def identity(x: Any) -> Any:
    return x


def one_too_many(x: Any, y: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (impl("taken"), DuplicateImplError),
        (impl("misfit", fn=one_too_many), SignatureMismatchError),
        ("no implementation", RegistrationError),
    ],
    ids=["duplicate", "misfit", "nonsense"],
)
def test_register_many_is_all_or_nothing(
    registry: OpRegistry, last: Any, error: type[Exception]
) -> None:
    registry.register_impl(impl("taken"))
    before = registry.snapshot()
    with pytest.raises(error):
        registry.register_many([impl("new"), impl("newer", op_name="other"), last])
    assert registry.snapshot() is before


def test_register_many_takes_nothing_from_a_generator_that_breaks(registry: OpRegistry) -> None:
    def impls() -> Iterator[OpImpl]:
        yield impl("new")
        raise KeyError("half-way")

    with pytest.raises(KeyError):
        registry.register_many(impls())
    assert ids(registry) == []


def test_a_snapshot_never_changes(registry: OpRegistry) -> None:
    registry.register_impl(impl("first"))
    snapshot = registry.snapshot()
    registry.register_impl(impl("second"))
    registry.register_impl(impl("elsewhere", op_name="other"))
    registry.clear()
    assert [entry.impl.impl_id for entry in snapshot.operators["scale"]] == ["first"]
    assert list(snapshot.operators) == ["scale"]
    with pytest.raises(TypeError):
        snapshot.operators["scale"] = ()  # type: ignore[index]
    with pytest.raises(AttributeError):
        snapshot.operators = {}  # type: ignore[misc]


def test_clear_forgets_everything() -> None:
    manager = make_manager(impl("first"))
    assert manager.call("scale", 1) == "first"
    manager.registry.clear()
    assert manager.registry.list_operators() == ()
    manager.registry.register_impl(impl("second"))
    assert manager.call("scale", 1) == "second"


def test_a_source_that_two_register_at_once_is_registered_by_the_first(
    registry: OpRegistry,
) -> None:
    with registry.transaction("plugin") as slow:
        slow.register_impl(impl("slow"))
        with registry.transaction("plugin") as quick:
            quick.register_impl(impl("quick"))
        assert ids(registry) == ["quick"], "nobody sees a transaction before its end"
    assert ids(registry) == ["quick"]


def test_the_error_of_an_unknown_implementation_suggests_the_nearest(registry: OpRegistry) -> None:
    registry.register_many([impl("vendor.acme", "vendor"), impl("reference.torch")])
    with pytest.raises(UnknownOperatorError, match=r"did you mean 'vendor\.acme'") as caught:
        registry.get_implementation("scale", "vendor.acne")
    assert "reference.torch" in str(caught.value)
    with pytest.raises(UnknownOperatorError, match="it has: none"):
        registry.get_implementation("nothing", "vendor.acme")
    assert registry.get_implementation("fused_scale", "vendor.acme").vendor == "acme"


@pytest.mark.parametrize("ask", ["call", "bind", "pin", "resolve", "explain"])
@pytest.mark.parametrize(
    ("asked", "nearest"), [("scael", "scale"), ("Scale", "scale"), ("fused_scal", "fused_scale")]
)
def test_the_error_of_an_unknown_operator_suggests_the_nearest(
    ask: str, asked: str, nearest: str
) -> None:
    manager = make_manager(impl("first"))
    with pytest.raises(UnknownOperatorError, match=f"'{asked}'; did you mean '{nearest}'"):
        getattr(manager, ask)(asked)


@pytest.mark.parametrize("ask", ["call", "plan", "explain"])
def test_an_operator_that_is_not_named_by_text_is_refused(ask: str) -> None:
    manager = make_manager(impl("first"))
    with pytest.raises(UnknownOperatorError, match=r"must be a string.*; got Contract"):
        getattr(manager, ask)(next(iter(manager.registry.contracts.values())))


def test_the_error_of_an_unknown_operator_suggests_one_of_its_namespace() -> None:
    manager = make_manager(impl("first"), impl("mine", op_name="aten::tanh", fn=identity))
    with pytest.raises(
        UnknownOperatorError, match=r"did you mean 'aten::tanh'.*1 are known in 'at"
    ):
        manager.call("aten::tahn")
    with pytest.raises(UnknownOperatorError, match=r"unknown operator 'aten::scale' \("):
        manager.call("aten::scale")  # 'scale', without a namespace, is not suggested
    known = len(manager.registry.contracts)
    with pytest.raises(
        UnknownOperatorError, match=rf"'scael'; .* \({known} are known; `te-fl list`"
    ):
        manager.call("scael")  # te-fl list omits namespaced operators


def test_an_operator_with_a_contract_and_no_implementation_is_known() -> None:
    manager = make_manager()
    assert manager.resolve_candidates("scale") == ()
    with pytest.raises(UnknownOperatorError, match="'scle'; did you mean 'scale'"):
        manager.call("scle")


# ------------------------------------------------------------------------------ sharing


def sets_of(manager: OpManager) -> list[str]:
    return [it.impl_id for it in manager.registry.get_implementations("rmsnorm_fwd")]


def test_managers_that_share_a_registry_register_the_built_in_sets_once() -> None:
    registry = OpRegistry()
    managers = [OpManager(registry, plugins=False) for _ in range(3)]
    for manager in managers:
        manager.ensure_initialized()
        assert sets_of(manager).count("reference.torch") == 1
    assert managers[0].plugins == managers[2].plugins
    assert "set reference" in {report.name for report in managers[2].plugins}


def test_a_users_own_registry_gets_the_built_in_sets_unless_told_not_to() -> None:
    def fn(input: Any, weight: Any, eps: float = 1e-5) -> Any:
        return "mine"

    registry = OpRegistry()
    registry.register_impl(OpImpl("rmsnorm_fwd", "mine", "reference", fn))  # type: ignore[arg-type]
    alone = OpManager(registry, builtins=False, plugins=False)
    alone.ensure_initialized()
    assert sets_of(alone) == ["mine"]
    full = OpManager(registry)
    full.ensure_initialized()
    assert {"mine", "reference.torch"} <= set(sets_of(full))


def test_a_clash_with_a_built_in_set_leaves_the_users_implementation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fn(input: Any, weight: Any, eps: float = 1e-5) -> Any:
        return "mine"

    registry = OpRegistry()
    registry.register_impl(OpImpl("rmsnorm_fwd", "reference.torch", "reference", fn))  # type: ignore[arg-type]
    manager = OpManager(registry, plugins=False)
    manager.ensure_initialized()
    report = next(it for it in manager.plugins if it.name == "set reference")
    assert "DuplicateImplError" in str(report.error)
    assert __file__ in str(report.error)
    assert registry.get_implementation("rmsnorm_fwd", "reference.torch").fn is fn
    assert "reference.torch" not in ids(registry, "layernorm_fwd"), "all or nothing"
    assert "set reference" in caplog.text


def test_each_manager_has_its_own_quarantine_and_tensors_over_a_shared_registry() -> None:
    first = make_manager(impl("first"))
    second = OpManager(first.registry, builtins=False, plugins=False)
    assert second.registry is first.registry
    assert second.quarantine is not first.quarantine
    assert second.tensors is not first.tensors


# -------------------------------------------------------------------- what is registered


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "vendro"}, "unknown kind 'vendro'.*did you mean 'vendor'"),
        ({"kind": "vendor", "vendor": None}, "needs a vendor name"),
        ({"fn": "no colon"}, "callable or 'module:attribute'"),
        ({"fn": 3}, "callable or 'module:attribute', got int"),
        ({"min_arch": "hopper"}, "not an architecture name"),
        ({"min_arch": (9, 0)}, "not an architecture name"),
        ({"traits": {"determinstic"}}, "unknown trait.*did you mean 'deterministic'"),
        ({"priority": "high"}, "priority must be an int"),
        ({"priority": True}, "priority must be an int"),
        ({"supports": True}, "supports must be callable"),
        ({"is_available": True}, "is_available must be callable"),
        ({"supported_dtypes": "float32"}, "supported_dtypes must be a collection"),
        ({"devices": "cuda"}, "devices must be a collection"),
        ({"devices": set()}, "devices is empty, so it can never serve"),
        ({"supported_dtypes": ()}, "supported_dtypes is empty, so it can never serve"),
        ({"mutates": "input"}, "mutates must be a collection of argument names, got 'input'"),
        ({"mutates": (1,)}, r"mutates must be a collection of argument names, got \(1,\)"),
        (
            {"mutates": ("ouput",), "fn": lambda input, output: None},
            "mutates: fn has no argument 'ouput'; did you mean 'output'.; it has input, output",
        ),
        ({"supported_dtypes": {"float32", "bf16"}}, "'bf16' is not.*did you mean 'bfloat16'"),
        ({"supported_dtypes": {"bfloat61"}}, "'bfloat61' is not.*did you mean 'bfloat16'"),
        ({"supported_dtypes": {"half"}}, "'half' is not.*did you mean 'float16'"),
        ({"devices": {"cuda:0"}}, "'cuda:0' is not a device type"),
        ({"devices": {"CPU"}}, "'CPU' is not a device type"),
        ({"devices": {"cuda", "gpu"}}, "no tensor has the device type 'gpu'; did you mean 'cuda'"),
        ({"devices": {"hip"}}, "no tensor has the device type 'hip'; did you mean 'cuda'"),
        ({"impl_id": "two words"}, "impl_id must be a name"),
        ({"op_name": "rms norm"}, "op_name must be a name"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    described = {"op_name": "scale", "impl_id": "mine", "kind": "reference", "fn": Kernel()}
    with pytest.raises(RegistrationError, match=message):
        OpImpl(**(described | fields))


@pytest.mark.parametrize(
    ("op_name", "fn"),
    [
        ("aten::relu_", lambda x: x),
        ("fused", lambda *args: args[0]),
        ("fused", lambda self: self),
        ("fused", "module:attribute"),
    ],
)
def test_what_is_written_may_be_named_where_a_signature_does_not_show_it(
    op_name: str, fn: Any
) -> None:
    described = OpImpl(op_name, "mine", "reference", fn, mutates=["self"])  # type: ignore[arg-type]
    assert described.mutates == ("self",)


def test_dtypes_may_be_given_as_torch_dtypes() -> None:
    import torch

    described = impl("mine", supported_dtypes=[torch.bfloat16, "torch.float16", "float32"])
    assert described.supported_dtypes == {"bfloat16", "float16", "float32"}


def test_every_dtype_of_torch_may_be_claimed() -> None:
    import torch

    dtypes = [it for it in vars(torch).values() if isinstance(it, torch.dtype)]
    described = impl("mine", supported_dtypes=dtypes)
    assert described.supported_dtypes == {str(it).removeprefix("torch.") for it in dtypes}


def test_a_registration_of_a_new_operator_needs_no_contract(registry: OpRegistry) -> None:
    registry.register_impl(impl("mine", op_name="acme_scale", fn=identity))
    manager = OpManager(registry, builtins=False, plugins=False)
    assert manager.call("acme_scale", 5) == 5


def test_an_alias_registers_and_calls_the_operator(registry: OpRegistry) -> None:
    registry.register_impl(impl("mine", op_name="fused_scale"))
    assert registry.list_operators() == ("scale",)
    assert ids(registry) == ids(registry, "fused_scale") == ["mine"]


def test_the_place_of_a_registration_is_outside_core(registry: OpRegistry) -> None:
    registry.register_many([impl("mine")])
    (entry,) = registry.entries("scale")
    assert entry.where.startswith(f"{__file__}:")


def test_contracts_may_be_ones_own() -> None:
    def twice(x: Any) -> Any: ...

    registry = OpRegistry({"twice": contract_of(twice)})
    with pytest.raises(SignatureMismatchError):
        registry.register_impl(impl("mine", op_name="twice", fn=lambda y: y))


def test_single_operators_of_a_set_may_differ_from_the_others() -> None:
    registry = OpRegistry()
    register_set(
        registry,
        "acme_kernels",
        families=("dropout",),
        impl_id="vendor.acme",
        kind=BackendImplKind.VENDOR,
        vendor="acme",
        traits=frozenset({"deterministic", "graph_safe"}),
        differing={"dropout_bwd": {"traits": frozenset({"graph_safe"})}},
    )
    forward, backward = (
        registry.get_implementation(name, "vendor.acme") for name in ("dropout_fwd", "dropout_bwd")
    )
    assert forward.traits == {"deterministic", "graph_safe"}
    assert backward.traits == {"graph_safe"}
    assert (forward.vendor, backward.vendor) == ("acme", "acme")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"families": ("normalisation",)}, "families: the catalogue has no 'normalisation'; did"),
        ({"omit": ("layernorm_fw",)}, "omit: .* no 'layernorm_fw'; did you mean 'layernorm_fwd'"),
        ({"differing": {"gem": {}}}, "differing: the catalogue has no 'gem'; did you mean 'gemm'"),
        ({"families": "gemm"}, "families must be a collection of names, got the string 'gemm'"),
        ({"omit": "gelu"}, "omit must be a collection of names, got the string 'gelu'"),
    ],
)
def test_a_name_that_a_set_has_not_got_from_the_catalogue_is_refused(
    given: dict[str, Any], said: str
) -> None:
    registry = OpRegistry()
    with pytest.raises(RegistrationError, match=f"^acme.kernels: {said}"):
        register_set(
            registry, "acme.kernels", kind=BackendImplKind.REFERENCE, impl_id="acme", **given
        )
    assert registry.list_operators() == ()


def test_a_stand_in_is_replaced_by_a_registration_with_its_id() -> None:
    registry = OpRegistry(contracts={})
    common = {"op_name": "op", "impl_id": "vendor.acme", "kind": "reference"}
    registry.register_impl(OpImpl(**common, fn=lambda x: 1, stand_in=True))  # type: ignore[arg-type]
    registry.register_impl(OpImpl(**common, fn=lambda x: 2))  # type: ignore[arg-type]
    (impl,) = registry.get_implementations("op")
    assert not impl.stand_in
    with pytest.raises(DuplicateImplError):
        registry.register_impl(OpImpl(**common, fn=lambda x: 3, stand_in=False))  # type: ignore[arg-type]
    registry.register_impl(OpImpl(**common, fn=lambda x: 4, stand_in=True))  # type: ignore[arg-type]
    assert registry.get_implementations("op") == (impl,), "one that comes later gives way at once"

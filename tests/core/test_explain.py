"""Explanations of decisions: as text, table and JSON, and for hypothetical machines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from core_helpers import StubTensor, impl, make_manager, one_of_each

from transformer_engine_fl import (
    ConfigurationError,
    NoImplementationError,
    OpManager,
    SelectionPolicy,
    UnknownOperatorError,
    policy_context,
    reset_global_policy,
    set_global_policy,
    with_strict_mode,
)
from transformer_engine_fl.core.policy import get_environment


@pytest.fixture
def manager() -> OpManager:
    """Candidates that are rejected on the CPU for different reasons, and two that are accepted."""
    return make_manager(
        impl("default.flagos", "flagos", priority=150, devices={"cuda"}),
        impl("vendor.acme", "vendor", vendor="Acme", priority=100, min_arch="sm_90"),
        impl("vendor.zeta", "vendor", vendor="zeta", priority=90, is_available=lambda: "no chip"),
        impl("reference.torch", "reference", priority=50),
        impl("reference.slow", "reference", priority=10, supports=lambda *args, **kwargs: True),
    )


TEXT = """\
scale(device=cpu, dtype=float32): 'reference.torch' serves
  - default.flagos (flagos, priority 150): device 'cpu' is not supported; supported: cuda
  - vendor.acme (vendor:Acme, priority 100): needs architecture sm_90 or newer; \
device 'cpu' has none
  - vendor.zeta (vendor:zeta, priority 90): not available: no chip
  * reference.torch (reference, priority 50): choice 3, 'reference' (default)
  + reference.slow (reference, priority 10): choice 3, 'reference' (default)"""

TABLE = """\
   implementation   kind         priority  reason
-  default.flagos   flagos       150       device 'cpu' is not supported; supported: cuda
-  vendor.acme      vendor:Acme  100       needs architecture sm_90 or newer; device 'cpu' has none
-  vendor.zeta      vendor:zeta  90        not available: no chip
*  reference.torch  reference    50        choice 3, 'reference' (default)
+  reference.slow   reference    10        choice 3, 'reference' (default)"""


def test_a_decision_as_text_gives_each_candidate_and_its_reason(manager: OpManager) -> None:
    assert str(manager.explain("scale", StubTensor())) == TEXT


def test_a_decision_as_a_table_is_aligned(manager: OpManager) -> None:
    assert manager.explain("scale", StubTensor()).table() == TABLE


def test_a_reason_of_several_lines_stays_in_its_column() -> None:
    table = make_manager(
        impl("x", fn="core_helpers:scale", is_available=lambda: "first\nsecond")
    ).explain("scale")
    first, second = table.table().splitlines()[1:]
    assert second.index("second") == first.index("not available: first")
    assert "\n      second" in str(table)


def test_a_decision_as_json_has_stable_keys_and_survives_a_round_trip(manager: OpManager) -> None:
    set_global_policy(SelectionPolicy(prefer="vendor:ACME", deny_vendors={"zeta", "b"}))
    decision = manager.explain("scale", StubTensor("cuda", "bfloat16", "sm_80"))
    found = json.loads(decision.to_json())
    assert found == decision.to_dict()
    assert list(found) == [
        "op",
        "selected",
        "device",
        "arch",
        "dtype",
        "note",
        "policy",
        "candidates",
    ]
    assert {key: found[key] for key in list(found)[:6]} == {
        "op": "scale",
        "selected": "default.flagos",
        "device": "cuda",
        "arch": "sm_80",
        "dtype": "bfloat16",
        "note": "",
    }
    assert found["policy"] == {
        "prefer": {"value": "vendor:acme", "origin": "set_global_policy"},
        "strict": {"value": False, "origin": "default"},
        "per_op_order": {"value": {}, "origin": "default"},
        "deny_vendors": {"value": ["b", "zeta"], "origin": "set_global_policy"},
        "require": {"value": [], "origin": "default"},
    }
    assert found["candidates"][0] == {
        "impl_id": "vendor.acme",
        "kind": "vendor",
        "vendor": "Acme",
        "priority": 100,
        "accepted": False,
        "cause": "arch",
        "reason": "needs architecture sm_90 or newer; the device is sm_80",
    }
    assert [(it["impl_id"], it["accepted"], it["cause"]) for it in found["candidates"][1:]] == [
        ("vendor.zeta", False, "policy"),
        ("default.flagos", True, ""),
        ("reference.torch", True, ""),
        ("reference.slow", True, ""),
    ]


def test_a_reason_names_the_variable_that_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_FL_PER_OP", "scale=vendor:zeta|reference")
    monkeypatch.setenv("TE_FL_DENY_VENDORS", "acme")
    monkeypatch.setenv("TE_FL_STRICT", "on")
    text = str(make_manager(*one_of_each()).explain("scale"))
    assert "choice 1, 'vendor:zeta' (TE_FL_PER_OP=scale=vendor:zeta|reference)" in text
    assert "vendor 'Acme' is denied (TE_FL_DENY_VENDORS=acme)" in text
    assert "not in the order 'vendor:zeta|reference' of 'scale' (TE_FL_PER_OP=" in text
    assert "strict: only the first candidate, 'vendor.zeta', may serve (TE_FL_STRICT=on)" in text


def test_before_any_tensor_is_seen_conditions_on_one_are_left_open() -> None:
    manager = make_manager(
        impl(
            "kernel",
            "flagos",
            devices={"cuda"},
            supported_dtypes={"float16", "bfloat16"},
            min_arch="sm_80",
            supports=lambda *args, **kwargs: True,
        ),
        impl("plain"),
    )
    decision = manager.explain("scale")
    assert [it.impl_id for it in decision.accepted] == ["kernel", "plain"]
    assert decision.headline() == "scale: 'kernel' serves"
    assert decision.verdicts[0].reason == (
        "choice 1, 'flagos' (default); subject to device cuda; dtype bfloat16, float16; "
        "arch sm_80 or newer; its own check of the arguments"
    )


def test_an_operator_without_implementations_is_explained() -> None:
    manager = make_manager()
    decision = manager.explain("scale", StubTensor())
    assert decision.selected is None
    assert str(decision) == (
        "scale(device=cpu, dtype=float32): no implementation serves\n"
        "  no implementation is registered"
    )
    assert json.loads(decision.to_json())["candidates"] == []


# ----------------------------------------------------------------------- other questions


def test_the_selected_id_is_the_answer_for_this_machine(manager: OpManager) -> None:
    assert manager.get_selected_impl_id("scale") == "default.flagos"
    with policy_context(prefer="vendor:zeta"):  # zeta is not available here
        assert manager.get_selected_impl_id("scale") == "vendor.acme"


def test_resolve_gives_the_callable_that_would_serve(manager: OpManager) -> None:
    assert manager.resolve("scale")(None) == "default.flagos"
    assert manager.resolve("scale", StubTensor())(None) == "reference.torch"
    assert manager.resolve("scale", x=StubTensor("cuda"))(None) == "default.flagos"


def test_resolve_candidates_gives_all_that_may_serve_best_first(manager: OpManager) -> None:
    found = manager.resolve_candidates("scale", StubTensor("cuda", arch="sm_90"))
    assert [it.impl_id for it in found] == [
        "default.flagos",
        "vendor.acme",
        "reference.torch",
        "reference.slow",
    ]


def test_where_nothing_serves_the_error_carries_the_decision() -> None:
    manager = make_manager(impl("only", is_available=lambda: "no chip"))
    for question in (
        lambda: manager.resolve("scale"),
        lambda: manager.get_selected_impl_id("scale"),
        lambda: manager.call("scale", StubTensor()),
    ):
        with pytest.raises(NoImplementationError, match="not available: no chip") as caught:
            question()
        assert caught.value.decision.verdicts[0].cause == "available"
    assert manager.resolve_candidates("scale") == ()


@pytest.mark.parametrize(
    "ask",
    [
        lambda manager, op: manager.call(op, StubTensor()),
        lambda manager, op: manager.bind(op),
        lambda manager, op: manager.resolve(op),
        lambda manager, op: manager.resolve_candidates(op),
        lambda manager, op: manager.get_selected_impl_id(op),
        lambda manager, op: manager.explain(op),
        lambda manager, op: manager.explain_for(op, device="cuda"),
    ],
)
def test_an_unknown_operator_is_an_error_with_the_nearest_name(
    manager: OpManager, ask: Any
) -> None:
    with pytest.raises(
        UnknownOperatorError, match="unknown operator 'scael'; did you mean 'scale'"
    ):
        ask(manager, "scael")


def test_an_alias_asks_about_the_operator(manager: OpManager) -> None:
    assert manager.explain("fused_scale", StubTensor()).op_name == "scale"


# ------------------------------------------------------------------------------- what if


def what_if(manager: OpManager, **machine: Any) -> dict[str, tuple[bool, str]]:
    decision = manager.explain_for("scale", **machine)
    return {it.impl.impl_id: (it.accepted, it.reason) for it in decision.verdicts}


def test_what_if_judges_by_the_machine_named_and_not_by_this_one() -> None:
    asked: list[str] = []

    def is_available() -> bool:
        asked.append("asked")
        return False

    manager = make_manager(
        impl("hopper", "flagos", priority=2, min_arch="sm_90", is_available=is_available),
        impl("half", "flagos", priority=1, devices={"cuda"}, supported_dtypes={"float16"}),
        impl("elsewhere", "flagos", fn="no_such_module:fn", devices={"cuda"}),
        impl("plain"),
    )
    decision = manager.explain_for("scale", device="cuda", arch="sm_80", dtype="bfloat16")
    assert (
        decision.headline() == "scale(device=cuda, arch=sm_80, dtype=bfloat16): 'elsewhere' serves"
    )
    assert [it.impl_id for it in decision.accepted] == ["elsewhere", "plain"]
    assert {it.impl.impl_id: it.cause for it in decision.verdicts if it.cause} == {
        "hopper": "arch",
        "half": "dtype",
    }
    newer = manager.explain_for("scale", device="cuda", arch="sm_90a", dtype="bfloat16")
    assert newer.selected is not None
    assert newer.selected.impl_id == "hopper"
    assert asked == []  # probes describe this machine, not the one asked about
    assert "assumes that" in str(decision)
    assert json.loads(decision.to_json())["arch"] == "sm_80"


def test_what_the_environment_switches_off_serves_neither_here_nor_in_a_what_if() -> None:
    asked: list[str] = []

    def is_available() -> bool:
        asked.append("asked")
        return True

    def switched(switch: str | None) -> OpManager:
        off = impl("off", "flagos", is_available=is_available, switched_off=lambda: switch)
        return make_manager(off, impl("plain"))

    for decision in (
        switched("by TE_FL_SKIP").explain("scale"),
        switched("by TE_FL_SKIP").explain_for("scale", device="cuda"),
    ):
        assert decision.selected is not None
        assert decision.selected.impl_id == "plain"
        off = next(it for it in decision.verdicts if it.impl.impl_id == "off")
        assert (off.cause, off.reason) == ("available", "not available: by TE_FL_SKIP")
    assert asked == []
    served = switched(None).explain_for("scale", device="cuda").selected
    assert served is not None
    assert served.impl_id == "off"


def test_a_switch_is_read_again_when_the_environment_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def switch() -> str | None:
        return "by TE_FL_SKIP_CUDA" if get_environment().skip_cuda else None

    probes: list[str] = []

    def probe() -> bool:
        probes.append("asked")
        return True

    manager = make_manager(
        impl("off", "flagos", is_available=probe, switched_off=switch), impl("plain")
    )
    for skip, served in (("0", "off"), ("1", "plain"), ("0", "off")):
        monkeypatch.setenv("TE_FL_SKIP_CUDA", skip)
        reset_global_policy()
        assert manager.call("scale", None) == served
        for decision in (manager.explain("scale"), manager.explain_for("scale", device="cuda")):
            assert decision.selected is not None
            assert decision.selected.impl_id == served
    assert probes == ["asked"]


def test_a_switched_off_that_raises_is_reported_and_disables_the_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> str:
        raise KeyError("HOME")

    manager = make_manager(impl("off", "flagos", switched_off=broken), impl("plain"))
    for decision in (manager.explain("scale"), manager.explain_for("scale", device="cuda")):
        assert "switched_off() raised KeyError" in decision.verdicts[0].reason
        assert not decision.verdicts[0].accepted
    assert caplog.text.count("switched_off() raised") == 1


def test_what_if_leaves_open_what_is_not_named() -> None:
    manager = make_manager(
        impl("kernel", "flagos", devices={"cuda"}, supported_dtypes={"float16"}, min_arch="sm_80")
    )
    assert what_if(manager, device="cuda")["kernel"] == (
        True,
        "choice 1, 'flagos' (default); subject to dtype float16; arch sm_80 or newer",
    )
    assert what_if(manager, device="npu")["kernel"] == (
        False,
        "device 'npu' is not supported; supported: cuda",
    )


def test_what_if_takes_a_dtype_as_torch_prints_it() -> None:
    manager = make_manager(impl("half", supported_dtypes={"float16"}))
    assert what_if(manager, device="cuda", dtype="torch.float16")["half"][0] is True
    assert what_if(manager, device="cuda", dtype="torch.float32")["half"][0] is False


def test_what_if_follows_the_policy() -> None:
    manager = make_manager(*one_of_each())
    with policy_context(prefer="vendor:zeta"), with_strict_mode():
        decision = manager.explain_for("scale", device="cuda")
    assert [it.impl_id for it in decision.accepted] == ["vendor.zeta"]


@pytest.mark.parametrize("arch", ["hopper", "90", (9, 0)])
def test_what_is_no_architecture_is_refused(manager: OpManager, arch: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"not an architecture name; examples: 'sm_90'"):
        manager.explain_for("scale", device="cuda", arch=arch)


@pytest.mark.parametrize("device", ["CUDA", None, "a gpu", "", "cuda:x", 0])
def test_what_is_no_device_type_is_refused(manager: OpManager, device: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"device: {device!r} is not a device type"):
        manager.explain_for("scale", device=device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_an_architecture_of_gpus_is_refused_for_a_cpu(manager: OpManager, device: str) -> None:
    with pytest.raises(ConfigurationError, match="'sm_90' is a GPU architecture"):
        manager.explain_for("scale", device=device, arch="sm_90")

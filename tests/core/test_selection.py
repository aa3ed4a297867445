"""Which candidate is chosen: their order, what the policy excludes, what each supports."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from core_helpers import (
    KINDS,
    StubTensor,
    answering,
    impl,
    make_manager,
    one_of_each,
    order,
    reason,
)
from hypothesis import given, settings

from transformer_engine_fl import (
    NoImplementationError,
    OpImpl,
    OpManager,
    SelectionPolicy,
    StrictModeError,
    policy_context,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)

# ----------------------------------------------------------------------------- the order


@pytest.mark.parametrize(
    ("prefer", "kinds"),
    [
        ("flagos", ["flagos", "vendor", "reference"]),
        ("vendor", ["vendor", "flagos", "reference"]),
        ("reference", ["reference", "flagos", "vendor"]),
    ],
)
def test_prefer_orders_the_kinds_whatever_the_priorities(prefer: str, kinds: list[str]) -> None:
    rising = make_manager(*(impl(f"x.{kind}", kind, priority=i) for i, kind in enumerate(KINDS)))
    falling = make_manager(*(impl(f"x.{kind}", kind, priority=-i) for i, kind in enumerate(KINDS)))
    with with_preference(prefer):
        assert order(rising) == order(falling) == [f"x.{kind}" for kind in kinds]


def test_within_a_kind_priority_decides_and_then_the_impl_id() -> None:
    manager = make_manager(
        impl("b", priority=1),
        impl("a", priority=1),
        impl("z", priority=2),
        impl("B", priority=1),
        impl("c", priority=-1),
        impl("d"),
    )
    assert order(manager) == ["z", "B", "a", "b", "d", "c"]


def test_the_order_of_registration_does_not_matter() -> None:
    assert order(make_manager(*one_of_each())) == order(make_manager(*reversed(one_of_each())))


@pytest.mark.parametrize(
    ("prefer", "expected"),
    [
        ("flagos", ["default.flagos", "vendor.acme", "vendor.zeta", "reference.torch"]),
        ("vendor", ["vendor.acme", "vendor.zeta", "default.flagos", "reference.torch"]),
        ("reference", ["reference.torch", "default.flagos", "vendor.acme", "vendor.zeta"]),
        ("vendor:zeta", ["vendor.zeta", "vendor.acme", "default.flagos", "reference.torch"]),
        ("vendor:ACME", ["vendor.acme", "vendor.zeta", "default.flagos", "reference.torch"]),
        (
            "impl:reference.torch",
            ["reference.torch", "default.flagos", "vendor.acme", "vendor.zeta"],
        ),
        ("impl:vendor.zeta", ["vendor.zeta", "default.flagos", "vendor.acme", "reference.torch"]),
        ("vendor:nobody", ["vendor.acme", "vendor.zeta", "default.flagos", "reference.torch"]),
        (
            "impl:Reference.torch",
            ["default.flagos", "vendor.acme", "vendor.zeta", "reference.torch"],
        ),
    ],
)
def test_each_token_puts_its_implementations_first(prefer: str, expected: list[str]) -> None:
    with with_preference(prefer):
        assert order(make_manager(*one_of_each())) == expected


# -------------------------------------------------------------------------- per operator


def test_an_order_of_an_operator_is_exhaustive_and_outranks_prefer() -> None:
    manager = make_manager(*one_of_each())
    with policy_context(
        prefer="flagos", per_op_order={"scale": ["impl:reference.torch", "vendor:Zeta"]}
    ):
        assert order(manager) == ["reference.torch", "vendor.zeta"]
        assert reason(manager, "default.flagos") == (
            "policy",
            "not in the order 'impl:reference.torch|vendor:zeta' of 'scale' (with block)",
        )


def test_within_a_token_of_an_order_priority_decides() -> None:
    manager = make_manager(*one_of_each())
    with policy_context(per_op_order={"scale": ["reference", "vendor"]}):
        assert order(manager) == ["reference.torch", "vendor.acme", "vendor.zeta"]


def test_the_first_token_that_names_an_implementation_places_it() -> None:
    manager = make_manager(*one_of_each())
    with policy_context(per_op_order={"scale": ["vendor:zeta", "vendor", "impl:vendor.zeta"]}):
        assert order(manager) == ["vendor.zeta", "vendor.acme"]


def test_an_order_of_another_operator_does_not_concern_this_one() -> None:
    manager = make_manager(*one_of_each(), impl("other.x", op_name="other"))
    with policy_context(per_op_order={"other": ["vendor"]}):
        assert order(manager) == order(make_manager(*one_of_each()))
        with pytest.raises(NoImplementationError):
            manager.call("other", None)


def test_an_order_given_to_an_alias_is_the_operators() -> None:
    manager = make_manager(*one_of_each())
    with policy_context(per_op_order={"fused_scale": ["reference"]}):
        for name in ("scale", "fused_scale"):
            assert order(manager, name) == ["reference.torch"]
            assert manager.call(name, None) == "reference.torch"
        assert reason(manager, "reference.torch")[1] == "choice 1, 'reference' (with block)"


def test_the_order_under_the_operators_own_name_outranks_its_aliass() -> None:
    manager = make_manager(*one_of_each())
    with policy_context(per_op_order={"fused_scale": ["reference"], "scale": ["vendor:acme"]}):
        assert order(manager, "fused_scale") == ["vendor.acme"]


def test_an_implementation_registered_under_an_alias_is_the_operators() -> None:
    manager = make_manager(impl("mine", op_name="fused_scale"))
    with policy_context(per_op_order={"scale": ["reference"]}, prefer="vendor"):
        assert manager.call("scale", None) == manager.call("fused_scale", None) == "mine"
        assert reason(manager, "mine")[1] == "choice 1, 'reference' (with block)"


# ------------------------------------------------------------------------ allow and deny


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prefer": "vendor"},
        {"prefer": "vendor:acme"},
        {"prefer": "impl:vendor.acme"},
        {"per_op_order": {"scale": ["impl:vendor.acme", "vendor:acme", "vendor"]}},
        {"allow_vendors": ["acme", "zeta"]},
    ],
)
@pytest.mark.parametrize("name", ["acme", "ACME"])
def test_deny_beats_everything_that_names_the_vendor(name: str, fields: dict[str, Any]) -> None:
    manager = make_manager(*one_of_each())
    with policy_context(**fields):
        assert "vendor.acme" in order(manager)
        with with_denied_vendors(name):
            assert "vendor.acme" not in order(manager)
            assert "vendor.zeta" in order(manager)
            assert reason(manager, "vendor.acme") == (
                "policy",
                "vendor 'Acme' is denied (with block)",
            )


def test_deny_leaves_nothing_when_the_order_names_nothing_else() -> None:
    manager = make_manager(*one_of_each())
    with (
        policy_context(per_op_order={"scale": ["impl:vendor.acme"]}, deny_vendors=["acme"]),
        pytest.raises(NoImplementationError, match="vendor 'Acme' is denied"),
    ):
        manager.call("scale", StubTensor())


def test_an_allow_list_admits_those_vendors_and_all_who_have_no_vendor() -> None:
    manager = make_manager(*one_of_each(), impl("zeta.triton", "flagos", vendor="ZETA"))
    with with_allowed_vendors("Zeta"):
        assert order(manager) == ["default.flagos", "zeta.triton", "vendor.zeta", "reference.torch"]
        assert reason(manager, "vendor.acme") == (
            "policy",
            "vendor 'Acme' is not allowed (with block)",
        )


def test_an_empty_allow_list_allows_no_vendor() -> None:
    manager = make_manager(*one_of_each(), impl("zeta.triton", "flagos", vendor="zeta"))
    with with_allowed_vendors(), with_preference("impl:vendor.acme"):
        assert order(manager) == ["default.flagos", "reference.torch"]


def test_a_required_trait_bars_those_who_do_not_claim_it() -> None:
    manager = make_manager(
        impl("both", traits={"deterministic", "graph_safe"}),
        impl("one", traits={"deterministic"}, priority=1),
        impl("none", priority=2),
    )
    with policy_context(require=["deterministic"]):
        assert order(manager) == ["one", "both"]
        assert reason(manager, "none") == ("policy", "does not claim 'deterministic' (with block)")
    with policy_context(require=["deterministic", "graph_safe"]):
        assert order(manager) == ["both"]


def test_a_reference_implementation_is_traceable_without_saying_so() -> None:
    manager = make_manager(
        impl("plain"), impl("kernel", "flagos"), impl("claims", "flagos", traits={"traceable"})
    )
    with policy_context(require=["traceable"]):
        assert order(manager) == ["claims", "plain"]


# --------------------------------------------------------------------------- strict mode


def test_strict_admits_only_the_first_that_the_policy_admits() -> None:
    manager = make_manager(*one_of_each())
    with with_strict_mode(), policy_context(prefer="vendor", deny_vendors=["acme"]):
        assert order(manager) == ["vendor.zeta"]
        assert reason(manager, "vendor.acme")[1] == "vendor 'Acme' is denied (with block)"
        assert reason(manager, "default.flagos") == (
            "policy",
            "strict: only the first candidate, 'vendor.zeta', may serve (with block)",
        )


def test_strict_does_not_go_on_when_the_first_cannot_serve() -> None:
    manager = make_manager(impl("first", "flagos", devices={"cuda"}), impl("second"))
    with (
        with_strict_mode(),
        pytest.raises(StrictModeError, match="device 'cpu' is not supported; supported: cuda"),
    ):
        manager.call("scale", StubTensor("cpu"))
    assert manager.call("scale", StubTensor("cpu")) == "second"


def test_strict_accepts_the_next_kind_where_the_preferred_one_has_nothing() -> None:
    manager = make_manager(impl("only"))
    with with_strict_mode(), with_preference("vendor"):
        assert manager.call("scale", StubTensor()) == "only"


# -------------------------------------------------------------------------- capabilities


def judged(tensor: StubTensor, **fields: Any) -> tuple[str, str]:
    """(cause, reason) of an implementation with these fields for a tensor; no cause: it serves."""
    manager = make_manager(impl("judged", "flagos", **fields), impl("other"))
    verdict = reason(manager, "judged", tensor)
    served = manager.call("scale", tensor)
    assert served == ("other" if verdict[0] else "judged")  # dispatch agrees
    return verdict


def test_a_dtype_that_is_not_supported_is_named() -> None:
    fields = {"supported_dtypes": {"bfloat16", "torch.float16"}}
    assert judged(StubTensor(dtype="float16"), **fields)[0] == ""
    assert judged(StubTensor(dtype="float32"), **fields) == (
        "dtype",
        "dtype 'float32' is not supported; supported: bfloat16, float16",
    )


def test_a_device_that_is_not_supported_is_named() -> None:
    fields = {"devices": {"cuda", "npu"}}
    assert judged(StubTensor("npu"), **fields)[0] == ""
    assert judged(StubTensor("cpu"), **fields) == (
        "device",
        "device 'cpu' is not supported; supported: cuda, npu",
    )


def test_a_call_without_a_tensor_meets_no_condition_on_one() -> None:
    manager = make_manager(impl("judged", "flagos", devices={"cuda"}), impl("other"))
    assert reason(manager, "judged", None) == (
        "device",
        "no device is known; it needs one of cuda",
    )
    assert manager.call("scale", None) == "other"


@pytest.mark.parametrize(
    ("min_arch", "arch"),
    [
        ("sm_80", "sm_80"),
        ("sm_80", "sm_90"),
        ("sm_80", "sm_86"),
        ("sm_90", "sm_100"),
        ("sm_90", "sm_120"),
        ("sm_90a", "sm_90"),
        ("sm_90a", "sm_90a"),
        ("sm_100f", "sm_100"),
        ("sm_100f", "sm_103"),
        ("gfx90a", "gfx90a"),
        ("gfx90a", "gfx942"),
        ("gfx942", "gfx950"),
    ],
)
def test_an_architecture_that_is_new_enough_serves(min_arch: str, arch: str) -> None:
    assert judged(StubTensor("cuda", arch=arch), min_arch=min_arch)[0] == ""


@pytest.mark.parametrize(
    ("min_arch", "arch", "said"),
    [
        ("sm_90", "sm_80", "sm_90 or newer; the device is sm_80"),
        ("sm_90", "sm_89", "sm_90 or newer; the device is sm_89"),
        ("sm_100", "sm_90", "sm_100 or newer; the device is sm_90"),
        ("sm_90a", "sm_100", "sm_90a; the device is sm_100"),
        ("sm_90a", "sm_89", "sm_90a; the device is sm_89"),
        ("sm_103f", "sm_100", "sm_103f or newer; the device is sm_100"),
        ("sm_100f", "sm_120", "sm_100f or newer; the device is sm_120"),
        ("gfx942", "gfx90a", "gfx942 or newer; the device is gfx90a"),
        ("sm_80", "gfx942", "sm_80 or newer; the device is gfx942"),
        ("gfx90a", "sm_90", "gfx90a or newer; the device is sm_90"),
        ("sm_80", "unheard of", "sm_80 or newer; the device is unheard of"),
        ("sm_80", None, "sm_80 or newer; device 'cuda' has none"),
    ],
)
def test_an_architecture_too_old_or_of_another_family_is_named(
    min_arch: str, arch: str | None, said: str
) -> None:
    verdict = judged(StubTensor("cuda", arch=arch), min_arch=min_arch)
    assert verdict == ("arch", f"needs architecture {said}")


def _refuses(x: Any, factor: float = 1.0, *, mode: str = "plain") -> bool | str:
    return True if factor == 1.0 else "factor is not 1"


def _raises(*args: Any, **kwargs: Any) -> bool:
    raise ZeroDivisionError("oops")


@pytest.mark.parametrize(
    ("supports", "said"),
    [
        (lambda *args, **kwargs: "rows are too long", "rows are too long"),
        (lambda *args, **kwargs: False, "supports() returned False"),
        (lambda *args, **kwargs: None, "supports() returned None"),
        (lambda *args, **kwargs: "", "supports() returned ''"),
        (lambda *args, **kwargs: 1, "supports() returned 1"),
        (_raises, "supports() raised ZeroDivisionError: oops"),
    ],
)
def test_supports_says_why_not_and_only_true_is_yes(
    supports: Callable[..., Any], said: str
) -> None:
    assert judged(StubTensor(), supports=supports) == ("supports", said)


def test_supports_is_asked_about_each_call() -> None:
    manager = make_manager(impl("judged", "flagos", supports=_refuses), impl("other"))
    served = [manager.call("scale", StubTensor(), factor) for factor in (1.0, 2.0, 1.0)]
    assert served == ["judged", "other", "judged"]
    assert reason(manager, "judged", StubTensor(), factor=2.0) == ("supports", "factor is not 1")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("the driver is too old", "not available: the driver is too old"),
        (False, "not available: is_available() says no"),
        ("", "not available: is_available() says no"),
        (None, "not available: is_available() says no"),
        (OSError("no library"), "not available: is_available() raised OSError: no library"),
    ],
)
def test_is_available_says_why_not_and_is_asked_once(answer: Any, said: str) -> None:
    asked = []

    def is_available() -> Any:
        asked.append(1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    manager = make_manager(impl("judged", "flagos", is_available=is_available), impl("other"))
    other = OpManager(manager.registry, builtins=False, plugins=False)
    for _ in range(2):
        assert manager.call("scale", StubTensor()) == "other"
        cause, why = reason(manager, "judged")
        assert cause == "available"
        assert re.sub(r" \(at .*:\d+\)", "", why) == said
        assert other.get_selected_impl_id("scale") == "other"
    assert len(asked) == 1


def test_an_implementation_that_is_available_is_asked_once_too() -> None:
    asked = []
    manager = make_manager(
        impl("judged", "flagos", is_available=lambda: asked.append(1) is None), impl("other")
    )
    for dtype in ("float32", "bfloat16"):
        assert manager.call("scale", StubTensor(dtype=dtype)) == "judged"
    with with_preference("reference"):
        assert manager.call("scale", StubTensor()) == "other"
    assert len(asked) == 1


def test_an_unavailable_implementation_stays_so_when_a_handle_has_read_its_signature() -> None:
    manager = make_manager(
        impl(
            "judged", op_name="free", fn="core_helpers:importable", is_available=lambda: "no chip"
        ),
    )
    bound = manager.bind("free")  # without a contract, imports it to get a signature
    with pytest.raises(NoImplementationError, match="not available: no chip"):
        bound(StubTensor())


def test_an_implementation_that_cannot_be_imported_gives_way() -> None:
    manager = make_manager(
        impl("gone", "flagos", fn="no_such_module:fn"),
        impl("lost", "vendor", fn="core_helpers:no_such_name"),
        impl("here", fn="core_helpers:importable"),
    )
    assert manager.call("scale", StubTensor()) == "importable"
    assert reason(manager, "gone") == (
        "available",
        "not available: cannot import no_such_module:fn: "
        "ModuleNotFoundError: No module named 'no_such_module'",
    )
    assert "no_such_name" in reason(manager, "lost")[1]


def test_a_tensor_without_memory_goes_only_to_plain_tensor_code() -> None:
    fake = StubTensor(unusual="a fake tensor has no data")
    raw = {"devices": ["cpu"]}
    assert judged(fake, **raw) == (
        "tensor",
        "a fake tensor has no data, and this implementation is not plain PyTorch code",
    )
    assert judged(fake, **raw, traits={"traceable"})[0] == ""
    assert judged(fake)[0] == "", "what states no condition takes every tensor"


# ------------------------------------------------------------------------------- options


def _swallows(x: Any, **kwargs: Any) -> str:
    assert not kwargs, "an option that the implementation does not name reached it"
    return "judged"


def _without_mode(x: Any, factor: float = 1.0) -> str:
    return f"judged {factor}"


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {"mode": "fast"}, "does not support the option 'mode' (got str 'fast')"),
        ((2.0,), {}, "does not support the option 'factor' (got float 2.0)"),
        ((), {"factor": 2.0}, "does not support the option 'factor' (got float 2.0)"),
        ((), {"factor": 1}, "does not support the option 'factor' (got int 1)"),
    ],
)
def test_an_option_that_is_not_named_is_unsupported_though_kwargs_would_swallow_it(
    args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    manager = make_manager(impl("judged", "flagos", fn=_swallows), impl("other"))
    tensor = StubTensor()
    assert manager.call("scale", tensor, *args, **kwargs) == "other"
    assert reason(manager, "judged", tensor, *args, **kwargs) == ("option", said)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1.0,), {}), ((), {"mode": "plain"}), ((1.0,), {"mode": "".join("plain")})],
)
def test_an_option_that_is_not_named_may_be_passed_with_its_default(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    manager = make_manager(impl("judged", "flagos", fn=_swallows), impl("other"))
    assert manager.call("scale", StubTensor(), *args, **kwargs) == "judged"


def test_options_that_are_named_still_arrive() -> None:
    manager = make_manager(impl("judged", "flagos", fn=_without_mode), impl("other"))
    assert manager.call("scale", StubTensor(), 3.0, mode="plain") == "judged 3.0"
    assert manager.call("scale", StubTensor(), factor=3.0) == "judged 3.0"
    assert manager.call("scale", StubTensor(), 3.0, mode="fast") == "other"


# ------------------------------------------------------------------- the cost of a choice


def test_a_kind_of_tensor_is_looked_at_once_however_it_is_passed() -> None:
    manager = make_manager(impl("judged", "flagos", devices={"cpu"}), impl("other"))
    tensors: Any = manager.tensors
    for _ in range(3):
        manager.call("scale", StubTensor())
        manager.call("scale", x=StubTensor())
    assert tensors.looks == 1
    manager.call("scale", StubTensor(dtype="bfloat16"))
    assert tensors.looks == 2


# -------------------------------------- dispatch and explain, on random candidates and policies


def _answer(value: Any) -> Callable[..., Any] | None:
    if value is None:
        return None

    def ask(*args: Any, **kwargs: Any) -> Any:
        if value == "raise":
            raise ValueError("raised")
        return value

    return ask


@st.composite
def _impls(draw: st.DrawFn) -> list[OpImpl]:
    made = []
    for number in range(draw(st.integers(0, 6))):
        impl_id = f"i{number}"
        kind = draw(st.sampled_from(KINDS))
        vendors = ["acme", "Zeta"] if kind == "vendor" else [None, None, "acme"]
        functions: list[Any] = [
            answering(impl_id),
            answering(impl_id),
            _named(impl_id),
            "core_helpers:no_such_name",
        ]
        asked = st.sampled_from([None, None, None, True, False, "no", "raise"])
        made.append(
            impl(
                impl_id,
                kind,
                vendor=draw(st.sampled_from(vendors)),
                priority=draw(st.integers(0, 2)),
                fn=draw(st.sampled_from(functions)),
                supported_dtypes=draw(st.sampled_from([None, None, {"float32"}, {"bfloat16"}])),
                devices=draw(st.sampled_from([None, None, {"cpu"}, {"cuda", "cpu"}])),
                min_arch=draw(st.sampled_from([None, None, None, "sm_80", "sm_90a"])),
                supports=_answer(draw(asked)),
                is_available=_answer(draw(asked)),
                traits=draw(st.sets(st.sampled_from(["deterministic", "traceable"]))),
            )
        )
    return made


def _named(impl_id: str) -> Callable[..., str]:
    def fn(x: Any, **kwargs: Any) -> str:
        return impl_id

    return fn


_tokens = st.sampled_from([*KINDS, "vendor:acme", "vendor:ZETA", "impl:i0", "impl:i3"])
_vendors = st.none() | st.sets(st.sampled_from(["acme", "zeta"]))
_policies = st.builds(
    SelectionPolicy,
    prefer=st.none() | _tokens,
    strict=st.sampled_from([None, False, True]),
    per_op_order=st.none()
    | st.dictionaries(
        st.sampled_from(["scale", "fused_scale"]),
        st.lists(_tokens, min_size=1, max_size=4, unique=True),
        max_size=1,
    ),
    allow_vendors=_vendors,
    deny_vendors=_vendors,
    require=st.sampled_from([None, None, ("deterministic",), ("traceable",)]),
)
_calls = st.tuples(
    st.builds(
        StubTensor,
        st.sampled_from(["cpu", "cuda"]),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from([None, "sm_80", "sm_90"]),
        st.sampled_from([None, None, "a fake tensor"]),
    ),
    st.sampled_from([{}, {}, {"mode": "plain"}, {"mode": "fast"}, {"factor": 2.0}]),
)


@settings(max_examples=400, deadline=None, database=None)
@given(_impls(), _policies, st.lists(_calls, min_size=1, max_size=4))
def test_dispatch_and_explain_choose_alike(
    impls: list[OpImpl], policy: SelectionPolicy, calls: list[tuple[StubTensor, dict[str, Any]]]
) -> None:
    manager = make_manager(*impls)
    bound = manager.bind("scale")
    refusal = StrictModeError if policy.strict else NoImplementationError
    with policy_context(policy):
        for tensor, options in calls * 2:  # the second time from cached plans
            decision = manager.explain("scale", tensor, **options)
            assert {it.impl.impl_id for it in decision.verdicts} == {it.impl_id for it in impls}
            assert all(it.accepted != bool(it.cause) and it.reason for it in decision.verdicts)
            ways: list[Callable[[], Any]] = [
                lambda tensor=tensor, options=options: manager.call("scale", tensor, **options),
                lambda tensor=tensor, options=options: manager.call("scale", x=tensor, **options),
                lambda tensor=tensor, options=options: bound(tensor, **options),
            ]
            for way in ways:
                if decision.selected is None:
                    with pytest.raises(refusal) as caught:
                        way()
                    assert caught.value.decision.selected is None
                else:
                    assert way() == decision.selected.impl_id


def _expected_order(impls: list[OpImpl], policy: SelectionPolicy) -> list[str]:
    """The policy's rules implemented differently: group by group instead of with a sort key."""
    prefer = policy.prefer or "flagos"
    following = {
        "flagos": ["flagos", "vendor", "reference"],
        "vendor": ["vendor", "flagos", "reference"],
        "reference": ["reference", "flagos", "vendor"],
    }
    first = (
        prefer if prefer in following else "vendor" if prefer.startswith("vendor:") else "flagos"
    )
    tokens = [prefer, *following[first]]
    for tokens_of_operator in (policy.per_op_order or {}).values():
        tokens = list(tokens_of_operator)
    placed: list[OpImpl] = []
    for token in tokens:
        group = [
            it
            for it in impls
            if it not in placed
            and token
            in (it.kind.value, f"vendor:{(it.vendor or '').lower()}", f"impl:{it.impl_id}")
        ]
        placed += sorted(sorted(group, key=lambda it: it.impl_id), key=lambda it: -it.priority)
    allowed = []
    for it in placed:
        vendor = (it.vendor or "").lower()
        named = vendor and policy.allow_vendors is not None and vendor not in policy.allow_vendors
        if not named and vendor not in (policy.deny_vendors or ()):
            allowed.append(it.impl_id)
    return allowed[:1] if policy.strict else allowed


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.lists(
        st.builds(
            lambda kind, priority, vendor: (kind, priority, vendor),
            st.sampled_from(KINDS),
            st.integers(0, 2),
            st.sampled_from(["acme", "Zeta"]),
        ),
        max_size=6,
    ),
    _policies.map(lambda it: SelectionPolicy(**{**it.to_dict(), "require": None})),
)
def test_the_policy_alone_orders_as_the_rules_say(
    made: list[tuple[str, int, str]], policy: SelectionPolicy
) -> None:
    impls = [
        impl(
            f"i{number}",
            kind,
            priority=priority,
            **({"vendor": vendor} if kind != "reference" else {}),
        )
        for number, (kind, priority, vendor) in enumerate(made)
    ]
    with policy_context(policy):
        assert order(make_manager(*impls)) == _expected_order(impls, policy)


def test_what_is_opt_in_serves_only_where_its_vendor_or_its_id_is_named() -> None:
    manager = make_manager(impl("here"), impl("extra", "vendor", vendor="Zeta", opt_in=True))
    with with_preference("vendor"):
        assert manager.call("scale", StubTensor()) == "here"
        assert reason(manager, "extra") == (
            "policy",
            "opt-in: serves only if the policy names it, as vendor:Zeta or impl:extra",
        )
    for name in ("vendor:zeta", "impl:extra"):
        with with_preference(name):
            assert manager.call("scale", StubTensor()) == "extra"

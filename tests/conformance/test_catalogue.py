"""Every listed operator has a contract, a reference implementation and samples."""

from __future__ import annotations

import itertools

import pytest
import torch
from operator_names import ALL, LISTED, OUT_OF_SCOPE

from transformer_engine_fl import ArgumentError, Contract, OpManager, ops

NAMES = {name: it for it in ops.CATALOGUE.values() for name in (it.name, *it.aliases)}
PRESENT = sorted(ALL & NAMES.keys())


def test_no_operator_is_missing() -> None:
    assert sorted(ALL - NAMES.keys()) == []


def test_no_name_is_listed_twice_or_both_in_scope_and_out_of_it() -> None:
    every = [*itertools.chain(*LISTED.values()), *OUT_OF_SCOPE]
    assert len(set(every)) == len(every)


def test_what_is_out_of_scope_has_a_reason_and_no_contract() -> None:
    assert all(OUT_OF_SCOPE.values())
    assert OUT_OF_SCOPE.keys() & NAMES.keys() == set()


@pytest.fixture(scope="module")
def manager() -> OpManager:
    made = OpManager(plugins=False)
    made.ensure_initialized()
    return made


@pytest.mark.parametrize("contract", ops.CATALOGUE.values(), ids=lambda it: it.name)
def test_an_operator_of_the_catalogue_is_whole(
    contract: Contract[..., object], manager: OpManager
) -> None:
    assert len(contract.__doc__ or "") > 100
    entries = {it.impl.impl_id: it for it in manager.registry.entries(contract.name)}
    assert "reference.torch" in entries
    assert entries["reference.torch"].load() is None
    for dtype in contract.dtypes:
        labels = [sample.label for sample in contract.samples(dtype, "cpu")]
        assert labels[0].startswith("typical")
        assert len(set(labels)) == len(labels) > 2
    if contract.backward is not None:
        assert contract.backward.op in ops.CATALOGUE


@pytest.mark.parametrize("name", PRESENT)
def test_a_listed_name_leads_to_its_operator(name: str, manager: OpManager) -> None:
    assert manager.registry.canonical(name) == NAMES[name].name


def test_a_name_that_is_no_operator_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="'rmsnorm_forward'; did you mean 'rmsnorm_fwd'"):
        ops.rmsnorm_forward  # noqa: B018


def test_a_number_of_another_library_is_refused_as_none_of_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(ArgumentError, match=r"'eps' is float32 .*expects a Python number"):
        ops.rmsnorm_fwd(x, weight, numpy.float32(1e-5))
    with pytest.raises(ArgumentError, match="expects a Python integer of at least"):
        ops.te_general_grouped_gemm([torch.ones(3, 4)], [x], [numpy.int64(2)])


def test_the_error_of_an_integer_beyond_int64_states_the_valid_range() -> None:
    x = torch.ones(4, 8)
    adam = [[torch.ones(4)] for _ in range(4)]
    beyond = 2**63
    for call, expected in (
        (lambda: ops.dropout_fwd(x, 0.5, seed=beyond), rf"of at least 0 and below {beyond}$"),
        (
            lambda: ops.fused_topk_with_score_function_fwd(x, beyond),
            r"a Python integer of at least 1 and below 9$",
        ),
        (
            lambda: ops.multi_tensor_adam(*adam, 0.1, beyond),
            r"a Python integer of at least 1, in the range of int64$",
        ),
        (lambda: ops.multi_tensor_adam(*adam, beyond, 1), r"in the range of int64, or a float$"),
    ):
        with pytest.raises(ArgumentError, match=expected):
            call()


@pytest.mark.parametrize(
    ("op", "option"),
    [
        ("clamped_swiglu", "limit"),
        ("clamped_dswiglu", "limit"),
        ("clamped_swiglu_quantize", "limit"),
        ("clamped_swiglu_quantize", "amax_epsilon"),
        ("quantize", "amax_epsilon"),
        ("bgrad_quantize", "amax_epsilon"),
        ("split_quantize", "amax_epsilon"),
        ("multi_tensor_compute_scale_and_scale_inv", "max_fp8"),
        ("multi_tensor_compute_scale_and_scale_inv", "epsilon"),
        ("fused_moe_aux_loss_fwd", "coeff"),
    ],
)
def test_a_number_that_float32_does_not_hold_is_refused(op: str, option: str) -> None:
    contract = ops.CATALOGUE[op]
    sample = next(iter(contract.samples("float32", "cpu")))
    call = contract.signature.bind(*sample.args, **sample.kwargs)
    call.arguments[option] = torch.finfo(torch.float32).max
    contract(*call.args, **call.kwargs)
    call.arguments[option] = 1e39
    with pytest.raises(ArgumentError) as raised:
        contract(*call.args, **call.kwargs)
    assert raised.value.argument == option

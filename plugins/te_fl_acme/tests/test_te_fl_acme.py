"""Acme's implementations held to the contracts: values, refusals, claims."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import te_fl_acme
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine_fl import ArgumentError, OpManager, OpRegistry, Sample, ops

OPERATORS = ("rmsnorm_fwd", "rmsnorm_bwd")
DTYPES = ("float32", "bfloat16")


SAMPLES = [
    pytest.param(op_name, sample, id=f"{op_name}-{dtype}-{sample.label}")
    for op_name in OPERATORS
    for dtype in DTYPES
    for sample in ops.CATALOGUE[op_name].samples(dtype, "cpu")
]


@pytest.mark.parametrize(("op_name", "sample"), SAMPLES)
def test_values_are_those_of_the_formula(op_name: str, sample: Sample) -> None:
    contract = ops.CATALOGUE[op_name]
    results = getattr(te_fl_acme, op_name)(*sample.args, **sample.kwargs)
    shapes = contract.shapes(*sample.args, **sample.kwargs)
    expected = contract.oracle(*sample.args, **sample.kwargs)
    given = [str(value.dtype).removeprefix("torch.") for value in sample.args[:2]]
    for result, shape, value in zip(results, shapes, expected, strict=True):
        assert (result.shape, result.dtype) == (shape.shape, shape.dtype)
        assert result.is_contiguous()
        tolerance = contract.tolerance_for(*given, str(result.dtype).removeprefix("torch."))
        scale = value.square().mean().sqrt() if value.numel() else 0.0
        bound = tolerance.rtol * value.abs() + tolerance.atol * scale
        assert ((result.double() - value).abs() <= bound).all()


def test_outputs_never_require_grad() -> None:
    x, w = torch.randn(2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y, rsigma = te_fl_acme.rmsnorm_fwd(x, w)
    results = (y, rsigma, *te_fl_acme.rmsnorm_bwd(y, x, rsigma, w))
    assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize(
    ("weight", "options", "argument"),
    [
        (torch.ones(5), {}, "weight"),
        (torch.ones(8, dtype=torch.int64), {}, "weight"),
        (torch.ones(8), {"eps": -1.0}, "eps"),
        (torch.ones(8), {"out_dtype": torch.int32}, "out_dtype"),
    ],
)
def test_called_directly_with_wrong_arguments_it_refuses(
    weight: torch.Tensor, options: dict[str, object], argument: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        te_fl_acme.rmsnorm_fwd(torch.ones(2, 8), weight, **options)
    assert caught.value.argument == argument


def test_what_it_registers_fits_the_contracts() -> None:
    registry = OpRegistry()
    te_fl_acme.register(registry)
    for op_name in OPERATORS:
        (impl,) = registry.get_implementations(op_name)
        assert (impl.impl_id, impl.vendor) == ("vendor.acme", "acme")


def test_the_installed_entry_point_names_this_module() -> None:
    (point,) = entry_points(group="te_fl.plugin", name="acme")
    assert point.load() is te_fl_acme


@pytest.mark.parametrize(
    ("dtype", "served_by"),
    [
        (torch.float32, "vendor.acme"),
        (torch.bfloat16, "vendor.acme"),
        (torch.float64, "reference.torch"),
    ],
)
def test_only_the_dtypes_it_states_come_to_it(dtype: torch.dtype, served_by: str) -> None:
    manager = OpManager()
    x, w = torch.ones(2, 8, dtype=dtype), torch.ones(8, dtype=dtype)
    chosen = manager.explain("rmsnorm_fwd", x, w).accepted
    assert next(it.impl_id for it in chosen if it.kind != "flagos") == served_by


def test_as_a_traceable_implementation_it_takes_fake_tensors() -> None:
    with FakeTensorMode():
        y, rsigma = te_fl_acme.rmsnorm_fwd(torch.empty(3, 8), torch.empty(8))
    assert (y.shape, rsigma.shape) == ((3, 8), (3,))


def test_as_a_deterministic_implementation_it_repeats_its_bits() -> None:
    x, w, dy = torch.randn(64, 96), torch.randn(96), torch.randn(64, 96)
    y, rsigma = te_fl_acme.rmsnorm_fwd(x, w)
    first = te_fl_acme.rmsnorm_bwd(dy, x, rsigma, w)
    again = te_fl_acme.rmsnorm_bwd(dy, x, rsigma, w)
    assert torch.equal(te_fl_acme.rmsnorm_fwd(x, w)[0], y)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

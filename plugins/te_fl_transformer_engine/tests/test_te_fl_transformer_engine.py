"""Tests the adapters against the contracts, over a stand-in for Transformer Engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import te_fl_transformer_engine
import torch
from te_fl_transformer_engine import IMPL_ID, OPERATORS, operators
from torch import Tensor

from transformer_engine_fl import (
    ArgumentError,
    NotSupportedError,
    OpManager,
    OpRegistry,
    PluginError,
    ops,
)
from transformer_engine_fl.core.contract import Between
from transformer_engine_fl.integrations.tex import ADAPTERS
from transformer_engine_fl.testing import compare

BLOCKS = ((1, 256), (2, 128), (4, 64), (8, 32), (16, 16), (128, 8), (16384, 4))
"""(the most keys, the rows that a block of the fused softmax processes for up to so many)."""

Calls = list[tuple[str, tuple[Any, ...]]]


DType = SimpleNamespace(kFloat32=4, kFloat16=5, kBFloat16=6)

NAMES = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}


def stand_in(calls: Calls) -> ModuleType:
    """A module with the functions of ``transformer_engine_torch``: float64, then rounded."""
    module = ModuleType("transformer_engine_torch")
    module.__file__ = f"transformer_engine_torch{EXTENSION_SUFFIXES[0]}"
    module.DType = DType  # type: ignore[attr-defined]

    def exact(name: str, *args: Any, **kwargs: Any) -> Any:
        found = ops.CATALOGUE[name].oracle(*args, **kwargs)
        return (found.low + found.high) / 2 if isinstance(found, Between) else found

    def norm_fwd(name: str, x: Tensor, params: tuple[Any, ...], rest: tuple[Any, ...]) -> Any:
        eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma = rest
        assert ln_out is None
        assert quantizer is None
        assert sm_margin == 0
        assert x.ndim == 2
        results = exact(name, x, *params, eps, zero_centered_gamma=zero_centered_gamma)
        return [results[0].to(NAMES[otype]), *(it.float() for it in results[1:])]

    def rmsnorm_fwd(input: Tensor, weight: Tensor, *rest: Any) -> Any:
        output, rsigma = norm_fwd("rmsnorm_fwd", input, (weight,), rest)
        return [output, None, rsigma]

    def layernorm_fwd(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        assert bias is not None  # "Gamma and Beta must have the same shape."
        return norm_fwd("layernorm_fwd", input, (weight, bias), rest)

    def norm_bwd(name: str) -> Any:
        def backward(dy: Tensor, x: Tensor, *rest: Any) -> Any:
            *saved, sm_margin, zero_centered_gamma = rest
            assert sm_margin == 0
            assert x.ndim == 2
            assert isinstance(zero_centered_gamma, bool)
            results = exact(name, dy, x, *saved, zero_centered_gamma=zero_centered_gamma)
            return [it.to(x.dtype) for it in results]

        return backward

    def activation(name: str) -> Any:
        def forward(input: Tensor, quantizer: Any) -> Tensor:
            assert quantizer is None
            return exact(name, input).to(input.dtype)

        return forward

    def derivative(name: str) -> Any:
        def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Tensor:
            assert quantizer is None
            return exact(name, grad, fwd_input).to(fwd_input.dtype)

        return backward

    def softmax(name: str) -> Any:
        triangular, aligned = "upper_triang" in name, "aligned" in name

        def check(scores: Tensor) -> None:
            assert scores.dtype in (torch.float16, torch.bfloat16)
            assert scores.ndim == (3 if triangular else 4)
            keys = scores.shape[-1]
            if keys > 64 or not triangular:
                assert keys % 8 == 0
            if not aligned:
                counted = len(scores) if triangular else scores.shape[2]
                block = next(rows for longest, rows in BLOCKS if keys <= longest)
                if counted % block:
                    raise RuntimeError("Unsupported shape.")

        def forward(input: Tensor, *rest: Any) -> Tensor:
            check(input)
            if len(rest) == 2:
                mask, scale = rest
                assert mask.dtype == torch.uint8
                assert mask.shape[0] in (1, input.shape[0])
                assert mask.shape[1:] == (1, *input.shape[2:])
                rest = (mask == 1, scale)  # values other than 1 hide nothing
            return exact(name, input, *rest).to(input.dtype)

        def backward(output_grad: Tensor, softmax_output: Tensor, scale: float) -> Tensor:
            check(softmax_output)
            result = exact(name, output_grad, softmax_output, scale).to(softmax_output.dtype)
            return output_grad.copy_(result)  # in place, as the kernels do

        return backward if name.endswith("_backward") else forward

    functions: dict[str, Any] = {"rmsnorm_fwd": rmsnorm_fwd, "layernorm_fwd": layernorm_fwd}
    for name in OPERATORS:
        if "softmax" in name:
            functions[name] = softmax(name)
        elif "norm" in name and name not in functions:
            functions[name] = norm_bwd(name)
        elif name not in functions:
            known = ADAPTERS[name].parameters == ("input", "quantizer")
            functions[name] = activation(name) if known else derivative(name)

    def recorded(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append((name, args))
            return function(*args)

        return call

    for name, function in functions.items():
        setattr(module, name, recorded(name, function))
    return module


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The calls of the stand-in, which replaces Transformer Engine."""
    seen: Calls = []
    parent, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    for module in (parent, pytorch, stand_in(seen)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    operators.extension.cache_clear()
    yield seen
    operators.extension.cache_clear()


SAMPLES = [
    pytest.param(name, sample, id=f"{name}-{dtype}-{sample.label}")
    for name in OPERATORS
    for dtype in ("float32", "bfloat16")
    for sample in ops.CATALOGUE[name].samples(dtype, "cpu")
]


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_values_are_the_contracts_or_the_call_is_declined(
    name: str, sample: Any, calls: Calls
) -> None:
    contract = ops.CATALOGUE[name]
    before = [it.clone() if isinstance(it, Tensor) else it for it in sample.args]
    if set(sample.kwargs) - {"zero_centered_gamma"}:
        pytest.skip("an option that dispatch does not pass on to it")
    try:
        results = getattr(operators, name)(*sample.args, **sample.kwargs)
    except NotSupportedError:
        assert calls == []
        return
    shapes = contract.shapes(*sample.args, **sample.kwargs)
    expected = contract.oracle(*sample.args, **sample.kwargs)
    if isinstance(results, Tensor):
        results, shapes, expected = (results,), (shapes,), (expected,)
    given = [str(it.dtype).removeprefix("torch.") for it in sample.args if isinstance(it, Tensor)]
    assert len(results) == len(expected)
    for result, shape, value in zip(results, shapes, expected, strict=True):
        assert (result.shape, result.dtype) == (shape.shape, shape.dtype)
        assert result.is_contiguous()
        assert not result.requires_grad
        own = str(result.dtype).removeprefix("torch.")
        tolerance = contract.tolerance_for(*given, own)
        assert compare(result, value, tolerance).ratio <= 1
    for kept, argument in zip(before, sample.args, strict=True):
        if isinstance(argument, Tensor):
            same = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(argument, kept, **same, msg="an argument was written")


def test_the_typical_sample_of_each_operator_is_served(calls: Calls) -> None:
    for name in OPERATORS:
        typical = next(iter(ops.CATALOGUE[name].samples("bfloat16", "cpu")))
        getattr(operators, name)(*typical.args, **typical.kwargs)


def test_square_score_matrices_are_padded_to_a_whole_block_of_batches(calls: Calls) -> None:
    scores = torch.randn(2, 3, 40, 40).half()
    output = operators.scaled_upper_triang_masked_softmax_forward(scores)
    assert output.shape == scores.shape
    assert calls[-1][1][0].shape == (8, 40, 40)
    operators.scaled_upper_triang_masked_softmax_backward(scores, output)
    assert [it.shape for it in calls[-1][1][:2]] == [(8, 40, 40)] * 2


def test_a_mask_of_all_heads_is_passed_as_it_is(calls: Calls) -> None:
    scores, mask = torch.randn(2, 3, 16, 16).half(), torch.rand(2, 1, 16, 16) < 0.3
    operators.scaled_masked_softmax_forward(scores, mask)
    given = calls[-1][1]
    assert (given[0].shape, given[1].shape) == (scores.shape, mask.shape)
    operators.scaled_masked_softmax_forward(scores, mask.expand(scores.shape).clone())
    assert [it.shape for it in calls[-1][1][:2]] == [(1, 1, 96, 16)] * 2


def test_dtypes_with_wrong_values_on_a_device_are_not_registered() -> None:
    registry = OpRegistry()
    te_fl_transformer_engine.register(registry)
    dtypes = {
        name: registry.get_implementation(name, IMPL_ID).supported_dtypes
        for name in ("dgelu", "dglu", "gelu")
    }
    assert dtypes == {
        "dgelu": {"float16"},
        "dglu": {"bfloat16", "float16"},
        "gelu": {"float32", "bfloat16", "float16"},
    }


def test_a_norm_is_called_by_rows_with_the_modules_own_dtype(calls: Calls) -> None:
    x, w = torch.randn(2, 3, 8).bfloat16(), torch.ones(8).bfloat16()
    operators.rmsnorm_fwd(x, w, 1e-3, zero_centered_gamma=True)
    ((name, args),) = calls
    assert name == "rmsnorm_fwd"
    assert args[0].shape == (6, 8)
    assert args[2:] == (1e-3, None, None, DType.kBFloat16, 0, True)


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("gelu", (torch.ones(2, dtype=torch.float64),), "float64 is not supported"),
        ("gelu", (torch.ones(0),), "empty tensors"),
        ("gelu", (torch.ones(2, device="meta"),), "a meta tensor has no data"),
        ("dgelu", (torch.ones(2).bfloat16(), torch.ones(2)), "the same dtype"),
        ("rmsnorm_fwd", (torch.ones(2, 8).bfloat16(), torch.ones(8)), "weight is torch.float32"),
        ("scaled_softmax_forward", (torch.ones(1, 1, 2, 8),), "needs half precision"),
        ("scaled_softmax_forward", (torch.ones(1, 1, 2, 9).half(),), "multiples of 8; got 9"),
        ("scaled_softmax_forward", (torch.ones(2, 15, 8).half(),), "multiple of 32; got 30"),
        ("scaled_softmax_backward", (torch.ones(2, 7, 64).half(),) * 2, "multiple of 8; got 14"),
        (
            "scaled_masked_softmax_forward",
            (torch.ones(3, 301, 304).half(), torch.zeros(301, 304).bool()),
            "multiple of 4; got 903",
        ),
        (
            "scaled_upper_triang_masked_softmax_forward",
            (torch.ones(4, 65, 65).half(),),
            "multiples of 8; got 65",
        ),
        (
            "scaled_aligned_causal_masked_softmax_forward",
            (torch.ones(4, 64, 64).half(),),
            "needs 4 dimensions",
        ),
    ],
)
def test_what_the_kernels_cannot_do_is_declined_before_they_are_called(
    name: str, args: tuple[Any, ...], reason: str, calls: Calls
) -> None:
    with pytest.raises(NotSupportedError, match=reason):
        getattr(operators, name)(*args)
    assert calls == []


def test_called_directly_with_wrong_arguments_it_refuses(calls: Calls) -> None:
    with pytest.raises(ArgumentError, match="weight"):
        operators.rmsnorm_fwd(torch.ones(2, 8), torch.ones(5))
    assert calls == []


def test_what_it_registers_fits_the_contracts_and_is_in_the_list() -> None:
    registry = OpRegistry()
    te_fl_transformer_engine.register(registry)
    assert set(registry.list_operators()) == set(OPERATORS) == set(ADAPTERS)
    for name in OPERATORS:
        (impl,) = registry.get_implementations(name)
        assert (impl.impl_id, impl.vendor) == (IMPL_ID, "transformer_engine")


def test_each_function_fits_its_contract(calls: Calls) -> None:
    from transformer_engine_fl.core.contract import fit

    for name in OPERATORS:
        fit(ops.CATALOGUE[name].signature, getattr(operators, name), name)


def test_without_transformer_engine_nothing_serves_and_explain_says_why() -> None:
    if "transformer_engine" in sys.modules or te_fl_transformer_engine.is_available() is True:
        pytest.skip("there is one here")
    registry = OpRegistry()
    te_fl_transformer_engine.register(registry)
    manager = OpManager(registry, builtins=False, plugins=False)
    assert "Transformer Engine is not installed" in str(manager.explain("rmsnorm_fwd"))


def test_a_module_of_that_name_that_is_not_nvidias_is_not_called(
    calls: Calls, tmp_path: Path
) -> None:
    sys.modules["transformer_engine_torch"].__file__ = str(tmp_path / "anothers.py")
    with pytest.raises(PluginError, match=r"anothers\.py, not NVIDIA's"):
        _ = operators.gelu


def test_a_function_that_a_release_has_not_is_named(calls: Calls) -> None:
    del sys.modules["transformer_engine_torch"].silu  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="has no 'silu'"):
        _ = operators.silu


def test_the_installed_entry_point_names_this_module() -> None:
    points = entry_points(group="te_fl.plugin", name="transformer_engine")
    if not points:
        pytest.skip("not installed, only on the path")
    (point,) = points
    assert point.load() is te_fl_transformer_engine

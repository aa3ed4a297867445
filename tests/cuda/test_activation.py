"""Activations in CUDA C++: what the samples of the contracts do not cover."""

from __future__ import annotations

import pytest
import torch
from against_contract import RECTIFIERS, checking, with_nan
from torch import Tensor

from transformer_engine_fl.backends.vendor.cuda import activation
from transformer_engine_fl.backends.vendor.cuda.activation import CLAMPED, KINDS
from transformer_engine_fl.core.errors import ArgumentError

check = checking(activation)

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("op", "args", "named"),
    [
        ("gelu", (torch.ones(4, dtype=torch.int32),), "input"),
        ("dgelu", (torch.ones(4), torch.ones(5)), "grad"),
        ("swiglu", (torch.ones(2, 5),), "input"),
        ("dswiglu", (torch.ones(2, 6), torch.ones(2, 6)), "grad"),
        ("clamped_swiglu", (torch.ones(2, 6), -1.0), "limit"),
        ("dbias_dgelu", (torch.ones(()), torch.ones(())), "fwd_input"),
    ],
)
@pytest.mark.usefixtures("no_launch")
def test_wrong_arguments_are_named(op: str, args: tuple[object, ...], named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        getattr(activation, op)(*args)
    assert raised.value.argument == named


def test_every_kind_is_compiled_ahead() -> None:
    from transformer_engine_fl.backends.vendor.cuda._launch import Limits

    sources = activation.representative_sources(Limits(9, 0, 132, 232_448, 233_472))
    assert {dict(source.defines).get("KIND") for source, _ in sources} >= {*KINDS, CLAMPED}


def test_a_limit_that_float32_does_not_hold_is_refused_unless_there_is_none(device: str) -> None:
    x = torch.full((2, 6), 1e30, device=device)
    assert torch.equal(
        activation.clamped_swiglu(x, torch.inf),
        activation.clamped_swiglu(x, torch.finfo(torch.float32).max),
    )
    with pytest.raises(ArgumentError) as raised:
        activation.clamped_swiglu(x, 1e39)
    assert raised.value.argument == "limit"


@pytest.mark.parametrize("op", RECTIFIERS)
def test_the_gradient_of_a_rectifier_passes_where_its_input_is_nan(op: str, device: str) -> None:
    check(op, *with_nan(op, device))


# ------------------------------------------------------------------------- on a device


def values(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 2047, 2048, 2049, 100_003])
def test_tails_of_elementwise_tensors(size: int, dtype: torch.dtype) -> None:
    x, grad = values(size + 3, dtype=dtype, seed=1), values(size + 3, dtype=dtype, seed=2)
    for skip in (0, 1, 2):  # aligned and unaligned memory
        args = grad[skip : skip + size], x[skip : skip + size]
        check("gelu", args[1])
        check("dgelu", *args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 96, 1000, 5003, 14336])
def test_gated_activations_of_strided_rows(columns: int, dtype: torch.dtype) -> None:
    x = values(37, 2 * columns + 24, dtype=dtype, seed=3)[:, 8 : 2 * columns + 8]
    grad = values(37, columns + 3, dtype=dtype, seed=4)[:, :columns]
    check("swiglu", x)
    check("dswiglu", grad, x)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 8), (5, 1), (3000, 7), (4097, 1024), (513, 14336), (33, 65536)]
)
def test_bias_gradients_of_every_width(rows: int, columns: int, dtype: torch.dtype) -> None:
    args = values(rows, columns, dtype=dtype, seed=5), values(rows, columns, dtype=dtype, seed=6)
    found = check("dbias_dgelu", *args)
    again = activation.dbias_dgelu(*args)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 40), (2, 512), (3, 512), (37, 40), (11, 1100), (70, 1101)]
)
def test_bias_gradients_of_strips_of_many_rows(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation.WithBias, "groups", lambda self, rows: 1)
    generator = torch.Generator().manual_seed(rows)
    grad, x = (torch.randn(rows, columns, generator=generator).to(device) for _ in range(2))
    check("dbias_dgelu", grad.to(grad_dtype), x.to(dtype))


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed() -> None:
    x, grad = (values(256, 1024, dtype=torch.bfloat16, seed=seed) for seed in (7, 8))
    activation._kernels.clear()  # so the capture includes loading
    activation._bias_kernels.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = activation.gelu(x), *activation.dbias_dgelu(grad, x)
    for seed in (9, 10):
        x.copy_(values(256, 1024, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        expected = activation.gelu(x), *activation.dbias_dgelu(grad, x)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))

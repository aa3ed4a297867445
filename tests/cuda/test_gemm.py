"""Matrix products by the libraries: the arguments that they get, and the calls declined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cuda_emulation
import grouped_calls
import pytest
import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends._tf32 import uses_tf32
from transformer_engine_fl.backends.vendor.cuda import _launch, gemm
from transformer_engine_fl.backends.vendor.cuda._arguments import KnownCalls
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError

LOW, FULL = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = {"A_scale_inv": torch.full((1,), 0.5), "B_scale_inv": torch.full((1,), 0.25)}


def matrix(rows: int, columns: int, dtype: torch.dtype = LOW, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gelu": True}, "GELU"),
        ({"grad": True, "gelu": True, "gelu_input": matrix(16, 32)}, "GELU"),
        ({"out_dtype": torch.float16}, "does not store products of torch.bfloat16"),
        ({"bias": torch.ones(32)}, "the bias must have the dtype"),
        ({"bias": torch.ones(64, dtype=LOW)[::2]}, "a contiguous bias only"),
        ({"bias": torch.ones(1, dtype=LOW).expand(32)}, "a contiguous bias only"),
        ({"bias": torch.ones(32), "out_dtype": FULL}, "the bias must have the dtype"),
        (
            {"bias": torch.ones(32, dtype=LOW), "accumulate_into": matrix(16, 32)},
            "a bias and accumulate",
        ),
        ({"accumulate_into": matrix(16, 32)}, "rounds a product"),
        ({"grad": True, "bias_grad": True, "out_dtype": torch.float16}, "with a single rounding"),
        ({"accumulate_into": torch.ones(16, 64)[:, ::2].t().t().double()}, "torch.float64"),
    ],
)
def test_what_takes_more_than_one_call_is_left_to_others(
    options: dict[str, Any], reason: str
) -> None:
    with cuda_emulation.running(), pytest.raises(NotSupportedError, match=reason):
        gemm.generic_gemm(matrix(32, 48), matrix(16, 48), **options)


def test_factors_beyond_float32_are_left_to_others_unless_the_product_is_of_float64() -> None:
    x = matrix(2, 4, FULL)
    with cuda_emulation.running():
        for options in ({"alpha": 1e39}, {"beta": -1e39, "accumulate_into": torch.ones(2, 2)}):
            with pytest.raises(NotSupportedError, match="must fit in float32"):
                gemm.generic_gemm(x, x, **options)  # type: ignore[arg-type]
        with pytest.raises(NotSupportedError, match="must fit in float32"):
            gemm.te_general_grouped_gemm([x], [x], alpha=1e39)
        product, *_ = gemm.generic_gemm(x.double(), x.double(), alpha=1e39)
        torch.testing.assert_close(product, x.double() @ x.double().t() * 1e39)
        product, *_ = gemm.generic_gemm(x, x, alpha=torch.inf)
        assert torch.equal(product, x @ x.t() * torch.inf)  # type: ignore[arg-type]


def test_what_inference_mode_has_made_is_refused_after_a_like_call_too() -> None:
    a, b = matrix(4, 8, FULL), matrix(3, 8, FULL)
    with torch.inference_mode():
        into = torch.zeros(3, 4)
    with cuda_emulation.running():
        for _ in range(2):
            with pytest.raises(ArgumentError, match="created in inference mode"):
                gemm.generic_gemm(a, b, accumulate_into=into)
            gemm.generic_gemm(a, b, accumulate_into=torch.zeros(3, 4))
        with torch.inference_mode():
            gemm.generic_gemm(a, b, accumulate_into=into)
    torch.testing.assert_close(into, b @ a.t())


@pytest.mark.parametrize(("columns", "terms"), [(1, 48), (32, 1)])
def test_a_bias_that_the_library_adds_to_a_rounded_product_is_left_to_others(
    columns: int, terms: int
) -> None:
    a, b, bias = matrix(columns, terms), matrix(16, terms), torch.ones(columns, dtype=LOW)
    with cuda_emulation.running(), pytest.raises(NotSupportedError, match="N > 1 and K > 1"):
        gemm.generic_gemm(a, b, bias=bias)


@pytest.mark.parametrize(
    ("a", "b", "options", "reason"),
    [
        ((32, 48, E5M2), (16, 48, E5M2), {}, "float8_e5m2 by float8_e5m2"),
        ((32, 40, E4M3), (16, 40, E4M3), {}, "multiples of 16"),
        ((40, 48, E4M3), (16, 48, E4M3), {}, "multiples of 16"),
        ((48, 32, E4M3), (16, 48, E4M3), {"transa": False}, "needs transa=True, transb=False"),
        ((32, 48, E4M3), (16, 48, E4M3), {"alpha": 2.0}, "no alpha"),
        ((32, 48, E4M3), (16, 48, E4M3), {"accumulate_into": matrix(16, 32)}, "no accumulation"),
        ((32, 48, E4M3), (16, 48, E4M3), {"out_dtype": torch.float64}, "float64"),
        ((32, 48, E4M3), (16, 48, E4M3), {"A_scale_inv": torch.ones(32, 1)}, "block scales"),
        (
            (32, 48, E4M3),
            (16, 48, E4M3),
            {"out_dtype": FULL, "bias": torch.ones(32)},
            "bias of a float8 GEMM with torch.float32",
        ),
    ],
)
def test_float8_that_the_library_does_not_take_is_left_to_others(
    a: Any, b: Any, options: dict[str, Any], reason: str
) -> None:
    with cuda_emulation.running(), pytest.raises(NotSupportedError, match=reason):
        gemm.generic_gemm(matrix(*a), matrix(*b), **{**SCALES, **options})


def test_float8_that_is_not_aligned_is_left_to_others() -> None:
    wide = matrix(32, 56, E4M3)
    with cuda_emulation.running(), pytest.raises(NotSupportedError, match="aligned to 16 bytes"):
        gemm.generic_gemm(wide[:, :48], matrix(16, 48, E4M3), **SCALES)


@pytest.mark.parametrize("options", [{"accumulate_into": matrix(16, 32, FULL)}, {"alpha": 2.0}])
def test_before_torch_2_10_wide_sums_are_left_to_others(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with cuda_emulation.running(), monkeypatch.context() as patched:
        patched.setattr(gemm, "_addmm_wide", None)
        patched.setattr(gemm, "_known", KnownCalls())
        with pytest.raises(NotSupportedError, match="no such products"):
            gemm.generic_gemm(matrix(32, 48), matrix(16, 48), out_dtype=FULL, **options)


def test_float32_is_not_multiplied_as_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "uses_tf32", lambda: True)
    with cuda_emulation.running(), pytest.raises(NotSupportedError, match="TF32"):
        gemm.generic_gemm(matrix(32, 48, FULL), matrix(16, 48, FULL))


def test_the_use_of_tf32_follows_torchs_matmul_precision() -> None:
    assert not uses_tf32()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert uses_tf32()
    finally:
        torch.set_float32_matmul_precision(before)
    assert not uses_tf32()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_parts_of_a_sum_are_not_rounded_and_the_switch_is_as_it_was(
    name: str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = f"allow_{name}_reduced_precision_reduction"
    cublas = torch.backends.cuda.matmul
    at_first = getattr(cublas, switch)
    seen = []
    own = torch.mm

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(getattr(cublas, switch))
        return own(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", watched)
    dtype = {"bf16": LOW, "fp16": torch.float16}[name]
    setattr(cublas, switch, before)
    try:
        with cuda_emulation.running():
            gemm.generic_gemm(matrix(32, 48, dtype), matrix(16, 48, dtype))
        assert seen == [False]
        assert getattr(cublas, switch) is before
    finally:
        setattr(cublas, switch, at_first)


@pytest.mark.parametrize(
    ("dtype", "options", "function"),
    [
        (LOW, {}, "mm"),
        (LOW, {"bias": torch.ones(32, dtype=LOW)}, "addmm"),
        (LOW, {"alpha": 2.0}, "addmm"),
        (FULL, {"accumulate_into": matrix(16, 32, FULL)}, "addmm"),
    ],
)
def test_a_product_is_one_call_and_nothing_else(
    dtype: torch.dtype, options: dict[str, Any], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    called: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            called.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    with cuda_emulation.running(), Watching():
        gemm.generic_gemm(matrix(32, 48, dtype), matrix(16, 48, dtype), **options)
    views = {"t", "detach", "randn", "_to_copy", "empty", "empty_strided"}
    assert [name for name in called if name not in views] == [function]


@pytest.mark.parametrize("way", grouped_calls.WAYS)
def test_groups_like_those_of_a_call_before(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_emulation.running():
        grouped_calls.check(gemm, way, "cpu", monkeypatch, copied=False)


GROUPS, ROWS, WIDE, DEEP = 16, 96, 24, 40
SPLITS = {"even": [6] * 16, "uneven": [1, 11] * 8, "empty": [0, 0, 50, 0, 46, *[0] * 11]}


def grouped_call(way: str, splits: list[int], device: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and options of a call that torch multiplies at once."""
    x = matrix(ROWS, DEEP).to(device)
    dy = matrix(ROWS, WIDE, seed=1).to(device)
    weights = [*matrix(GROUPS * WIDE, DEEP, seed=2).to(device).split(WIDE)]
    if way == "wgrad":
        return [[x], [dy], splits], {"transa": False, "transb": True, "grad": True}
    if way == "dgrad":
        return [weights, [dy], splits], {"transa": False, "grad": True, "bias_grad": True}
    return [weights, [x], splits], {}


@pytest.fixture
def calls_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of groups that torch is asked to multiply in each call."""
    found: list[int] = []
    grouped_mm = torch.nn.functional.grouped_mm

    def noted(*args: Any, offs: Tensor) -> Tensor:
        found.append(offs.numel())
        return grouped_mm(*args, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", noted)
    return found


def assert_grouped(args: list[Any], options: dict[str, Any]) -> None:
    expected = ops.te_general_grouped_gemm.oracle(*args, **options)
    found = gemm.te_general_grouped_gemm(*args, **options)
    into = options.get("accumulate_into")
    assert (found[0] is None) == (into is not None)
    for one, two in zip(
        [*found, *(into or ())], [*expected[:3], *(expected[3] or ())], strict=False
    ):
        if one is not None:
            assert one.dtype == options.get("out_dtype", (into or args[1])[0].dtype)
            assert one.is_contiguous()
            assert torch.allclose(one.double(), two, rtol=2**-8, atol=0.01)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("way", ["forward", "dgrad", "wgrad"])
def test_many_groups_are_one_call(
    way: str, split: str, device: str, calls_at_once: list[int]
) -> None:
    args, options = grouped_call(way, SPLITS[split], device)
    for _ in range(2):  # the second call is repeated from the first
        assert_grouped(args, options)
    # torch's result for a group without terms is not always zero.
    assert calls_at_once == ([] if (way, split) == ("wgrad", "empty") else [GROUPS] * 2)


def _unlike(x: Tensor, *, columns: int = 0, start: int = 0) -> Tensor:
    """The same values in rows ``columns`` elements further apart, ``start`` after an allocation."""
    rows, own = x.shape
    memory = torch.zeros(start + rows * (own + columns), dtype=x.dtype)
    return memory[start:].view(rows, own + columns)[:, :own].copy_(x)


def _weights(rows: int, apart: int, start: int = 0) -> list[Tensor]:
    """Views of one tensor, each beginning ``apart`` elements after the one before."""
    memory = matrix(1, start + GROUPS * apart + rows * DEEP, seed=2)
    return [memory.as_strided((rows, DEEP), (DEEP, 1), start + i * apart) for i in range(GROUPS)]


WHOLE = WIDE * DEEP
# Calls whose groups are multiplied one by one: of a forward here, of a wgrad below.
LEFT_ALONE: dict[str, Callable[[list[Any]], list[Any]]] = {
    "weights of their own": lambda it: [[w.clone() for w in it[0]], *it[1:]],
    "weights in another order": lambda it: [[*it[0][1:], it[0][0]], *it[1:]],
    "one weight that lies otherwise": lambda it: [
        [*it[0][:-1], it[0][-1].as_strided((WIDE, DEEP), (8, 1))], *it[1:],
    ],
    "weights whose address is odd": lambda it: [_weights(WIDE, WHOLE, 4), *it[1:]],
    "weights an odd distance apart": lambda it: [_weights(WIDE, WHOLE + 4), *it[1:]],
    "weights of 23 rows": lambda it: [_weights(23, 23 * DEEP), *it[1:]],
    "float16": lambda it: [[w.half() for w in it[0]], [it[1][0].half()], it[2]],
    "few groups": lambda it: [it[0][:4], [it[1][0][:24]], [6] * 4],
    "no rows": lambda it: [it[0], [it[1][0][:0]], [0] * GROUPS],
    "rows an odd distance apart": lambda it: [it[0], [_unlike(it[1][0], columns=4)], it[2]],
    "rows at an odd address": lambda it: [it[0], [_unlike(it[1][0], start=4)], it[2]],
    "rows that lie over each other": lambda it: [
        it[0], [matrix(1, ROWS * 8 + DEEP)[0].as_strided((ROWS, DEEP), (8, 1))], it[2],
    ],
}  # fmt: skip
WGRADS_LEFT_ALONE: dict[str, Callable[[list[Any]], list[Any]]] = {
    "rows at an odd address": lambda it: [[_unlike(it[0][0], start=4)], *it[1:]],
    "no columns": lambda it: [[it[0][0][:, :0]], *it[1:]],
}


@pytest.mark.parametrize(
    ("way", "change"),
    [("forward", it) for it in LEFT_ALONE] + [("wgrad", it) for it in WGRADS_LEFT_ALONE],
)
def test_groups_that_torch_does_not_read_at_once_are_a_call_each(
    way: str, change: str, calls_at_once: list[int]
) -> None:
    args, options = grouped_call(way, SPLITS["uneven"], "cpu")
    args = (LEFT_ALONE if way == "forward" else WGRADS_LEFT_ALONE)[change](args)
    with cuda_emulation.running():
        assert_grouped(args, options)
    assert calls_at_once == []


def test_a_weight_whose_memory_ends_with_it_is_no_part_of_the_others(
    calls_at_once: list[int],
) -> None:
    args, options = grouped_call("forward", SPLITS["even"], "cpu")
    memory = torch.cat([it.view(torch.int16) for it in args[0]]).numpy()
    first, *others = torch.from_numpy(memory).view(LOW).split(WIDE)
    args[0] = [torch.from_numpy(memory[:WIDE]).view(LOW), *others]
    assert args[0][0].data_ptr() == first.data_ptr()
    with cuda_emulation.running():
        assert_grouped(args, options)
    assert calls_at_once == []


def test_float8_is_a_call_each(calls_at_once: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[torch.dtype] = []
    monkeypatch.setattr(gemm, "_multiply", lambda op, out, *rest: multiplied.append(out.dtype))
    weights = [*matrix(GROUPS * 32, 48, E4M3).split(32)]
    scales = {name: [it] * count for (name, it), count in zip(SCALES.items(), (16, 1), strict=True)}
    with cuda_emulation.running():
        gemm.te_general_grouped_gemm(weights, [matrix(ROWS, 48, E4M3)], [6] * 16, **scales)
    assert multiplied == [LOW] * GROUPS
    assert calls_at_once == []


def test_what_is_accumulated_is_a_call_each(calls_at_once: list[int]) -> None:
    for way, rows in (("forward", ROWS), ("wgrad", GROUPS * WIDE)):
        args, options = grouped_call(way, SPLITS["even"], "cpu")
        columns = WIDE if way == "forward" else DEEP
        into = matrix(rows, columns, FULL, seed=5)
        with cuda_emulation.running():
            assert_grouped(args, options | {"accumulate_into": [into]})
    assert calls_at_once == []


def test_more_groups_than_torch_takes_are_a_call_each(calls_at_once: list[int]) -> None:
    weights = [*matrix(1024 * 8, 8, seed=2).split(8)]
    with cuda_emulation.running():
        assert_grouped([weights, [matrix(1024, 8)], [1] * 1024], {})
    assert calls_at_once == []


@pytest.mark.parametrize(
    "options", [{"alpha": 2.0}, {"out_dtype": FULL}, {"bias": [torch.ones(WIDE, dtype=LOW)] * 16}]
)
def test_what_torch_does_not_do_at_once_is_a_call_each(
    options: dict[str, Any], calls_at_once: list[int]
) -> None:
    args, _ = grouped_call("forward", SPLITS["even"], "cpu")
    with cuda_emulation.running():
        assert_grouped(args, options)
    assert calls_at_once == []


def test_more_rows_than_torch_counts_are_a_call_each(
    calls_at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "_MOST_ROWS", ROWS - 1)
    args, options = grouped_call("forward", SPLITS["even"], "cpu")
    with cuda_emulation.running():
        assert_grouped(args, options)
    assert calls_at_once == []


@pytest.mark.parametrize("major", [8, 12])
def test_devices_without_a_kernel_for_groups_get_a_call_each(
    major: int, calls_at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, options = grouped_call("forward", SPLITS["even"], "cpu")
    with cuda_emulation.running():
        other = dataclasses.replace(_launch.limits(0), major=major)
        monkeypatch.setattr(_launch, "limits", lambda device: other)
        assert_grouped(args, options)
    assert calls_at_once == []


# ------------------------------------------------------------------------- on a device


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [LOW, FULL])
def test_a_float8_product_has_the_bits_of_the_library(out_dtype: torch.dtype) -> None:
    a, b = matrix(4096, 2048, E4M3).cuda(), matrix(1024, 2048, E4M3, 1).cuda()
    scales = {name: it.cuda() for name, it in SCALES.items()}
    D, *_ = gemm.generic_gemm(a, b, out_dtype=out_dtype, **scales)
    direct = torch._scaled_mm(
        b, a.t(), scales["B_scale_inv"], scales["A_scale_inv"], out_dtype=out_dtype
    )
    assert D is not None
    assert torch.equal(D, direct)


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [64, 4096, 100_000])
@pytest.mark.parametrize("dtype", [LOW, torch.float16])
def test_long_sums_are_rounded_once(dtype: torch.dtype, terms: int) -> None:
    a, b = matrix(128, terms, dtype).cuda(), matrix(64, terms, dtype, 1).cuda()
    for options in ({}, {"out_dtype": FULL}, {"accumulate_into": torch.zeros(64, 128).cuda()}):
        D, *_ = gemm.generic_gemm(a, b, **options)
        found = options.get("accumulate_into", D)
        expected = b.double() @ a.double().t()
        rounded = torch.finfo(found.dtype).eps / 2 if found.dtype != FULL else 0
        error = (found.double() - expected).abs()
        assert bool((error <= rounded * expected.abs() * 1.01 + 3e-4 * terms**0.5).all())


@pytest.mark.gpu
def test_products_can_be_captured_and_replayed() -> None:
    a, b = matrix(256, 512).cuda(), matrix(64, 512, seed=1).cuda()
    bias = torch.ones(256, dtype=LOW, device="cuda")
    gemm.generic_gemm(a, b, bias=bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        D, *_ = gemm.generic_gemm(a, b, bias=bias)
    b.copy_(matrix(64, 512, seed=2))
    graph.replay()
    expected = ops.generic_gemm.oracle(a, b, bias=bias)[0]
    assert D is not None
    assert torch.allclose(D.double(), expected, rtol=2**-8, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["forward", "dgrad", "wgrad"])
def test_many_groups_can_be_captured_and_replayed(way: str) -> None:
    args, options = grouped_call(way, SPLITS["uneven"], "cuda")
    gemm.te_general_grouped_gemm(*args, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        D, *_ = gemm.te_general_grouped_gemm(*args, **options)
    args[1][0].mul_(-3)
    graph.replay()
    assert D is not None
    again, *_ = gemm.te_general_grouped_gemm(*args, **options)
    assert again is not None
    assert torch.equal(D, again)
    assert_grouped(args, options)

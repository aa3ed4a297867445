"""Triton's matrix products against the contract: each path through the kernels, arguments."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import direct_launches
import grouped_calls
import pytest
import torch
from against_contract import checking
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.flagos import _launch, _numbers
from transformer_engine_fl.backends.flagos import gemm as flagos
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.testing.arguments import clone, tensors

check = checking(flagos)

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
TRANSPOSES = tuple(itertools.product((True, False), repeat=2))
SCALES = tuple(itertools.product(("whole", "rows", "squares", "exponents"), repeat=2))
# More tiles than programs, more rows of tiles than a group of them has, and partial tiles.
MANY = (333, 200, 72)


def each(value: Any, other: Any) -> zip[tuple[Tensor, Tensor]]:
    return zip(tensors(value), tensors(other), strict=True)


def operands(
    dtype: str,
    device: str,
    transa: bool = True,
    transb: bool = False,
    sizes: tuple[int, int, int] = MANY,
    seed: int = 7,
) -> tuple[Tensor, Tensor]:
    """A and B for a product D of shape ``sizes[:2]``."""
    m, n, k = sizes
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn((n, k) if transa else (k, n), generator=generator)
    b = torch.randn((k, m) if transb else (m, k), generator=generator)
    kind = getattr(torch, dtype)
    return a.to(device, kind), b.to(device, kind)


def scale_of(data: Tensor, kind: str) -> Tensor:
    """Scales of a matrix; ``kind`` is "whole", "rows", "squares" or "exponents"."""
    height, width = {"whole": (0, 0), "rows": (1, 128), "squares": (128, 128)}.get(kind, (1, 32))
    if not height:
        return torch.full((1,), 0.37, device=data.device)
    shape = [-(-data.shape[0] // height), -(-data.shape[1] // width)]
    scale = torch.linspace(0.3, 3, shape[0] * shape[1]).reshape(shape)
    if kind == "exponents":
        scale = scale.log2().round().exp2().to(torch.float8_e8m0fnu)
    return scale.to(data.device)


# ------------------------------------------------------------------------------- values


@pytest.mark.parametrize("op", ["generic_gemm", "te_general_grouped_gemm"])
def test_every_sample_of_float8(op: str, device: str) -> None:
    for sample in ops.CATALOGUE[op].samples("float8_e4m3fn", device):
        try:
            check(op, *sample.args, **sample.kwargs)
        except AssertionError as error:
            raise AssertionError(f"{sample.label}: {error}") from None


@pytest.mark.parametrize(("transa", "transb"), TRANSPOSES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_tiles_of_each_layout(dtype: str, transa: bool, transb: bool, device: str) -> None:
    check("generic_gemm", *operands(dtype, device, transa, transb), transa=transa, transb=transb)


@pytest.mark.parametrize(("transa", "transb"), TRANSPOSES)
@pytest.mark.parametrize("kinds", SCALES)
def test_each_pair_of_scales(
    kinds: tuple[str, str], transa: bool, transb: bool, device: str
) -> None:
    A, B = operands("float8_e4m3fn", device, transa, transb, (40, 130, 140))
    options = {"transa": transa, "transb": transb, "grad": True, "bias_grad": True}
    scales = {"A_scale_inv": scale_of(A, kinds[0]), "B_scale_inv": scale_of(B, kinds[1])}
    check("generic_gemm", A, B, **scales, **options)


@pytest.mark.parametrize("way", ["start", "row distance"])
@pytest.mark.parametrize(("transa", "transb"), TRANSPOSES)
def test_what_descriptors_cannot_describe_is_copied_or_loaded_otherwise(
    way: str, transa: bool, transb: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unaligned(tensor: Tensor) -> Tensor:
        rows, columns = tensor.shape
        if way == "start":
            memory = tensor.new_empty(rows * columns + 1)[1:].view(rows, columns)
        else:
            memory = tensor.new_empty(rows, columns + 1)[:, :columns]
        return memory.copy_(tensor)

    options = {"transa": transa, "transb": transb}
    A, B = operands("bfloat16", device, transa, transb, (72, 136, 40))
    (right, _, _) = check("generic_gemm", A, B, **options)
    for worth in (2**62, 0):
        monkeypatch.setattr(flagos, "_WORTH_A_COPY", worth)
        monkeypatch.setattr(flagos, "_PLANS", {})
        for a, b in ((unaligned(A), B), (A, unaligned(B)), (unaligned(A), unaligned(B))):
            (found, _, _) = flagos.generic_gemm(a, b, **options)
            assert torch.equal(found, right)


def test_a_tensor_with_dense_columns_is_not_copied(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = operands("float32", device)
    monkeypatch.setattr(flagos, "_PLANS", {})
    (right, _, _) = flagos.generic_gemm(A, B)
    (found, _, _) = flagos.generic_gemm(A.t(), B.t(), transa=False, transb=True)
    assert torch.equal(found, right)
    turned = A.t().contiguous().t()
    check("generic_gemm", turned, B)
    # A plan is kept only if the kernel takes the tensors as they were given.
    assert len(flagos._PLANS) == 3


def test_a_wide_epilogue_over_many_tiles(device: str) -> None:
    A, B = operands("bfloat16", device)
    bias = torch.randn(MANY[1], device=device)
    saved, total = torch.randn(2, *MANY[:2], device=device)
    check("generic_gemm", A, B, bias=bias, gelu=True, alpha=0.3)
    check("generic_gemm", A, B, grad=True, gelu=True, gelu_input=saved, bias_grad=True)
    check("generic_gemm", A, B, accumulate_into=total, beta=-0.5, bias=bias, gelu=True)
    check("generic_gemm", A, B, accumulate_into=total[:, ::1].t().contiguous().t())


def test_the_bias_gradient_of_many_rows(device: str) -> None:
    A, B = operands("bfloat16", device, False, True, (72, 40, 3000))
    check("generic_gemm", A, B, transa=False, transb=True, grad=True, bias_grad=True)


# ------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_groups_than_one_launch_has_numbers_for(dtype: str, device: str) -> None:
    splits = [3 * (i % 4) for i in range(40)]
    A, B = operands(dtype, device, sizes=(sum(splits), 40 * 24, 64))
    weights = list(A.clone().split(24))
    bias = [torch.randn(24, device=device) for _ in splits]
    check("te_general_grouped_gemm", weights, [B], splits, bias=bias, gelu=True)
    dy, x = operands(dtype, device, False, True, (24, 64, sum(splits)))
    wgrad = {"transa": False, "transb": True, "grad": True, "bias_grad": True}
    totals = [torch.randn(24, 64, device=device) for _ in splits]
    check("te_general_grouped_gemm", [dy], [x], splits, accumulate_into=totals, **wgrad)


@pytest.mark.parametrize("kinds", [("whole", "whole"), ("squares", "rows"), ("exponents",) * 2])
@pytest.mark.parametrize(("transa", "transb"), [(True, False), (False, False), (False, True)])
def test_groups_of_scaled_matrices(
    kinds: tuple[str, str], transa: bool, transb: bool, device: str
) -> None:
    splits = [1, 140, 0, 59]
    m, k = (130, 200) if transb else (200, 260)
    A, B = operands("float8_e4m3fn", device, transa, transb, (m, 144, k))
    many_a = [A] if transb else [A.clone() for _ in splits]
    check(
        "te_general_grouped_gemm",
        many_a,
        [B],
        splits,
        transa=transa,
        transb=transb,
        A_scale_inv=[scale_of(it, kinds[0]) for it in many_a],
        B_scale_inv=[scale_of(B, kinds[1])],
    )


def test_groups_without_columns_may_have_a_bias(device: str) -> None:
    weights, rows, bias = (torch.ones(*size, device=device) for size in ((0, 4), (5, 4), (0,)))
    output, _, _ = flagos.te_general_grouped_gemm([weights] * 2, [rows], [2, 3], bias=[bias] * 2)
    assert output.shape == (5, 0)


def test_groups_with_different_terms_and_row_distances(device: str) -> None:
    terms = (24, 0, 56)
    A = [torch.randn(40, k + i, device=device)[:, :k] for i, k in enumerate(terms)]
    B = [torch.randn(9 + k, k, device=device) for k in terms]
    check("te_general_grouped_gemm", A, B)


def test_accumulated_groups_of_several_dtypes(device: str) -> None:
    splits = [5, 7]
    A, B = operands("float32", device, sizes=(12, 40, 32))
    into = [
        torch.randn(5, 40, device=device, dtype=torch.bfloat16),
        torch.randn(7, 80, device=device)[:, ::2],
    ]
    check("te_general_grouped_gemm", [A, A], [B], splits, accumulate_into=into, beta=0.5)


@pytest.mark.parametrize("way", grouped_calls.WAYS)
def test_groups_like_those_of_a_call_before(
    way: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter keeps all outputs of a kernel in one memory, so a wgrad's tensors are copied.
    copied = _launch.INTERPRETED and way == "wgrad"
    grouped_calls.check(flagos, way, device, monkeypatch, copied=copied)


def test_groups_of_transposed_weights_come_again(device: str) -> None:
    B = torch.randn(12, 32, device=device).bfloat16()
    for _ in range(3):
        A = [torch.randn(32, 40, device=device).bfloat16().t() for _ in range(2)]
        parts = [x.double() @ it.t().double() for x, it in zip(B.split([5, 7]), A, strict=True)]
        D, _, _ = flagos.te_general_grouped_gemm(A, [B], [5, 7])
        torch.testing.assert_close(D.double(), torch.cat(parts), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16])
def test_autocast_has_no_say_in_groups(other: torch.dtype, device: str) -> None:
    dtype = "bfloat16" if other == torch.float16 else "float16"
    A, B = operands(dtype, device, sizes=(12, 40, 32))
    bias = [torch.randn(40, device=device, dtype=A.dtype) for _ in range(2)]
    into = [torch.randn(it, 80, device=device, dtype=A.dtype)[:, ::2] for it in (5, 7)]

    def results() -> list[Tensor]:
        given = clone(into)
        flagos.te_general_grouped_gemm([A, A], [B], [5, 7], accumulate_into=given)
        output, _, _ = flagos.te_general_grouped_gemm([A, A], [B], [5, 7], bias=bias)
        return [output, *given]

    expected = results()
    with torch.autocast(device, other):
        found = results()
    assert all(torch.equal(one, another) for one, another in each(found, expected))


def test_groups_with_scales_of_two_kinds_are_declined(device: str) -> None:
    A, B = operands("float8_e4m3fn", device, sizes=(200, 130, 260))
    with pytest.raises(NotSupportedError, match="'A'"):
        flagos.te_general_grouped_gemm(
            [A, A],
            [B],
            [100, 100],
            A_scale_inv=[scale_of(A, "whole"), scale_of(A, "rows")],
            B_scale_inv=[scale_of(B, "whole")],
        )


@pytest.mark.parametrize("count", [1, 33, 700])
def test_numbers_reach_the_device(count: int, device: str) -> None:
    numbers = [(-1) ** i * (i + (i % 3 << 40)) for i in range(count)]
    memory = _numbers.numbers_on_device(numbers, torch.empty(0, device=device).device)
    assert memory[:count].tolist() == numbers
    assert not memory[count:].any()


# ---------------------------------------------------------------------------- arguments


def test_a_kept_plan_serves_other_values_and_no_other_call(device: str) -> None:
    A, B = operands("float32", device, sizes=(9, 40, 32))
    total = torch.randn(9, 40, device=device)
    for seed in (1, 2):
        A, B = operands("float32", device, sizes=(9, 40, 32), seed=seed)
        check("generic_gemm", A, B, alpha=float(seed))
        check("generic_gemm", A, B, accumulate_into=total, beta=0.0)
        check("generic_gemm", A, B, accumulate_into=total, beta=2)
    wrong = [
        {"transa": 1}, {"gelu": 0}, {"alpha": True}, {"out_dtype": "float32"}, {"transb": True},
        {"bias": total}, {"accumulate_into": total[:8]}, {"A_scale_inv": total}, {"beta": None},
        {"alpha": 2**63}, {"beta": -(10**400)},
    ]  # fmt: skip
    with torch.inference_mode():
        wrong.append({"accumulate_into": torch.zeros(9, 40, device=device)})
    for options in wrong:
        with pytest.raises(ArgumentError):
            flagos.generic_gemm(A, B, **options)  # type: ignore[arg-type]


def test_float64_is_declined(device: str) -> None:
    A, B = operands("float64", device)
    with pytest.raises(NotSupportedError, match="float64"):
        flagos.generic_gemm(A, B)
    with pytest.raises(NotSupportedError, match="float64"):
        flagos.te_general_grouped_gemm([A], [B])


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_factor_beyond_float32_is_declined(name: str, device: str) -> None:
    A, B = operands("float32", device, sizes=(8, 24, 32))
    into = torch.zeros(8, 24, device=device)
    one: dict[str, Any] = {"accumulate_into": into}
    grouped: dict[str, Any] = {"accumulate_into": [into]}
    for _ in range(2):  # the second time the call is known, but for the number
        flagos.generic_gemm(A, B, **one)
        flagos.te_general_grouped_gemm([A], [B], **grouped)
        for factor in (1e39, -1e39):
            with pytest.raises(NotSupportedError, match="must fit in float32"):
                flagos.generic_gemm(A, B, **one, **{name: factor})
            with pytest.raises(NotSupportedError, match="must fit in float32"):
                flagos.te_general_grouped_gemm([A], [B], **grouped, **{name: factor})


def test_tensors_inside_a_transform_are_declined(device: str) -> None:
    A, B = operands("float32", device, sizes=(8, 24, 32))
    with pytest.raises(NotSupportedError):
        torch.vmap(lambda row: flagos.generic_gemm(A, row)[0])(B)
    with pytest.raises(NotSupportedError):
        torch.vmap(lambda row: flagos.te_general_grouped_gemm([A], [row[None]])[0])(B)


def test_float8_needs_a_device_that_has_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = _launch.Limits(2, 1 << 16, 32, 65536, 80)
    monkeypatch.setattr(_launch, "limits", lambda device: limits)
    A, B = operands("float8_e4m3fn", device, sizes=(8, 24, 32))
    one = torch.ones(1, device=device)
    with pytest.raises(NotSupportedError, match=r"8\.9"):
        flagos.generic_gemm(A, B, A_scale_inv=one, B_scale_inv=one)


# ---------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_rows_do_not_depend_on_the_tile_that_they_are_in(dtype: str, device: str) -> None:
    A, B = operands(dtype, device, sizes=(4096, 4096, 2048))
    scales: dict[str, Tensor] = {}
    if dtype in FLOAT8:
        one = torch.ones(1, device=device)
        scales = {"A_scale_inv": one, "B_scale_inv": one}
    (whole, _, _) = check("generic_gemm", A, B, **scales)
    for rows in (1, 16, 100, 300, 1000):
        (some, _, _) = flagos.generic_gemm(A, B[:rows].clone(), **scales)
        assert torch.equal(some, whole[:rows])
        (some, _, _) = flagos.te_general_grouped_gemm(
            [A, A],
            [B],
            [rows, 4096 - rows],
            **{name: [it] * (2 if name[0] == "A" else 1) for name, it in scales.items()},
        )
        assert torch.equal(some, whole)


@pytest.mark.parametrize("count", [0, 1, 2], ids=["plain", "one target", "two targets"])
def test_autograd_is_notified_of_accumulated_tensors(
    count: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = operands("float32", device, sizes=(8, 16, 24))
    into = [torch.zeros(8 // (count or 1), 16, device=device) for _ in range(count or 1)]
    weight = torch.ones(16, device=device, requires_grad=True)
    saved = (into[0] * weight).sum()
    # Not by the interpreter, whose torch operators would tell autograd.
    monkeypatch.setattr(_launch.Launch, "__call__", lambda *_: None)
    if count:
        flagos.te_general_grouped_gemm([A, A], [B], [4, 4], accumulate_into=into)
    else:
        flagos.generic_gemm(A, B, accumulate_into=into[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.gpu
@pytest.mark.parametrize(("transa", "transb"), TRANSPOSES)
def test_large_products_with_every_epilogue(transa: bool, transb: bool, device: str) -> None:
    options: dict[str, Any] = {"transa": transa, "transb": transb}
    for sizes in ((2048, 2560, 1088), (1111, 2056, 1000), (2100, 2001, 999)):
        A, B = operands("bfloat16", device, sizes=sizes, **options)
        bias = torch.randn(sizes[1], device=device)
        saved, total = torch.randn(2, *sizes[:2], device=device)
        check("generic_gemm", A, B, bias=bias, gelu=True, **options)
        check("generic_gemm", A, B, grad=True, gelu=True, gelu_input=saved, **options)
        check("generic_gemm", A, B, accumulate_into=total, **options)


def one_and_grouped(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    grouped, *_ = flagos.te_general_grouped_gemm([A] * 4, [B], [100, 0, 24, 900])
    return flagos.generic_gemm(A, B)[0], grouped


@pytest.mark.gpu
def test_direct_and_ordinary_launches_give_the_same_bytes(device: str) -> None:
    A, B = operands("bfloat16", device, sizes=(1024, 2048, 512))
    direct_launches.check(functools.partial(one_and_grouped, A, B))


@pytest.mark.gpu
def test_a_graph_replays_products_and_the_table_of_groups(device: str) -> None:
    A, B = operands("bfloat16", device, sizes=(1024, 2048, 512))
    run = functools.partial(one_and_grouped, A, B)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    flagos.te_general_grouped_gemm([A] * 2, [B], [1000, 24])
    B.copy_(torch.randn_like(B))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, run()))


def hopper_and_portable(
    op: str, monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of Hopper's kernels and of the portable ones, after a check of the usual choice."""
    if torch.cuda.get_device_capability() != (9, 0) or not _launch.has_gluon():
        pytest.skip("needs a Hopper GPU, and a Triton whose Gluon is known")
    given = flagos._TILES

    def run(specialize: bool) -> list[Tensor]:
        tiles = {
            kind: tuple(it for it in given[kind] if it.specialize == specialize) for kind in given
        }
        copies, options = clone(args), clone(kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(flagos, "_TILES", tiles)
            patch.setattr(flagos, "_PLANS", {})
            found = getattr(flagos, op)(*copies, **options)
        return [it for it in (*found, *tensors(options.get("accumulate_into"))) if it is not None]

    check(op, *args, **kwargs)
    return run(True), run(False)


KINDS = ("plain", "bias and gelu", "accumulated", "dgrad", "both turned")


def call_of(
    kind: str, sizes: tuple[int, int, int], device: str
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """A, B and the options of a product of one of ``KINDS``."""
    turned = {
        "dgrad": {"transa": False},
        "accumulated": {"transa": False, "transb": True},
        "both turned": {"transb": True},
    }
    options: dict[str, Any] = dict(turned.get(kind, {}))
    if options.get("transb"):
        sizes = (-(-sizes[0] // 8) * 8, *sizes[1:])
    A, B = operands("bfloat16", device, sizes=sizes, **options)
    if kind == "bias and gelu":
        options |= {"bias": torch.randn(sizes[1], device=device), "gelu": True}
    if kind == "accumulated":
        options |= {"accumulate_into": torch.randn(*sizes[:2], device=device), "alpha": 0.5}
    return A, B, options


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(4096, 4096, 1088), (2111, 4104, 1064), (4096, 4096, 32)])
def test_hopper_s_products_have_the_bits_of_the_others(
    sizes: tuple[int, int, int], kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B, options = call_of(kind, sizes, device)
    one, other = hopper_and_portable("generic_gemm", monkeypatch, A, B, **options)
    assert all(map(torch.equal, one, other))


def check_every_tile(
    kind: str, A: Tensor, B: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Each listed tile gives the same bits, for one product and for three groups of its rows."""
    check("generic_gemm", A, B, **options)
    accumulated = "accumulate_into" in options
    grouped = not options.get("transb") and not accumulated
    m = B.shape[1 if options.get("transb") else 0]
    rows = [m - m // 3, 0, m // 3]
    lists = {name: [it] * 3 for name, it in options.items() if isinstance(it, Tensor)}
    lists |= {name: [it] for name, it in options.items() if name == "B_scale_inv"}
    used: list[flagos._Tile] = []
    choose = flagos._chosen

    def chosen(*args: Any) -> flagos._Tile:
        used.append(choose(*args))
        return used[-1]

    monkeypatch.setattr(flagos, "_chosen", chosen)

    def results() -> list[Tensor]:
        copies = clone(options)
        plain = flagos.generic_gemm(A, B, **copies)
        found = [it for it in (*plain, *tensors(copies.get("accumulate_into"))) if it is not None]
        if grouped:
            D, *_ = flagos.te_general_grouped_gemm([A] * 3, [B], rows, **(copies | lists))
            assert torch.equal(D, found[0])
        return found

    by_rule = results()
    on_hopper = _launch.limits(A.device).capability == 90 and _launch.has_gluon()
    for tile in flagos._TILES[kind]:
        used.clear()
        with flagos._CHOICES[kind].trial(tile):
            assert all(map(torch.equal, results(), by_rule)), tile
        if on_hopper:  # elsewhere not all fit
            few = bool(tile.alone) and tile.described and m <= tile.rows
            is_offered = not few and tile.warp_groups <= (2 if accumulated else 3)
            assert (used[0][:3] == tile[:3]) is is_offered, (tile, used[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 65, 200])
def test_every_tile_gives_the_same_bits(
    rows: int, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B, options = call_of(kind, (rows, 520, 1088), device)
    check_every_tile("half", A, B, monkeypatch, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("a_kind", "b_kind"), [("whole", "whole"), ("squares", "rows")])
@pytest.mark.parametrize("rows", [1, 65, 200])
def test_every_tile_of_float8_gives_the_same_bits(
    rows: int, a_kind: str, b_kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = operands("float8_e4m3fn", device, sizes=(rows, 520, 1168))
    scales = {"A_scale_inv": scale_of(A, a_kind), "B_scale_inv": scale_of(B, b_kind)}
    kind = "float8" if a_kind == "whole" else "float8 steps"
    check_every_tile(kind, A, B, monkeypatch, **scales)


def test_few_tiles_may_each_fill_a_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", False)

    def chosen(rows: int | list[int], columns: int, shared: int = 227 << 10) -> flagos._Tile:
        offered = _launch.Limits(132, shared, 32, 1 << 16, 100)
        monkeypatch.setattr(_launch, "limits", lambda _: offered)
        ms = [rows] if isinstance(rows, int) else rows
        return flagos._chosen("half", ms, columns, 2, 2, True, 0, torch.device("cpu"))

    for rows, columns, width, together in (
        (64, 1024, 32, 1),
        (64, 132 * 32, 32, 1),
        (64, 132 * 32 + 1, 64, 1),
        (64, 132 * 64, 64, 1),
        (64, 132 * 64 + 1, 64, 2),
        (64, 132 * 128, 64, 2),
        (128, 132 * 64, 128, 1),
        ([16] * 8, 2048, 64, 2),
        ([128] * 4, 2048, 128, 1),
    ):
        tile = chosen(rows, columns)
        assert (tile.columns, tile.alone) == (width, together)
        stage = (tile.rows + tile.columns) * 64 * tile.steps * 2
        assert 227 << 10 >= tile.stages * stage * together > 170 << 10
    for rows, columns in ((64, 132 * 128 + 1), (128, 132 * 64 + 1), (4096, 4096)):
        assert not chosen(rows, columns).alone
    for rows, columns in ((1, 4096), (1, 8192), (1, 14336), (128, 6144)):
        assert not chosen(rows, columns, shared=99 << 10).alone


def test_a_specialised_tile_of_a_file_may_have_another_speed() -> None:
    wrong = flagos._CHOICES["float8 steps"].wrong
    tile = flagos._TILES["float8 steps"][0]
    assert tile.specialize
    assert wrong(tile._replace(speed=2.0)) is None
    reason = str(wrong(tile._replace(stages=2)))
    assert "valid tiles: {rows: 128, columns: 128, threads: 128, stages: 6, specialize: true, " in (
        reason
    )
    assert wrong(tile._replace(specialize=False, steps=2)) == "steps must be 1"


@pytest.mark.gpu
@pytest.mark.parametrize("b_kind", ["whole", "rows", "squares"])
@pytest.mark.parametrize("a_kind", ["whole", "squares"])
@pytest.mark.parametrize("sizes", [(4096, 4096, 1088), (2111, 4104, 1168), (4096, 4096, 64)])
def test_hopper_s_float8_products_have_the_bits_of_the_others(
    sizes: tuple[int, int, int],
    a_kind: str,
    b_kind: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    A, B = operands("float8_e4m3fn", device, sizes=sizes)
    scales = {"A_scale_inv": scale_of(A, a_kind), "B_scale_inv": scale_of(B, b_kind)}
    one, other = hopper_and_portable("generic_gemm", monkeypatch, A, B, **scales)
    assert all(map(torch.equal, one, other))
    splits = [1000, 0, 1, sizes[0] - 1001]
    groups = {
        "A_scale_inv": [scale * (1 + i) for i, scale in enumerate([scales["A_scale_inv"]] * 4)],
        "B_scale_inv": [scales["B_scale_inv"]],
    }
    one, other = hopper_and_portable(
        "te_general_grouped_gemm", monkeypatch, [A] * 4, [B], splits, **groups
    )
    assert all(map(torch.equal, one, other))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("terms", [64, 1072])
@pytest.mark.parametrize("splits", [[1500, 0, 17, 2878, 0, 0, 1, 200], [125] * 40])
def test_hopper_s_products_of_groups_have_the_bits_of_the_others(
    splits: list[int], terms: int, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = sum(splits), 1048
    x, dy = (
        torch.randn(rows, width, device=device, dtype=torch.bfloat16) for width in (terms, columns)
    )
    weights = list(torch.randn(len(splits), columns, terms, device=device).bfloat16())
    bias = list(torch.randn(len(splits), columns, device=device))
    totals = list(torch.randn(len(splits), columns, terms, device=device))
    lists: tuple[list[Tensor], list[Tensor]] = (weights, [x])
    options: dict[str, Any] = {"bias": bias, "gelu": True}
    if kind == "dgrad":
        lists, options = (weights, [dy]), {"transa": False}
    if kind == "wgrad":
        lists, options = ([x], [dy]), {"transa": False, "transb": True, "accumulate_into": totals}
    one, other = hopper_and_portable(
        "te_general_grouped_gemm", monkeypatch, *lists, splits, **options
    )
    assert all(map(torch.equal, one, other))

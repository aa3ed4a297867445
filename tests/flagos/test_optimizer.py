"""Triton's optimizer beyond the contract's samples: tables, chunks, alignment, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_engine_fl.backends._lists import MOST_LAYOUTS, MOST_TABLES
from transformer_engine_fl.backends.flagos import _arguments, _launch, _lists, _numbers
from transformer_engine_fl.backends.flagos import optimizer as flagos
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.ops import optimizer as contracts
from transformer_engine_fl.testing import compare
from transformer_engine_fl.testing.arguments import clone, tensors

THREADS, TILE, CHUNK, SEARCH = 64, 64, 256, 16
# No tile, parts of one, whole tiles; one chunk and several, with and without a remainder.
SIZES = [0, 1, TILE - 1, TILE, TILE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + TILE + 5]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tiles, so that small tensors take every path through a kernel; no launch is known."""
    torch.manual_seed(0)
    monkeypatch.setattr(flagos, "_SEARCH", SEARCH)
    monkeypatch.setattr(flagos, "_NORMS", (THREADS, SEARCH))
    monkeypatch.setattr(_arguments, "_LAUNCHES", {})
    with contextlib.ExitStack() as trials:
        for choice in flagos._TILES.values():
            trials.enter_context(choice.trial(_lists.Tiles(THREADS, TILE, CHUNK)))
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels, in the order of their launches."""
    names: list[str] = []
    launch = _launch.Launch.__call__

    def noted(self: Any, *arguments: Any) -> None:
        names.append(self._kernel.__name__)
        launch(self, *arguments)

    monkeypatch.setattr(_launch.Launch, "__call__", noted)
    return names


def normal(sizes: list[int], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(size).to(device, dtype) for size in sizes]


def moments(sizes: list[int], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [(torch.rand(size) + 0.1).to(device, dtype) for size in sizes]


def numbers(value: float, count: int, device: str) -> list[Tensor]:
    return [torch.full((1,), value + place, device=device) for place in range(count)]


def unaligned(values: list[Tensor]) -> list[Tensor]:
    """The same values, one element after an aligned address."""
    return [torch.cat([it.new_zeros(1), it])[1:] for it in values]


def check_values(op: str, *args: Any, **kwargs: Any) -> None:
    """Run ``op`` in place, and check what it returns and writes against the contract."""
    contract = getattr(contracts, op)
    arguments = contract.bind(*args, **kwargs)
    copies = clone(arguments)
    found = getattr(flagos, op)(*args, **kwargs)
    outputs = () if found is None else found
    written = [arguments[name] for name in contract.mutates]
    if contract.decode is not None:
        written = contract.decode(*written)
    expected = contract.oracle(**copies)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for place, (got, want) in enumerate(zip([*outputs, *written], expected, strict=True)):
        if got is None:
            continue
        for one, right in zip(tensors(got), tensors(want), strict=True):
            dtype = str(one.dtype).removeprefix("torch.")
            # Integers and float8 must match to the bit, whatever the tolerance.
            named = [dtype] if dtype in contract.tolerance else contract.tolerance
            worst = compare(one, right, contract.tolerance_for(*named))
            assert worst.ratio <= 1, f"value {place}: {worst}"


def adam_lists(sizes: list[int], device: str) -> tuple[list[Tensor], ...]:
    grads, params, exp_avgs = (normal(sizes, device) for _ in range(3))
    return grads, params, exp_avgs, moments(sizes, device)


def calls(sizes: list[int], device: str) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """A call of each operator on tensors of these sizes."""
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    one = torch.full((1,), 0.3, device=device)
    step = torch.full((1,), 3, dtype=torch.int32, device=device)
    grads, count = normal(sizes, device), len(sizes)
    yield "multi_tensor_scale", (grads, normal(sizes, device), 0.3), {"noop_flag": flag}
    halves = normal(sizes, device, torch.bfloat16)
    yield "multi_tensor_scale_tensor", (halves, normal(sizes, device), one), {"noop_flag": flag}
    yield "multi_tensor_l2norm", (grads,), {"per_tensor": True, "noop_flag": flag}
    yield "multi_tensor_unscale_l2norm", (halves, one), {"per_tensor": True}
    options: dict[str, Any] = {"weight_decay": 0.1, "noop_flag": flag}
    yield "multi_tensor_adam", (*adam_lists(sizes, device), 0.1, 3), options
    yield "multi_tensor_adam_capturable", (*adam_lists(sizes, device), one, step), options
    lists = halves, normal(sizes, device, torch.bfloat16), *adam_lists(sizes, device)[2:]
    masters = normal(sizes, device)
    yield "multi_tensor_adam_capturable_master", (*lists, masters, one, step), options
    lists = halves, normal(sizes, device, torch.bfloat16), *adam_lists(sizes, device)[2:]
    drawn = [torch.randint(-(2**15), 2**15, (size,), dtype=torch.int16) for size in sizes]
    yield (
        "multi_tensor_adam_param_remainder",
        (*lists, [it.to(device) for it in drawn], 0.1, 3),
        options,
    )
    yield "multi_tensor_sgd", (*adam_lists(sizes, device)[:3], 0.1, 0.1, 0.9), {}
    amaxes, places = moments(sizes, device), normal(sizes, device)
    call = amaxes, places, normal(sizes, device), 448.0
    yield "multi_tensor_compute_scale_and_scale_inv", call, {"force_pow_2_scales": True}
    bytes_ = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    call8 = moments(sizes, device, torch.bfloat16), bytes_
    yield "multi_tensor_compute_scale_inv_e8m0", call8, {}
    # With a learning rate of 0 the parameters are the masters, whose rounding is not near a tie.
    params = [torch.zeros(size, device=device).to(torch.float8_e4m3fn) for size in sizes]
    lists8 = grads, params, *adam_lists(sizes, device)[2:]
    of_each = numbers(3.0, count, device), numbers(1.0, count, device), numbers(7.0, count, device)
    yield "multi_tensor_adam_fp8", (*lists8, normal(sizes, device), *of_each, 0.0, 3), {}


OPERATORS = [op for op, _, _ in calls([], "cpu")]


def call_of(op: str, sizes: list[int], device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return next((args, kwargs) for name, args, kwargs in calls(sizes, device) if name == op)


# -------------------------------------------------------------------------------- values


def test_every_operator_has_a_call() -> None:
    assert sorted(OPERATORS) == sorted(contracts.__all__)


@pytest.mark.parametrize("op", OPERATORS)
def test_tensors_of_every_size(op: str, device: str) -> None:
    args, kwargs = call_of(op, SIZES, device)
    check_values(op, *args, **kwargs)


@pytest.mark.parametrize("op", ["multi_tensor_adam", "multi_tensor_l2norm"])
def test_more_rows_than_are_searched_at_once(op: str, device: str) -> None:
    args, kwargs = call_of(op, [3, 0, CHUNK + 1] * SEARCH, device)
    check_values(op, *args, **kwargs)


def test_aligned_and_other_rows_in_one_list(device: str, launches: list[str]) -> None:
    sizes = [TILE + 3, CHUNK, 5]
    grads, *others = adam_lists(sizes, device)
    grads[1:2] = unaligned(grads[1:2])
    check_values("multi_tensor_adam", grads, *others, 0.1, 3)
    assert launches.count("_adam") == 2


def test_one_launch_for_all_rows_of_the_same_dtypes(device: str, launches: list[str]) -> None:
    sizes = [7, CHUNK + 7] * 4
    kinds = torch.float32, torch.bfloat16
    grads, exp_avgs = normal(sizes, device), normal(sizes, device)
    params = [it.to(kinds[row % 2]) for row, it in enumerate(normal(sizes, device))]
    check_values("multi_tensor_adam", grads, params, exp_avgs, moments(sizes, device), 0.1, 3)
    assert launches.count("_adam") == 2


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8_and_the_numbers_between(kind: torch.dtype, device: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()
    ordered = every[every.isfinite()].unique()
    ties = (ordered[1:] + ordered[:-1]) / 2
    beside = [torch.nextafter(ties, it.expand_as(ties)) for it in torch.tensor([-9e9, 9e9])]
    beyond = torch.tensor([float("nan"), 1e9, -1e9, 1e-30, -1e-30, 0.0, -0.0])
    masters = torch.cat([ordered, ties, *beside, beyond]).to(device)
    zeros = [torch.zeros_like(masters) for _ in range(3)]
    params = [torch.zeros_like(masters).to(kind)]
    one, amax, inverse = numbers(1.0, 3, device)
    one.fill_(1.0)
    lists = zeros[:1], params, zeros[1:2], zeros[2:], [masters], [one], [amax], [inverse]
    before = masters.clone()
    flagos.multi_tensor_adam_fp8(*lists, 0.0, 1)
    assert torch.equal(masters.nan_to_num(5.0), before.nan_to_num(5.0))
    limit = torch.finfo(kind).max
    right = before.clamp(-limit, limit).to(kind)
    same = params[0].view(torch.uint8) == right.view(torch.uint8)
    assert (same | (params[0].float().isnan() & before.isnan())).all()
    assert amax.item() == 1e9


# -------------------------------------------------------------------------------- tables


@pytest.fixture
def written_by_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host numbers are never copied but written by launches, where tests see them."""
    numbers = "transformer_engine_fl.backends.flagos._numbers"
    monkeypatch.setattr(f"{numbers}._can_be_copied", lambda device: False)


@pytest.mark.usefixtures("written_by_launches")
def test_a_second_call_on_the_same_tensors_writes_no_table(
    device: str, launches: list[str]
) -> None:
    lists = adam_lists(SIZES, device)
    flagos.multi_tensor_adam(*lists, 0.1, 1)
    assert "_write_numbers" in launches
    launches.clear()
    check_values("multi_tensor_adam", *lists, 0.1, 2)
    assert launches == ["_adam"]


def test_gradients_may_be_elsewhere_in_each_step(device: str) -> None:
    grads, *others = adam_lists([5, CHUNK + 1], device)
    steps = [[it.clone() for it in grads] for _ in range(MOST_TABLES + 2)]
    for step, elsewhere in enumerate([*steps, *steps], 1):
        check_values("multi_tensor_adam", elsewhere, *others, 0.1, step)
    (layout,) = _lists.LAYOUTS.values()
    assert len(layout._tables) <= MOST_TABLES


def test_what_is_kept_is_bounded(device: str) -> None:
    for size in range(1, MOST_LAYOUTS + 3):
        flagos.multi_tensor_l2norm([torch.ones(size, device=device)])
    assert len(_lists.LAYOUTS) <= MOST_LAYOUTS


@pytest.mark.usefixtures("written_by_launches")
def test_a_captured_call_has_tables_of_its_own(
    device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = adam_lists(SIZES, device)
    flagos.multi_tensor_adam(*lists, 0.1, 1)
    (layout,) = _lists.LAYOUTS.values()
    kept = dict(layout._tables)
    monkeypatch.setattr("transformer_engine_fl.backends._lists.keeping_stream", lambda device: None)
    for step in (2, 3):
        launches.clear()
        check_values("multi_tensor_adam", *lists, 0.1, step)
        assert "_write_numbers" in launches
    assert layout._tables == kept


def test_stream_capture_is_checked_on_the_device_of_the_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = ["cuda:0"]

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == "cuda:1")
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    found = [_numbers._can_be_copied(torch.device(name)) for name in ("cuda:0", "cuda:1")]
    assert found == [True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_outlives_what_is_kept(device: str) -> None:
    lists = adam_lists(SIZES, device)
    expected = clone(lists)
    flagos.multi_tensor_adam(*clone(lists), 0.1, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flagos.multi_tensor_adam(*lists, 0.1, 1)
    _lists.LAYOUTS.clear()
    torch.cuda.empty_cache()
    held = [torch.full((1 << size,), -1, device=device) for size in range(5, 20)]
    for _ in range(2):
        graph.replay()
        flagos.multi_tensor_adam(*expected, 0.1, 1)
    assert all(map(torch.equal, tensors(lists), tensors(expected)))
    assert all(bool((it == -1).all()) for it in held)


def test_the_same_memory_with_another_shape_is_looked_at_again(device: str) -> None:
    grads, params, exp_avgs, exp_avg_sqs = adam_lists([12, 12], device)
    flagos.multi_tensor_adam(grads, params, exp_avgs, exp_avg_sqs, 0.1, 1)
    for wrong in (exp_avgs[1].view(3, 4), exp_avgs[1].view(torch.int32), exp_avgs[1][:11]):
        with pytest.raises(ArgumentError) as caught:
            flagos.multi_tensor_adam(grads, params, [exp_avgs[0], wrong], exp_avg_sqs, 0.1, 1)
        assert caught.value.argument == "exp_avgs[1]"
    for wrong in (-1.0, torch.ones(1)):
        with pytest.raises(ArgumentError) as caught:
            flagos.multi_tensor_adam(grads, params, exp_avgs, exp_avg_sqs, wrong, 1)  # type: ignore[arg-type]
        assert caught.value.argument == "lr"
    flag = torch.zeros(1, dtype=torch.int32, device="meta")
    with pytest.raises(ArgumentError) as caught:
        flagos.multi_tensor_adam(*(grads, params, exp_avgs, exp_avg_sqs), 0.1, 1, noop_flag=flag)
    assert caught.value.argument == "noop_flag"


# -------------------------------------------------------------------------------- memory


def test_tensors_of_equal_strides_are_not_copied(device: str) -> None:
    def turned(values: list[Tensor]) -> list[Tensor]:
        return [it.view(2, 3, 20).permute(2, 0, 1) for it in values]

    lists = tuple(turned(it) for it in adam_lists([120, 120], device))
    check_values("multi_tensor_adam", *lists, 0.1, 1)
    (layout,) = _lists.LAYOUTS.values()
    assert not layout.copied


def test_copied_rows_of_other_strides_are_written_back(device: str) -> None:
    grads, params, exp_avgs, exp_avg_sqs = adam_lists([120, 120], device)
    params = [it.view(10, 12).mT for it in params]
    others = [[it.view(12, 10) for it in some] for some in (grads, exp_avgs, exp_avg_sqs)]
    for step in (1, 2):
        check_values("multi_tensor_adam", others[0], params, *others[1:], 0.1, step)


def test_lazily_negated_tensors_are_taken_at_their_value(device: str) -> None:
    values = normal([TILE + 1], device)
    flagos.multi_tensor_scale(values, [torch.zeros_like(values[0])], 2.0)
    negated = [torch._neg_view(values[0])]
    output = torch.zeros_like(values[0])
    flagos.multi_tensor_scale(negated, [output], 2.0)
    assert torch.equal(output, -2 * values[0])
    flagos.multi_tensor_scale(values, [torch._neg_view(output)], 2.0)
    assert torch.equal(output, -2 * values[0])
    flag = torch._neg_view(torch.zeros(1, dtype=torch.int32, device=device))
    with pytest.raises(NotSupportedError, match="noop_flag"):
        flagos.multi_tensor_scale(values, [output], 2.0, noop_flag=flag)


@pytest.mark.parametrize("kept", [False, True])
def test_autograd_is_notified_of_written_tensors(kept: bool, device: str) -> None:
    params = [torch.nn.Parameter(it) for it in normal([5, 7], device)]
    lists = normal([5, 7], device), params, normal([5, 7], device), moments([5, 7], device)
    if kept:
        flagos.multi_tensor_adam(*lists, 0.1, 1)
    loss = params[1].square().sum()
    flagos.multi_tensor_adam(*lists, 0.1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_subclass_with_memory_is_written(device: str) -> None:
    class Labelled(Tensor):
        pass

    output = torch.zeros(5, device=device).as_subclass(Labelled)
    flagos.multi_tensor_scale([torch.ones(5, device=device)], [output], 2.0)
    assert (output == 2).all()


def test_inference_tensors_are_written_in_their_mode(device: str) -> None:
    ones = [torch.ones(5, device=device)]
    with torch.inference_mode():
        output = torch.zeros(5, device=device)
    with pytest.raises(ArgumentError, match="inference"):
        flagos.multi_tensor_scale(ones, [output], 3.0)
    assert not output.any()
    with torch.inference_mode():
        flagos.multi_tensor_scale(ones, [output], 2.0)
    assert bool((output == 2).all())


def test_a_tensor_is_not_written_twice(device: str) -> None:
    grads, params, exp_avgs, exp_avg_sqs = adam_lists([5, 5], device)
    for _ in range(2):
        with pytest.raises(NotSupportedError, match="twice"):
            flagos.multi_tensor_adam(grads, [params[0]] * 2, exp_avgs, exp_avg_sqs, 0.1, 1)
    nothing = [torch.zeros(0, device=device)] * 2
    flagos.multi_tensor_scale(nothing, nothing, 2.0)
    check_values("multi_tensor_adam", [grads[0]] * 2, params, exp_avgs, exp_avg_sqs, 0.1, 1)


def test_tensors_whose_memory_was_given_back_are_declined(device: str) -> None:
    for first in (False, True):
        values = normal([5], device)
        if not first:
            flagos.multi_tensor_l2norm(values)
        values[0].untyped_storage().resize_(0)
        with pytest.raises(NotSupportedError, match="no memory"):
            flagos.multi_tensor_l2norm(values)


def test_float64_beyond_float32(device: str) -> None:
    """Numbers stay float64 on their way to a tensor, and in the kernel's arithmetic."""
    values = [torch.full((3,), 1e200, dtype=torch.float64, device=device)]
    places = [torch.zeros(3, dtype=torch.float64, device=device)]
    check_values("multi_tensor_scale", values, places, 1 / 3e100)
    params = [torch.ones(3, dtype=torch.float64, device=device)]
    buffers = [torch.zeros(3, dtype=torch.float64, device=device)]
    check_values("multi_tensor_sgd", places, params, buffers, 1e-101 / 3, 1e-9, 1 / 3)


# ----------------------------------------------------------------------------- declining


def assert_declined(values: list[Tensor], outputs: list[Tensor]) -> None:
    with pytest.raises(NotSupportedError):
        flagos.multi_tensor_scale(values, outputs, 2.0)
    with pytest.raises(NotSupportedError):
        flagos.multi_tensor_l2norm(values)


@pytest.fixture
def plain(device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Lists on which the operators have already been called."""
    values, outputs = normal([5, 7], device), normal([5, 7], device)
    flagos.multi_tensor_scale(values, outputs, 2.0)
    flagos.multi_tensor_l2norm(values)
    return values, outputs


def test_tensors_without_memory_are_declined(plain: tuple[list[Tensor], list[Tensor]]) -> None:
    assert_declined(*([it.to("meta") for it in some] for some in plain))


def test_fake_tensors_are_declined(plain: tuple[list[Tensor], list[Tensor]]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = clone(plain)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert_declined(*([mode.from_tensor(it) for it in some] for some in plain))
        # The arguments are real, but what torch allocates is fake.
        assert_declined(*plain)
    assert all(map(torch.equal, tensors(before), tensors(plain)))


def test_tensors_inside_a_transform_are_declined(device: str) -> None:
    values = torch.ones(3, 5, device=device)
    with pytest.raises(NotSupportedError):
        torch.vmap(lambda row: flagos.multi_tensor_l2norm([row])[0])(values)


def test_without_inputs_the_norm_is_where_the_flag_is(device: str) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    norm, norms = flagos.multi_tensor_l2norm([], per_tensor=True, noop_flag=flag)
    assert norm.device == flag.device
    assert norm.tolist() == [0.0]
    assert norms is not None
    assert norms.shape == (0,)


def test_tensors_of_another_device_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setattr(_launch, "_driven_type", lambda: "cuda")
    for values in ([torch.ones(3)], []):
        with pytest.raises(NotSupportedError, match="'cuda'"):
            flagos.multi_tensor_l2norm(values)


def test_numbers_reach_the_device(device: str) -> None:
    """Tables consist of such numbers: addresses, counts, and 0."""
    some = [0, 1, -1, 16, 2**31, -(2**40), 2**57 - 1] * 60
    found = _numbers.numbers_on_device(some, torch.device(device))
    assert found[: len(some)].tolist() == some

"""The optimizer operators over several steps, compared with torch's; flags, halves, scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine_fl as te
from transformer_engine_fl import ops
from transformer_engine_fl.testing.arguments import clone, tensors, transformed

SHAPES = [(3, 4), (7,), (), (0, 5), (2, 3, 2)] * 30
"""150 small tensors."""

Lists = list[Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(80)


def normal(dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> Lists:
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def zeros(like: Lists, dtype: torch.dtype | None = None) -> Lists:
    return [torch.zeros_like(it, dtype=dtype) for it in like]


def flag(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


def close(found: Lists, expected: Lists, dtype: torch.dtype) -> None:
    rtol = 1e-12 if dtype == torch.float64 else 3e-6
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=rtol, atol=rtol / 10)


def stepped(params: Lists, optimizer: torch.optim.Optimizer, gradients: list[Lists]) -> None:
    for grads in gradients:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()


# --------------------------------------------------------------------------- torch.optim

WIDE = [torch.float64, torch.float32]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("capturable", [False, True])
def test_adam_is_torchs(
    dtype: torch.dtype, decoupled: bool, weight_decay: float, capturable: bool
) -> None:
    start, gradients = normal(dtype), [normal(dtype) for _ in range(5)]
    numbers = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": weight_decay}
    theirs = [torch.nn.Parameter(it.clone()) for it in start]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    stepped(theirs, kind(theirs, **numbers), gradients)

    ours = [torch.nn.Parameter(it.clone()) for it in start]
    m, v = zeros(start), zeros(start)
    count = torch.zeros(1, dtype=torch.int32)
    options = {"decoupled_weight_decay": decoupled}
    for step, grads in enumerate(gradients, 1):
        betas = (0.8, 0.99, 1e-6, weight_decay)
        if capturable:
            count += 1
            lr = torch.tensor([0.01], dtype=torch.float64)
            ops.multi_tensor_adam_capturable(grads, ours, m, v, lr, count, *betas, **options)
        else:
            ops.multi_tensor_adam(grads, ours, m, v, 0.01, step, *betas, **options)
    close(ours, theirs, dtype)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
)
def test_sgd_is_torchs(dtype: torch.dtype, options: dict[str, Any]) -> None:
    start, gradients = normal(dtype), [normal(dtype) for _ in range(4)]
    theirs = [torch.nn.Parameter(it.clone()) for it in start]
    stepped(theirs, torch.optim.SGD(theirs, 0.05, **options), gradients)

    ours, buffers = clone(start), [torch.full_like(it, torch.nan) for it in start]
    for step, grads in enumerate(gradients):
        scaled = [it * 8 for it in grads]
        given = {**options, "scale": 1 / 8, "first_run": step == 0}
        ops.multi_tensor_sgd(scaled, ours, buffers, 0.05, **given)
    close(ours, theirs, dtype)


def test_without_momentum_its_buffers_are_left_alone() -> None:
    params = normal()
    buffers = [torch.full_like(it, 7.0) for it in params]
    ops.multi_tensor_sgd(normal(), params, buffers, 0.1, 0.1)
    assert all(bool(it.eq(7).all()) for it in buffers)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_clipping_is_torchs(dtype: torch.dtype, largest: float) -> None:
    grads = normal(dtype)
    params = [torch.nn.Parameter(torch.zeros_like(it)) for it in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    total = torch.nn.utils.clip_grad_norm_(params, largest)

    norm, norms = ops.multi_tensor_l2norm(grads, per_tensor=True)
    assert norms is not None
    close([norm[0]], [total], dtype)
    close([*norms], [it.norm() for it in grads], dtype)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    ops.multi_tensor_scale_tensor(grads, grads, factor)  # in place
    close(grads, [it.grad for it in params if it.grad is not None], dtype)


@pytest.mark.parametrize("factor", [0.125, -3.0])
def test_the_norm_of_what_will_be_unscaled(factor: float) -> None:
    grads = normal()
    inv_scale = torch.tensor([factor], dtype=torch.float64)
    norm, none = ops.multi_tensor_unscale_l2norm(grads, inv_scale)
    assert none is None
    unscaled = [torch.empty_like(it) for it in grads]
    ops.multi_tensor_scale(grads, unscaled, factor)
    close([norm[0]], [torch.cat([it.flatten() for it in unscaled]).norm()], torch.float64)


# ---------------------------------------------------------------------------------- flags

LOOKING: dict[str, Callable[[Lists, Tensor], object]] = {
    "scale": lambda x, up: ops.multi_tensor_scale(x, clone(x), 2.0, noop_flag=up),
    "scale_tensor": lambda x, up: ops.multi_tensor_scale_tensor(
        x, clone(x), torch.ones(1), noop_flag=up
    ),
    "l2norm": lambda x, up: ops.multi_tensor_l2norm(x, noop_flag=up),
    "unscale_l2norm": lambda x, up: ops.multi_tensor_unscale_l2norm(x, torch.ones(1), noop_flag=up),
}


@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_flag_collects_what_is_not_finite_over_several_calls(
    name: str, value: float, dtype: torch.dtype
) -> None:
    clean, dirty, up = normal(dtype), normal(dtype), flag()
    dirty[-1].view(-1)[-1] = value
    LOOKING[name](clean, up)
    assert up.item() == 0
    LOOKING[name](dirty, up)
    assert up.item() == 1
    LOOKING[name](clean, up)
    assert up.item() == 1


def test_scaling_goes_on_while_the_flag_is_up() -> None:
    inputs, outputs = normal(), [torch.zeros_like(it) for it in normal()]
    ops.multi_tensor_scale(inputs, outputs, 2.0, noop_flag=flag(1))
    close(outputs, [it * 2 for it in inputs], torch.float64)


def test_a_step_whose_gradients_overflowed_is_skipped_and_the_next_one_is_not() -> None:
    params, m, v = normal(torch.float32), zeros(normal(torch.float32)), zeros(normal(torch.float32))
    grads, scale = normal(torch.float16), 2.0**6
    count, lr = torch.ones(1, dtype=torch.int32), torch.full((1,), 0.1)
    inv_scale, up = torch.full((1,), 1 / scale), flag()
    overflowed = [(it * scale).clone() for it in grads]
    overflowed[1][3] = torch.inf
    before = clone(params)
    for scaled, moved in ((overflowed, False), ([it * scale for it in grads], True)):
        up.zero_()
        ops.multi_tensor_unscale_l2norm(scaled, inv_scale, noop_flag=up)
        ops.multi_tensor_adam_capturable(
            scaled, params, m, v, lr, count, inv_scale=inv_scale, noop_flag=up
        )
        if not moved:
            assert all(map(torch.equal, params, before))
            assert not any(bool(it.any()) for it in (*m, *v))
    expected, zero = clone(before), zeros(before)
    ops.multi_tensor_adam([it.float() for it in grads], expected, zero, zeros(before), 0.1, 1)
    close(params, expected, torch.float32)


# -------------------------------------------------------------------------- master weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_too_small_for_a_narrow_parameter_add_up_in_its_master(dtype: torch.dtype) -> None:
    masters = [torch.ones(5), torch.full((2, 2), -1.0)]
    params = [it.to(dtype) for it in masters]
    bare = clone(params)
    grads = [torch.ones_like(it) for it in params]
    states = [(zeros(masters), zeros(masters)) for _ in range(2)]
    for step in range(1, 201):
        ops.multi_tensor_adam(grads, params, *states[0], 1e-4, step, master_params=masters)
        ops.multi_tensor_adam(grads, bare, *states[1], 1e-4, step)
    for param, master, start, sign in zip(params, masters, bare, (1, -1), strict=True):
        assert torch.equal(param, master.to(dtype))
        torch.testing.assert_close(master, torch.full_like(master, sign - 0.02))
        assert bool(start.eq(sign).all())


def halves(masters: Lists) -> tuple[Lists, Lists]:
    """Masters split into parameters and remainders, by arithmetic on Python's integers."""
    params, remainders = [], []
    for master in masters:
        words = [word & 0xFFFFFFFF for word in master.view(torch.int32).flatten().tolist()]
        low = [(word & 0xFFFF) - 0x10000 * (word >> 15 & 1) for word in words]
        high = [(word - rest) >> 16 for word, rest in zip(words, low, strict=True)]
        signed = [it - 0x10000 * (it >> 15) for it in high]
        shape = master.shape
        params.append(torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16).view(shape))
        remainders.append(torch.tensor(low, dtype=torch.int16).view(shape))
    return params, remainders


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_master_in_two_halves_goes_the_way_of_a_whole_one_bit_for_bit(decoupled: bool) -> None:
    masters = normal(torch.float32)
    params, remainders = halves(masters)
    whole = [it.bfloat16() for it in masters]
    states = [(zeros(masters), zeros(masters)) for _ in range(2)]
    options = {"weight_decay": 0.1, "decoupled_weight_decay": decoupled}
    for step in range(1, 21):
        grads = normal(torch.bfloat16)
        ops.multi_tensor_adam(
            grads, whole, *states[0], 0.01, step, master_params=masters, **options
        )
        ops.multi_tensor_adam_param_remainder(
            grads, params, *states[1], remainders, 0.01, step, **options
        )
    for found, expected in zip((params, remainders), halves(masters), strict=True):
        assert all(map(torch.equal, found, expected))
    assert any(bool((it < 0).any()) for it in remainders)
    for param, master in zip(params, masters, strict=True):
        nearest = (param.double() - master.double()).abs() <= master.double().abs() * 2**-8
        assert bool(nearest.all())


def test_every_remainder_comes_back_from_a_step_that_changes_nothing() -> None:
    remainders = [torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)]
    for value in (1.0, -1.5, 3.0e-5, 2.0**100):
        params = [torch.full((2**16,), value, dtype=torch.bfloat16)]
        before = clone((params, remainders))
        states = (zeros(params, torch.float32), zeros(params, torch.float32))
        grads = [torch.ones_like(params[0])]
        ops.multi_tensor_adam_param_remainder(grads, params, *states, remainders, 0.0, 1)
        assert torch.equal(params[0], before[0][0])
        assert torch.equal(remainders[0], before[1][0])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_parameters_follow_their_masters(dtype: torch.dtype) -> None:
    masters = [torch.randn(6, 4), torch.randn(5) * 10]
    params = [torch.empty_like(it, dtype=dtype) for it in masters]
    expected = clone(masters)
    scales = [torch.tensor([8.0]), torch.tensor([4096.0])]
    amaxes, inverses = [torch.tensor([99.0]), torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]
    states = [(zeros(masters), zeros(masters)) for _ in range(2)]
    for step in range(1, 4):
        grads = [torch.randn_like(it) for it in masters]
        ops.multi_tensor_adam_fp8(
            grads, params, *states[0], masters, scales, amaxes, inverses, 0.1, step
        )
        ops.multi_tensor_adam(grads, expected, *states[1], 0.1, step)
    assert all(map(torch.equal, masters, expected))
    largest = torch.finfo(dtype).max
    for param, master, scale in zip(params, masters, scales, strict=True):
        inside = (master * scale).clamp(-largest, largest)
        assert torch.equal(param.float(), inside.to(dtype).float())
    assert (params[1].float().abs() == largest).any()  # the largest values are clamped
    assert amaxes[0].item() == 99.0
    assert amaxes[1].item() >= masters[1].abs().max().item() > 0
    assert [it.item() for it in inverses] == [1 / 8, 1 / 4096]


# -------------------------------------------------------------------------------- memory


def test_parameters_that_are_views_of_one_buffer_are_each_written_in_place() -> None:
    flat = torch.randn(40)
    before = flat.clone()
    params = [flat[2:8].view(2, 3), flat[8:20], flat[30:31].view(())]
    alone = clone([it.clone() for it in params])
    grads = [torch.randn_like(it) for it in params]
    moments = [(zeros(alone), zeros(alone)) for _ in range(2)]
    ops.multi_tensor_adam(grads, params, *moments[0], 0.1, 1)
    ops.multi_tensor_adam(grads, alone, *moments[1], 0.1, 1)
    assert all(map(torch.equal, params, alone))
    untouched = [*range(2), *range(20, 30), *range(31, 40)]
    assert torch.equal(flat[untouched], before[untouched])


def test_autograd_notices_that_a_parameter_was_written() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    loss = (param * param).sum()
    ops.multi_tensor_sgd([torch.ones(3)], [param], [torch.zeros(3)], 0.1)
    assert param.is_leaf
    assert param.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -------------------------------------------------------------------------------- scales


def scales_of(amaxes: list[float], largest: float, **options: Any) -> list[list[float]]:
    given = [torch.tensor(amaxes)]
    places = [torch.zeros(len(amaxes))], [torch.zeros(len(amaxes))]
    ops.multi_tensor_compute_scale_and_scale_inv(given, *places, largest, **options)
    return [place[0].tolist() for place in places]


def test_scales_by_hand() -> None:
    nan, inf = float("nan"), float("inf")
    biggest = torch.finfo(torch.float32).max
    scales, inverses = scales_of([2.0, 3.5, 0.0, inf, nan, 1e-40], 448.0)
    assert scales == [224.0, 128.0, 1.0, 1.0, 1.0, biggest]
    assert inverses == pytest.approx([1 / it for it in scales], rel=1e-6)
    scales, _ = scales_of([2.0, 3.5, 3.6, 0.0, 1e-40], 448.0, force_pow_2_scales=True)
    assert scales == [128.0, 128.0, 64.0, 1.0, 2.0**127]
    scales, _ = scales_of([2.0, 0.25, 0.0, nan], 448.0, epsilon=0.5)
    assert scales == [224.0, 896.0, 896.0, 1.0]


def test_an_e8m0_scale_is_the_smallest_by_which_its_block_fits() -> None:
    amaxes = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    found = torch.empty(len(amaxes), dtype=torch.float8_e8m0fnu)
    ops.multi_tensor_compute_scale_inv_e8m0([amaxes], [found])
    scaled = amaxes.double() / found.double()
    assert bool((scaled <= 448).all())
    smallest = found.view(torch.uint8) == 0
    assert bool(((scaled > 224) | smallest).all())
    assert bool(smallest.any())


def test_e8m0_scales_by_hand() -> None:
    amaxes = torch.tensor([448.0, 450.0, 1.0, 0.0, float("inf"), float("nan")]).bfloat16()
    found = torch.empty(6, dtype=torch.uint8)
    ops.multi_tensor_compute_scale_inv_e8m0([amaxes], [found])
    assert found.tolist() == [127, 128, 119, 0, 254, 255]


# --------------------------------------------------------------------------- on the device

OPERATORS = [name for name, it in ops.CATALOGUE.items() if it.family == "optimizer"]


class NothingIsRead(TorchDispatchMode):
    """Fails if a value is brought to the host."""

    REFUSED = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.REFUSED:
            raise AssertionError(f"{func} reads values on the host")
        return func(*args, **(kwargs or {}))


def reference_of(name: str) -> Callable[..., Any]:
    manager = te.get_default_manager()
    manager.ensure_initialized()
    entry = next(
        it for it in manager.registry.entries(name) if it.impl.impl_id == "reference.torch"
    )
    assert entry.load() is None
    return entry.fn


def samples_of(name: str) -> Iterator[te.Sample]:
    contract = ops.CATALOGUE[name]
    yield from contract.samples(contract.dtypes[0], "cpu")


def on_no_device(value: Any) -> Any:
    """The value on meta: its data can be neither read nor combined with CPU tensors."""
    return transformed(
        value,
        lambda it: torch.empty_strided(it.shape, it.stride(), dtype=it.dtype, device="meta"),
    )


def test_reading_is_seen() -> None:
    for read in (lambda x: x.sum().item(), lambda x: bool(x[0] > 0), lambda x: x.nonzero()):
        with NothingIsRead(), pytest.raises(AssertionError, match="on the host"):
            read(torch.ones(2))
    for read in (lambda x: x.tolist(), lambda x: x[x > 0], lambda x: x + torch.ones(2)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(on_no_device(torch.ones(2)))


@pytest.mark.parametrize("name", OPERATORS)
def test_nothing_is_read_on_the_host(name: str) -> None:
    run = reference_of(name)
    for sample in samples_of(name):
        args, kwargs = clone((sample.args, sample.kwargs))
        with NothingIsRead():
            run(*args, **kwargs)


@pytest.mark.parametrize("name", OPERATORS)
def test_everything_stays_on_the_device_of_the_tensors(name: str) -> None:
    run = reference_of(name)
    for sample in samples_of(name):
        args, kwargs = on_no_device((sample.args, sample.kwargs))
        results = run(*args, **kwargs)
        if any(True for _ in tensors((args, kwargs))):
            assert all(it.device.type == "meta" for it in tensors(results))


def test_a_compiled_step_serves_all_steps() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(grads: Lists, params: Lists, m: Lists, v: Lists, lr: Tensor, count: Tensor) -> Tensor:
        up = torch.zeros(1, dtype=torch.int32)
        norm, _ = ops.multi_tensor_l2norm(grads, noop_flag=up)
        ops.multi_tensor_adam_capturable(grads, params, m, v, lr, count, noop_flag=up)
        return norm

    shapes = [(3, 4), (7,)]
    params = normal(torch.float32, shapes)
    expected = clone(params)
    states = [(zeros(params), zeros(params)) for _ in range(2)]
    for count in range(1, 4):
        grads = normal(torch.float32, shapes)
        lr = 0.1 / count
        counted = torch.tensor([count], dtype=torch.int32)
        norm = step(grads, params, *states[0], torch.tensor([lr]), counted)
        ops.multi_tensor_adam(grads, expected, *states[1], lr, count)
        close([norm[0]], [torch.nn.utils.get_total_norm(grads)], torch.float32)
    close(params, expected, torch.float32)
    assert counter.frame_count == 1
    torch._dynamo.reset()


# -------------------------------------------------------------------------------- errors


def test_an_empty_parameter_may_be_expanded() -> None:
    written = torch.ones(1, 0).expand(2, 0)
    ops.multi_tensor_scale([torch.ones(2, 0), torch.ones(3)], [written, out := torch.zeros(3)], 2)
    assert out.tolist() == [2, 2, 2]
    with pytest.raises(te.ArgumentError, match="expanded"):
        ops.multi_tensor_scale([torch.ones(2, 1)], [torch.ones(1, 1).expand(2, 1)], 2)


def test_what_does_not_agree_is_named_with_its_place() -> None:
    params = [torch.ones(3), torch.ones(2, 2)]
    grads, m, v = clone(params), zeros(params), zeros(params)
    masters = [*m[:1], torch.zeros(2, 2, dtype=torch.float64)]
    for wrong, words in (
        (lambda: ops.multi_tensor_adam(grads[:1], params, m, v, 0.1, 1), "'grads' is 1 tensors"),
        (lambda: ops.multi_tensor_adam([*grads[:1], m[0]], params, m, v, 0.1, 1), r"'grads\[1\]'"),
        (lambda: ops.multi_tensor_adam(grads, params, m, v, 0.1, 0), "'step'"),
        (lambda: ops.multi_tensor_adam(grads, params, m, v, 0.1, 1, 1.0), "'beta1'"),
        (
            lambda: ops.multi_tensor_adam(grads, params, m, v, 0.1, 1, master_params=masters),
            r"'master_params\[1\]'.*float32",
        ),
        (
            lambda: ops.multi_tensor_adam(grads, params, [it.half() for it in m], v, 0.1, 1),
            r"'exp_avgs\[0\]'",
        ),
        (
            lambda: ops.multi_tensor_adam(grads, params, m, [it.bfloat16() for it in v], 0.1, 1),
            r"'exp_avg_sqs\[0\]'.*'exp_avgs\[0\]'",
        ),
        (
            lambda: ops.multi_tensor_l2norm(grads, noop_flag=torch.zeros(2, dtype=torch.int32)),
            "'noop_flag'",
        ),
    ):
        with pytest.raises(te.ArgumentError, match=words):
            wrong()
    assert all(bool(it.eq(1).all()) for it in params)

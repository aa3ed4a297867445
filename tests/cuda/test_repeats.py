"""Repeated calls: their results, and what makes a call differ from the known ones."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import inspect
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cuda_emulation
import pytest
import repeated_calls
import torch
from stub_driver import StubDriver
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine_fl as te
from transformer_engine_fl import ops
from transformer_engine_fl.backends import _driver, _repeats
from transformer_engine_fl.backends.vendor.cuda import (
    _arguments,
    _launch,
    moe,
    normalization,
    padding,
    quantization,
)
from transformer_engine_fl.core.contract import Sample
from transformer_engine_fl.core.errors import ArgumentError
from transformer_engine_fl.core.policy import get_environment
from transformer_engine_fl.testing import Guarded


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    reason = cuda_emulation.missing()
    if reason:
        pytest.skip(reason)
    with cuda_emulation.running():
        yield


def _rows(rows: int = 3, columns: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, columns), generator=generator)


def _nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():  # torch warns that this is a prototype
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([x, x])


def _repeated(call: Callable[[], Any]) -> None:
    for _ in range(_repeats.CALLS_BEFORE):
        call()


def _is_repeat(operator: Any, *arguments: Any) -> bool:
    names = inspect.signature(operator).parameters
    options = dict(zip(names, arguments, strict=True))
    return operator.calls.last(**options) is not _repeats.MISS


def test_a_repeated_call_gives_what_its_own_arguments_make() -> None:
    gamma = _rows(1, 64, 1)[0]
    _repeated(lambda: normalization.rmsnorm_fwd(_rows(), gamma))
    x = _rows(seed=2)
    assert _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)
    output, rsigma = normalization.rmsnorm_fwd(x, gamma)
    wide = x.double()
    expected = (wide.square().mean(-1) + 1e-5).rsqrt()
    torch.testing.assert_close(rsigma.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        output.double(), wide * expected[:, None] * gamma, rtol=1e-5, atol=1e-6
    )


def test_outputs_are_new_at_each_call() -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    first, second = normalization.rmsnorm_fwd(x, gamma), normalization.rmsnorm_fwd(x, gamma)
    assert first[0].data_ptr() != second[0].data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        lambda x, gamma: (x[:2], gamma, 1e-5, False, None),
        lambda x, gamma: (x.bfloat16(), gamma, 1e-5, False, None),
        lambda x, gamma: (x.t().contiguous().t(), gamma, 1e-5, False, None),
        lambda x, gamma: (x, torch.nn.Parameter(gamma), 1e-5, False, None),
        lambda x, gamma: (x, gamma.clone().requires_grad_(), 1e-5, False, None),
        lambda x, gamma: (x, gamma, 1e-6, False, None),
        lambda x, gamma: (x, gamma, 1e-5, True, None),
        lambda x, gamma: (x, gamma, 1e-5, 0, None),
        lambda x, gamma: (x, gamma, 1e-5, False, torch.bfloat16),
        lambda x, gamma: (torch._neg_view(x), gamma, 1e-5, False, None),
        lambda x, gamma: (torch.zeros(193)[1:].view(3, 64), gamma, 1e-5, False, None),
        lambda x, gamma: (x.to("meta"), gamma, 1e-5, False, None),
        lambda x, gamma: (None, gamma, 1e-5, False, None),
        lambda x, gamma: (_nested(x), gamma, 1e-5, False, None),
        lambda x, gamma: (x, _nested(gamma), 1e-5, False, None),
        lambda x, gamma: (x.to_sparse(), gamma, 1e-5, False, None),
        lambda x, gamma: (x.to_mkldnn(), gamma, 1e-5, False, None),
    ],
    ids=[
        "fewer rows",
        "another dtype",
        "other strides",
        "a parameter",
        "requires grad",
        "another eps",
        "another option",
        "an option of another type",
        "another output dtype",
        "a sign kept apart",
        "unaligned",
        "another device",
        "no tensor",
        "nested",
        "nested behind the first",
        "sparse",
        "of a layout of its own",
    ],
)
def test_another_call_goes_the_ordinary_way(other: Callable[..., Any]) -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    assert _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)
    assert not _is_repeat(normalization.rmsnorm_fwd, *other(x, gamma))


class Unseen(TorchDispatchMode):
    """A mode that torch's check for active modes overlooks."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [Guarded, Unseen, lambda: FakeTensorMode(allow_non_fake_inputs=True)],
    ids=["of the kit", "unseen", "fake tensors"],
)
def test_modes_see_every_allocation(mode: Callable[[], TorchDispatchMode]) -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    with mode():
        assert not _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)


def test_modes_that_are_active_in_another_thread_prevent_a_repeat_there() -> None:
    """In autograd's threads the modes of the forward's thread are active."""
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    found = []

    def run() -> None:
        _python_dispatch._push_mode(Guarded())
        try:
            found.append(_is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None))
        finally:
            _python_dispatch._pop_mode()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]


def test_arguments_that_share_memory_are_not_taken_for_others() -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_bwd(x, x.view(3, 64), torch.ones(3), gamma))
    assert not _is_repeat(normalization.rmsnorm_bwd, x, _rows(seed=3), torch.ones(3), gamma, False)


def test_an_argument_that_is_given_twice_is_expected_twice() -> None:
    gamma = torch.ones(64)

    def call(dy: Tensor, x: Tensor) -> Sample:
        return Sample("", (dy, x, torch.ones(3), gamma))

    def repeats(it: Sample) -> bool:
        return _is_repeat(normalization.rmsnorm_bwd, *it.args, False)

    x, other = _rows(), _rows(seed=3)
    _repeated(lambda: normalization.rmsnorm_bwd(*call(x, x).args))
    assert repeats(call(other, other))
    repeated_calls.check_same(normalization.rmsnorm_bwd, call(other, other))
    assert not repeats(call(x, other))
    repeated_calls.check_same(normalization.rmsnorm_bwd, call(x, other))


def test_an_address_is_not_taken_for_that_of_an_argument_in_the_same_memory() -> None:
    memory = _rows(4)
    # Each tensor has its own storage, so torch cannot see that they share memory.
    gamma = torch.from_dlpack(memory[2])
    _repeated(lambda: normalization.rmsnorm_fwd(memory, gamma))
    assert normalization.rmsnorm_fwd.calls.last is _repeats._never  # type: ignore[attr-defined]


def test_arguments_may_lie_side_by_side_in_one_storage() -> None:
    memory = _rows(4)
    _repeated(lambda: normalization.rmsnorm_fwd(memory[:3], memory[3]))
    x, gamma = _rows(seed=2), _rows(1, 64, 3)[0]
    assert _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)
    repeated_calls.check_same(normalization.rmsnorm_fwd, Sample("", (x, gamma)))


def test_several_kinds_of_calls_are_at_hand() -> None:
    gamma = torch.ones(64)
    for rows in (2, 3):
        _repeated(lambda rows=rows: normalization.rmsnorm_fwd(_rows(rows), gamma))
    for rows in (2, 3, 2):
        output, _ = normalization.rmsnorm_fwd(_rows(rows), gamma)
        assert output.shape == (rows, 64)
        assert _is_repeat(normalization.rmsnorm_fwd, _rows(rows), gamma, 1e-5, False, None)


def test_clearing_plans_forgets_calls() -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    normalization._forwards.clear()
    assert not _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)


def test_a_repeated_quantization_is_the_contracts() -> None:
    x = _rows(32, 64)
    _repeated(lambda: quantization.quantize(x, format="mxfp8"))
    values = _rows(32, 64, 5) * 100
    again = Sample("", (values,), {"format": "mxfp8"})
    assert repeated_calls.is_repeat(quantization.quantize, again)
    found = quantization.quantize(values, format="mxfp8")
    _repeats.forget()
    expected = quantization.quantize(values, format="mxfp8")
    for one, other in zip(found, expected, strict=True):
        assert (one is None) is (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_repeated_permutation_follows_its_indices() -> None:
    rows = _rows(6, 16)

    def call(indices: Tensor) -> Any:
        return moe.moe_permute_fwd(rows, indices)

    start = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]], dtype=torch.int32)
    _repeated(lambda: call(start))
    turned = start.flip(0).contiguous()
    assert repeated_calls.is_repeat(moe.moe_permute_fwd, Sample("", (rows, turned)))
    found = call(turned)
    _repeats.forget()
    for one, other in zip(found, call(turned), strict=True):
        assert torch.equal(one, other)


def test_errors_are_the_operators_own() -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    with pytest.raises(TypeError):
        normalization.rmsnorm_fwd(x)  # type: ignore[call-arg]
    assert ops.rmsnorm_fwd.name == normalization.rmsnorm_fwd.__name__


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("normalization", "rmsnorm_fwd"),
        ("normalization", "layernorm_bwd"),
        ("softmax", "scaled_masked_softmax_forward"),
        ("quantization", "quantize"),
        ("rope", "fused_qkv_rope_forward"),
        ("moe", "moe_permute_mask_fwd"),
        ("dropout", "dropout_bwd"),
        ("router", "fused_moe_aux_loss_fwd"),
    ],
)
def test_every_call_of_a_row_does_what_the_ordinary_way_does(family: str, name: str) -> None:
    module = importlib.import_module(f"transformer_engine_fl.backends.vendor.cuda.{family}")
    operator = getattr(module, name)
    sample = next(iter(getattr(ops, name).samples("float32", "cpu")))
    assert repeated_calls.serves(operator, sample)
    repeated_calls.check(operator, sample)
    assert repeated_calls.is_repeat(operator, sample), operator.calls.refusal
    for seed, (shift, apart) in enumerate([(1, 0), (0, 4), (3, 1), (0, 0)], 20):
        other = repeated_calls.renewed(sample, seed, shift=shift, apart=apart)
        assert repeated_calls.is_repeat(operator, other) is not bool(shift or apart)
        repeated_calls.check_same(operator, other)


NEVER_REPEATED = {
    "dropout_fwd",  # its seed differs in each call
    ("vendor.cuda", "fused_attn_fwd"),  # torch calls cuDNN
    ("vendor.cuda", "fused_attn_bwd"),
    "fused_linear_cross_entropy_fwd",  # torch multiplies the matrices
    "fused_linear_cross_entropy_bwd",
    "fused_linear_cross_entropy_fwd_bwd",
    "multi_tensor_quantize",  # lists of tensors
}
WRITTEN = {("default.flagos", name) for name in repeated_calls.WRITING}


def test_operators_are_repeated_if_and_only_if_all_that_they_do_is_seen() -> None:
    pytest.importorskip("triton")
    registry = te.OpRegistry()
    te.OpManager(registry, plugins=False).ensure_initialized()
    seen = 0
    for name, contract in registry.contracts.items():
        for entry in registry.entries(name):
            if entry.impl.impl_id in ("default.flagos", "vendor.cuda"):
                assert entry.load() is None
                never = NEVER_REPEATED & {name, (entry.impl.impl_id, name)}
                wanted = not contract.mutates and not never
                wanted |= (entry.impl.impl_id, name) in WRITTEN
                assert hasattr(entry.fn, "calls") is wanted, (entry.impl.impl_id, name)
                seen += wanted
    assert seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_are_repeated(mode: Callable[[], Any]) -> None:
    _repeats._tensor_guards.cache_clear()
    gamma = torch.nn.Parameter(torch.ones(64))
    with mode():
        _repeated(lambda: normalization.rmsnorm_fwd(_rows(), gamma))
        assert _is_repeat(normalization.rmsnorm_fwd, _rows(), gamma, 1e-5, False, None)
        repeated_calls.check_same(normalization.rmsnorm_fwd, Sample("", (_rows(3, 64, 4), gamma)))


def test_what_a_call_held_is_let_go() -> None:
    x, gamma = _rows(), torch.ones(64)
    held = [weakref.ref(x), weakref.ref(gamma)]
    outputs = [normalization.rmsnorm_fwd(x, gamma) for _ in range(_repeats.CALLS_BEFORE + 1)]
    held += [weakref.ref(it) for results in outputs for it in results]
    several = [_rows()]  # no valid argument, which only the operator finds out
    held += map(weakref.ref, several)
    for _ in range(_repeats.CALLS_BEFORE + 1):
        with contextlib.suppress(ArgumentError):
            normalization.rmsnorm_fwd(several, gamma)  # type: ignore[arg-type]
    del x, gamma, outputs, several
    gc.collect()
    assert not [it for it in held if it() is not None]


def test_a_kind_of_call_that_could_not_be_watched_is_watched_later() -> None:
    gamma = torch.ones(64)
    unaligned = torch.zeros(193)[1:].view(3, 64)
    _repeated(lambda: normalization.rmsnorm_fwd(unaligned, gamma))
    assert not _is_repeat(normalization.rmsnorm_fwd, unaligned, gamma, 1e-5, False, None)
    _repeated(lambda: normalization.rmsnorm_fwd(_rows(), gamma))
    assert _is_repeat(normalization.rmsnorm_fwd, _rows(), gamma, 1e-5, False, None)


def test_calls_forgotten_while_one_is_watched_stay_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note, x, gamma = _repeats.note, _rows(), torch.ones(64)

    def forgetful(*launch: Any) -> bool:
        _repeats.forget()
        return note(*launch)

    monkeypatch.setattr(_repeats, "note", forgetful)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    assert not _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)


@pytest.mark.parametrize("member", ["_recent", "last"])
def test_calls_forgotten_while_one_is_remembered_stay_forgotten(member: str) -> None:
    class Interrupted(_repeats._Calls):
        """Another thread forgets every call right before one is remembered."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name == member and value not in ((), _repeats._never):
                self.forget()
            super().__setattr__(name, value)

    operator, gamma = normalization.rmsnorm_fwd, torch.ones(64)
    calls: Any = operator.calls  # type: ignore[attr-defined]
    calls.__class__ = Interrupted
    try:
        _repeated(lambda: operator(_rows(), gamma))
    finally:
        calls.__class__ = _repeats._Calls
    assert not _is_repeat(operator, _rows(), gamma, 1e-5, False, None)
    assert calls._recent == ()


def test_calls_forgotten_while_an_older_one_is_repeated_stay_forgotten() -> None:
    forgetting = False

    def start(*addresses: int) -> None:
        if forgetting:  # as another thread may do
            _repeats.forget()

    @_repeats.repeating
    def operator(input: Tensor) -> Tensor:
        output = torch.empty((4,), device=input.device)
        _repeats.note(start, _repeats.Address(input.data_ptr()))
        return output

    for size in (4, 8):
        _repeated(lambda size=size: operator(torch.zeros(size)))
    forgetting = True
    operator(torch.zeros(4))
    assert not _is_repeat(operator, torch.zeros(4))
    assert not _is_repeat(operator, torch.zeros(8))


def test_a_full_memory_of_plans_forgets_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gamma = _rows(), torch.ones(64)
    _repeated(lambda: normalization.rmsnorm_fwd(x, gamma))
    monkeypatch.setattr(_arguments, "_MOST_PLANS", 1)
    normalization.rmsnorm_fwd(_rows(3, 32), torch.ones(32))
    assert len(normalization._forwards) == 1
    assert _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)


def test_a_call_does_not_wait_for_a_thread_that_watches_another() -> None:
    x, gamma = _rows(), torch.ones(64)
    for _ in range(_repeats.CALLS_BEFORE - 1):
        normalization.rmsnorm_fwd(x, gamma)
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with _repeats._watching:
            taken.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    taken.wait(60)
    normalization.rmsnorm_fwd(x, gamma)
    assert other.is_alive()
    done.set()
    other.join()
    assert not _is_repeat(normalization.rmsnorm_fwd, x, gamma, 1e-5, False, None)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, 3, float("inf"), float("nan")])
def test_memory_is_filled_with_the_same_bits(value: float) -> None:
    @_repeats.repeating
    def filled(input: Tensor) -> Tensor:
        output = torch.empty((4,), dtype=torch.float32, device=input.device)
        output.fill_(value)
        _repeats.note(lambda *addresses: None, _repeats.Address(input.data_ptr()))
        return output

    x = torch.zeros(4)
    _repeated(lambda: filled(x))
    assert _is_repeat(filled, x)
    expected = torch.full((4,), value, dtype=torch.float32)
    assert torch.equal(filled(x).view(torch.int32), expected.view(torch.int32))


def _reads_a_value(x: Tensor) -> Any:
    return x.sum().item()


def _copies(x: Tensor) -> Any:
    return x.clone()


def _gives_its_argument(x: Tensor) -> Any:
    return x


def _launches_on_other_memory(x: Tensor) -> Any:
    _repeats.note(lambda *addresses: None, _repeats.Address(OTHER.data_ptr()))


def _launches_nothing(x: Tensor) -> Any:
    return torch.empty((4,), device=x.device)


def _moves_an_argument(x: Tensor) -> Any:
    x.add_(1)


OTHER = torch.zeros(4)


@pytest.mark.parametrize(
    "does",
    [
        _reads_a_value,
        _copies,
        _gives_its_argument,
        _launches_on_other_memory,
        _launches_nothing,
        _moves_an_argument,
    ],
)
def test_operators_whose_effects_the_guard_does_not_cover_are_never_repeated(
    does: Callable[..., Any],
) -> None:
    times = []

    @_repeats.repeating
    def operator(input: Tensor) -> Any:
        times.append(1)
        if does is not _launches_nothing:
            _repeats.note(lambda *addresses: None, _repeats.Address(input.data_ptr()))
        return does(input)

    x = torch.zeros(4)
    for _ in range(40):
        operator(x)
    assert len(times) == 40
    assert operator.calls.refusal  # type: ignore[attr-defined]


def test_parameters_may_have_any_name() -> None:
    @_repeats.repeating
    def operator(found: Tensor, type: int, calls: list[int], *, plain: float = 0.0) -> Tensor:
        output = torch.empty((type,), device=found.device)
        output.fill_(plain + sum(calls))
        _repeats.note(lambda *addresses: None, _repeats.Address(found.data_ptr()))
        return output

    x = torch.zeros(4)
    _repeated(lambda: operator(x, 3, [1, 2], plain=0.5))
    assert _is_repeat(operator, x, 3, [1, 2], 0.5)
    assert operator(x, 3, [1, 2], plain=0.5).tolist() == [3.5] * 3
    for other in [(x, 2, [1, 2], 0.5), (x, 3, (1, 2), 0.5), (x, 3, [True, 2], 0.5), (x, 3, [1, 2])]:
        assert not _is_repeat(operator, *other[:3], other[3] if len(other) > 3 else 0.0)


def test_items_of_a_list_that_are_no_numbers_are_not_compared() -> None:
    x = _rows(6, 16)

    def call(rows: list[Any]) -> Tensor:
        return padding.fused_multi_row_padding(x, row_list=rows, padded_row_list=[4, 4])

    _repeated(lambda: call([2, 4]))
    assert _is_repeat(padding.fused_multi_row_padding, x, [2, 4], [4, 4])
    with pytest.raises(ArgumentError):
        call([torch.ones(2), 4])


FIRST_CALLS = """
import gc, sys, weakref
import torch
from transformer_engine_fl.backends import _repeats

@_repeats.repeating
def operator(input):
    output = torch.empty((4,), device=input.device)
    _repeats.note(lambda *addresses: None, _repeats.Address(input.data_ptr()))
    return output

gc.disable()
x = torch.zeros(4)
for _ in range(_repeats.CALLS_BEFORE):
    operator(x)
assert operator.calls.last is not _repeats._never, operator.calls.refusal
held = weakref.ref(x)
del x
assert held() is None, "what was watched is kept"
assert "torch._dynamo" not in sys.modules, "torch's compiler was imported"
"""


def test_the_first_call_that_is_watched_in_a_process_leaves_nothing_behind() -> None:
    subprocess.run([sys.executable, "-c", FIRST_CALLS], check=True)


def test_a_variable_switches_repeating_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def operator(input: Tensor) -> Tensor:
        return input

    settings = dataclasses.replace(get_environment(), repeat_calls=False)
    assert _repeats.tensor_guard([torch.ones(3)])
    monkeypatch.setattr(_repeats, "get_environment", lambda: settings)
    assert _repeats.repeating(operator) is operator
    assert _repeats.tensor_guard([torch.ones(3)]) is None


def test_a_tensor_guard_compares_all_but_addresses_and_values() -> None:
    alike = _repeats.tensor_guard([torch.ones(3, 4), torch.nn.Parameter(torch.ones(2))])
    assert alike
    first, second = torch.zeros(3, 4), torch.nn.Parameter(torch.zeros(2))
    assert alike([first, second])
    others: list[list[Any]] = [
        [second, first], [first, torch.zeros(2)],
        [first.t().contiguous().t(), second], [first.double(), second], [first, None],
        [torch._neg_view(first), second], [first.to("meta"), second], [_nested(first), second],
        [first.to_sparse(), second],
    ]  # fmt: skip
    assert not any(map(alike, others))
    with FakeTensorMode():
        assert not alike([first, second])
    assert _repeats.tensor_guard([first.to_sparse()]) is None


# ----------------------------------------------------------------------- repeated launches


def _kernel(driver: StubDriver, function: int = 77, **geometry: Any) -> _launch.Kernel:
    kernel = object.__new__(_launch.Kernel)
    kernel.name, kernel.device = "nothing", 0
    options = geometry or {"shared_bytes": 512, "cluster": 2, "dependent": True}
    driver.arguments[function] = "PPqiP"
    kernel._geometry = _launch.Geometry(128, "PPqiP", **options)
    kernel._idle, kernel._function = [], ctypes.c_void_p(function)
    kernel._launch, kernel._stream = driver.launch, lambda device: 900 + device
    kernel._device_now = lambda: 0
    return kernel


def _launching(*kernels: _launch.Kernel) -> Any:
    """An operator that launches each kernel once; its second address may be 0."""

    @_repeats.repeating
    def operator(input: Tensor, other: Tensor | None = None) -> Tensor:
        output = torch.empty((16,), device=input.device)
        for turn, kernel in enumerate(kernels):
            there = 0 if other is None else other[4:].data_ptr()
            kernel.launch(4, 3 + turn, input.data_ptr(), there, -5, 6 + turn, output.data_ptr())
        return output

    return operator


@pytest.mark.parametrize("other", [None, torch.zeros(64)], ids=["nothing", "a tensor"])
def test_a_repeated_launch_gives_the_driver_what_an_ordinary_one_does(
    other: Tensor | None,
) -> None:
    driver = StubDriver()
    operator = _launching(_kernel(driver))
    _repeated(lambda: operator(torch.zeros(64), None if other is None else torch.zeros(64)))
    driver.launches.clear()
    x, y = torch.zeros(64), torch.zeros(64)
    assert _is_repeat(operator, x, other), operator.calls.refusal
    outputs = [operator.__wrapped__(x, other), operator(x, other), operator(y, other)]
    del driver.launches[0]  # the launch by _is_repeat
    ordinary, repeated, next_one = driver.launches
    assert repeated[0] == next_one[0] == ordinary[0]
    cluster = {_driver._CLUSTER_DIMENSION: (2, 1, 1)}
    started = {_driver._PROGRAMMATIC_STREAM_SERIALIZATION: (1, 0, 0)}
    assert ordinary[0] == (77, (4, 3, 1), (128, 1, 1), 512, 900, cluster | started)
    there = 0 if other is None else other.data_ptr() + 16
    given = zip((x, x, y), outputs, driver.launches, strict=True)
    for argument, output, (_, values) in given:
        assert values == (argument.data_ptr(), there, -5, 6, output.data_ptr())


def test_an_exchanging_launch_has_new_epochs_each_time_and_the_same_slots() -> None:
    driver = StubDriver()
    kernel = object.__new__(_launch.ExchangingKernel)
    like = _kernel(driver, together=4)
    for name in ("name", "device", "_idle", "_function", "_launch", "_stream", "_device_now"):
        setattr(kernel, name, getattr(like, name))
    driver.arguments[77] = "PqPPP"
    kernel._geometry = _launch.Geometry(128, "PqPPP", together=4)
    slots = torch.zeros(64, dtype=torch.int64)
    asked: list[tuple[int, int]] = []

    def slots_for(blocks: int, epochs: int) -> tuple[int, Tensor]:
        asked.append((blocks, epochs))
        return 2**33 + len(asked), slots

    kernel._slots = slots_for  # type: ignore[assignment]

    @_repeats.repeating
    def operator(input: Tensor) -> Tensor:
        output = torch.empty((16,), device=input.device)
        kernel.launch(8, 1, input.data_ptr(), -5, output.data_ptr(), 7)
        return output

    x = torch.zeros(64)
    _repeated(lambda: operator(torch.zeros(64)))
    assert _is_repeat(operator, x), operator.calls.refusal
    driver.launches.clear()
    asked.clear()
    outputs = [operator(x), operator(x), operator.__wrapped__(x)]
    assert asked == [(8, 7)] * 3
    assert [values for _, values in driver.launches] == [
        (x.data_ptr(), -5, output.data_ptr(), 2**33 + epoch, slots.data_ptr())
        for epoch, output in enumerate(outputs, start=1)
    ]


def test_a_repeated_launch_is_as_cooperative_as_an_ordinary_one() -> None:
    driver = StubDriver()
    operator = _launching(_kernel(driver, together=4))
    _repeated(lambda: operator(torch.zeros(64)))
    assert _is_repeat(operator, torch.zeros(64), None), operator.calls.refusal
    for (*_, attributes), _ in driver.launches:
        assert {name: value[0] for name, value in attributes.items()} == {_driver._COOPERATIVE: 1}


def test_a_repeated_launch_takes_the_stream_of_the_moment() -> None:
    driver, streams = StubDriver(), list(range(1, 40))
    kernel = _kernel(driver)
    kernel._stream = lambda device: streams.pop(0)
    operator = _launching(kernel)
    _repeated(lambda: operator(torch.zeros(64)))
    for _ in range(3):
        assert _is_repeat(operator, torch.zeros(64), None), operator.calls.refusal
    found = [stream for (*_, stream, _), _ in driver.launches]
    assert found == list(range(1, len(found) + 1))


def test_a_repeated_launch_takes_the_memory_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, x = StubDriver(), torch.zeros(64)
    operator = _launching(_kernel(driver))
    _repeated(lambda: operator(x))
    made = []

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return prepared(*arguments)

    prepared = _driver.Prepared
    monkeypatch.setattr(_driver, "Prepared", counted)
    for _ in range(3):
        assert _is_repeat(operator, x, None), operator.calls.refusal
    assert not made


def test_a_repeated_launch_binds_the_context_of_a_new_thread_and_raises_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[int] = []
    monkeypatch.setattr(_driver, "bind_context", bound.append)
    monkeypatch.setattr(_driver, "_describe", str)
    driver, x = StubDriver(), torch.zeros(64)
    operator = _launching(_kernel(driver))
    _repeated(lambda: operator(x))
    driver.launches.clear()
    driver.codes = [_driver._INVALID_CONTEXT, 0, 700]
    assert _is_repeat(operator, x, None)
    assert bound == [0]
    with pytest.raises(_launch.LaunchError) as raised:
        operator(x)
    assert raised.value.code == 700
    assert _is_repeat(operator, x, None)
    assert len(driver.launches) == 2


def test_several_launches_of_a_call_are_each_repeated_in_their_order() -> None:
    driver, x = StubDriver(), torch.zeros(64)
    operator = _launching(_kernel(driver, 77), _kernel(driver, 78, together=4))
    _repeated(lambda: operator(torch.zeros(64)))
    assert _is_repeat(operator, x, None), operator.calls.refusal
    driver.launches.clear()
    outputs = [operator.__wrapped__(x), operator(x)]
    ordinary, repeated = driver.launches[:2], driver.launches[2:]
    assert [how for how, _ in repeated] == [how for how, _ in ordinary]
    assert [how[0] for how, _ in repeated] == [77, 78]
    for launches, output in zip((ordinary, repeated), outputs, strict=True):
        start, end = x.data_ptr(), output.data_ptr()
        assert [values for _, values in launches] == [
            (start, 0, -5, 6, end),
            (start, 0, -5, 7, end),
        ]


def test_a_call_whose_second_launch_fails_raises_that_and_the_next_does_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_driver, "_describe", str)
    driver, x = StubDriver(), torch.zeros(64)
    operator = _launching(_kernel(driver, 77), _kernel(driver, 78))
    _repeated(lambda: operator(x))
    driver.launches.clear()
    driver.codes = [0, 700]
    with pytest.raises(_launch.LaunchError, match="the launch of nothing"):
        operator(x)
    assert [how[0] for how, _ in driver.launches] == [77]
    assert _is_repeat(operator, x, None)
    assert [how[0] for how, _ in driver.launches] == [77, 77, 78]


def test_threads_that_repeat_a_call_at_once_do_not_share_what_they_launch_with() -> None:
    driver, count = StubDriver(), 4
    operator = _launching(_kernel(driver, 77), _kernel(driver, 78))
    _repeated(lambda: operator(torch.zeros(64)))
    driver.launches.clear()
    driver.meeting = threading.Barrier(count)  # in the driver: all have written their arguments
    inputs = [[torch.zeros(64) for _ in range(3)] for _ in range(count)]
    outputs: list[list[Tensor]] = [[] for _ in range(count)]

    def work(turn: int) -> None:
        outputs[turn] += [operator(it) for it in inputs[turn]]

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    driver.meeting = None
    assert _is_repeat(operator, inputs[0][0], None), operator.calls.refusal
    del driver.launches[-2:]
    expected = {
        (function, x.data_ptr(), number, y.data_ptr())
        for mine, made in zip(inputs, outputs, strict=True)
        for x, y in zip(mine, made, strict=True)
        for function, number in ((77, 6), (78, 7))
    }
    found = [(how[0], *values[::3], values[-1]) for how, values in driver.launches]
    assert len(found) == len(expected) == 6 * count
    assert set(found) == expected


def test_numbers_that_may_be_addresses_are_not_repeated() -> None:
    with pytest.raises(_repeats.UnrepeatableError):
        _kernel(StubDriver()).statements(str, 1, 1, 1 << 40, 0, 1 << 40, 2, 0)


def test_a_launch_is_noted_once_on_whichever_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StubDriver()
    kernel = _kernel(driver)
    now = iter([1, 0])
    kernel._device_now = lambda: next(now)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_repeats, "active", watch := _repeats._Watch(torch.device("cpu")))
    kernel.launch(1, 1, 1 << 40, 0, 1, 2, 0)
    assert len(watch.steps) == len(driver.launches) == 1

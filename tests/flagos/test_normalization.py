"""Triton's normalization against the contract: values, memory, arguments, launching."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_contract import checking
from torch import Tensor

from transformer_engine_fl.backends.flagos import _arguments, _launch, _rows
from transformer_engine_fl.backends.flagos import normalization as flagos
from transformer_engine_fl.core.errors import ArgumentError, NotSupportedError
from transformer_engine_fl.ops import normalization as contracts

check = checking(flagos)

OPERATORS = (
    "rmsnorm_fwd",
    "rmsnorm_bwd",
    "rmsnorm_fwd_add",
    "rmsnorm_bwd_add",
    "layernorm_fwd",
    "layernorm_bwd",
)


def backward_inputs(x: Tensor, gamma: Tensor, centred: bool) -> tuple[Tensor, ...]:
    forward = contracts.layernorm_fwd if centred else contracts.rmsnorm_fwd
    saved = [
        value.to(contracts.statistics_dtype(x.dtype)) for value in forward.oracle(x, gamma)[1:]
    ]
    return (torch.randn(x.shape).to(x), x, *saved, gamma)


# ------------------------------------------------------------------------------- values


# The conformance tests run the samples of the other dtypes, in the interpreter, too.
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("op", OPERATORS)
def test_every_sample_of_the_contract(op: str, dtype: str, device: str) -> None:
    for sample in getattr(contracts, op).samples(dtype, device):
        try:
            check(op, *sample.args, **sample.kwargs)
        except AssertionError as error:
            raise AssertionError(f"{sample.label}: {error}") from None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "columns", [1, 2600, 9000, 13_001, 20000, 24_001, 40008, 50_257, 131_073, 262144]
)
def test_rows_of_every_width_forward(columns: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(3, columns).to(device, dtype)
    weight, bias = torch.randn(2, columns).to(device, dtype)
    check("rmsnorm_fwd", x, weight)
    check("layernorm_fwd", x, weight, bias)
    if columns in (9000, 40008):
        check("rmsnorm_fwd_add", x, torch.randn(3, columns).to(x), weight)


@pytest.mark.parametrize(
    ("columns", "widest", "least", "parts"),
    [
        (4096, 4096, 512, (4096,)),
        (8192, 4096, 1024, (4096, 4096)),
        (5003, 4096, 1024, (4096, 1024)),
        (4100, 4096, 1024, (4096, 1024)),  # no part is narrower than the least
        (7680, 8192, 1024, (8192,)),  # padded by a sixteenth, rather than three parts
        (28672, 16384, 2048, (16384, 8192, 4096)),
        (25000, 16384, 2048, (16384, 8192, 2048)),
        (31000, 16384, 2048, (16384, 16384)),
        (65536, 16384, 2048, (16384, 16384, 32768)),
        (100, 16, 128, (128,)),
    ],
)
def test_the_parts_of_a_row(columns: int, widest: int, least: int, parts: tuple[int, ...]) -> None:
    assert _rows.parts_of(columns, widest, least) == parts


def test_parts_hold_their_row_and_little_more() -> None:
    for columns in range(2049, 65537, 37):
        for choice in (flagos._FORWARD, flagos._FORWARD_ADD, flagos._FORWARD_CENTRED):
            key = choice.round((columns, 2, columns % 2))
            cut = choice.heuristic(torch.device("cpu"), *key)
            if cut.shared:
                continue
            parts = _rows.parts_of(columns, cut.width, 4 * cut.threads)
            assert columns <= sum(parts), (columns, cut)
            assert sum(parts) - columns < max(columns // 7, 4 * cut.threads), (columns, cut)
            assert len(parts) <= 3
            assert sum(parts[:-1]) < columns


# Several programs share a row, except in the first case; most programs in the last.
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        (9000, torch.float32),
        (9000, torch.float64),
        (20000, torch.bfloat16),
        (40008, torch.float32),
        (70001, torch.float32),
        (262144, torch.bfloat16),
    ],
)
def test_rows_of_every_width_backward(columns: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(3, columns).to(device, dtype)
    gamma = torch.randn(columns).to(device, dtype)
    for op, centred in (("rmsnorm_bwd", False), ("layernorm_bwd", True)):
        check(op, *backward_inputs(x, gamma, centred), zero_centered_gamma=True)
    dz, _, *others = backward_inputs(x, gamma, False)
    check("rmsnorm_bwd_add", dz, x, torch.randn(x.shape).to(x), *others)


@pytest.mark.parametrize(
    "columns", [100, 5003, 13_001, 20_000, 24_001, 32_768, 40008, 50_257, 131_073]
)
def test_the_variance_survives_a_large_mean(columns: int, device: str) -> None:
    """A difference of mean squares would be off by some per cent."""
    x = (torch.randn(2, columns) + 1000).to(device, torch.float16)
    ones = torch.ones(columns, dtype=torch.float16, device=device)
    check("layernorm_fwd", x, ones, ones)


@pytest.mark.parametrize("columns", [14_336, 32_768, 40_008])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_variance_of_pieces_survives_a_mean_of_any_size(
    columns: int, dtype: torch.dtype, device: str
) -> None:
    """Pieces are summed around 0 first, and summed again where that is not precise enough."""
    means = torch.tensor([0.0, 1.0, 2.5, 2.8, 4.0, 30.0, 120.0, 250.0, 0.0, 0.0])
    x = means[:, None] + means.abs().clamp(min=4)[:, None] / 4 * torch.randn(10, columns)
    x[5:8] = means[5:8, None] + torch.randn(3, columns)
    x[8, :2048] += 100  # one piece has another mean
    x[9, 5] = 1000.0  # one number is far from all others
    x = x.to(device, dtype)
    weight, bias = torch.randn(2, columns).to(device, dtype)
    check("layernorm_fwd", x, weight, bias)
    _, mu, rsigma = flagos.layernorm_fwd(x, weight, bias)
    exact = (x.double().var(-1, correction=0) + 1e-5).rsqrt()
    torch.testing.assert_close(rsigma.double(), exact, rtol=2e-6, atol=0)
    torch.testing.assert_close(mu.double(), x.double().mean(-1), rtol=5e-7, atol=2e-6)


@pytest.mark.parametrize("columns", [14_336, 22_528, 32_768, 40_008])
@pytest.mark.parametrize("value", [5e17, 1e20])
def test_squares_too_large_for_a_sum_are_those_of_a_mean(
    columns: int, value: float, device: str
) -> None:
    x = torch.full((3, columns), value).to(device, torch.bfloat16)
    ones = torch.ones(columns, dtype=torch.bfloat16, device=device)
    _, mu, rsigma = flagos.layernorm_fwd(x, ones, ones)
    torch.testing.assert_close(mu, x[:, 0].float())
    torch.testing.assert_close(rsigma, torch.full((3,), 1e-5, device=device).rsqrt())


@pytest.mark.parametrize("columns", [40, 1000, 3000, 7168, 14_336, 20_480, 40_008])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_numbers_that_are_all_alike_have_no_variance(
    columns: int, dtype: torch.dtype, device: str
) -> None:
    """However large the numbers are, their mean is one of them."""
    x = torch.full((3, columns), 1.5 * 2**70, dtype=dtype, device=device)
    ones = torch.ones(columns, dtype=dtype, device=device)
    flagos._FORWARD_PLANS.clear()
    y, mu, rsigma = flagos.layernorm_fwd(x, ones, 2 * ones)
    assert torch.equal(mu, x[:, 0].float())
    torch.testing.assert_close(rsigma, torch.full((3,), 1e-5, device=device).rsqrt())
    (plan,) = flagos._FORWARD_PLANS.values()
    if isinstance(plan.run, _rows.WholeRows):
        assert torch.equal(y, torch.full_like(y, 2))
    else:
        assert ((y.double() - 2).abs() <= (2**-23 * mu.double() * rsigma)[:, None]).all()


NORMS_OF_FEW: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "rmsnorm_fwd": lambda x, weight, bias: flagos.rmsnorm_fwd(x, weight),
    "rmsnorm_fwd_add": lambda x, weight, bias: flagos.rmsnorm_fwd_add(x, x + 1, weight),
    "layernorm_fwd": flagos.layernorm_fwd,
    "an offset": lambda x, weight, bias: flagos.layernorm_fwd(
        x, weight, bias, zero_centered_gamma=True
    ),
}


@pytest.mark.parametrize("columns", [4096, 9000, 16_384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS_OF_FEW)
def test_few_rows_have_the_bits_of_many(
    norm: str, dtype: torch.dtype, columns: int, device: str
) -> None:
    """With one program per multiprocessor, gamma and beta are loaded ahead of the sums."""
    multiprocessors = _launch.limits(torch.device(device, 0)).multiprocessors
    x = torch.randn(2 * multiprocessors + 2, columns).to(device, dtype)
    weight, bias = torch.randn(2, columns).to(device, dtype)
    flagos._FORWARD_PLANS.clear()
    many, few = NORMS_OF_FEW[norm](x, weight, bias), NORMS_OF_FEW[norm](x[:2], weight, bias)
    (plan,) = flagos._FORWARD_PLANS.values()
    if not isinstance(plan.run, _rows.WholeRows):
        pytest.skip("rows of this width are in pieces")
    assert plan.run._low_occupancy is not plan.run._launch
    assert plan.run.groups(2) <= multiprocessors < plan.run.groups(len(x))
    for one, other in zip(many, few, strict=True):
        assert torch.equal(one[:2], other)


@pytest.mark.parametrize(("loaded", "captured"), [(False, True), (True, True), (False, False)])
def test_no_kernel_is_loaded_for_few_rows_while_a_graph_is_captured(
    loaded: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known:
        def __init__(self, loaded_before: bool) -> None:
            self.loaded_before = loaded_before
            self.calls: list[tuple[int, int]] = []

        def __call__(self, grid: tuple[int, int], tensors: Any, numbers: Any) -> None:
            self.calls.append(grid)

    rows = _rows.WholeRows.__new__(_rows.WholeRows)
    few, many = Known(loaded), Known(True)
    rows._low_occupancy, rows._launch = few, many  # type: ignore[assignment]
    rows._rows, rows._most, rows._multiprocessors = 1, 1000, 132
    rows._device = torch.device("cuda", 0)
    monkeypatch.setattr(_rows, "is_captured", lambda device: captured)
    rows(16, (), ())
    assert (few.calls, many.calls)[captured and not loaded] == [(16, 1)]
    rows(600, (), ())
    assert many.calls[-1] == (600, 1)


@pytest.mark.parametrize("columns", [64, 1000, 5003, 9000, 40008])
def test_a_row_does_not_depend_on_the_rows_around_it(columns: int, device: str) -> None:
    x = torch.randn(67 if columns < 9000 else 7, columns, device=device)
    gamma = torch.randn(columns, device=device)
    dy, _, mu, rsigma, _ = backward_inputs(x, gamma, True)
    y, *_ = flagos.layernorm_fwd(x, gamma, gamma)
    dx, *_ = flagos.layernorm_bwd(dy, x, mu, rsigma, gamma)
    for row in (0, len(x) // 2, len(x) - 1):
        one = slice(row, row + 1)
        assert torch.equal(flagos.layernorm_fwd(x[one], gamma, gamma)[0], y[one])
        alone = flagos.layernorm_bwd(dy[one], x[one], mu[one], rsigma[one], gamma)
        assert torch.equal(alone[0], dx[one])


def test_parameter_gradients_are_the_same_bits_each_time(device: str) -> None:
    x, gamma = torch.randn(300, 96, device=device), torch.randn(96, device=device)
    arguments = backward_inputs(x, gamma, True)
    first, second = (flagos.layernorm_bwd(*arguments) for _ in range(2))
    assert all(map(torch.equal, first, second))


# ------------------------------------------------------------------------------- memory


def strided_inputs() -> dict[str, Tensor]:
    return {
        "padded rows": torch.randn(6, 80)[:, :72],
        "padded rows of three dimensions": torch.randn(2, 3, 80)[..., :72],
        "every other row": torch.randn(12, 72)[::2],
        "one row for all": torch.randn(1, 72).expand(6, 72),
        "one row of several dimensions": torch.randn(1, 1, 72),
    }


@pytest.mark.parametrize("label", strided_inputs())
def test_rows_that_lie_apart_are_not_copied(label: str, device: str) -> None:
    x = strided_inputs()[label].to(device)
    assert _arguments.by_rows(x)[0] is x
    weight = torch.randn(72, device=device)
    check("rmsnorm_fwd", x, weight)
    check("rmsnorm_bwd", *backward_inputs(x, weight, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [72, 76, 73])
def test_rows_of_any_alignment_are_summed_as_dense_ones(
    columns: int, dtype: torch.dtype, device: str
) -> None:
    """Rows that a dense row's accesses cannot read are copied: the accesses decide the sums."""
    weight = torch.randn(columns, device=device, dtype=dtype)
    vector = math.gcd(columns, 16 // dtype.itemsize)
    flat = torch.randn(6 * columns + 1).to(device, dtype)
    cases = {
        "padded by vectors": (torch.randn(6, columns + 8).to(device, dtype)[:, :columns], False),
        "padded": (torch.randn(6, columns + 3).to(device, dtype)[:, :columns], vector > 1),
        "one of those": (torch.randn(6, columns + 3).to(device, dtype)[4:5, :columns], vector > 1),
        "shifted": (flat[1:].view(6, columns), vector > 1),
    }
    flagos._FORWARD_PLANS.clear()
    flagos._BACKWARD_PLANS.clear()
    for label, (x, copied) in cases.items():
        rows, step = _arguments.rows_to_sum("rmsnorm_fwd", x)
        assert (rows is not x) is copied, label
        assert not copied or (step == columns and rows.data_ptr() % 16 == 0)
        for _ in range(2):  # the second time there is a plan
            check("rmsnorm_fwd", x, weight)
            check("layernorm_fwd", x, weight, weight)
            check("rmsnorm_fwd_add", x, x, weight)
        dy, _, rsigma, _ = backward_inputs(x, weight, False)
        check("rmsnorm_bwd", dy, x, rsigma, weight)
        check("rmsnorm_bwd", x, dy.contiguous(), rsigma, weight)
    plans = (*flagos._FORWARD_PLANS.values(), *flagos._BACKWARD_PLANS.values())
    assert all(plan.unit % vector == 0 for plan in plans)


def test_the_residual_may_have_other_strides(device: str) -> None:
    x, weight = torch.randn(6, 72, device=device), torch.randn(72, device=device)
    for other in strided_inputs().values():
        added = other.to(device).reshape(-1, 72)
        rows = x[: len(added)]
        check("rmsnorm_fwd_add", rows, added, weight)
        check("rmsnorm_fwd_add", added, rows, weight)
        dz, _, rsigma, _ = backward_inputs(rows, weight, False)
        check("rmsnorm_bwd_add", dz, rows, added, rsigma, weight)


def test_rows_at_no_single_distance_are_copied(device: str) -> None:
    x = torch.randn(3, 4, 80, device=device)[:, :3, :64]
    check("rmsnorm_fwd", x, torch.randn(64, device=device))


def test_a_lazily_negated_tensor_is_taken_at_its_value(device: str) -> None:
    x = torch.randn(1, 1, dtype=torch.complex64, device=device).conj().imag
    assert x.is_neg()
    assert x.is_contiguous()
    one = torch.ones(1, device=device)
    check("rmsnorm_fwd", x, one)
    check("rmsnorm_fwd", one.view(1, 1), x.view(1))


def test_parameters_and_inputs_that_want_gradients_are_plain_tensors(device: str) -> None:
    x = torch.randn(4, 64, device=device, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(64, device=device))
    check("layernorm_fwd", x, weight, weight)

    class Labelled(Tensor):
        pass

    output, _ = flagos.rmsnorm_fwd(x.detach().as_subclass(Labelled), weight)
    assert type(output) is Tensor


def test_inputs_are_left_as_they_are(device: str) -> None:
    x = torch.randn(5, 80, device=device).bfloat16()
    gamma = torch.randn(72, device=device).bfloat16()
    arguments = backward_inputs(x[:, :72], gamma, True)
    before = [value.clone() for value in (x, *arguments)]
    flagos.layernorm_bwd(*arguments)
    flagos.layernorm_fwd(x[:, :72], gamma, gamma)
    assert all(map(torch.equal, before, (x, *arguments)))


# ---------------------------------------------------------------------------- arguments


def wrong_calls() -> dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Any]]]:
    """label -> argument at fault, and a call of (x [4, 64], weight [64], statistics [4])."""
    rms, rms_bwd = flagos.rmsnorm_fwd, flagos.rmsnorm_bwd
    layer, layer_bwd = flagos.layernorm_fwd, flagos.layernorm_bwd
    return {
        "no tensor": ("input", lambda x, w, s: rms([1.0], w)),  # type: ignore[arg-type]
        "integers": ("input", lambda x, w, s: rms(x.int(), w)),
        "no dimension": ("input", lambda x, w, s: rms(x.sum(), w)),
        "no column": ("input", lambda x, w, s: rms(x[:, :0], w[:0])),
        "short weight": ("weight", lambda x, w, s: rms(x, w[1:])),
        "weight of two dimensions": ("weight", lambda x, w, s: rms(x, w[None])),
        "weight elsewhere": ("weight", lambda x, w, s: rms(x, w.to("meta"))),
        "no weight": ("weight", lambda x, w, s: rms(x, None)),  # type: ignore[arg-type]
        "negative eps": ("eps", lambda x, w, s: rms(x, w, -1.0)),
        "eps that is no number": ("eps", lambda x, w, s: layer(x, w, w, float("nan"))),
        "eps of text": ("eps", lambda x, w, s: rms(x, w, "1")),  # type: ignore[arg-type]
        "flag of 1": (
            "zero_centered_gamma",
            lambda x, w, s: rms(x, w, zero_centered_gamma=1),  # type: ignore[arg-type]
        ),
        "dtype by name": ("out_dtype", lambda x, w, s: rms(x, w, out_dtype="float32")),  # type: ignore[arg-type]
        "dtype in a list": ("out_dtype", lambda x, w, s: rms(x, w, out_dtype=[])),  # type: ignore[arg-type]
        "integer output": ("out_dtype", lambda x, w, s: rms(x, w, out_dtype=torch.int8)),
        "short bias": ("bias", lambda x, w, s: layer(x, w, w[1:])),
        "short dy": ("dy", lambda x, w, s: rms_bwd(x[1:], x, s, w)),
        "dy of another shape": ("dy", lambda x, w, s: rms_bwd(x.view(2, 2, 64), x, s, w)),
        "short rsigma": ("rsigma", lambda x, w, s: rms_bwd(x, x, s[1:], w)),
        "rsigma by row": ("rsigma", lambda x, w, s: rms_bwd(x, x, s[:, None], w)),
        "rsigma of another dtype": ("rsigma", lambda x, w, s: rms_bwd(x, x, s.double(), w)),
        "mu of another dtype": ("mu", lambda x, w, s: layer_bwd(x, x, s.half(), s, w)),
        "no mu": ("mu", lambda x, w, s: layer_bwd(x, x, None, s, w)),  # type: ignore[arg-type]
        "short gamma": ("gamma", lambda x, w, s: layer_bwd(x, x, s, s, w[1:])),
        "no residual": ("residual", lambda x, w, s: flagos.rmsnorm_fwd_add(x, None, w)),  # type: ignore[arg-type]
        "residual of another dtype": (
            "residual",
            lambda x, w, s: flagos.rmsnorm_fwd_add(x, x.double(), w),
        ),
        "short residual": ("residual", lambda x, w, s: flagos.rmsnorm_fwd_add(x, x[1:], w)),
        "no add": ("add", lambda x, w, s: flagos.rmsnorm_bwd_add(x, x, None, s, w)),  # type: ignore[arg-type]
        "short add": ("add", lambda x, w, s: flagos.rmsnorm_bwd_add(x, x, x[1:], s, w)),
        "short dz": ("dz", lambda x, w, s: flagos.rmsnorm_bwd_add(x[1:], x, x, s, w)),
        "flag of None": (
            "zero_centered_gamma",
            lambda x, w, s: rms_bwd(x, x, s, w, zero_centered_gamma=None),  # type: ignore[arg-type]
        ),
    }


@pytest.mark.parametrize("label", wrong_calls())
def test_a_wrong_argument_is_named(label: str, device: str) -> None:
    argument, call = wrong_calls()[label]
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    statistics = torch.ones(4, device=device)
    # First without plans, then with the plans of valid calls.
    for _ in range(2):
        with pytest.raises(ArgumentError) as caught:
            call(x, weight, statistics)
        assert caught.value.argument == argument
        flagos.rmsnorm_fwd(x, weight)
        flagos.rmsnorm_fwd(x, weight, zero_centered_gamma=True)
        flagos.layernorm_fwd(x, weight, weight)
        flagos.rmsnorm_bwd(x, x, statistics, weight)
        flagos.layernorm_bwd(x, x, statistics, statistics, weight)
        flagos.rmsnorm_fwd_add(x, x, weight)
        flagos.rmsnorm_bwd_add(x, x, x, statistics, weight)


def call_all(x: Tensor, weight: Tensor, statistics: Tensor) -> list[Callable[[], Any]]:
    return [
        lambda: flagos.rmsnorm_fwd(x, weight),
        lambda: flagos.layernorm_fwd(x, weight, weight),
        lambda: flagos.rmsnorm_bwd(x, x, statistics, weight),
        lambda: flagos.rmsnorm_fwd_add(x, x, weight),
        lambda: flagos.rmsnorm_bwd_add(x, x, x, statistics, weight),
        lambda: flagos.layernorm_bwd(x, x, statistics, statistics, weight),
    ]


@pytest.fixture
def plain(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of ``call_all``, for which there are plans."""
    arguments = (
        torch.randn(4, 64, device=device),
        torch.randn(64, device=device),
        torch.ones(4, device=device),
    )
    for call in call_all(*arguments):
        call()
    return arguments


def assert_declined(x: Tensor, weight: Tensor, statistics: Tensor) -> None:
    for call in call_all(x, weight, statistics):
        with pytest.raises(NotSupportedError):
            call()


@pytest.mark.usefixtures("plain")
def test_meta_tensors_are_declined() -> None:
    assert_declined(
        torch.empty(4, 64, device="meta"),
        torch.empty(64, device="meta"),
        torch.empty(4, device="meta"),
    )


def test_fake_tensors_are_declined(plain: tuple[Tensor, Tensor, Tensor]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert_declined(*(mode.from_tensor(tensor) for tensor in plain))
        # The arguments are real, but what torch allocates is fake.
        assert_declined(*plain)


def test_tensors_inside_a_transform_are_declined(plain: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _ = plain
    with pytest.raises(NotSupportedError):
        torch.vmap(lambda row: flagos.rmsnorm_fwd(row, weight)[0])(x)


def test_sparse_tensors_are_refused(plain: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _ = plain
    with pytest.raises(ArgumentError, match="strided"):
        flagos.rmsnorm_fwd(x.to_sparse(), weight)


def test_tensors_of_another_device_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setattr(_launch, "_driven_type", lambda: "cuda")
    monkeypatch.setattr(flagos, "_FORWARD_PLANS", {})
    with pytest.raises(NotSupportedError, match="'cuda'"):
        flagos.rmsnorm_fwd(torch.randn(4, 48), torch.randn(48))
    monkeypatch.setattr(_launch, "_driven_type", lambda: None)
    with pytest.raises(NotSupportedError, match="no device"):
        flagos.rmsnorm_fwd(torch.randn(4, 48), torch.randn(48))

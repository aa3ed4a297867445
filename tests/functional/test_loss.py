"""functional: cross entropy against torch's, its gradients, shards of the vocabulary, memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import vocabulary_shards
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 0.1},
    {"softcap": 1.5},
    {"ignore_index": 2},
    {"label_smoothing": 0.2, "z_loss": 0.05, "softcap": 3.0, "ignore_index": 0},
]
ROW_TARGETS = [0, 6, 2, -100, 3, 2]


def logits(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(30)
    return torch.randn(6, 7, dtype=dtype).requires_grad_()


def targets(ignore_index: int = -100) -> Tensor:
    return torch.tensor([ignore_index if it == -100 else it for it in ROW_TARGETS])


def linear(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(31)
    shapes = ((6, 4), (7, 4), (7,))
    x, weight, bias = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return x, weight, bias


# ------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_gradient_of_the_loss(options: dict[str, Any], reduction: str) -> None:
    target = targets(options.get("ignore_index", -100))
    assert torch.autograd.gradcheck(
        lambda it: functional.cross_entropy(it, target, reduction=reduction, **options),
        (logits(),),
    )


@pytest.mark.parametrize("options", OPTIONS[3:])
@pytest.mark.parametrize("used", [slice(0, 2), slice(1, 2)])
def test_the_gradient_of_the_part_that_z_loss_makes(options: dict[str, Any], used: slice) -> None:
    target = targets(options.get("ignore_index", -100))

    def both(input: Tensor) -> tuple[Tensor, ...]:
        return functional.cross_entropy(input, target, return_z_loss=True, **options)[used]

    assert torch.autograd.gradcheck(both, (logits(),))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_the_gradients_of_the_fused_linear_form(options: dict[str, Any], biased: bool) -> None:
    target = targets(options.get("ignore_index", -100))

    def losses(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, *bias = leaves
        return functional.fused_linear_cross_entropy(
            x, weight, target, *bias, return_z_loss=True, **options
        )

    assert torch.autograd.gradcheck(losses, linear()[: 3 if biased else 2])


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_the_gradients_that_are_wanted_are_returned(wanted: int) -> None:
    leaves = [tensor.detach() for tensor in linear()]
    leaves[wanted].requires_grad_()
    x, weight, bias = leaves
    functional.fused_linear_cross_entropy(x, weight, targets(), bias).backward()
    assert [tensor.grad is not None for tensor in leaves] == [i == wanted for i in range(3)]


# ------------------------------------------------------------- a gradient in the forward


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.25])  # powers of two are exact in both formats
def test_a_gradient_of_the_forward_is_the_gradient(
    options: dict[str, Any], reduction: str, dtype: torch.dtype, scale: float
) -> None:
    x, target = logits(dtype), targets(options.get("ignore_index", -100))
    given = {"reduction": reduction, **options}
    expected = functional.cross_entropy(x, target, **given)
    (gradient,) = torch.autograd.grad(expected * scale, x)
    found = functional.cross_entropy(x, target, gradient_in_forward=True, **given)
    assert torch.equal(found, expected)
    for _ in range(3):  # the second and third are computed again
        (again,) = torch.autograd.grad(found * scale, x, retain_graph=True)
        torch.testing.assert_close(again, gradient)
        again.zero_()


def called(run: Callable[[], object]) -> list[str]:
    """The operators that ``run`` calls."""
    seen: list[str] = []
    undo = te.get_default_manager().monitor(lambda op, impl: seen.append(op))
    try:
        run()
    finally:
        undo()
    return seen


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_the_fused_form_s_forward_are_the_gradients(
    options: dict[str, Any], reduction: str, biased: bool
) -> None:
    leaves = linear()[: 3 if biased else 2]
    x, weight, *bias = leaves
    target = targets(options.get("ignore_index", -100))
    given = {"reduction": reduction, **options}
    expected = functional.fused_linear_cross_entropy(x, weight, target, *bias, **given)
    gradients = torch.autograd.grad(expected * 0.25, leaves)

    def loss() -> Tensor:
        return functional.fused_linear_cross_entropy(
            x, weight, target, *bias, gradient_in_forward=True, **given
        )

    found = loss()
    assert called(loss) == ["fused_linear_cross_entropy_fwd_bwd"]
    torch.testing.assert_close(found, expected)
    for _ in range(3):  # the second and third are computed again
        again = torch.autograd.grad(found * 0.25, leaves, retain_graph=True)
        torch.testing.assert_close(again, gradients)
        for it in again:
            it.zero_()
    weight.requires_grad_(False)
    assert "fused_linear_cross_entropy_fwd_bwd" not in called(loss), "nobody wants the weight's"


def by_vmap(loss: Tensor, leaves: tuple[Tensor, ...], scales: Tensor) -> tuple[Tensor, ...]:
    return torch.func.vmap(lambda it: torch.autograd.grad(loss, leaves, it))(scales)


def in_a_batch(loss: Tensor, leaves: tuple[Tensor, ...], scales: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves, scales, is_grads_batched=True)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("cross_entropy", by_vmap),
        ("cross_entropy", in_a_batch),
        ("fused_linear_cross_entropy", in_a_batch),  # with vmap torch warns about speed
    ],
)
def test_gradients_of_the_forward_asked_for_in_a_batch(
    name: str, asked: Callable[..., tuple[Tensor, ...]]
) -> None:
    leaves = linear() if name.startswith("fused") else (logits(),)
    x, *weight_and_bias = leaves
    call = [x, *weight_and_bias[:1], targets(), *weight_and_bias[1:]]
    expected = getattr(functional, name)(*call)
    found = getattr(functional, name)(*call, gradient_in_forward=True)
    scales = torch.tensor([0.25, -2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(asked(found, leaves, scales), asked(expected, leaves, scales))


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("weight", {"weight": None}),
        ("weight", {"weight": [1.0]}),
        ("input", {"input": None}),
        ("target", {"target": [1, 2, 3]}),
        ("target", {"target": None}),
        ("ignore_index", {"ignore_index": "a"}),
    ],
)
def test_what_is_wrong_is_named_also_where_the_forward_makes_gradients(
    named: str, wrong: dict[str, Any]
) -> None:
    x, weight, _ = linear()
    given = {
        "input": x,
        "weight": weight,
        "target": targets(),
        "gradient_in_forward": True,
        **wrong,
    }
    with pytest.raises(te.ArgumentError) as raised:
        functional.fused_linear_cross_entropy(**given)
    assert raised.value.argument == named


@pytest.mark.parametrize(
    "given", [{"reduction": "none"}, {"return_z_loss": True}, {"dtype": torch.float16}]
)
def test_when_the_fused_form_s_forward_makes_no_gradients(given: dict[str, Any]) -> None:
    dtype = given.pop("dtype", torch.float64)
    leaves = [it.detach().to(dtype).requires_grad_() for it in linear()]

    def loss() -> object:
        return functional.fused_linear_cross_entropy(
            leaves[0], leaves[1], targets(), leaves[2], gradient_in_forward=True, **given
        )

    assert called(loss) == ["fused_linear_cross_entropy_fwd"]


def test_the_gradients_of_a_checkpointed_fused_forward() -> None:
    x, weight, bias = linear()

    def loss(it: Tensor) -> Any:
        return functional.fused_linear_cross_entropy(
            it * 2, weight, targets(), bias, gradient_in_forward=True
        )

    found = torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False)
    expected = F.cross_entropy(F.linear(x * 2, weight, bias), targets())
    leaves = (x, weight, bias)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves)
    )


@pytest.mark.parametrize(
    ("at_once", "dtype", "given"),
    [
        (True, torch.float32, {}),
        (True, torch.bfloat16, {"reduction": "sum"}),
        (False, torch.float32, {"reduction": "none"}),
        (False, torch.float32, {"return_z_loss": True}),
        (False, torch.float16, {}),
    ],
)
def test_when_the_forward_makes_the_gradient(
    at_once: bool, dtype: torch.dtype, given: dict[str, Any]
) -> None:
    def run(x: Tensor) -> list[str]:
        return called(
            lambda: functional.cross_entropy(x, targets(), gradient_in_forward=True, **given)
        )

    assert ("cross_entropy_fwd_bwd" in run(logits(dtype))) == at_once
    assert "cross_entropy_fwd_bwd" not in run(logits(dtype).detach())
    with torch.no_grad():
        assert "cross_entropy_fwd_bwd" not in run(logits(dtype))


def test_the_gradient_of_a_checkpointed_forward() -> None:
    x, target = logits(), targets()

    def loss(it: Tensor) -> Tensor:
        return functional.cross_entropy(it * 2, target, gradient_in_forward=True)

    found = torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False)
    expected = F.cross_entropy(x * 2, target)
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


# ---------------------------------------------------------------------- against torch


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_losses_and_gradients_are_torchs(
    reduction: str, label_smoothing: float, ignore_index: int
) -> None:
    x, options = logits(), {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    target = targets(ignore_index)
    found = functional.cross_entropy(x, target, reduction=reduction, **options)
    expected = F.cross_entropy(x, target, reduction=reduction, **options)
    torch.testing.assert_close(found, expected)
    weights = torch.arange(1.0, 1 + found.numel()).double().view(found.shape)
    torch.testing.assert_close(
        torch.autograd.grad((found * weights).sum(), x),
        torch.autograd.grad((expected * weights).sum(), x),
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_the_fused_form_is_the_linear_layer_and_the_loss(
    options: dict[str, Any], biased: bool
) -> None:
    leaves = linear()[: 3 if biased else 2]
    x, weight, *bias = leaves
    target = targets(options.get("ignore_index", -100)).view(3, 2)
    x = x.view(3, 2, 4)
    found = functional.fused_linear_cross_entropy(x, weight, target, *bias, **options)
    expected = functional.cross_entropy(F.linear(x, weight, *bias), target, **options)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves)
    )


def test_every_row_ignored_is_nan_as_the_mean_and_nothing_as_the_sum() -> None:
    x, target = logits(), torch.full((6,), -100)
    assert functional.cross_entropy(x, target).isnan()
    assert F.cross_entropy(x, target).isnan()
    assert functional.cross_entropy(x, target, reduction="sum") == 0
    (gradient,) = torch.autograd.grad(functional.cross_entropy(x, target), x)
    assert not gradient.any()


def test_losses_of_narrow_logits_are_float32_and_gradients_keep_their_dtype() -> None:
    x, target = logits(torch.bfloat16), targets()
    loss = functional.cross_entropy(x, target)
    loss.backward()
    expected = F.cross_entropy(x.detach().float(), target)
    assert (loss.dtype, x.grad is not None and x.grad.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss, expected)


# --------------------------------------------------------------------------- meaning


def test_values_are_those_of_the_formula() -> None:
    row, target, e, z, cap = [0.5, -1.0, 2.0], 1, 0.3, 0.01, 4.0
    scores = [cap * math.tanh(it / cap) for it in row]
    lse = math.log(sum(math.exp(it) for it in scores))
    smooth = lse - sum(scores) / 3
    expected = (1 - e) * (lse - scores[target]) + e * smooth + z * lse**2
    loss, part = functional.cross_entropy(
        torch.tensor([row], dtype=torch.float64),
        torch.tensor([target]),
        label_smoothing=e,
        z_loss=z,
        softcap=cap,
        return_z_loss=True,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-14)
    assert part.item() == pytest.approx(z * lse**2, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ignored_rows_have_no_loss_and_gradients_of_exactly_zero(dtype: torch.dtype) -> None:
    x = logits(dtype).detach()
    x[2], x[3, 1:], x[5] = torch.nan, torch.inf, -torch.inf
    x.requires_grad_()
    target = torch.tensor([0, 6, -100, -100, 3, -100])
    ignored = target == -100
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1}
    losses = functional.cross_entropy(x, target, reduction="none", return_z_loss=True, **options)
    torch.autograd.backward(losses, [torch.full((6,), torch.nan), torch.ones(6)])
    assert x.grad is not None
    for values in (*losses, x.grad):
        assert not values[ignored].any()
    assert losses[0][~ignored].gt(0).all()


def test_a_target_outside_the_vocabulary_shows_as_nan_in_its_row_alone() -> None:
    x, target = logits(), torch.tensor([0, 7, 1, -1, 3, -100])
    loss = functional.cross_entropy(x, target, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().tolist() == [False, True, False, True, False, False]
    assert gradient.isnan().all(-1).tolist() == loss.isnan().tolist()
    assert gradient.isnan().any(-1).tolist() == loss.isnan().tolist()


def test_a_masked_word_has_no_probability_and_no_gradient() -> None:
    x = logits().detach()
    x[:, 4:] = -torch.inf
    x.requires_grad_()
    target = torch.tensor([0, 1, 2, 3, 0, 1])
    loss = functional.cross_entropy(x, target)
    torch.testing.assert_close(loss, F.cross_entropy(x[:, :4], target))
    (gradient,) = torch.autograd.grad(loss, x)
    assert not gradient[:, 4:].any()


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_a_common_offset_of_the_logits_takes_nothing_from_the_loss(offset: float) -> None:
    x = (logits().detach() * 64).round() / 64  # exact in float32 even with the offset
    found = functional.cross_entropy((x + offset).float(), targets())
    assert found.item() == pytest.approx(functional.cross_entropy(x, targets()).item(), rel=2e-7)


def test_gradients_at_once_may_be_of_an_lse_that_is_rounded_however_large_it_is() -> None:
    # Float32 numbers are 4 apart there, so adding 1 does not change them.
    lows = torch.arange(2**25, 2**25 + 64, 4, dtype=torch.float32).unsqueeze(-1)
    x, target = lows + torch.arange(0.0, -32, -4), torch.zeros(16, dtype=torch.int64)
    grad, lse = torch.ones(16), lows.squeeze(-1)
    bounds = ops.CATALOGUE["cross_entropy_fwd_bwd"].oracle(x, target, grad)[2]
    for rounded in (lse, torch.nextafter(lse, lse * 2)):
        found = ops.cross_entropy_bwd(grad, x, target, rounded).double()
        assert found.ge(bounds.low).all()
        assert found.le(bounds.high).all()


# ------------------------------------------------------------- shards of the vocabulary


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, tuple[Tensor, ...]]]:
    """The results of two processes of a gloo group for their shards."""
    folder: Path = tmp_path_factory.mktemp("group")
    torch.multiprocessing.spawn(vocabulary_shards.run, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", vocabulary_shards.CALLS)
@pytest.mark.parametrize("way", vocabulary_shards.WIDTHS)
def test_two_processes_with_half_of_the_vocabulary_each_agree_with_one(
    way: str, name: str, shards: list[dict[Any, tuple[Tensor, ...]]]
) -> None:
    vocabulary_shards.check_ranks(shards, way, name)


def test_what_does_not_fit_a_group_is_refused() -> None:
    x, target = logits(), targets()
    for group in (3, -100, object):  # torch gives -100 to ranks outside a group
        with pytest.raises(te.ArgumentError, match=r"'process_group' is .*expects None or a t"):
            functional.cross_entropy(x, target, process_group=group)
    alone = torch.distributed.ProcessGroup(0, 1)
    for wrong in (None, torch.tensor(1.0)):
        with pytest.raises(te.ArgumentError, match="argument 'input'"):
            functional.cross_entropy(wrong, target, process_group=alone)
    with pytest.raises(te.ArgumentError, match="vocab_start"):
        functional.cross_entropy(x, target, vocab_start=0)
    with pytest.raises(te.ArgumentError, match="vocab_size"):
        functional.cross_entropy(x, target, vocab_size=7)
    for start, size, wrong in ((2, x.shape[-1] + 1, "vocab_size"), (-1, 7, "vocab_start")):
        with pytest.raises(te.ArgumentError, match=f"^cross_entropy: argument '{wrong}'"):
            functional.cross_entropy(
                x, target, process_group=alone, vocab_start=start, vocab_size=size
            )
    stats = ops.cross_entropy_partial_fwd(x, target)
    with pytest.raises(te.ArgumentError, match="stats"):
        ops.cross_entropy_merge(stats, target, vocab_size=7)
    saved = torch.ones(6, dtype=torch.float64)
    with pytest.raises(te.ArgumentError, match="vocab_size"):
        ops.cross_entropy_bwd(saved, x, target, saved, vocab_start=2, vocab_size=8)


def test_a_shard_is_differentiated_by_backward_alone() -> None:
    x, target = logits(), targets()
    group = torch.distributed.ProcessGroup(0, 1)

    def loss(it: Tensor) -> Tensor:
        return functional.cross_entropy(it, target, process_group=group)

    with pytest.raises(te.NotSupportedError, match=r"transform of torch\.func"):
        torch.func.grad(loss)(x)
    with pytest.raises(te.NotSupportedError, match="forward-mode derivatives"):
        torch.func.jvp(loss, (x,), (x,))


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("cross_entropy_partial_fwd", None, "output 0 of 'vendor.acme' is None"),
        (
            "cross_entropy_merge",
            [],
            r"'vendor.acme' returned \(list\); the contract requires 2 outputs",
        ),
        ("cross_entropy_bwd", None, "output 0 of its implementation is None"),
    ],
)
def test_what_is_no_output_of_a_shard_is_named(
    name: str, wrong: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(output: Tensor, input: Tensor, group: Any) -> None:
        output.copy_(input)

    for function in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(torch.distributed, function, gather, raising=False)

    @functools.wraps(getattr(ops, name))
    def returning(*args: Any, **kwargs: Any) -> Any:
        return wrong

    te.get_default_manager().registry.register_impl(
        te.OpImpl(name, "vendor.acme", "vendor", returning, vendor="acme")
    )
    group = torch.distributed.ProcessGroup(0, 1)
    with te.with_preference("vendor:acme"), pytest.raises(te.TeFlError, match=f"^{name}: {said}"):
        functional.cross_entropy(
            logits().requires_grad_(), targets(), process_group=group
        ).backward()


# ---------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest new tensor in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]])
def test_the_logits_of_the_fused_form_are_never_there_as_a_whole(options: dict[str, Any]) -> None:
    rows, features, words = 512, 8, 1024
    torch.manual_seed(32)
    x = torch.randn(rows, features, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(words, features, dtype=torch.bfloat16).requires_grad_()
    bias = torch.randn(words, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, words, (rows,))
    with Largest() as seen:
        functional.fused_linear_cross_entropy(x, weight, target, bias, **options).backward()
    assert seen.elements <= words * features == rows * words // 64
    with Largest() as seen:
        functional.cross_entropy(F.linear(x, weight, bias), target, **options).backward()
    assert seen.elements == rows * words


# -------------------------------------------------------------------------- compiling


def test_both_forms_are_compiled_with_their_gradients() -> None:
    torch._dynamo.reset()
    target = targets()

    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        fused = functional.fused_linear_cross_entropy(x, weight, target, bias, z_loss=0.1)
        loss, part = functional.cross_entropy(x @ weight.t(), target, return_z_loss=True)
        return fused + loss + part

    found = []
    for run in (program, torch.compile(program, fullgraph=True, backend="aot_eager")):
        leaves = linear()
        run(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found)


def test_a_layer_without_features_has_the_logits_of_its_bias() -> None:
    input, weight = torch.empty(2, 3, 0), torch.empty(5, 0)
    target, bias = torch.tensor([[0, 1, 4], [2, 2, 3]]), torch.randn(5)
    loss, lse = ops.fused_linear_cross_entropy_fwd(input, weight, target, bias)
    torch.testing.assert_close(lse, bias.logsumexp(0).expand(2, 3))
    torch.testing.assert_close(loss, lse - bias[target])
    ones = torch.ones(2, 3)
    dx, dw, db = ops.fused_linear_cross_entropy_bwd(ones, input, weight, target, lse, bias)
    assert (dx.shape, dw.shape) == (input.shape, weight.shape)
    counts = torch.bincount(target.flatten(), minlength=5)
    torch.testing.assert_close(db, 6 * bias.softmax(0) - counts)


def test_what_does_not_agree_is_refused() -> None:
    x, weight, bias = linear()
    with pytest.raises(te.ArgumentError, match="reduction"):
        functional.cross_entropy(x, targets(), reduction="average")
    with pytest.raises(te.ArgumentError, match="target"):
        functional.cross_entropy(x, targets()[1:])
    with pytest.raises(te.ArgumentError, match="softcap"):
        functional.cross_entropy(x, targets(), softcap=0.0)
    with pytest.raises(te.ArgumentError, match="input"):
        functional.cross_entropy(x[:, :0], targets())
    with pytest.raises(te.ArgumentError, match="weight"):
        functional.fused_linear_cross_entropy(x, weight.float(), targets())
    with pytest.raises(te.ArgumentError, match="weight"):
        functional.fused_linear_cross_entropy(x, weight[:, 1:], targets())
    with pytest.raises(te.ArgumentError, match="bias"):
        functional.fused_linear_cross_entropy(x, weight, targets(), bias[1:])

"""Two GPUs: a process for each, and one process, or two threads, that use both.

Joint results of several processes are compared with the definitions over the whole. One process
has to get the same bits from both devices, whichever is current.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import vocabulary_shards
from small_gpt import (
    GPT,
    IDS,
    LARGE,
    SETS,
    TIMES,
    Trainer,
    batches,
    check_same,
    error,
    exact,
    gradients,
    suited,
)
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.core.contract import Sample
from transformer_engine_fl.testing.arguments import bits, tensors, transformed

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DEVICES = ("cuda:0", "cuda:1")
DTYPE = torch.bfloat16
SHAPE = LARGE
EXPERTS = dataclasses.replace(LARGE, experts=4)
TIMEOUT = 240
STEPS = 3


@pytest.fixture(autouse=True)
def two_devices() -> Iterator[None]:
    """Device 0 is current before and after each test."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


# ---------------------------------------------------------------------- a process on each


class Worked:
    """The results of the ranks by set and task; computed on first use."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self.by_set: dict[str, list[dict[str, Any]]] = {}

    def of(self, prefer: str, work: str) -> list[Any]:
        """The results of one task, one for each rank."""
        if prefer not in self.by_set:
            args = self._folder(), DEVICE, prefer, suited(SHAPE, prefer), DTYPE, TIMEOUT
            self.by_set[prefer] = ranks.of_all_ranks(*args)
        found = [results.get(work, "was not come to") for results in self.by_set[prefer]]
        failed = [it for it in found if isinstance(it, str)]
        assert not failed, "\n".join(failed)
        return found


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Worked:
    return Worked(lambda: tmp_path_factory.mktemp("group"))


def by_definition(function: Callable[[], Any]) -> Any:
    with te.with_preference("reference"):
        return function()


@pytest.mark.parametrize("prefer", SETS)
def test_shards_of_a_vocabulary_have_the_loss_of_the_whole(worked: Worked, prefer: str) -> None:
    found = worked.of(prefer, "shards")
    for way in vocabulary_shards.WIDTHS:
        for name in vocabulary_shards.CALLS:
            vocabulary_shards.check_ranks(found, way, name)


@pytest.mark.parametrize("prefer", SETS)
def test_wide_shards_of_narrow_logits_have_the_loss_of_the_whole(
    worked: Worked, prefer: str
) -> None:
    found = worked.of(prefer, "wide shards")
    logits, target = ranks.wide_logits(DTYPE)
    logits = logits.double().requires_grad_()
    loss = by_definition(lambda: functional.cross_entropy(logits, target))
    loss.backward()
    for one, _ in found:
        torch.testing.assert_close(one.double(), loss.detach(), rtol=1e-6, atol=0)
    gradient = torch.cat([it for _, it in found], -1)
    assert gradient.dtype == DTYPE
    torch.testing.assert_close(gradient.double(), logits.grad, rtol=2.0**-8, atol=1e-9)
    assert not gradient[5].any()


@functools.cache
def of_halves() -> tuple[list[Tensor], list[Tensor], float]:
    """The losses of the halves of the first batch, their mean gradients, the error in bfloat16."""

    def results(model: GPT) -> tuple[list[Tensor], list[Tensor]]:
        (batch,) = batches(SHAPE, ranks.STEPS, DEVICE)[:1]
        losses = [model(*half) for half in zip(*(it.chunk(2) for it in batch), strict=True)]
        return [it.detach().cpu() for it in losses], gradients(model, sum(losses) / 2)

    model = GPT(SHAPE, DEVICE, DTYPE)
    right, narrow = (by_definition(lambda it=it: results(it)) for it in (exact(model), model))
    return right[0], [it.cpu() for it in right[1]], error([it.cpu() for it in narrow[1]], right[1])


@pytest.mark.parametrize("prefer", SETS)
def test_data_parallel_ranks_have_the_mean_of_their_gradients(worked: Worked, prefer: str) -> None:
    losses, grads, narrow = of_halves()
    found = worked.of(prefer, "data parallel")
    for mine, right in zip(found, losses, strict=True):
        assert abs(mine[0][0] - right) <= 2.0**-7 * right
    # Adding up the ranks' gradients rounds once more.
    assert error(found[0][1], grads) <= TIMES * (narrow + 2.0**-9)
    same = [list(map(torch.equal, *their)) for their in zip(*(it[1:] for it in found), strict=True)]
    assert all(map(all, same))
    assert not torch.equal(found[0][0][0], found[1][0][0])  # the ranks had different words


@pytest.mark.parametrize("prefer", SETS)
def test_fully_sharded_parameters_have_gradients_and_are_updated(
    worked: Worked, prefer: str
) -> None:
    losses, grads, narrow = of_halves()
    before = [it.detach().float() for it in GPT(SHAPE, "cpu", DTYPE).parameters()]
    for mine, right in zip(worked.of(prefer, "fully sharded"), losses, strict=True):
        loss, found, of_the_whole, of_shards = mine
        assert abs(loss - right) <= 2.0**-7 * right
        assert error(found, grads) <= TIMES * narrow
        assert all(map(torch.equal, of_the_whole, of_shards))
        assert not any(map(torch.equal, of_shards, before))


@pytest.mark.parametrize("prefer", SETS)
def test_ranks_that_share_sequences_have_attention_over_the_whole(
    worked: Worked, prefer: str
) -> None:
    *values, cu_seqlens = ranks.sequences(DTYPE)
    q, k, v, dout = (it.double() for it in values)
    leaves = [it.requires_grad_() for it in (q, k, v)]
    out = by_definition(
        lambda: functional.attention(
            *leaves,
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=128,
            max_seqlen_kv=128,
        )
    )
    right = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    found = worked.of(prefer, "ring")
    everyone = torch.cat([it[0] for it in found])
    assert everyone.sort().values.equal(torch.arange(len(q)))
    for place, whole in enumerate(right, 1):
        # Each step of the ring rounds its result and the accumulated value.
        assert error([torch.cat([it[place] for it in found])], [whole[everyone]]) <= 2.0**-7


# ------------------------------------------------------------------- one process with both

OPERATORS = [
    *("rmsnorm_fwd", "rmsnorm_bwd", "rmsnorm_fwd_add", "layernorm_fwd", "layernorm_bwd"),
    *("scaled_softmax_forward", "scaled_masked_softmax_forward", "scaled_softmax_backward"),
    *("scaled_upper_triang_masked_softmax_forward", "gelu", "dgelu", "dbias_dgelu"),
    *("swiglu", "dswiglu", "fused_rope_forward", "fused_rope_backward"),
    *("fused_qkv_rope_forward", "fused_qkv_rope_backward", "dropout_fwd", "dropout_bwd"),
    *("cross_entropy_fwd", "cross_entropy_bwd", "cross_entropy_fwd_bwd"),
    *("cross_entropy_partial_fwd", "cross_entropy_merge", "fused_linear_cross_entropy_fwd"),
    *("fused_linear_cross_entropy_bwd", "fused_linear_cross_entropy_fwd_bwd"),
    *("multi_tensor_scale", "multi_tensor_l2norm", "multi_tensor_adam", "multi_tensor_sgd"),
    *("multi_tensor_adam_capturable_master", "quantize", "bgrad_quantize", "split_quantize"),
    *("group_quantize", "multi_tensor_quantize", "dequantize", "compute_amax", "fp8_transpose"),
    *("rmsnorm_fwd_quantize", "swiglu_quantize", "moe_permute_fwd", "moe_unpermute_fwd"),
    *("moe_permute_mask_fwd", "moe_unpermute_mask_fwd", "moe_unpermute_mask_bwd"),
    *("fused_topk_with_score_function_fwd", "fused_topk_with_score_function_bwd"),
    *("fused_moe_aux_loss_fwd", "fused_multi_row_padding", "generic_gemm"),
    *("te_general_grouped_gemm", "fused_attn_fwd", "fused_attn_bwd", "copy_to_kv_cache"),
    *("convert_thd_to_bshd", "thd_out_correction", "thd_read_half_tensor"),
]


def there(sample: Sample, device: str) -> Sample:
    """The call with its own tensors on the device; host tensors stay on the host."""

    def moved(tensor: Tensor) -> Tensor:
        if tensor.device.type != torch.device(device).type:
            return tensor.clone()
        if 0 in tensor.stride():
            return tensor.to(device)
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.copy_(tensor)

    args, kwargs = transformed((sample.args, sample.kwargs), moved)
    return Sample(sample.label, args, kwargs)


def served(name: str, sample: Sample) -> bool:
    """Whether the set takes the call; the policy must be strict, so that no other set can."""
    call = there(sample, DEVICES[0])
    try:
        getattr(ops, name)(*call.args, **call.kwargs)
    except te.StrictModeError:
        return False
    return True


def check_devices(name: str, sample: Sample, same_bits: bool = True) -> None:
    """Call twice on each device, alternating: first calls and repeated ones."""
    first: list[Tensor] = []
    for device in DEVICES * 2:
        call = there(sample, device)
        outputs = getattr(ops, name)(*call.args, **call.kwargs)
        assert DEVICE == "cpu" or torch.cuda.current_device() == 0
        returned = list(tensors(outputs))
        assert all(it.device == torch.device(device) for it in returned)
        found = [*returned, *tensors((call.args, call.kwargs))]
        first = first or found
        for place, (one, right) in enumerate(zip(found, first, strict=True)):
            if same_bits or place >= len(returned):
                assert bits(one).cpu().equal(bits(right).cpu()), (sample.label, device)
            else:
                assert error([one.cpu()], [right.cpu()]) <= 2.0**-7, (sample.label, device)


def claims(prefer: str, name: str) -> bool:
    """Whether the set's operator claims to be deterministic."""
    candidates = te.get_default_manager().registry.get_implementations(name)
    impl = next((it for it in candidates if it.impl_id == IDS[prefer]), None)
    return impl is None or "deterministic" in impl.traits


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("prefer", SETS)
def test_an_operator_gives_the_same_bits_on_either_device(prefer: str, name: str) -> None:
    contract = ops.CATALOGUE[name]
    te.get_default_manager().ensure_initialized()
    known = [it for it in ("bfloat16", "float32") if it in contract.dtypes]
    checked = 0
    with te.policy_context(prefer=prefer, strict=True):
        for dtype in known or list(contract.dtypes)[:1]:
            samples = contract.samples(dtype, DEVICES[0])
            taken = [it for it in list(samples)[:6] if served(name, it)][:2]
            for sample in taken:
                check_devices(name, sample, claims(prefer, name))
            checked += len(taken)
    assert checked


@pytest.mark.parametrize("columns", [64, 20_000, 131_072])
@pytest.mark.parametrize("prefer", SETS)
def test_rows_of_every_width_give_the_same_bits_on_either_device(prefer: str, columns: int) -> None:
    """Several blocks share each of the widest rows and exchange sums through the device's slots."""
    generator = torch.Generator().manual_seed(columns)
    rows = 40

    def normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICES[0], dtype)

    x, dy, w = normal(rows, columns), normal(rows, columns), normal(columns)
    mu, rsigma = (normal(rows, dtype=torch.float32) for _ in range(2))
    rsigma = rsigma.abs() + 0.5
    target = torch.randint(columns, (rows,), generator=generator).to(DEVICES[0])
    grad = normal(rows, dtype=torch.float32)
    y = x.float().softmax(-1).to(DTYPE)
    calls: dict[str, tuple[Any, ...]] = {
        "rmsnorm_fwd": (x, w),
        "rmsnorm_bwd": (dy, x, rsigma, w),
        "rmsnorm_fwd_add": (x, dy, w),
        "layernorm_fwd": (x, w, w),
        "layernorm_bwd": (dy, x, mu, rsigma, w),
        "scaled_softmax_forward": (x[None, None], 0.5),
        "scaled_softmax_backward": (dy[None, None], y[None, None], 0.5),
        "cross_entropy_fwd": (x, target),
        "cross_entropy_fwd_bwd": (x, target, grad),
        "multi_tensor_l2norm": ([x, dy, w],),
    }
    with te.policy_context(prefer=prefer, strict=True):
        for name, args in calls.items():
            check_devices(name, Sample(f"{columns} columns", args, {}))


def trained(prefer: str, device: str, graphed: bool = False) -> list[Tensor]:
    """The losses and everything that a few steps change, on the CPU."""
    model = GPT(suited(EXPERTS, prefer), device, DTYPE)
    trainer, given = Trainer(model), batches(EXPERTS, STEPS, device)
    if graphed:
        losses = trainer.train_in_a_graph(given)
    else:
        losses = [it for batch in given for it in trainer.train([batch])]
    return [it.detach().cpu() for it in (*losses, *trainer.state())]


@pytest.mark.parametrize("prefer", SETS)
def test_a_model_trains_alike_on_either_device(prefer: str) -> None:
    with te.policy_context(prefer=prefer, require=["deterministic"]):
        right = trained(prefer, DEVICES[0])
        check_same(trained(prefer, DEVICES[1]), right)
        check_same(trained(prefer, DEVICES[0]), right)


# A warning of torch's: a weight copied to the other device gets its gradient on that stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("prefer", SETS)
def test_a_model_with_a_part_on_each_device_has_the_same_gradients(prefer: str) -> None:
    (batch,) = batches(SHAPE, 1, DEVICES[0])
    with te.policy_context(prefer=prefer, require=["deterministic"]):
        found = []
        for second in DEVICES:
            model = GPT(suited(SHAPE, prefer), DEVICES[0], DTYPE)
            model.blocks[1].to(second)
            found.append([it.cpu() for it in gradients(model, model(*batch))])
    check_same(*found)


@pytest.mark.parametrize("prefer", SETS)
def test_two_threads_with_a_device_each_do_not_disturb_each_other(prefer: str) -> None:
    wanted = te.SelectionPolicy(prefer=prefer, require=frozenset({"deterministic"}))
    te.set_global_policy(wanted)
    right = trained(prefer, DEVICES[0])

    def work(device: str) -> list[list[Tensor]]:
        torch.cuda.set_device(device)
        return [trained(prefer, device) for _ in range(3)]

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(work, device) for device in DEVICES]:
            for found in each.result(timeout=TIMEOUT):
                check_same(found, right)


@pytest.mark.parametrize("prefer", SETS)
def test_a_graph_of_the_other_device_gives_the_same_bits(prefer: str) -> None:
    with te.policy_context(prefer=prefer, require=["deterministic", "graph_safe"]):
        right = trained(prefer, DEVICES[0])
        with torch.cuda.device(1):
            found = trained(prefer, DEVICES[1], graphed=True)
        check_same(found, right)
        check_same(trained(prefer, DEVICES[0], graphed=True), right)

"""Distributed test cases: one process for each rank, whose results are collected.

The device is an argument: "cuda" uses one GPU for each rank and NCCL, "cpu" uses gloo.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import vocabulary_shards
from small_gpt import GPT, Shape, Trainer, batches, leave_no_gradients
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

import transformer_engine_fl as te
from transformer_engine_fl import functional, ops
from transformer_engine_fl.testing.arguments import transformed

__all__ = ["RANKS", "STEPS", "WORKS", "of_all_ranks", "sequences", "wide_logits"]

RANKS: Final = 2
STEPS: Final = 2


# ------------------------------------------------------------------------------- processes


def of_all_ranks(
    folder: Path, device: str, prefer: str, shape: Shape, dtype: torch.dtype, timeout: float
) -> list[dict[str, Any]]:
    """Each rank's results of :data:`WORKS` on the CPU; for work that failed, its traceback.

    Raises:
        TimeoutError: the processes did not end in time. They have been killed.
    """
    ends = time.monotonic() + timeout
    context = torch.multiprocessing.start_processes(
        _rank, (folder, device, prefer, shape, dtype), nprocs=RANKS, join=False
    )
    try:
        while not context.join(max(0.1, ends - time.monotonic())):
            if time.monotonic() > ends:
                raise TimeoutError(f"the ranks took more than {timeout} seconds")
    except ProcessException:  # some work has failed; the saved results say which
        if not all((folder / f"{rank}.pt").exists() for rank in range(RANKS)):
            raise
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def _rank(rank: int, folder: Path, kind: str, prefer: str, shape: Shape, dtype: Any) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
        device_id=device if kind == "cuda" else None,
    )
    te.set_global_policy(te.SelectionPolicy(prefer=prefer))
    results: dict[str, Any] = {}
    for name, work in WORKS.items():
        try:
            results[name] = transformed(work(rank, device, shape, dtype), lambda it: it.cpu())
        except Exception:  # noqa: BLE001 the test of this work says it; others have been done
            results[name] = traceback.format_exc()
            break  # in a further collective, the other rank might not take part
        finally:
            torch.save(results, folder / f"{rank}.pt")
    else:
        dist.destroy_process_group()
        return
    raise SystemExit(f"{name}: {results[name]}")


# ---------------------------------------------------------------------------- the vocabulary


def wide_logits(dtype: torch.dtype, rows: int = 64, words: int = 65_536) -> tuple[Tensor, Tensor]:
    """Logits and targets, the same on every rank: targets in both shards, and one ignored."""
    generator = torch.Generator().manual_seed(6)
    logits = (3 * torch.randn((rows, words), generator=generator)).to(dtype)
    target = torch.randint(words, (rows,), generator=generator)
    target[5] = -100
    return logits, target


def _shards(rank: int, device: torch.device, shape: Shape, dtype: torch.dtype) -> Any:
    return vocabulary_shards.results_of(rank, device)


def _wide_shards(rank: int, device: torch.device, shape: Shape, dtype: torch.dtype) -> Any:
    logits, target = (it.to(device) for it in wide_logits(dtype))
    shard = logits.chunk(RANKS, -1)[rank].contiguous().requires_grad_()
    loss = functional.cross_entropy(shard, target, process_group=dist.group.WORLD)
    loss.backward()
    return loss.detach(), shard.grad


# ------------------------------------------------------------------------- the same model


def _own_part(rank: int, device: torch.device, shape: Shape) -> list[tuple[Tensor, Tensor]]:
    given = batches(shape, STEPS, device)
    return [tuple(it.chunk(RANKS)[rank] for it in batch) for batch in given]


def _data_parallel(rank: int, device: torch.device, shape: Shape, dtype: torch.dtype) -> Any:
    """Losses, the gradients of the first step, and the trainer's state after the last."""
    model = GPT(shape, device, dtype)
    ids = [device.index] if device.type == "cuda" else None
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    trainer = Trainer(model)
    losses, first = [], []
    for number, batch in enumerate(_own_part(rank, device, shape)):
        loss = parallel(*batch, step=number)
        loss.backward()
        first = first or [it.grad.clone() for it in model.parameters()]
        trainer.update()
        leave_no_gradients(model)
        losses.append(loss.detach())
    return losses, first, [it.detach() for it in trainer.state()]


def _fully_sharded(rank: int, device: torch.device, shape: Shape, dtype: torch.dtype) -> Any:
    """The loss, the full gradients, and the parameters after a step of Adam on full tensors and
    after one on shards.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Each rank holds a shard of the float32 parameters; matrix products run in ``dtype``.
    model = GPT(shape, device, dtype).float()
    mesh = init_device_mesh(device.type, (RANKS,))
    # Without casts of inputs, the angles of the rotary embedding stay float32.
    narrow = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=narrow)
    fully_shard(model, mesh=mesh, mp_policy=narrow)
    words, following = _own_part(rank, device, shape)[0]
    loss = model(words, following)
    loss.backward()
    params = list(model.parameters())
    whole = [[it.full_tensor().detach().clone() for it in params]]
    whole.insert(0, [it.grad.full_tensor().clone() for it in params])
    whole += [[torch.zeros_like(it) for it in whole[0]] for _ in range(2)]
    shards = [[it.grad.to_local() for it in params], [it.to_local().detach() for it in params]]
    shards += [[torch.zeros_like(it) for it in shards[0]] for _ in range(2)]
    grads = [it.clone() for it in whole[0]]
    for lists in (whole, shards):
        ops.multi_tensor_adam(*lists, 1e-2, 1, weight_decay=0.1)
    return loss.detach(), grads, whole[1], [it.full_tensor().detach() for it in params]


# ------------------------------------------------------------------ shares of the sequences


def sequences(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys, values and the gradient of the output, all ``thd``, and ``cu_seqlens``."""
    generator = torch.Generator().manual_seed(8)
    cu_seqlens = torch.tensor([0, 32, 48, 176, 192], dtype=torch.int32)
    total, heads, kv_heads, head = 192, 4, 2, 32
    q, dout = (torch.randn((total, heads, head), generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn((total, kv_heads, head), generator=generator).to(dtype) for _ in range(2))
    return q, k, v, dout, cu_seqlens


def _exchanged(rank: int, tensor: Tensor, like: Tensor) -> Tensor:
    """Send to the other rank, and return what it sends: a tensor of ``like``'s shape."""
    received, other = torch.empty_like(like), 1 - rank
    tensor = tensor.contiguous()
    sending = dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, received, other)
    for request in dist.batch_isend_irecv(list(sending)):
        request.wait()
    return received


def _ring(rank: int, device: torch.device, shape: Shape, dtype: torch.dtype) -> Any:
    """Ring attention: this rank's token indices, and their output and gradients of q, k and v."""
    whole_q, whole_k, whole_v, whole_dout, cu_whole = (it.to(device) for it in sequences(dtype))
    mine = ops.thd_get_partitioned_indices(cu_whole, whole_q.shape[0], RANKS, rank).long()
    q, k, v, dout = (it[mine] for it in (whole_q, whole_k, whole_v, whole_dout))
    kv, cu, half = torch.stack((k, v)), cu_whole // RANKS, cu_whole // (2 * RANKS)
    theirs = _exchanged(rank, kv, kv)
    lower = rank == 0  # only the second half of rank 0's queries sees rank 1's keys

    def options(causal: bool, cu_q: Tensor, cu_kv: Tensor) -> dict[str, Any]:
        return {
            "qkv_format": "thd",
            "attn_mask_type": "padding_causal" if causal else "padding",
            "cu_seqlens_q": cu_q,
            "cu_seqlens_kv": cu_kv,
            "max_seqlen_q": 128,
            "max_seqlen_kv": 128,
        }

    own = options(True, cu, cu)
    out_own, lse_own = ops.fused_attn_fwd(q, k, v, **own)
    if lower:
        other = options(False, half, cu)
        q_other, kv_other = ops.thd_read_half_tensor(q, cu, 1), theirs
    else:
        other = options(False, cu, half)
        q_other, kv_other = q, ops.thd_read_half_tensor(theirs, cu, 0)
    out_other, lse_other = ops.fused_attn_fwd(q_other, *kv_other.unbind(), **other)
    if lower:
        lse = lse_own.clone()
        ops.thd_second_half_lse_correction(lse, lse_other, cu, lse_packed=True)
    else:
        lse = torch.logaddexp(lse_own, lse_other)
    out = torch.zeros_like(q)
    for part, lse_part, second in ((out_own, lse_own, False), (out_other, lse_other, lower)):
        ops.thd_out_correction(
            out, part, lse, lse_part, cu, only_second_half=second, lse_packed=True
        )

    dq, dk, dv, *_ = ops.fused_attn_bwd(dout, q, k, v, out, lse, **own)
    dkv = torch.stack((dk, dv))
    out_there, dout_there, lse_there = out, dout, lse
    if lower:
        out_there, dout_there = (ops.thd_read_half_tensor(it, cu, 1) for it in (out, dout))
        lse_there = ops.thd_read_second_half_lse(lse, cu, len(out_there), lse_packed=True)
    dq_other, *dkv_other, _, _ = ops.fused_attn_bwd(
        dout_there, q_other, *kv_other.unbind(), out_there, lse_there, **other
    )
    halves = {"first_half": "none" if lower else "add", "second_half": "add"}
    ops.thd_grad_correction(dq, dq_other, cu, **halves)
    # Rank 0's queries saw all of rank 1's keys; rank 1's saw only the first half of rank 0's.
    like = dkv[:, ::2] if lower else dkv
    given = _exchanged(rank, torch.stack(dkv_other), like.contiguous())
    halves = {"first_half": "add", "second_half": "none" if lower else "add"}
    ops.thd_grad_correction(dkv, given, cu, **halves)
    return mine, out, dq, *dkv.unbind()


WORKS: Final[dict[str, Callable[..., Any]]] = {
    "shards": _shards,
    "wide shards": _wide_shards,
    "data parallel": _data_parallel,
    "ring": _ring,
    "fully sharded": _fully_sharded,
}
"""The cases, which run in this order in the same processes, by name.

Each takes the rank, the device, the model's shape and the dtype.
"""

"""The halves of sequences that context parallelism exchanges."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos import context_parallel as flagos

MODULES = ("context_parallel",)
STREAMING = {"_add_or_copy", "_add_share", "_read_half"}


def launch() -> None:
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    flagos.thd_get_partitioned_indices(lengths, 8, 2, 0)
    for dtype, kind in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        tokens = torch.zeros(6, 8, 128, dtype=dtype)
        half = flagos.thd_read_half_tensor(tokens, lengths, 1)
        for ways in (("add", "copy"), ("copy", "copy"), ("none", "add")):
            step = half if "none" in ways else tokens
            flagos.thd_grad_correction(
                tokens, step, lengths, first_half=ways[0], second_half=ways[1]
            )
        for packed, shape in ((True, (8, 6)), (False, (2, 8, 4))):
            lse = torch.zeros(shape, dtype=kind)
            halves = flagos.thd_read_second_half_lse(
                lse, lengths, shape[-1] // 2, lse_packed=packed
            )
            flagos.thd_second_half_lse_correction(lse, halves, lengths, lse_packed=packed)
            step, its = (half, halves) if packed else (tokens, lse)
            flagos.thd_out_correction(
                tokens, step, lse, its, lengths, only_second_half=packed, lse_packed=packed
            )

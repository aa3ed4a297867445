"""The router: every score function, groups that fill their tile and groups that do not."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos import router as flagos

MODULES = ("router",)
STREAMING = {"_choose_backward"}
FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def launch() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logits = torch.zeros(5, 128, dtype=dtype)
        for function in FUNCTIONS:
            named = {"score_function": function}
            choice = flagos.fused_topk_with_score_function_fwd(logits, 2, **named)
            flagos.fused_topk_with_score_function_bwd(*choice, 2, **named)
            scores, _, saved = flagos.fused_score_for_moe_aux_loss_fwd(logits, 2, **named)
            flagos.fused_score_for_moe_aux_loss_bwd(scores, saved, 2, **named)
        flagos.fused_topk_with_score_function_fwd(logits, 2, use_pre_softmax=True)
        for width, groups in ((128, 4), (120, 6)):
            x = torch.zeros(5, width, dtype=dtype)
            flagos.fused_topk_with_score_function_fwd(
                x, 4, x[0], num_groups=groups, group_topk=2, score_function="sigmoid"
            )
        counts = torch.zeros(128, dtype=torch.int32)
        loss, const = flagos.fused_moe_aux_loss_fwd(logits, counts, 5, 2, 0.01)
        flagos.fused_moe_aux_loss_bwd(loss, const, counts, 5)
    flagos.fused_topk_with_score_function_fwd(torch.zeros(2, 16384), 8)

"""Lists of tensors, in each combination of dtypes that has a kernel of its own."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_fl.backends.flagos import optimizer as flagos

MODULES = ("optimizer", "_numbers")
# Kernels that traverse lists of tensors, except those of a few numbers.
TABLES = {"_scale", "_squares", "_adam", "_sgd"}


def launch() -> None:
    float32, bfloat16, float64 = torch.float32, torch.bfloat16, torch.float64
    number, flag = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    count = torch.ones(1, dtype=torch.int32)

    def some(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(4096, dtype=dtype)]

    def states(grad: torch.dtype, param: torch.dtype, moment: torch.dtype) -> Any:
        return some(grad), some(param), some(moment), some(moment)

    for dtype in (float32, bfloat16, float64):
        flagos.multi_tensor_scale(some(dtype), some(dtype), 2.0, noop_flag=flag)
        flagos.multi_tensor_unscale_l2norm(some(dtype), number, per_tensor=True, noop_flag=flag)
        wide = torch.float64 if dtype == float64 else float32
        flagos.multi_tensor_adam(*states(dtype, dtype, wide), 0.1, 1, noop_flag=flag)
        flagos.multi_tensor_sgd(*states(dtype, dtype, dtype)[:3], 0.1, 0.1, 0.9)
    odd = [torch.zeros(4097)[1:]]
    flagos.multi_tensor_adam(odd, odd, some(float32), some(float32), 0.1, 1)
    mixed = states(bfloat16, bfloat16, float32)
    masters = some(float32)
    flagos.multi_tensor_l2norm(mixed[0])
    flagos.multi_tensor_adam(*states(float32, bfloat16, bfloat16), 0.1, 1, master_params=masters)
    flagos.multi_tensor_adam(*mixed, 0.1, 1, master_params=masters)
    options: Any = {"inv_scale": number, "noop_flag": flag, "decoupled_weight_decay": False}
    flagos.multi_tensor_adam_capturable_master(*mixed, masters, number, count, 0.2, **options)
    halves = some(torch.int16)
    flagos.multi_tensor_adam_param_remainder(*mixed, halves, 0.1, 1)
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        of_each = [torch.ones(1)], [torch.ones(1)], [torch.ones(1)]
        flagos.multi_tensor_adam_fp8(*states(bfloat16, kind, float32), masters, *of_each, 0.1, 1)
    steps: Any = {"nesterov": True, "wd_after_momentum": True, "model_params": some(bfloat16)}
    flagos.multi_tensor_sgd(*states(float32, float32, float32)[:3], 0.1, 0.1, 0.9, **steps)
    flagos.multi_tensor_sgd(*states(float32, float32, float32)[:3], 0.1)
    for powers in (False, True):
        flagos.multi_tensor_compute_scale_and_scale_inv(
            some(float32), some(float32), some(float32), 448.0, force_pow_2_scales=powers
        )
    flagos.multi_tensor_compute_scale_inv_e8m0(some(bfloat16), some(torch.uint8), noop_flag=flag)


def check(cases: list[dict[str, Any]]) -> None:
    lists = [case for case in cases if case["run"] in (4, 8)]
    assert {case["kernel"] for case in lists} >= TABLES
    for case in lists:
        if case["kernel"] in TABLES:
            assert case["wide loads"] >= 2, case
            assert case["wide stores"] >= 2 * (case["kernel"] != "_squares"), case
            # No tile changes its layout through shared memory: only sums do.
            assert case["shared"] < 1024, case

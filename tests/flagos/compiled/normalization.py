"""Norms: tiles of several rows, one row in registers, also in parts, and wide rows."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from transformer_engine_fl.backends.flagos import normalization as flagos

MODULES = ("normalization", "_sums")
STREAMING = {"_backward_shared", "_forward_rows", "_forward_shared"}
FORWARD_WIDTHS = {
    "bfloat16": (1024, 4096, 6144, 20480, 32768, 65536, 131072),
    "float32": (4096, 65536),
}
BACKWARD_WIDTHS = {"bfloat16": (1024, 8192, 16384, 32768, 131072), "float32": (4096, 131072)}
PARTIAL_SUMS = (16, 24, 64, 100, 132)
FEW, MANY = 3, 600
"""Numbers of rows: at most one program per multiprocessor, or more; rows in pieces ignore it."""


def single(case: dict[str, Any]) -> int:
    """Scalar accesses: three for a whole row that is summed once."""
    return {"_forward_rows": 3}.get(case["kernel"], 0)


def launch() -> None:
    for name, widths in FORWARD_WIDTHS.items():
        for width, rows in itertools.product(widths, (FEW, MANY)):
            x = torch.zeros(rows, width, dtype=getattr(torch, name))
            weight = torch.zeros(width, dtype=x.dtype)
            flagos.rmsnorm_fwd(x, weight)
            flagos.rmsnorm_fwd_add(x, x, weight)
            flagos.layernorm_fwd(x, weight, weight)
    for name, widths in BACKWARD_WIDTHS.items():
        for width in widths:
            x = torch.zeros(FEW, width, dtype=getattr(torch, name))
            weight, saved = torch.zeros(width, dtype=x.dtype), torch.zeros(FEW)
            flagos.rmsnorm_bwd(x, x, saved, weight)
            flagos.rmsnorm_bwd_add(x, x, x, saved, weight)
            flagos.layernorm_bwd(x, x, saved, saved, weight)
    for rows in PARTIAL_SUMS:  # each row is a tile, so as many programs
        x, saved = torch.zeros(rows, 8192, dtype=torch.bfloat16), torch.zeros(rows)
        flagos.rmsnorm_bwd(x, x, saved, torch.zeros(8192))


def check(cases: list[dict[str, Any]]) -> None:
    """The kernel that sums over programs may start early, and waits for its input.

    Kernels of whole rows read single numbers only where a row is summed once. If rows have more
    pieces than a warp has lanes, a lane waits for several slots at once.
    """
    for kernel, most in (("_forward_shared", 4), ("_backward_shared", 4)):  # for 128 pieces
        slots = {it for case in cases if case["kernel"] == kernel for it in case["slots"]}
        assert max(slots) == most, (kernel, slots)
    once = f"({flagos._forward_rows.arg_names.index('ONCE')},): True"
    rows = [case for case in cases if case["kernel"] == "_forward_rows"]
    for case in rows:
        single = 3 if once in case["constants"] else 0
        assert case["narrow accesses"] == single or case["dtype"] != "bf16", case
    assert sum(once in case["constants"] for case in rows) == 1  # 20,480 columns
    for case in cases:
        adds = case["kernel"] == "_sum_programs"
        assert case["waits"] == adds, case
        assert case["lets"] == case["kernel"].startswith("_backward"), case
        assert case["wide loads"] > 0 or not adds, case

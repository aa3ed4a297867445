"""Checks the losses of cross entropy operators that calculate gradients in the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformer_engine_fl.ops import loss as contracts
from transformer_engine_fl.testing import compare

LOGITS, LINEAR = "cross_entropy", "fused_linear_cross_entropy"
_GRAD_LOSS = {LOGITS: 2, LINEAR: 3}  # position of grad_loss in the arguments


def checking_losses(check: Callable[..., Any]) -> Callable[..., None]:
    """``check``, with the losses held to the tolerance of the forward's contract as well."""

    def check_at_once(name: str, *args: Any, **options: Any) -> None:
        found = check(f"{name}_fwd_bwd", *args, **options)[:2]
        forward = getattr(contracts, f"{name}_fwd")
        given = [it for place, it in enumerate(args) if place != _GRAD_LOSS[name]]
        exact = forward.oracle(*given, **options)
        for value, expected in zip(found, exact, strict=True):
            assert compare(value, expected, forward.tolerance_for("float32")).ratio <= 1

    return check_at_once

"""A backend inside your own program, in three steps: define, register, call.

    python examples/example_intree.py

example_outtree.py has the same backend as a module that the framework finds by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine_fl import (
    BackendImplKind,
    NotSupportedError,
    OpImpl,
    get_default_manager,
    ops,
    with_denied_vendors,
)


# 1. Define: a function with the operator's signature. A function that does not fit the
# contract is refused when it is registered.
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    zero_centered_gamma: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Root mean square normalization, by a backend that supports plain gamma only."""
    ops.rmsnorm_fwd.check(
        input, weight, eps, zero_centered_gamma=zero_centered_gamma, out_dtype=out_dtype
    )
    if zero_centered_gamma:
        raise NotSupportedError("zero_centered_gamma")  # the next implementation serves
    with torch.no_grad():
        rsigma = torch.rsqrt(input.float().square().mean(-1) + eps)
        output = input.float() * rsigma.unsqueeze(-1) * weight.float()
        return output.to(out_dtype or input.dtype).contiguous(), rsigma.reshape(-1)


def main() -> None:
    manager = get_default_manager()

    # 2. Register: its vendor, and what it needs.
    manager.registry.register_impl(
        OpImpl(
            op_name="rmsnorm_fwd",
            impl_id="vendor.mybackend",
            kind=BackendImplKind.VENDOR,
            vendor="mybackend",
            fn=rmsnorm_fwd,
            priority=200,
            supported_dtypes=frozenset({"float32", "bfloat16"}),
            devices=frozenset({"cpu", "cuda"}),
        )
    )

    # 3. Call: model code names the operator, not an implementation.
    x, weight = torch.randn(4, 64), torch.ones(64)
    y, _ = manager.call("rmsnorm_fwd", x, weight)
    print("root mean square of the output:", f"{y.square().mean().sqrt():.3f}")

    print(manager.explain("rmsnorm_fwd", x, weight))
    with with_denied_vendors("mybackend"):
        print(manager.explain("rmsnorm_fwd", x, weight))


if __name__ == "__main__":
    main()

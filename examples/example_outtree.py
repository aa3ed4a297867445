"""Model code and a backend that are independent of each other.

    TE_FL_PLUGIN_MODULES=mybackend python examples/example_outtree.py
    TE_FL_PLUGIN_MODULES=mybackend TE_FL_DENY_VENDORS=mybackend python examples/example_outtree.py
    python examples/example_outtree.py

The backend is mybackend.py, beside this file; nothing below mentions it. An installed
package with an entry point is found without the variable.
"""

from __future__ import annotations

import torch

from transformer_engine_fl import get_default_manager
from transformer_engine_fl.functional import rms_norm


class Block(torch.nn.Module):
    """Normalization and a linear layer, as in any model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(rms_norm(x, self.weight))


def main() -> None:
    manager = get_default_manager()
    manager.monitor(lambda op_name, impl: print(f"{op_name} was served by {impl.impl_id}"))
    block = Block(64)
    block(torch.randn(4, 64)).square().mean().backward()
    print("the weight has a gradient:", block.weight.grad is not None)


if __name__ == "__main__":
    main()

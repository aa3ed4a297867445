"""A plugin module: a vendor whose kernels are the reference's functions, for every operator.

It is registered as an out-of-tree set is: running the kit on it tests the kit and the dispatch,
not kernels.
"""

from __future__ import annotations

from transformer_engine_fl import OpImpl, OpRegistry, ops

TE_FL_PLUGIN_API = 1
IMPL_ID = "vendor.loopback"


def register(registry: OpRegistry) -> None:
    registry.register_many(
        OpImpl(
            op_name=contract.name,
            impl_id=IMPL_ID,
            kind="vendor",
            vendor="loopback",
            fn=f"transformer_engine_fl.backends.reference.{contract.family}:{contract.name}",
            traits={"deterministic"},
        )
        for contract in ops.CATALOGUE.values()
    )

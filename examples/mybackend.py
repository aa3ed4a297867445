"""The backend of example_intree.py as a module of its own: a plugin.

Nothing imports it by name. It is found through ``TE_FL_PLUGIN_MODULES=mybackend``, or,
once it is an installed package, through an entry point in its pyproject.toml:

    [project.entry-points."te_fl.plugin"]
    mybackend = "mybackend"

plugins/te_fl_acme is such a package.
"""

from __future__ import annotations

from example_intree import rmsnorm_fwd

from transformer_engine_fl import BackendImplKind, OpImpl, OpRegistry

TE_FL_PLUGIN_API = 1


def register(registry: OpRegistry) -> None:
    """Register every implementation of this plugin; called by the framework."""
    registry.register_impl(
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

"""plugins/te_fl_transformer_engine, installed without Transformer Engine."""

from __future__ import annotations

from pathlib import Path

from plugin_environments import environment, install, run

PLUGIN = Path(__file__).parents[2] / "plugins" / "te_fl_transformer_engine"


def test_without_transformer_engine_explain_says_so_and_others_serve(tmp_path: Path) -> None:
    python = environment(tmp_path / "environment")
    install(python, PLUGIN)
    code = (
        "from transformer_engine_fl import get_default_manager as manager, ops\n"
        "import sys, torch\n"
        "ops.gelu(torch.ones(2))\n"
        "print(manager().explain('gelu'))\n"
        "assert 'transformer_engine' not in sys.modules\n"
    )
    said = run(python, "-c", code).stdout
    assert "vendor.transformer_engine (vendor:transformer_engine, priority 100)" in said
    assert "not available: Transformer Engine is not installed" in said

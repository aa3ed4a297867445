"""Tuning for AMD's devices."""

from __future__ import annotations

from pathlib import Path

from transformer_engine_fl.backends.flagos.tuning.lookup import register_tuning

register_tuning("amd", devices=("gfx*",), folder=Path(__file__).parent)

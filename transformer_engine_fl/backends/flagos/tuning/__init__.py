"""Tuning as data: what kernels can choose, what was measured, and rules for the rest.

A family declares each of its choices (``choice.py``) and queries it when it plans a launch. The
answer comes from YAML files (``lookup.py``, ``files.py``), which ``te-fl tune`` writes, or from a
heuristic. ``calls/`` lists the calls that are measured for a choice. Every other folder here
belongs to a vendor: it holds the vendor's files and, in its ``__init__.py``, the same registration
that a vendor's own package would do.

Measuring is done by the command; kernels are defined by the families. Nothing here loads torch or
Triton, and pydantic and YAML load only when there is a file to read.
"""

from __future__ import annotations

import importlib
import pkgutil

from transformer_engine_fl.backends.flagos.tuning.choice import CHOICES, Choice, forget
from transformer_engine_fl.backends.flagos.tuning.lookup import register_tuning

__all__ = ["CHOICES", "Choice", "forget", "register_tuning"]

for _found in pkgutil.iter_modules(__path__):
    if _found.ispkg and _found.name != "calls":
        importlib.import_module(f"{__name__}.{_found.name}")

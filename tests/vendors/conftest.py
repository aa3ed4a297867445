"""Tests of vendors start without the vendors and packages of other tests."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_vendors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder on ``sys.path`` for packages; undoes all registrations after the test."""
    from transformer_engine_fl.backends.flagos.tuning import forget, lookup
    from transformer_engine_fl.vendors import detection, registry
    from transformer_engine_fl.vendors.flaggems import shim
    from transformer_engine_fl.vendors.liger.served import registry as served
    from transformer_engine_fl.vendors.packages import package

    kept: list[Any] = [registry._BACKENDS, package.LOADED.packages, package.FAILURES]
    kept += [shim.BROKEN, served.IMPL_REGISTRY, served.VENDOR_REGISTRY]
    before = [it.copy() for it in kept]
    tuning = copy.deepcopy(lookup.VENDORS)
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    detection._succeeds.cache_clear()
    yield tmp_path
    for current, content in zip(kept, before, strict=True):
        current.clear()
        current.update(content)
    lookup.VENDORS.clear()
    lookup.VENDORS.update(tuning)
    forget()  # choices that a vendor's tuning made
    for name in set(sys.modules) - modules:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if origin.startswith(str(tmp_path)):
            del sys.modules[name]

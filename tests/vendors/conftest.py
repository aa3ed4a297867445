"""What tests of vendors start from: no vendor and no package of another test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_vendors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder on the path for packages; whatever is registered is forgotten afterwards."""
    from transformer_engine_fl.vendors import detection, registry
    from transformer_engine_fl.vendors.liger.served import registry as served
    from transformer_engine_fl.vendors.packages import package

    kept = [registry._BACKENDS, package.LOADED.packages, package.FAILURES]
    kept += [served.IMPL_REGISTRY, served.VENDOR_REGISTRY]
    before = [dict(it) for it in kept]
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    detection._succeeds.cache_clear()
    yield tmp_path
    for current, content in zip(kept, before, strict=True):
        current.clear()
        current.update(content)
    for name in set(sys.modules) - modules:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if origin.startswith(str(tmp_path)):
            del sys.modules[name]

"""Launching kernels through the CUDA driver: the layout of configuration and arguments."""

from __future__ import annotations

import ctypes
import struct
import types
from typing import Any

import pytest

from transformer_engine_fl.backends import _driver


def test_the_driver_types_have_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(_driver._Config) == 56
    assert _driver._Config.stream.offset == 32
    assert _driver._Config.attributes.offset == 40
    assert ctypes.sizeof(_driver._Attribute) == 72
    assert _driver._Attribute.value.offset == 8


@pytest.mark.parametrize("first", [(), (0,), (3, 0)], ids=["in order", "one", "two"])
def test_launch_arguments_are_packed_where_the_kernel_reads_them(
    first: tuple[int, ...],
) -> None:
    """The pointers of ``first``, kept in front of the configuration, are found there as well."""
    geometry = _driver.Geometry(64, "PiqPf", 1024, cluster=4, dependent=True)
    prepared = _driver.Prepared(geometry, ctypes.c_void_p(77), first)
    values = (2**40 + 1, -3, -(2**40), 7, 0.5)
    prepared.pack_into(prepared.buffer, prepared.start, *values)
    struct.pack_into(f"@{len(first)}P", prepared.buffer, 0, *(int(values[at]) for at in first))
    kinds: tuple[Any, ...] = (
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_float,
    )
    found = [
        kind.from_address(address or 0).value
        for kind, address in zip(kinds, prepared.parameters, strict=True)
    ]
    assert found == [2**40 + 1, -3, -(2**40), 7, 0.5]
    assert all(
        (address or 0) % ctypes.sizeof(kind) == 0
        for kind, address in zip(kinds, prepared.parameters, strict=True)
    )
    config = prepared.config
    assert (config.grid_x, config.grid_y, config.grid_z, config.shared_bytes) == (1, 1, 1, 1024)
    assert (config.block_x, config.block_y, config.block_z, config.stream) == (64, 1, 1, None)
    assert config.attributes == ctypes.addressof(prepared.attributes)
    assert config.attribute_count == 2
    assert list(prepared.attributes[0].value[:3]) == [4, 1, 1]


@pytest.mark.parametrize(
    ("found", "there"),
    [({"cuLaunchKernelEx": None}, True), ({"cuLaunchKernel": None}, False), (None, False)],
    ids=["NVIDIA's", "another's", "none"],
)
def test_a_driver_is_there_that_launches_as_nvidias_does(
    found: dict[str, Any] | None, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def driver() -> Any:
        if found is None:
            raise OSError("nvcuda.dll")
        return types.SimpleNamespace(**found)

    monkeypatch.setattr(_driver, "_driver", driver)
    _driver.is_there.cache_clear()
    try:
        assert _driver.is_there() is there
    finally:
        _driver.is_there.cache_clear()

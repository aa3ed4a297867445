"""A stub of the CUDA driver that records kernel launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from transformer_engine_fl.backends import _driver

_TYPES: dict[str, Any] = {
    "P": ctypes.c_void_p,
    "i": ctypes.c_int32,
    "q": ctypes.c_int64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


class StubDriver:
    """Records each launch's configuration and arguments.

    Attributes:
        arguments: by function handle, the types of its parameters, in ``Geometry``'s notation.
        codes: the error codes that the next launches return.
        meeting: a barrier at which a launch waits for others before it reads its arguments.
        launches: for each launch, its configuration (function, grid, block, bytes of shared
            memory, stream, attributes) and its arguments.
        noting: a callback that gets each entry of ``launches``.
        launch: the launch function, without argument types in ctypes, like the real driver's.
    """

    def __init__(self) -> None:
        self.arguments: dict[int, str] = {}
        self.codes: list[int] = []
        self.meeting: threading.Barrier | None = None
        self.launches: list[tuple[Any, ...]] = []
        self.noting: Callable[[tuple[Any, ...]], None] = lambda launched: None
        taken = (ctypes.c_void_p,) * 4
        self._called = ctypes.CFUNCTYPE(ctypes.c_int, *taken)(self._launched)
        address = ctypes.cast(self._called, ctypes.c_void_p).value
        self.launch = ctypes.CFUNCTYPE(ctypes.c_int)(address)

    def _launched(self, config: int, function: int, parameters: int, extra: None) -> int:
        if self.meeting is not None:
            self.meeting.wait(60)
        code = self.codes.pop(0) if self.codes else 0
        if not code and extra is None:
            seen = _driver._Config.from_address(config)
            kinds = self.arguments[function]
            places = (ctypes.c_void_p * len(kinds)).from_address(parameters)
            values = [
                _TYPES[kind].from_address(place).value or 0
                for kind, place in zip(kinds, places, strict=True)
            ]
            attributes = (_driver._Attribute * seen.attribute_count).from_address(
                seen.attributes or 0
            )
            found = {it.id: tuple(it.value[0:3]) for it in attributes}
            grid = (seen.grid_x, seen.grid_y, seen.grid_z)
            block = (seen.block_x, seen.block_y, seen.block_z)
            how = (function, grid, block, seen.shared_bytes, seen.stream, found)
            self.launches.append((how, tuple(values)))
            self.noting(self.launches[-1])
        return code

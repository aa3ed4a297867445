"""GPUs that need not be there: what they have, and what kernels compiled for them say."""

from __future__ import annotations

import struct

from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda._tiles import SHARED_PER_BLOCK

__all__ = ["DEVICES", "own_shared_bytes"]

# Multiprocessors, and shared memory of a block and of a multiprocessor.
DEVICES = {
    "sm_80": Limits(8, 0, 108, 166_912, 167_936),
    "sm_86": Limits(8, 6, 84, 101_376, 102_400),
    "sm_89": Limits(8, 9, 128, 101_376, 102_400),
    "sm_90": Limits(9, 0, 132, 232_448, 233_472),
    "sm_100": Limits(10, 0, 148, 232_448, 233_472),
    "sm_120": Limits(12, 0, 170, 101_376, 102_400),
}
"""Of each generation one."""


def own_shared_bytes(code: bytes) -> int:
    """What a kernel declares of shared memory, without what a launch asks for.

    From compute capability 9.0 on it lies behind what the system has of each block, which
    the compiler counts with it and the limit of a block does not.
    """
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", code, table + size * i) for i in range(count)]
    start = sections[names][4]
    found, behind = 0, False
    for name, *_, length in sections:
        text = code[start + name : code.index(b"\0", start + name)]
        if text.startswith(b".nv.shared.reserved"):
            behind = True
        elif text.startswith(b".nv.shared."):
            found += length
    return found - SHARED_PER_BLOCK if behind and found else found

"""Limits of GPUs that this machine need not have, and the shared memory of compiled kernels."""

from __future__ import annotations

import struct

from transformer_engine_fl.backends.vendor.cuda._launch import Limits
from transformer_engine_fl.backends.vendor.cuda._tiles import SHARED_PER_BLOCK

__all__ = ["DEVICES", "own_shared_bytes"]

# Compute capability, multiprocessors, shared memory of a block and of a multiprocessor in bytes.
DEVICES = {
    "sm_80": Limits(8, 0, 108, 166_912, 167_936),
    "sm_86": Limits(8, 6, 84, 101_376, 102_400),
    "sm_89": Limits(8, 9, 128, 101_376, 102_400),
    "sm_90": Limits(9, 0, 132, 232_448, 233_472),
    "sm_100": Limits(10, 0, 148, 232_448, 233_472),
    "sm_120": Limits(12, 0, 170, 101_376, 102_400),
}
"""One GPU of each generation."""


def own_shared_bytes(code: bytes) -> int:
    """A kernel's static shared memory in bytes, from its cubin; a launch's dynamic part excluded.

    From compute capability 9.0 on, it starts behind the shared memory that the system reserves in
    each block. The compiler's figure includes the reserved bytes; the limit of a block does not.
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

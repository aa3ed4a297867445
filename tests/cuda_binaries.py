"""What a compiled kernel of the CUDA C++ set says of itself, read without a device."""

from __future__ import annotations

import struct

from transformer_engine_fl.backends.vendor.cuda._tiles import SHARED_PER_BLOCK

__all__ = ["own_shared_bytes"]


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

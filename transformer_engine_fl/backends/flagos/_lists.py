"""How the kernels of this set take lists of tensors: see ``backends/_lists.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from transformer_engine_fl.backends._lists import (
    ALIGNMENT,
    Demand,
    Group,
    ListPreparer,
    Tiles,
    whole_chunk,
)
from transformer_engine_fl.backends.flagos._arguments import is_block, plain
from transformer_engine_fl.backends.flagos._numbers import numbers_on_device
from transformer_engine_fl.backends.flagos.tuning import Choice

__all__ = [
    "ALIGNMENT",
    "LAYOUTS",
    "LIST_PREPARER",
    "Demand",
    "Group",
    "Tiles",
    "tiles_choice",
    "whole_chunk",
]

LIST_PREPARER = ListPreparer(plain, numbers_on_device)
LAYOUTS = LIST_PREPARER.layouts
"""The cached layouts of lists."""


def tiles_choice(
    name: str,
    usual: Callable[[int], Tiles],
    threads: Sequence[int],
    tiles: Sequence[int],
    counts: Sequence[int],
) -> Choice[Tiles]:
    """The choice of how an operator cuts its lists.

    Its key: the total elements of the first list, and the item size of the widest tensor.

    Args:
        name: the choice's name.
        usual: the value for an item size where nothing was measured.
        threads, tiles, counts: the candidates' threads, tiles, and tiles of a chunk.
    """

    def candidates(elements: int, itemsize: int) -> Iterator[Tiles]:
        for lanes, tile, count in itertools.product(threads, tiles, counts):
            if 4 <= tile // lanes <= 32:
                yield Tiles(lanes, tile, tile * count)

    return Choice(
        name,
        Tiles,
        key=("elements", "itemsize"),
        rounded=("elements",),
        candidates=candidates,
        heuristic=lambda device, elements, itemsize: usual(itemsize),
        wrong=_wrong_tiles,
        plans=(LAYOUTS,),
    )


def _wrong_tiles(tiles: Tiles) -> str | None:
    if not (is_block(tiles.threads, 32, 1024) and is_block(tiles.tile, tiles.threads, 2**16)):
        return "threads (32 to 1024) and tile (threads to 65536) must be powers of two"
    if tiles.chunk < tiles.tile or tiles.chunk % tiles.tile or tiles.chunk > 2**24:
        return "chunk (up to 2**24) must be a multiple of tile"
    return None

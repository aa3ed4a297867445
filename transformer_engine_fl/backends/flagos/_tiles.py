"""Tuning choices of the common kind: threads of a program and elements that it takes at a time.

What a family does with them, and choices of more numbers, are its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from transformer_engine_fl.backends.flagos._arguments import is_block
from transformer_engine_fl.backends.flagos.tuning import Choice

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["MOST_ELEMENTS", "Block", "Tile", "block_choice", "bounded", "tile_choice"]

MOST_ELEMENTS = 2**15
"""Of a tile that a file may ask for: plans of wider columns are the same."""


class Tile(NamedTuple):
    """How a tensor is cut.

    Attributes:
        threads: of a program.
        elements: that it takes at a time, of one row or of several.
    """

    threads: int
    elements: int


class Block(NamedTuple):
    """How a matrix is cut whose columns matter as well.

    Attributes:
        threads: of a program.
        rows, columns: that it takes at a time.
    """

    threads: int
    rows: int
    columns: int


def bounded(**bounds: tuple[int, int] | range) -> Callable[[Any], str | None]:
    """What is wrong with a value, if anything: by field, what there may be.

    Two numbers are the least and the greatest of powers of two; a range is any number in it.
    """

    def wrong(value: Any) -> str | None:
        for name, bound in bounds.items():
            number = getattr(value, name)
            if isinstance(bound, range):
                if number not in bound:
                    return f"{name} must be from {bound[0]} to {bound[-1]}"
            elif not is_block(number, *bound):
                return f"{name} must be a power of two from {bound[0]} to {bound[1]}"
        return None

    return wrong


def tile_choice(
    name: str,
    plans: dict[Any, Any],
    usual: Tile,
    in_bytes: bool = False,
) -> Choice[Tile]:
    """The choice of a tile by the bytes of an element.

    Args:
        name: of the choice.
        plans: made with its answers.
        usual: the tile where nothing was measured; half and twice its elements are tried too.
        in_bytes: the usual tile has so many bytes, not elements.
    """

    def rule(device: torch.device | None, itemsize: int) -> Tile:
        return Tile(usual.threads, usual.elements // (itemsize if in_bytes else 1))

    def candidates(itemsize: int) -> Iterable[Tile]:
        elements = rule(None, itemsize).elements
        sizes = (elements // 2, elements, 2 * elements)
        return itertools.starmap(Tile, itertools.product((128, 256), sizes))

    return Choice(
        name,
        Tile,
        key=("itemsize",),
        candidates=candidates,
        heuristic=rule,
        wrong=bounded(threads=(32, 1024), elements=(128, MOST_ELEMENTS)),
        plans=(plans,),
    )


def block_choice(
    name: str,
    plans: dict[Any, Any],
    kind: str,
    usual: Callable[[int], Block],
    candidates: Callable[[int], Iterable[Block]],
) -> Choice[Block]:
    """The choice of a block by a number of the family's own and the bytes of an element.

    Args:
        name: of the choice.
        plans: made with its answers.
        kind: the name of that number.
        usual: by it, the block where nothing was measured.
        candidates: by it, those that are tried.
    """
    return Choice(
        name,
        Block,
        key=(kind, "itemsize"),
        candidates=lambda number, itemsize: candidates(number),
        heuristic=lambda device, number, itemsize: usual(number),
        wrong=bounded(threads=(32, 1024), rows=(16, 256), columns=(32, 256)),
        plans=(plans,),
    )

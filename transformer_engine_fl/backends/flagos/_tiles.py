"""Tuning choices of the common kind: threads of a program and elements that it takes at a time.

Families decide what to do with them, and define choices of more numbers themselves.
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
"""Most elements of a tile that a file may ask for: all wider columns have the same plan."""


class Tile(NamedTuple):
    """How a tensor is cut.

    Attributes:
        threads: threads of a program.
        elements: elements that it takes at a time, from one row or several.
    """

    threads: int
    elements: int


class Block(NamedTuple):
    """How a matrix is cut if its columns matter as well.

    Attributes:
        threads: threads of a program.
        rows, columns: the tile that it takes at a time.
    """

    threads: int
    rows: int
    columns: int


def bounded(**bounds: tuple[int, int] | range) -> Callable[[Any], str | None]:
    """A check of values by the bounds of their fields; it returns what is wrong, or None.

    Two numbers are the least and the greatest of powers of two; a range allows any number in it.
    """

    def wrong(value: Any) -> str | None:
        for name, bound in bounds.items():
            number = getattr(value, name)
            if isinstance(bound, range):
                if number not in bound:
                    several = f"from {bound[0]} to {bound[-1]}" if len(bound) > 1 else bound[0]
                    return f"{name} must be {several}"
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
    """The choice of a tile by the item size.

    Args:
        name: the choice's name.
        plans: plans made with its answers.
        usual: the tile where nothing was measured; half and twice its elements are tried too.
        in_bytes: ``usual.elements`` are bytes, not elements.
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
    usual: Callable[[int, int], Block],
    candidates: Callable[[int, int], Iterable[Block]],
    least_rows: int = 16,
) -> Choice[Block]:
    """The choice of a block by a number defined by the family, and the item size.

    Args:
        name: the choice's name.
        plans: plans made with its answers.
        kind: the name of that number.
        usual: the block for that number and the item size where nothing was measured.
        candidates: the blocks that are tried for them.
        least_rows: the fewest rows of a block that a file may ask for.
    """
    return Choice(
        name,
        Block,
        key=(kind, "itemsize"),
        candidates=candidates,
        heuristic=lambda device, number, itemsize: usual(number, itemsize),
        wrong=bounded(threads=(32, 1024), rows=(least_rows, 256), columns=(32, 256)),
        plans=(plans,),
    )

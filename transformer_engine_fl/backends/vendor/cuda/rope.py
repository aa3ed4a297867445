"""Rotary position embedding in CUDA C++ (``rope.cu``), of one tensor or of packed ones.

Except for addresses, all that a call needs follows from its options and its tensors' properties
(dtypes, sizes, strides, alignment). A plan with it is made once, after the contract's check, and
cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.backends._allocation import allocator
from transformer_engine_fl.backends._repeats import repeating
from transformer_engine_fl.backends.vendor.cuda import _launch
from transformer_engine_fl.backends.vendor.cuda._arguments import (
    NAMES,
    PLAIN,
    SIZES,
    Plans,
    access_width,
    check_fresh,
    check_integers,
    check_size,
    dense,
    no_memory,
    on_device,
    plain,
)
from transformer_engine_fl.backends.vendor.cuda._compile import Specialisation
from transformer_engine_fl.ops import rope as contracts

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = [
    "fused_qkv_rope_backward",
    "fused_qkv_rope_forward",
    "fused_rope_backward",
    "fused_rope_forward",
]

THREADS: Final = 128
HEADS: Final = 4
"""Heads of a thread."""
BLOCKS: Final = {2: 4, 4: 4, 8: 1}
"""Blocks that must fit on a multiprocessor, by itemsize."""
MOST_TOKENS: Final = 2**31 - 2**14
MOST: Final = 2**30
"""Limit of the counts, other than that of tokens, that kernels keep in 32 bits."""
MOST_PIECES: Final = 2**16 - 1
"""Blocks that a grid may have along y."""


# -------------------------------------------------------------------------------- kernels


@dataclass(frozen=True, slots=True)
class Key:
    """What a kernel depends on, besides the device.

    Attributes:
        x: dtype of the tokens.
        interleaved: whether the features of a pair are neighbours.
        back: whether it is the gradient.
        width: features of a head, of queries and keys if there are several tensors.
        rotated: features that are rotated: of the only tensor, or of queries and of keys.
        v_width: features of a head of the values; 0 if there is one tensor.
        per_group: heads of queries for each head of keys.
        access, table_access: elements that one access to tokens, and to tables, may cover.
    """

    x: torch.dtype
    interleaved: bool
    back: bool
    width: int
    rotated: tuple[int, ...]
    v_width: int = 0
    per_group: int = 1
    access: int = 8
    table_access: int = 8

    @property
    def vec(self) -> int:
        """Elements per vector: up to 16 bytes, and a divisor of all parts of a head."""
        return math.gcd(
            16 // SIZES[self.x], self.width, self.v_width, *(r // 2 for r in self.rotated)
        )

    def parts(self) -> tuple[Part, ...]:
        """The only tensor, or queries, keys and values."""
        of = [Part(self.width, rotated, self.vec) for rotated in self.rotated]
        return (*of, Part(self.v_width, 0, self.vec)) if self.v_width else tuple(of)


class Part(NamedTuple):
    """A tensor with heads of ``width`` features, of which ``rotated`` are rotated."""

    width: int
    rotated: int
    vec: int

    @property
    def lanes(self) -> int:
        """Threads for a head: each has two vectors, of pairs or of features that are copied."""
        copied = (self.width - self.rotated) // self.vec
        return self.rotated // 2 // self.vec + -(-copied // 2)

    @property
    def pieces(self) -> int:
        """Blocks that share a head."""
        return -(-self.lanes // THREADS)

    def blocks(self, tokens: int, heads: int) -> int:
        """Blocks for so many tokens, whose heads are divided into portions of HEADS."""
        slots = THREADS // min(THREADS, self.lanes)
        portions = -(-heads // HEADS)
        return -(-tokens * portions // slots)


def source(key: Key) -> tuple[Specialisation, _launch.Geometry]:
    """The kernel for a key."""
    defines: dict[str, str | int] = {
        "TX": NAMES[key.x],
        "INTERLEAVED": int(key.interleaved),
        "BACK": int(key.back),
        "WIDTH": key.width,
        "ROTATED": key.rotated[0],
        "VEC": key.vec,
        "ACCESS": min(key.access, key.vec),
        "TABLE_ACCESS": min(key.table_access, key.vec),
        "THREADS": THREADS,
        "HEADS": HEADS,
        "BLOCKS": BLOCKS[SIZES[key.x]],
    }
    kernel, arguments = "rope", "PPPPPqqqiiiiqqiiiqqq"
    if key.v_width:
        kernel, arguments = "rope_packed", "PPPPPPPPqqqiiiiqqqqiiiii" + "q" * 12
        defines |= {
            "K_ROTATED": key.rotated[1],
            "V_WIDTH": key.v_width,
            "PER_GROUP": key.per_group,
        }
    geometry = _launch.Geometry(THREADS, arguments)
    return Specialisation("rope", kernel, tuple(defines.items())), geometry


def representative_sources(
    device: _launch.Limits,
) -> Iterator[tuple[Specialisation, _launch.Geometry]]:
    """A selection of the operators' kernels for a device: every kind, type and shape."""
    low, full, double, half = torch.bfloat16, torch.float32, torch.float64, torch.float16
    for back in (False, True):
        for interleaved in (False, True):
            others = ((half, 1), (full, 4), (double, 2)) if back == interleaved else ()
            for x, access in ((low, 8), *others):
                yield source(Key(x, interleaved, back, 128, (128,), 0, 1, access, access))
                yield source(Key(x, interleaved, back, 128, (128, 64), 128, 4, access, access))
            yield source(Key(low, interleaved, back, 11, (10,)))
            yield source(Key(low, interleaved, back, 4096, (4096,)))
            yield source(Key(low, interleaved, back, 8, (6, 4), 5, 3))


# ---------------------------------------------------------------------------------- plans


class Of(NamedTuple):
    """An operator.

    Attributes:
        contract: its contract.
        tokens: the parameters that are tensors of tokens.
        tables: the parameters that are tables of angles.
        back: whether it is a gradient.
    """

    contract: Contract[..., Any]
    tokens: tuple[str, ...]
    tables: tuple[str, ...]
    back: bool

    @property
    def packed(self) -> bool:
        """Whether there are queries, keys and values."""
        return len(self.tables) > 1


class Options(NamedTuple):
    """The arguments other than tensors, as the caller gave them."""

    qkv_format: Any
    interleaved: Any
    cp_size: Any
    cp_rank: Any
    qkv_split: Any = ()

    def quick(self) -> bool:
        """Whether their types are exact, so that they may be the key of a cached plan."""
        return (
            type(self.qkv_format) is str
            and type(self.interleaved) is bool
            and type(self.cp_size) is int
            and type(self.cp_rank) is int
            and type(self.qkv_split) in (tuple, list)
            and all(type(width) is int for width in self.qkv_split)
        )


Given = tuple[Tensor | None, ...]
"""The tokens, the tables, the start positions and the offsets."""


class Steps(NamedTuple):
    """The strides between tokens, in two dimensions, and between heads."""

    outer: int
    inner: int
    head: int


def _steps(tensor: Tensor) -> Steps:
    """The strides of ``[.., .., h, d]`` or ``[.., h, d]``; 0 for a dimension of size 1."""
    found = [
        stride if size > 1 else 0
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    return Steps(found[0], found[1] if len(found) == 3 else 0, found[-1])


def _dense_steps(shape: Sequence[int]) -> Steps:
    head = shape[-1]
    inner = head * shape[-2]
    return Steps(inner * shape[1] if len(shape) == 4 else inner, inner, head)


def _row_step(table: Tensor) -> int:
    """The stride between positions in a table; 0 if there is only one."""
    return table.stride(0) if table.shape[0] > 1 else 0


def _access(vec: int, sides: Sequence[tuple[Tensor, tuple[int, ...]]]) -> int:
    """Elements that one access to any of these tensors may cover."""
    numbers = []
    for tensor, steps in sides:
        size = tensor.itemsize
        numbers += [(tensor.data_ptr(), size), *((step * size, size) for step in steps)]
    return access_width(vec, *numbers)


class Shapes(NamedTuple):
    """The shapes of a call's tokens.

    Attributes:
        parts: the shape of the only tensor, or of queries, keys and values.
        packed: the shape of the packed tensor, if there is one.
    """

    parts: list[tuple[int, ...]]
    packed: tuple[int, ...] | None


def _shapes(lead: Tensor, options: Options) -> Shapes:
    """The shapes that follow from the last tensor of tokens, which has the heads of the keys."""
    if not options.qkv_split:
        return Shapes([tuple(lead.shape)], None)
    *leading, groups, _ = lead.shape
    dq, dk, dv = options.qkv_split
    heads = ((groups * (dq // dk), dk), (groups, dk), (groups, dv))
    return Shapes([(*leading, *it) for it in heads], (*leading, groups, dq + dk + dv))


def _key_of(
    of: Of, options: Options, shapes: Shapes, tokens: Sequence[Tensor], tables: Sequence[Tensor]
) -> Key:
    """What the kernel depends on."""
    queries, values = shapes.parts[0], shapes.parts[-1]
    key = Key(
        tokens[0].dtype,
        options.interleaved,
        of.back,
        queries[-1],
        tuple([it.shape[-1] for it in tables]),
        values[-1] if shapes.packed else 0,
        queries[-2] // values[-2],
    )
    return replace(
        key,
        access=_access(key.vec, [(it, _steps(it)) for it in tokens]),
        table_access=_access(key.vec, [(it, (_row_step(it),)) for it in tables]),
    )


class Cut(NamedTuple):
    """How tokens are distributed over blocks.

    Attributes:
        unit: tokens that the same blocks process.
        blocks: the number of these blocks, for each part.
    """

    unit: int
    blocks: list[int]


def _cut(key: Key, shapes: Shapes) -> Cut:
    """The cut with the fewest blocks for each token, for as few tokens as that takes."""
    parts = [(part, shape[-2]) for part, shape in zip(key.parts(), shapes.parts, strict=True)]
    most = max(1, min(THREADS, MOST // max(heads for _, heads in parts)))
    cuts = [Cut(n, [part.blocks(n, heads) for part, heads in parts]) for n in range(1, most + 1)]
    return min(cuts, key=lambda cut: sum(cut.blocks) / cut.unit)


class Plan:
    """All that calls with the same key have in common."""

    __slots__ = ("_blocks", "_contract", "_dtype", "_kernel", "_numbers", "_outputs", "_pieces")

    def __init__(self, of: Of, given: Given, options: Options) -> None:
        tokens = [it for it in given[: len(of.tokens)] if it is not None]
        tables = [it for it in given[len(of.tokens) : -2] if it is not None]
        shapes = _shapes(tokens[-1], options)
        outputs = [shapes.packed] if shapes.packed and of.back else shapes.parts
        self._contract = of.contract.name
        self._dtype = tokens[0].dtype
        self._outputs = [(it, _strides(it)) for it in outputs]
        self._kernel: _launch.Kernel | None = None
        if not math.prod(outputs[0]):
            return
        key = _key_of(of, options, shapes, tokens, tables)
        cut = _cut(key, shapes)
        outer, inner = (*shapes.parts[0][:-2], 1)[:2]
        self._blocks = -(-outer * inner // cut.unit) * sum(cut.blocks)
        self._pieces = max(part.pieces for part in key.parts())
        self._check_sizes(outer * inner, shapes, options)
        self._numbers = (
            *_places(outer, inner, given[-1], options),
            *(number for it in tables for number in (it.shape[0], _row_step(it))),
            *_distances(of, shapes, cut, [_steps(it) for it in tokens]),
        )
        self._kernel = _launch.load(*source(key), tokens[0].get_device())

    def _check_sizes(self, tokens: int, shapes: Shapes, options: Options) -> None:
        check_size(self._contract, "tokens", tokens, MOST_TOKENS)
        heads = max(it[-2] for it in shapes.parts)
        for name, size in (("blocks", self._blocks), ("heads", heads), ("ranks", options.cp_size)):
            check_size(self._contract, name, size, MOST)
        check_size(self._contract, "pieces of a head", self._pieces, MOST_PIECES)

    def __call__(self, of: Of, given: Given) -> list[Tensor]:
        """Run; ``given`` are tensors with the plan's key."""
        first = given[0]
        assert first is not None
        allocate = allocator(first.device)
        outputs = [allocate(shape, strides, self._dtype) for shape, strides in self._outputs]
        check_fresh(self._contract, outputs[0])
        if self._kernel is not None:
            addresses = [0 if it is None else it.data_ptr() for it in given]
            # The packed tensor comes first in either direction.
            at = 0 if of.packed and of.back else len(of.tokens)
            addresses[at:at] = [it.data_ptr() for it in outputs]
            self._kernel.launch(self._blocks, self._pieces, *addresses, *self._numbers)
        return outputs


def _places(outer: int, inner: int, offsets: Tensor | None, options: Options) -> tuple[int, ...]:
    """The arguments of a kernel from which the positions of tokens follow."""
    sequence_first = options.qkv_format != "bshd"
    return (
        outer * inner,
        inner,
        outer if sequence_first else inner,
        0 if offsets is None else offsets.shape[0] - 1,
        int(sequence_first),
        options.cp_size,
        options.cp_rank,
    )


def _distances(of: Of, shapes: Shapes, cut: Cut, steps: Sequence[Steps]) -> list[int]:
    """The arguments of a kernel for heads, their distribution over blocks, and strides."""
    if shapes.packed is None:
        return [shapes.parts[0][-2], cut.unit, *cut.blocks, *steps[0]]
    numbers = [shapes.packed[-2], cut.unit, sum(cut.blocks), *cut.blocks[:2]]
    parts = steps if of.back else [_dense_steps(it) for it in shapes.parts]
    numbers += _dense_steps(shapes.packed) if of.back else steps[0]
    return numbers + [number for it in parts for number in it]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(strides[::-1])


_plans: Plans[Plan] = Plans()


def _key(of: Of, given: Given, options: Options) -> tuple[Any, ...] | None:
    """What a plan depends on; None if some tensor is not plain memory on a device."""
    key: list[Any] = [of.contract.name, *options[:4], *options.qkv_split]
    try:
        for tensor in given:
            if tensor is None:
                key.append(None)
                continue
            if type(tensor) not in PLAIN or not on_device(tensor) or tensor.is_neg():
                return None
            key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device())
            key.append(tensor.data_ptr() & 15)
    except RuntimeError:  # a wrapper that torch's transforms put around tensors
        return None
    return tuple(key)


def _run(of: Of, given: Given, options: Options) -> list[Tensor]:
    key = _key(of, given, options) if options.quick() else None
    plan = None if key is None else _plans.get(key)
    if plan is None:
        given = _taken(of, given, options)
        key = _key(of, given, options)
        if key is None:
            raise no_memory(of.contract, None)
        plan = _plans.get(key) or _plans.get_or_create(key, lambda: Plan(of, given, options))
    return plan(of, given)


def _taken(of: Of, given: Given, options: Options) -> Given:
    """The tensors made suitable for kernels; raises if the arguments are invalid."""
    names = (*of.tokens, *of.tables, "start_positions", "cu_seqlens")
    named = dict(zip(names, given, strict=True))
    others = options._asdict()
    if not of.packed:
        del others["qkv_split"]
    of.contract.check(**named, **others)
    check_integers(of.contract.name, *options[2:4], *options.qkv_split)
    found: list[Tensor | None] = []
    for name, tensor in named.items():
        if tensor is None:
            found.append(None)
        elif name in ("start_positions", "cu_seqlens"):
            found.append(plain(of.contract.name, name, tensor).contiguous())
        else:
            found.append(dense(of.contract.name, name, tensor))
    return tuple(found)


# ---------------------------------------------------------------------------- operators

_FORWARD = Of(contracts.fused_rope_forward, ("input",), ("freqs",), False)
_BACKWARD = Of(contracts.fused_rope_backward, ("output_grads",), ("freqs",), True)
_QKV_TABLES = ("q_freqs", "k_freqs")
_QKV_FORWARD = Of(contracts.fused_qkv_rope_forward, ("qkv_input",), _QKV_TABLES, False)
_QKV_BACKWARD = Of(
    contracts.fused_qkv_rope_backward, ("q_grad", "k_grad", "v_grad"), _QKV_TABLES, True
)


@repeating
def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    *,
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """``fused_rope_forward`` of the contract."""
    options = Options(qkv_format, interleaved, cp_size, cp_rank)
    return _run(_FORWARD, (input, freqs, start_positions, cu_seqlens), options)[0]


@repeating
def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    *,
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """``fused_rope_backward`` of the contract."""
    options = Options(qkv_format, interleaved, cp_size, cp_rank)
    return _run(_BACKWARD, (output_grads, freqs, start_positions, cu_seqlens), options)[0]


@repeating
def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    *,
    qkv_split: Sequence[int],
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_qkv_rope_forward`` of the contract."""
    options = Options(qkv_format, interleaved, cp_size, cp_rank, qkv_split)
    q, k, v = _run(
        _QKV_FORWARD, (qkv_input, q_freqs, k_freqs, start_positions, cu_seqlens), options
    )
    return q, k, v


@repeating
def fused_qkv_rope_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    *,
    qkv_split: Sequence[int],
    start_positions: Tensor | None = None,
    qkv_format: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """``fused_qkv_rope_backward`` of the contract."""
    options = Options(qkv_format, interleaved, cp_size, cp_rank, qkv_split)
    given = (q_grad, k_grad, v_grad, q_freqs, k_freqs, start_positions, cu_seqlens)
    return _run(_QKV_BACKWARD, given, options)[0]

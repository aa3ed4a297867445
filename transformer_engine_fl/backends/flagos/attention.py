"""Attention in Triton: scores are never stored, and gradients are summed without atomics.

The forward stores the logarithm of each softmax denominator. The backward recomputes the weights
from it: once by queries, for dq and for each query's delta, which all keys need; once by keys, for
dk and dv; and with a bias once more by the bias's elements. Queries, keys and values are read in
place if their features are dense; the heads of a group read the same keys.

Hopper has kernels of its own for plain attention in 16 bits, in ``_attention_hopper``.

Tile sizes depend on widths and dtypes alone, so that a query's result does not depend on what else
is in the batch.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine_fl.backends._repeats import repeating_from_starts
from transformer_engine_fl.backends.flagos import _attention, _launch
from transformer_engine_fl.backends.flagos._arguments import (
    DESCRIBED_ALIGNMENT,
    DESCRIPTORS_FROM,
    OTHER_BYTES,
    TRITON_TYPES,
    WIDEST_UNIT,
    add_to_cache,
    address_of,
    block_of,
    check_integers,
    check_numbers,
    check_size,
    dense,
    float32_precision,
    fresh,
    launch_of,
    listed,
    plain,
)
from transformer_engine_fl.backends.flagos._sequences import steps
from transformer_engine_fl.backends.flagos._sums import SumOfPrograms
from transformer_engine_fl.backends.flagos._tiles import bounded
from transformer_engine_fl.backends.flagos.tuning import Choice
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import attention as contracts
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.ops.dropout import scale_of_kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["fused_attn_bwd", "fused_attn_fwd"]

# -------------------------------------------------------------------------------- tiles


class _Tile(NamedTuple):
    """A way to cut the scores into tiles.

    Attributes:
        rows, columns: queries and keys of a tile.
        threads: threads of a program.
        stages: pipeline stages: the most tiles of the other side in shared memory at a time.
        described: load the other side by tensor descriptors, where possible.
    """

    rows: int
    columns: int
    threads: int
    stages: int
    described: bool = False


# By pass, kind of dtype and width of the wider head, rounded up to a power of two.
_TILES: dict[str, dict[str, dict[int, _Tile]]] = {
    "forward": {
        "half": {
            64: _Tile(64, 128, 128, 3, described=True),
            128: _Tile(64, 64, 128, 3, described=True),
            256: _Tile(64, 64, 128, 2),
            512: _Tile(64, 32, 256, 2),
        },
        "float32": {
            64: _Tile(64, 32, 128, 2),
            128: _Tile(32, 32, 128, 2),
            512: _Tile(16, 16, 128, 1),
        },
        "float64": {128: _Tile(32, 16, 128, 1), 512: _Tile(16, 16, 128, 1)},
    },
    "queries": {
        "half": {
            64: _Tile(128, 64, 256, 3, described=True),
            128: _Tile(128, 64, 256, 3, described=True),
            256: _Tile(64, 32, 128, 2),
            512: _Tile(32, 32, 128, 1),
        },
        "float32": {
            64: _Tile(32, 32, 128, 2),
            128: _Tile(32, 32, 128, 1),
            512: _Tile(16, 16, 128, 1),
        },
        "float64": {128: _Tile(16, 16, 128, 1), 512: _Tile(16, 16, 128, 1)},
    },
    "keys": {
        "half": {
            64: _Tile(128, 64, 128, 2, described=True),
            128: _Tile(64, 128, 256, 3, described=True),
            256: _Tile(32, 64, 256, 1),
            512: _Tile(32, 32, 256, 1),
        },
        "float32": {
            64: _Tile(32, 32, 128, 2),
            128: _Tile(32, 32, 128, 1),
            512: _Tile(16, 16, 128, 1),
        },
        "float64": {128: _Tile(16, 16, 128, 1), 512: _Tile(16, 16, 128, 1)},
    },
    "bias": {
        "half": {128: _Tile(64, 64, 128, 1), 512: _Tile(32, 32, 128, 1)},
        "float32": {128: _Tile(32, 32, 128, 1), 512: _Tile(16, 16, 128, 1)},
        "float64": {512: _Tile(16, 16, 128, 1)},
    },
}
_INTERPRETED_TILE = _Tile(16, 16, 32, 1, described=True)
_SIZES = (32, 64, 128)  # rows and columns of the tiles that are tried
_MOST_SCORES = 64  # per thread, in these tiles
_WIDEST = 512
_FEW = 64  # rows and columns up to which one stage is tried before a smaller tile
_FEWEST = 16  # rows and columns of a tile that matrix instructions take
_WIDEST_DESCRIBED = 256  # features
_MOST_TOKENS = 2**28  # of a sequence: sums of positions and windows fit in an int32

_KERNELS = {
    "forward": _attention.forward,
    "queries": _attention.backward_queries,
    "keys": _attention.backward_keys,
    "bias": _attention.backward_bias,
}
_SUMS: dict[object, SumOfPrograms] = {}


def _listed(way: str, features: int, itemsize: int) -> _Tile:
    kind = "half" if itemsize == 2 else f"float{8 * itemsize}"
    found: _Tile = listed(_TILES[way][kind], features)
    return found


def _choice(way: str) -> Choice[_Tile]:
    """The choice of a pass's tile; the chosen tile is shrunk to fit in shared memory."""

    def candidates(features: int, itemsize: int) -> Iterator[_Tile]:
        described = itemsize == 2 and features <= _WIDEST_DESCRIBED
        yield _listed(way, features, itemsize)
        for rows, columns, threads in itertools.product(_SIZES, _SIZES, (128, 256)):
            if 16 <= rows * columns // threads <= _MOST_SCORES:
                for stages in (1, 2, 3):
                    yield _Tile(rows, columns, threads, stages, described)

    def rule(device: torch.device, features: int, itemsize: int) -> _Tile:
        return _INTERPRETED_TILE if _launch.INTERPRETED else _listed(way, features, itemsize)

    return Choice(
        f"attention_{way}",
        _Tile,
        key=("features", "itemsize"),
        rounded=("features",),
        candidates=candidates,
        heuristic=rule,
        wrong=bounded(
            rows=(_FEWEST, 256), columns=(_FEWEST, 256), threads=(32, 512), stages=range(1, 9)
        ),
    )


_CHOICES = {way: _choice(way) for way in _TILES}


def _shared_bytes(it: _Call, way: str, tile: _Tile) -> int:
    """An estimate of the shared memory that a program uses, in bytes."""
    width: int = it.constants["BLOCK"]
    v_width: int = it.constants["V_BLOCK"]
    both = width + v_width
    own, other = (tile.columns, tile.rows) if way == "keys" else (tile.rows, tile.columns)
    held = own * (width if way == "forward" else both)
    if not _launch.limits(it.q.device).capability:
        held = 0  # other devices than CUDA's keep it in registers
    if tile.stages == 1 and held:
        copies = max(keys * width + values * v_width for keys, values in _copies(it, way))
        return OTHER_BYTES + it.q.itemsize * (held + other * copies)
    scores = tile.rows * tile.columns
    bytes_of_bias = 0 if it.bias is None else it.bias.itemsize
    moved = 0 if way == "forward" else scores
    return (
        OTHER_BYTES
        + it.q.itemsize * (held + tile.stages * other * both + moved)
        + tile.stages * scores * bytes_of_bias
    )


def _copies(it: _Call, way: str) -> tuple[tuple[int, int], ...]:
    """Copies of the other side's rows in shared memory at once, with a single stage.

    Each product then has a copy of its operand, as stored or transposed. Pairs (copies of queries
    or keys, copies of values or gradients), one for each moment that may need the most memory;
    observed in what Triton 3.7 compiles for compute capability 8.0, 8.6, 9.0 and 12.0.
    """
    return (_COPIES_OF_FLOAT32 if it.q.itemsize == 4 else _COPIES)[way]


_COPIES = {
    "forward": ((1, 1),),
    "queries": ((1, 1), (2, 0)),
    "keys": ((2, 0), (1, 2)),
    "bias": ((1, 1),),
}
_COPIES_OF_FLOAT32 = {  # multiplied as several TF32 parts
    "forward": ((1, 1), (2, 0)),
    "queries": ((2, 1), (1, 2)),
    "keys": ((2, 1), (1, 3)),
    "bias": ((1, 1),),
}


def _tile(it: _Call, way: str) -> _Tile:
    """The tile of a pass: the chosen one, shrunk until it fits in shared memory."""
    width = max(it.constants["BLOCK"], it.constants["V_BLOCK"])
    chosen = _CHOICES[way](it.q.device, width, it.q.itemsize)
    if _launch.INTERPRETED:
        return chosen
    tile: _Tile | None = chosen
    shared = _launch.limits(it.q.device).shared_bytes
    while tile and _shared_bytes(it, way, tile) > shared:
        tile = _smaller(tile)
    if tile is None:
        raise NotSupportedError(
            f"{it.op}: no tile of {width} features fits in the {shared} bytes of shared memory"
        )
    return tile


def _smaller(tile: _Tile) -> _Tile | None:
    """The next smaller tile; pipelining is given up late, since loads then no longer overlap."""
    if tile.stages > 2:
        return tile._replace(stages=tile.stages - 1)
    if tile.columns > _FEW:
        return tile._replace(columns=tile.columns // 2)
    if tile.rows > _FEW:
        return tile._replace(rows=tile.rows // 2)
    if tile.stages > 1:
        return tile._replace(stages=1)
    if tile.columns > _FEWEST:
        return tile._replace(columns=tile.columns // 2)
    return tile._replace(rows=tile.rows // 2) if tile.rows > _FEWEST else None


# -------------------------------------------------------------------------------- calls


class _Call(NamedTuple):
    """A call as the kernels take it.

    Attributes:
        op: the operator.
        qkv_format: the format of every tensor of tokens.
        q, k, v: with dense features.
        bias: expanded to ``[b, h, sq, skv]``.
        sink: ``[h]``, if it is learnable.
        lengths: cu_seqlens of queries and keys, then the starts of sequences if given separately.
        sequences, sq, skv: b and the maximum lengths.
        sizes, random: numbers of every kernel.
        constants: constants of every kernel.
        folded, has_sink: used by the forward only.
    """

    op: str
    qkv_format: str
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None
    lengths: tuple[Tensor | None, ...]
    sequences: int
    sq: int
    skv: int
    sizes: tuple[float, ...]
    random: tuple[float, ...]
    constants: Mapping[str, Any]
    folded: bool
    has_sink: bool

    @property
    def packed(self) -> bool:
        """Whether sequences follow one another without a batch dimension."""
        return self.qkv_format == "thd"


def _prepared(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    softmax_offset: Tensor | None,
    *,
    scale: float | None,
    qkv_format: str,
    attn_mask_type: str,
    window_size_left: int,
    window_size_right: int,
    softmax_type: str,
    dropout_p: float,
    seed: int,
    offset: int,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    **lengths: Tensor | None,
) -> _Call:
    """A checked call, as the kernels take it."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    check_numbers(op, scale, dropout_p)
    check_integers(op, seed, offset, window_size_left, window_size_right)
    q, k, v = dense(op, "q", q), dense(op, "k", k), dense(op, "v", v)
    places = tuple(
        None if it is None else plain(op, name, it).contiguous() for name, it in lengths.items()
    )
    b, sq, skv = contracts.extents(
        q, k, qkv_format, lengths["cu_seqlens_q"], max_seqlen_q, max_seqlen_kv
    )
    check_integers(op, b, sq, skv)
    packed = qkv_format == "thd"
    tq, tkv = (q.shape[0], k.shape[0]) if packed else (sq, skv)
    for what, size in (("queries", tq), ("keys", tkv)):
        check_size(op, what, size)
    heads, width = q.shape[-2:]
    if max(sq, skv) > _MOST_TOKENS:
        raise NotSupportedError(
            f"{op}: a sequence of {max(sq, skv)} tokens exceeds the limit of {_MOST_TOKENS}"
        )
    if max(width, v.shape[-1]) > _WIDEST:
        raise NotSupportedError(
            f"{op}: a head of {max(width, v.shape[-1])} features exceeds the limit of {_WIDEST}"
        )
    if bias is not None:
        bias = plain(op, "bias", bias).expand(b, heads, sq, skv)
    if softmax_offset is not None:
        softmax_offset = plain(op, "softmax_offset", softmax_offset).contiguous()
    # A window at least as wide as all tokens hides nothing.
    left = window_size_left if window_size_left < sq + skv else -1
    right = 0 if attn_mask_type in contracts.CAUSAL else window_size_right
    right = right if right < sq + skv else -1
    threshold = min(int(dropout_p * 2**32), 2**32 - 1)
    kept_scale = scale_of_kept(dropout_p)
    acc = math_dtype(q.dtype)
    constants = {
        "ACC": TRITON_TYPES[acc],
        "NATURAL": q.itemsize > 2,
        "PRECISION": float32_precision(q.device) if q.dtype == torch.float32 else "ieee",
        "DROPOUT": dropout_p > 0,
        "TOP_LEFT": attn_mask_type in contracts.TOP_LEFT,
        "LEFT": left >= 0,
        "RIGHT": right >= 0,
        "PACKED": packed,
        "WIDTH": width,
        "V_WIDTH": v.shape[-1],
        "BLOCK": block_of(width),
        "V_BLOCK": block_of(v.shape[-1]),
    }
    return _Call(
        op,
        qkv_format,
        q,
        k,
        v,
        bias,
        softmax_offset,
        places,
        b,
        sq,
        skv,
        (heads, heads // k.shape[-2], sq, skv, tq, tkv, left, right, float(scale)),
        (seed, offset, threshold, kept_scale),
        constants,
        bias is None and scale >= _attention.LEAST_FOLDED,
        softmax_type != "vanilla",
    )


def _distances(tensor: Tensor, qkv_format: str) -> tuple[int, ...]:
    """The strides of sequences, tokens and heads."""
    of = dict(zip(qkv_format, steps(tensor), strict=False))
    return (of.get("b", 0), of.get("s", of.get("t", 0)), of["h"])


def _describable(op: str, tensor: Tensor, qkv_format: str, unit: int) -> bool:
    """Whether a tensor descriptor can describe a sequence's tokens."""
    return (
        not (address_of(op, tensor) | unit * tensor.itemsize) % DESCRIBED_ALIGNMENT
        and tensor.itemsize == 2
        and tensor.shape[-1] <= _WIDEST_DESCRIBED
        and _distances(tensor, qkv_format)[1] > 0
    )


def _start(
    it: _Call,
    way: str,
    tile: _Tile,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    others: tuple[Tensor, ...],
    streamed: tuple[Tensor, ...],
    first: tuple[int, ...] = (),
    **constants: Any,
) -> None:
    """Launch the kernel of a pass.

    Args:
        tensors: all tensors, in the order of the kernel's parameters.
        others: tensors of tokens whose strides follow those of q, k and v.
        streamed: the tensors to load by descriptors, if possible.
        first: numbers before all others.
    """
    if not programs:
        return
    check_size(it.op, "programs", programs)
    tokens = [_distances(one, it.qkv_format) for one in (it.q, it.k, it.v, *others)]
    unit = math.gcd(*(step for steps_of in tokens for step in steps_of), WIDEST_UNIT)
    device = it.q.device
    if streamed:
        constants["DESCRIBED"] = (
            tile.described
            and _launch.limits(device).capability >= DESCRIPTORS_FROM
            and all(_describable(it.op, one, it.qkv_format, unit) for one in streamed)
        )
    constants |= {**it.constants, "UNIT": unit, "ROWS": tile.rows, "COLUMNS": tile.columns}
    kinds = tuple([None if one is None else one.dtype for one in tensors])
    launch = launch_of(
        _KERNELS[way],
        device,
        kinds,
        threads=tile.threads,
        options={"num_stages": tile.stages},
        **constants,
    )
    lse_batch, lse_head = (0, it.q.shape[0]) if it.packed else (it.sizes[0] * it.sq, it.sq)
    of_bias = (0, 0, 0, 0) if it.bias is None else it.bias.stride()
    distances = [step // unit for steps_of in tokens for step in steps_of]
    numbers = (*first, *it.sizes, *it.random, lse_batch, lse_head, *of_bias, *distances)
    launch((programs, 1), tensors, numbers)


def _of_tokens(it: _Call, like: Tensor, width: int) -> Tensor:
    """A new tensor of tokens; zeroed if packed, because tokens may lie between sequences."""
    result = fresh(it.op, like, (*like.shape[:-1], width))
    return result.zero_() if it.packed else result


# ---------------------------------------------------------------------------- operators


@repeating_from_starts
def fused_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    window_size_left: int = -1,
    window_size_right: int = -1,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``fused_attn_fwd`` of the contract."""
    options: dict[str, Any] = {
        "scale": scale,
        "qkv_format": qkv_format,
        "attn_mask_type": attn_mask_type,
        "window_size_left": window_size_left,
        "window_size_right": window_size_right,
        "softmax_type": softmax_type,
        "dropout_p": dropout_p,
        "seed": seed,
        "offset": offset,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
    }
    contract = contracts.fused_attn_fwd
    contract.check(q, k, v, bias, softmax_offset, **options)
    return _forward(_prepared(contract.name, q, k, v, bias, softmax_offset, **options))


def _for_hopper(it: _Call) -> Any:
    """The module of kernels for Hopper alone, if they support this call; else None."""
    known = it.constants
    *_, right, scale = it.sizes
    plain_softmax = it.bias is None and not it.has_sink and not known["DROPOUT"]
    masked = any(one is not None for one in it.lengths) or known["LEFT"] or right > 0
    if masked or not plain_softmax or not _launch.has_gluon():
        return None
    from transformer_engine_fl.backends.flagos import _attention_hopper

    return _attention_hopper if _attention_hopper.serves(it.q, it.k, it.v, scale) else None


def _of_hopper(it: _Call) -> tuple[float, str, bool, bool]:
    """The arguments of those kernels besides tensors: scale, format, causal, top-left."""
    return it.sizes[-1], it.qkv_format, it.constants["RIGHT"], it.constants["TOP_LEFT"]


def _forward(it: _Call) -> tuple[Tensor, Tensor]:
    if hopper := _for_hopper(it):
        out, lse = hopper.forward(it.q, it.k, it.v, *_of_hopper(it))
        return out, lse
    out = _of_tokens(it, it.q, it.v.shape[-1])
    shape = contracts._lse_shape(it.q, it.qkv_format)
    lse = fresh(it.op, it.q, shape, math_dtype(it.q.dtype))
    if it.packed:
        lse.fill_(-math.inf)
    tile = _tile(it, "forward")
    _start(
        it,
        "forward",
        tile,
        it.sequences * it.q.shape[-2] * -(-it.sq // tile.rows),
        (it.q, it.k, it.v, it.bias, it.sink, *it.lengths, out, lse),
        (out,),
        (it.k, it.v),
        FOLDED=it.folded,
        SINK=it.has_sink,
    )
    return out, lse


@repeating_from_starts
def fused_attn_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    bias: Tensor | None = None,
    softmax_offset: Tensor | None = None,
    *,
    scale: float | None = None,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    window_size_left: int = -1,
    window_size_right: int = -1,
    softmax_type: str = "vanilla",
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """``fused_attn_bwd`` of the contract."""
    options: dict[str, Any] = {
        "scale": scale,
        "qkv_format": qkv_format,
        "attn_mask_type": attn_mask_type,
        "window_size_left": window_size_left,
        "window_size_right": window_size_right,
        "softmax_type": softmax_type,
        "dropout_p": dropout_p,
        "seed": seed,
        "offset": offset,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
    }
    contract = contracts.fused_attn_bwd
    contract.check(dout, q, k, v, out, softmax_lse, bias, softmax_offset, **options)
    op = contract.name
    it = _prepared(op, q, k, v, bias, softmax_offset, **options)
    dout, out = dense(op, "dout", dout), dense(op, "out", out)
    lse = plain(op, "softmax_lse", softmax_lse).contiguous()
    if hopper := _for_hopper(it):
        dq, dk, dv = hopper.backward(dout, it.q, it.k, it.v, out, lse, *_of_hopper(it))
        return dq, dk, dv, None, None
    dq, dk, dv, dsink, delta = _backward(it, dout, out, lse)
    dbias = None if bias is None else _bias_gradient(it, bias, dout, lse, delta)
    return dq, dk, dv, dbias, dsink


def _backward(
    it: _Call, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """All gradients except the bias's, and the delta of each query."""
    heads, kv_heads = it.q.shape[-2], it.k.shape[-2]
    dq, dk = _of_tokens(it, it.q, it.q.shape[-1]), _of_tokens(it, it.k, it.k.shape[-1])
    dv = _of_tokens(it, it.v, it.v.shape[-1])
    delta = fresh(it.op, lse, lse.shape)
    tile = _tile(it, "queries")
    tiles = it.sequences * -(-it.sq // tile.rows)
    partial = None if it.sink is None else fresh(it.op, lse, (tiles, heads))
    _start(
        it,
        "queries",
        tile,
        tiles * heads,
        (it.q, it.k, it.v, it.bias, it.sink, *it.lengths, out, lse, dout, dq, delta, partial),
        (out, dout, dq),
        (it.k, it.v),
    )
    tile = _tile(it, "keys")
    _start(
        it,
        "keys",
        tile,
        it.sequences * kv_heads * -(-it.skv // tile.columns),
        (it.q, it.k, it.v, it.bias, *it.lengths, lse, delta, dout, dk, dv),
        (dout, dk, dv),
        (it.q, dout),
    )
    return dq, dk, dv, _sink_gradient(it, partial), delta


def _sink_gradient(it: _Call, partial: Tensor | None) -> Tensor | None:
    """The sum of the programs' partial results, ``[tiles, h]``, over the tiles."""
    if partial is None or it.sink is None:
        return None
    tiles, heads = partial.shape
    dsink = fresh(it.op, it.sink, (heads,))
    if not tiles:
        return dsink.zero_()
    key = (heads, dsink.dtype, partial.dtype, dsink.device)
    add = _SUMS.get(key) or add_to_cache(
        _SUMS, key, SumOfPrograms(heads, math.gcd(heads, WIDEST_UNIT), dsink.device)
    )
    add(partial, dsink, None, tiles)
    return dsink


def _bias_gradient(it: _Call, bias: Tensor, dout: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    dbias = fresh(it.op, bias, bias.shape)
    sequences, heads, rows, columns = bias.shape
    tile = _tile(it, "bias")
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    _start(
        it,
        "bias",
        tile,
        sequences * heads * tiles,
        (it.q, it.k, it.v, it.bias, *it.lengths, lse, delta, dout, dbias),
        (dout,),
        (),
        (it.sequences,),
        ONE_SEQUENCE=sequences == 1,
        ONE_HEAD=heads == 1,
        ONE_ROW=rows == 1,
        ONE_COLUMN=columns == 1,
    )
    return dbias

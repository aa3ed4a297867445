"""Triton's attention beyond the contract's samples: many tiles, extremes, wrong offsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_contract import checking
from torch import Tensor

from transformer_engine_fl.backends.flagos import attention as flagos
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import attention as contracts
from transformer_engine_fl.ops._dtypes import math_dtype
from transformer_engine_fl.testing.allocation import Guarded

check = checking(flagos)


def check_both(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> None:
    out, lse = check("fused_attn_fwd", q, k, v, *rest, **options)
    assert out is not None
    check("fused_attn_bwd", torch.randn_like(out), q, k, v, out, lse, *rest, **options)


def lengths(device: str) -> tuple[int, int]:
    """Queries and keys for several tiles, the last ones not full."""
    return (37, 53) if device == "cpu" else (280, 410)


def tokens(
    device: str,
    *,
    b: int = 1,
    heads: int = 2,
    kv_heads: int = 1,
    width: int = 16,
    v_width: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    sq, skv = lengths(device)
    shapes = (b, sq, heads, width), (b, skv, kv_heads, width), (b, skv, kv_heads, v_width)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


# -------------------------------------------------------------------------- many tiles


@pytest.mark.parametrize("turned", [False, True], ids=["more keys", "more queries"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("window", [(-1, -1), (20, -1), (20, 3)])
def test_tiles_seen_whole_in_part_or_not_at_all(
    window: tuple[int, int], mask: str, turned: bool, device: str
) -> None:
    q, k, v = tokens(device, kv_heads=2)
    if turned:
        q, k, v = k, q, torch.randn_like(q)
    left, right = window
    options = {"window_size_left": left, "window_size_right": right, "attn_mask_type": mask}
    check_both(q, k, v, **options)


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "thd"])
def test_sequences_of_several_tiles(qkv_format: str, mask: str, device: str) -> None:
    sq, skv = lengths(device)
    q, k, v = tokens(device, b=3, heads=4, kv_heads=2)
    options: dict[str, Any] = {
        "qkv_format": qkv_format,
        "attn_mask_type": mask,
        "cu_seqlens_q": torch.tensor([0, sq, sq, 2 * sq - 5], dtype=torch.int32, device=device),
        "cu_seqlens_kv": torch.tensor([0, 18, 22, 22 + skv], dtype=torch.int32, device=device),
    }
    if qkv_format == "sbhd":
        q, k, v = (it.transpose(0, 1) for it in (q, k, v))
    if qkv_format == "thd":
        q, k, v = (it.flatten(0, 1) for it in (q, k, v))
        options |= {"max_seqlen_q": sq, "max_seqlen_kv": skv}
    check_both(q, k, v, **options)


@pytest.mark.parametrize("kept", ["", "b", "h", "k", "bhqk", "bq", "hk"])
def test_a_bias_expanded_in_any_dimensions(kept: str, device: str) -> None:
    q, k, v = tokens(device, b=2, kv_heads=2)
    full = dict(zip("bhqk", (2, 2, *lengths(device)), strict=True))
    bias = torch.randn([size if axis in kept else 1 for axis, size in full.items()]).to(device)
    # Summed over keys, the bias gradient nearly cancels out: less if the offset has much of the
    # weight. Summed over queries it does not, if all their deltas have the same sign.
    beside = torch.full((2,), 4.0, device=device)
    options = {"attn_mask_type": "causal_bottom_right", "softmax_type": "learnable"}
    out, lse = check("fused_attn_fwd", q, k, v.abs(), bias, beside, **options)
    assert out is not None
    dout = torch.rand_like(out)
    check("fused_attn_bwd", dout, q, k, v.abs(), out, lse, bias, beside, **options)


def test_weights_dropped_over_several_tiles(device: str) -> None:
    q, k, v = tokens(device)
    bias = torch.randn(1, 1, *lengths(device)).to(device)
    options: dict[str, Any] = {"dropout_p": 0.4, "seed": 2**40 + 3, "offset": 2**33 + 1}
    check_both(q, k, v, bias, **options, attn_mask_type="causal_bottom_right")


@pytest.mark.parametrize("softmax_type", ["off_by_one", "learnable"])
def test_the_gradient_of_offsets_over_several_tiles_and_sequences(
    softmax_type: str, device: str
) -> None:
    q, k, v = tokens(device, b=3, heads=4)
    offsets = torch.randn(4, device=device) if softmax_type == "learnable" else None
    check_both(q, k, v, None, offsets, softmax_type=softmax_type, attn_mask_type="causal")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (40, 72), (256, 16)])
def test_widths_of_heads(widths: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    q, k, v = tokens(device, width=widths[0], v_width=widths[1], dtype=dtype)
    check_both(q, k, v, attn_mask_type="causal")


def test_more_programs_than_the_second_axis_of_a_grid_has(device: str) -> None:
    if device == "cpu":
        pytest.skip("too much for the interpreter")
    q = torch.randn(70_000, 1, 1, 16, device=device, dtype=torch.bfloat16)
    out, lse = flagos.fused_attn_fwd(q, q, q)
    assert torch.equal(out, q)
    assert torch.allclose(lse.flatten(), q.float().square().sum(-1).flatten() / 4, atol=0.02)


@pytest.mark.parametrize("width", [96, 128])
def test_hundreds_of_blocks_of_keys_add_up_to_no_error(width: int, device: str) -> None:
    if device == "cpu":
        pytest.skip("too much for the interpreter, which has no fused multiply-add either")
    q, k, v = (torch.randn(1, size, 1, width, device=device) for size in (64, 16_384, 16_384))
    check("fused_attn_fwd", q, k, v)


# ---------------------------------------------------------------------------- extremes


@pytest.mark.parametrize("scale", [0, 1e-38, -0.3, 40.0])
def test_scales(scale: float, device: str) -> None:
    q, k, v = tokens(device)
    if scale > 1:  # exact scores, and weights of 0 or 1
        q, k = (it.round().clamp(-2, 2) for it in (q, k))
    check_both(q, k, v, scale=scale, attn_mask_type="causal")


def test_keys_hidden_by_a_bias_before_those_that_are_seen(device: str) -> None:
    """Whole tiles of -inf come first, so that the first maximum is -inf."""
    q, k, v = tokens(device)
    sq, skv = lengths(device)
    bias = torch.zeros(1, 1, sq, skv, device=device)
    bias[..., : skv - 3] = -torch.inf
    bias[:, :, 5] = -torch.inf
    check_both(q, k, v, bias)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # in the interpreter
@pytest.mark.parametrize("softmax_type", ["vanilla", "off_by_one"])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_a_nan_query_gives_a_nan_output(mask: str, softmax_type: str, device: str) -> None:
    """A maximum ignores NaN, but no maximum must not be taken for no visible key."""
    q, k, v = tokens(device)
    q[:, 3] = torch.nan
    check("fused_attn_fwd", q, k, v, attn_mask_type=mask, softmax_type=softmax_type)


def of_the_highest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The value of the key with each query's highest score, ``bshd``."""
    wide = [it.double().transpose(1, 2) for it in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    keys, values = (it.repeat_interleave(group, 1) for it in wide[1:])
    highest = (wide[0] @ keys.mT).argmax(-1)
    return values.gather(2, highest[..., None].expand(*highest.shape, v.shape[-1])).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_with_scores_of_coarse_spacing_is_not_taken_for_one_without_keys(
    dtype: torch.dtype, device: str
) -> None:
    """If its weights are lost, the output is NaN; on a GPU a fused multiply-add loses them."""
    q, k, v = tokens(device, width=40, dtype=dtype)
    q, k = q * 2**19, k * 2**19
    out, _ = flagos.fused_attn_fwd(q, k, v)
    right = (out - of_the_highest(q, k, v)).abs() <= 0.02 * v.abs().amax()
    assert (right | out.isnan()).all()


def test_a_window_wider_than_an_int32(device: str) -> None:
    q, k, v = tokens(device)
    options = {"window_size_left": 2**40, "window_size_right": 2**31 - 1}
    wide = flagos.fused_attn_fwd(q, k, v, **options)
    for one, other in zip(wide, flagos.fused_attn_fwd(q, k, v), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("seed", range(4))
def test_wrong_offsets_read_and_write_nothing_outside(seed: int, device: str) -> None:
    wild = torch.tensor([-(2**31), -5, 3, 2**31 - 1, 0, 7, 2**30], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)

    def offsets() -> Tensor:
        return wild[torch.randperm(len(wild), generator=generator)].to(device)

    # Ones, amid other values that would show in the results.
    memory = torch.full((3, 4096), 1e3, device=device)
    q, k, v = (it[1024 : 1024 + 9 * 2 * 8].fill_(1).view(9, 2, 8) for it in memory)
    options: dict[str, Any] = {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": offsets(),
        "cu_seqlens_kv": offsets(),
        "cu_seqlens_q_padded": offsets(),
        "cu_seqlens_kv_padded": offsets(),
        "max_seqlen_q": 20,
        "max_seqlen_kv": 20,
    }
    with Guarded() as allocations:
        out, lse = flagos.fused_attn_fwd(q, k, v, **options)
        gradients = flagos.fused_attn_bwd(out, q, k, v, out, lse, **options)
    assert allocations.broken() is None
    assert ((out == 0) | ((out - 1).abs() < 1e-5)).all()
    for gradient in gradients[:3]:
        assert gradient is not None
        assert gradient.abs().max() < 100


# ---------------------------------------------------------------------------- declined


def test_tensors_inside_a_transform_are_declined(device: str) -> None:
    tokens = torch.randn(2, 1, 16, 2, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(NotSupportedError):
        torch.vmap(lambda it: flagos.fused_attn_fwd(it, it, it)[0])(tokens)


def test_heads_wider_than_a_tile_are_declined(device: str) -> None:
    q = torch.zeros(1, 2, 1, 513, device=device)
    with pytest.raises(NotSupportedError, match="513 features"):
        flagos.fused_attn_fwd(q, q, q)


def test_sequences_too_long_to_be_counted_are_declined(device: str) -> None:
    q = torch.zeros(1, device=device).expand(1, 2**28 + 1, 1, 1)
    with pytest.raises(NotSupportedError, match="tokens"):
        flagos.fused_attn_fwd(q, q, q)


# ------------------------------------------------------------------------- tiles that fit


@pytest.mark.parametrize("width", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared", [232_448, 166_912, 101_376, 65_536])
def test_tiles_fit_in_shared_memory(
    shared: int, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Tiles have at least the 16 rows and columns of a product; what does not fit is declined."""
    q, k, v = tokens(device, width=width, v_width=width, dtype=dtype)
    none = dict.fromkeys(contracts._SEQUENCES)
    options: dict[str, Any] = {**none, "max_seqlen_q": None, "max_seqlen_kv": None}
    bound = contracts.fused_attn_fwd.bind(q, k, v, **options)
    it = flagos._prepared("fused_attn_fwd", **bound)
    limits = flagos._launch.Limits(132, shared, 32, 65536, 90)
    monkeypatch.setattr(flagos._launch, "INTERPRETED", False)
    monkeypatch.setattr(flagos._launch, "limits", lambda device: limits)
    assert it.constants["NATURAL"] == (math_dtype(dtype) == dtype)
    for way in ("forward", "queries", "keys", "bias"):
        try:
            tile = flagos._tile(it, way)
        except NotSupportedError:
            assert width == 512 or (width == 256 and dtype == torch.float32)
            continue
        assert min(tile.rows, tile.columns) >= 16
        assert flagos._shared_bytes(it, way, tile) <= shared

"""Attention by cuDNN: the arguments that it gets, and the calls that are declined."""

from __future__ import annotations

from typing import Any

import cuda_emulation
import pytest
import torch
from torch import Tensor

from transformer_engine_fl import ops
from transformer_engine_fl.backends.vendor.cuda import attention
from transformer_engine_fl.core.errors import NotSupportedError

LOW = torch.bfloat16
CAUSAL = {"attn_mask_type": "causal"}


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = LOW) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(b: int = 2, s: int = 16, h: int = 4, d: int = 16, h_kv: int = 4) -> tuple[Tensor, ...]:
    return tokens(b, s, h, d), tokens(b, s, h_kv, d, seed=1), tokens(b, s, h_kv, d, seed=2)


@pytest.mark.parametrize(
    ("args", "options", "reason"),
    [
        (heads(), {"dropout_p": 0.5}, "dropout does not use"),
        (heads(), {"window_size_left": 3}, "not pass a window"),
        (heads(), {"window_size_right": 0}, "not pass a window"),
        (heads(), {"softmax_type": "off_by_one"}, "softmax offsets"),
        ((*heads(), torch.zeros(1, 1, 16, 16)), {}, "bias gradients"),
        (
            heads(),
            {
                "attn_mask_type": "padding",
                "cu_seqlens_q": torch.tensor([0, 5, 9], dtype=torch.int32),
                "cu_seqlens_kv": torch.tensor([0, 5, 9], dtype=torch.int32),
            },
            "sequence lengths",
        ),
        ((heads(s=8)[0], *heads()[1:]), CAUSAL, "as many queries as keys"),
        (heads(d=12), {}, "width"),
        (heads(d=136), {}, "width"),
        (heads(s=1), {}, "two keys"),
        (tuple(it.float() for it in heads()), {}, "torch.float32"),
        (tuple(it.transpose(1, 2) for it in heads()), {}, "dimensions in memory order"),
        ((tokens(2, 16, 4, 20)[..., :16], *heads()[1:]), {}, "dense heads"),
        (heads(), {"scale": -1.0}, "negative scale"),
        (heads(), {"scale": float("nan")}, "negative scale"),
    ],
)
def test_what_cudnn_does_not_do_is_left_to_others(
    args: tuple[Tensor, ...], options: dict[str, Any], reason: str
) -> None:
    with cuda_emulation.running(), pytest.raises(NotSupportedError, match=reason):
        attention.fused_attn_fwd(*args, **options)


@pytest.mark.parametrize("far", range(3))
def test_strides_beyond_32_bits_are_declined(far: int) -> None:
    args = list(heads())
    behind = torch.empty(2**31 + 1024, dtype=LOW)  # its pages are never touched
    args[far] = behind.as_strided((2, 16, 4, 16), (2**31, 64, 16, 1))
    with cuda_emulation.running(), pytest.raises(NotSupportedError, match="cuDNN's limit is"):
        attention.fused_attn_fwd(*args)


def unaligned(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize("place", range(3))
def test_tensors_that_begin_between_accesses_are_left_to_others(place: int) -> None:
    given = list(heads())
    with cuda_emulation.running():
        attention.fused_attn_fwd(*given)  # calls like this one are repeated from now on
        given[place] = unaligned(given[place])
        with pytest.raises(NotSupportedError, match="aligned to 16"):
            attention.fused_attn_fwd(*given)


@pytest.mark.parametrize(("sq", "skv"), [(1, 128), (16, 64), (128, 192)])
def test_lengths_whose_gradients_can_be_nan_are_left_to_others(sq: int, skv: int) -> None:
    q, k, v = tokens(2, sq, 4, 16), tokens(2, skv, 4, 16), tokens(2, skv, 4, 16)
    saved = q, k, v, torch.zeros_like(q), torch.zeros(2, 4, sq)
    with cuda_emulation.running(), pytest.raises(NotSupportedError, match="can be NaN"):
        attention.fused_attn_bwd(q, *saved)


def test_without_cudnn_it_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with cuda_emulation.running():
        monkeypatch.setattr(attention, "_cudnn_version", lambda: 0)
        monkeypatch.setattr(attention, "_known", type(attention._known)())
        with pytest.raises(NotSupportedError, match="no cuDNN 9 attention"):
            attention.fused_attn_fwd(*heads())


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd"])
def test_packed_queries_keys_and_values_are_not_copied(qkv_format: str) -> None:
    packed = tokens(2, 16, 3, 4, 16)
    q, k, v = packed.unbind(2)
    seen: list[tuple[int, ...]] = []
    with cuda_emulation.running():
        own = attention._forward

        def watched(*args: Any, **options: Any) -> Any:
            seen.extend((it.data_ptr() - packed.data_ptr(), *it.stride()) for it in args[:3])
            return own(*args, **options)

        attention._forward = watched
        attention.fused_attn_fwd(q, k, v, qkv_format=qkv_format)
    strides = {"bshd": (3072, 16, 192, 1), "sbhd": (192, 16, 3072, 1)}[qkv_format]
    assert seen == [(128 * place, *strides) for place in range(3)]


# ------------------------------------------------------------------------- on a device


def on_cuda(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(LOW)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize(
    ("s", "h", "h_kv", "d"), [(512, 8, 8, 128), (1000, 8, 2, 64), (77, 4, 1, 40), (2, 3, 3, 8)]
)
def test_values_of_many_sizes(s: int, h: int, h_kv: int, d: int, mask: str) -> None:
    q, k, v = (on_cuda(2, s, it, d, seed=i) for i, it in enumerate((h, h_kv, h_kv)))
    dout = on_cuda(2, s, h, d, seed=3)
    out, lse = attention.fused_attn_fwd(q, k, v, attn_mask_type=mask)
    right = ops.fused_attn_fwd.oracle(q, k, v, attn_mask_type=mask)
    assert torch.allclose(out.double(), right[0], rtol=2**-8, atol=2**-6)
    assert torch.allclose(lse.double(), right[1], rtol=1e-4, atol=1e-3)
    saved = (q, k, v, out, lse)
    found = attention.fused_attn_bwd(dout, *saved, attn_mask_type=mask)
    expected = ops.fused_attn_bwd.oracle(dout, *saved, attn_mask_type=mask)
    for gradient, value in zip(found[:3], expected[:3], strict=True):
        assert gradient is not None
        # Probabilities are rounded to the input's dtype before they are multiplied.
        error = gradient.double() - value
        assert error.norm() <= 2**-8 * value.norm()
        allowed = 2**-3 * value.square().mean().sqrt()
        assert bool((error.abs() <= 2**-8 * value.abs() + allowed).all())


@pytest.mark.gpu
def test_a_gradient_with_other_strides_than_the_one_before_is_read_right() -> None:
    q, k, v = (on_cuda(2, 256, 4, 64, seed=i) for i in range(3))
    out, lse = attention.fused_attn_fwd(q, k, v)
    dout = on_cuda(2, 256, 4, 64, seed=3)
    first = attention.fused_attn_bwd(dout, q, k, v, out, lse)
    turned = dout.transpose(1, 2).contiguous().transpose(1, 2)
    second = attention.fused_attn_bwd(turned, q, k, v, out, lse)
    for one, other in zip(first[:3], second[:3], strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one.float(), other.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
def test_it_has_the_bits_of_the_library() -> None:
    q, k, v = (on_cuda(2, 1024, 8, 128, seed=i) for i in range(3))
    out, _ = attention.fused_attn_fwd(q, k, v, attn_mask_type="causal")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        direct = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
    assert torch.equal(out, direct.transpose(1, 2))


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed() -> None:
    q, k, v = (on_cuda(2, 256, 4, 64, seed=i) for i in range(3))
    dout = on_cuda(2, 256, 4, 64, seed=4)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):  # make the plans before the capture
        attention.fused_attn_bwd(dout, q, k, v, *attention.fused_attn_fwd(q, k, v))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out, lse = attention.fused_attn_fwd(q, k, v)
        dq, *_ = attention.fused_attn_bwd(dout, q, k, v, out, lse)
    q.copy_(on_cuda(2, 256, 4, 64, seed=5))
    graph.replay()
    torch.cuda.synchronize()
    again, statistics = attention.fused_attn_fwd(q, k, v)
    assert torch.equal(out, again)
    assert torch.equal(lse, statistics)
    expected = attention.fused_attn_bwd(dout, q, k, v, again, statistics)[0]
    assert torch.allclose(dq.float(), expected.float(), rtol=2**-7, atol=2**-7)

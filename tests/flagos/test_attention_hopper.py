"""Attention's kernels for Hopper: which calls they serve, and their values on such a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flagos.test_attention import check, check_both, of_the_highest
from torch import Tensor

from transformer_engine_fl.backends.flagos import _launch
from transformer_engine_fl.backends.flagos import attention as flagos
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import attention as contracts
from transformer_engine_fl.testing import compare

hopper = pytest.importorskip("transformer_engine_fl.backends.flagos._attention_hopper")
CAUSAL = {"attn_mask_type": "causal"}


def tokens(
    *, b: int = 2, sq: int = 5, skv: int = 7, heads: int = 4, groups: int = 2, width: int = 128,
    v_width: int = 0, dtype: torch.dtype = torch.bfloat16, qkv_format: str = "bshd",
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator(device).manual_seed(3)

    def new(s: int, heads: int, width: int) -> Tensor:
        shape = (b, s, heads, width) if qkv_format == "bshd" else (s, b, heads, width)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return new(sq, heads, width), new(skv, groups, width), new(skv, groups, v_width or width)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of Hopper's forward, on a device that passes for Hopper; nothing is launched."""
    calls: list[tuple[Any, ...]] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        calls.append(options)
        return q, k

    limits = _launch.Limits(132, 232_448, 32, 65_536, 90)
    monkeypatch.setattr(_launch, "limits", lambda device: limits)
    monkeypatch.setattr(_launch, "has_gluon", lambda: True)
    for name in ("dense", "plain"):  # these look for a GPU
        monkeypatch.setattr(flagos, name, lambda _op, _name, tensor: tensor)
    monkeypatch.setattr(hopper, "forward", forward)
    monkeypatch.setattr(flagos, "_start", lambda *_args, **_kwargs: None)
    return calls


@pytest.mark.parametrize(
    ("kwargs", "options"),
    [
        ({}, ("bshd", False)),
        (CAUSAL, ("bshd", True, True)),
        ({"attn_mask_type": "causal_bottom_right"}, ("bshd", True, False)),
        ({"window_size_right": 0}, ("bshd", True, False)),
        ({"window_size_left": 50, "window_size_right": 50}, ("bshd", False)),
        ({"qkv_format": "sbhd"}, ("sbhd", False)),
        ({"scale": 0.3}, ("bshd", False)),
    ],
)
def test_plain_attention_goes_to_the_kernels_for_hopper(
    kwargs: dict[str, Any], options: tuple[Any, ...], taken: list[tuple[Any, ...]]
) -> None:
    qkv_format = kwargs.get("qkv_format", "bshd")
    flagos.fused_attn_fwd(*tokens(qkv_format=qkv_format), **kwargs)
    ((scale, *rest),) = taken
    assert scale == kwargs.get("scale", 128**-0.5)
    assert tuple(rest)[: len(options)] == options


def test_more_queries_than_its_kernels_count_are_declined_backward() -> None:
    q = torch.empty(2**20, 1, 16, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(2**20, 16, 1, device="meta")
    with pytest.raises(NotSupportedError, match="2147483648 queries of all heads"):
        hopper.backward(q, q, q, q, q, lse, 0.125, "bshd", False, False)


@pytest.mark.parametrize(
    ("shapes", "kwargs"),
    [
        ({"dtype": torch.float32}, {}),
        ({"width": 80}, {}),
        ({"width": 64, "v_width": 128}, {}),
        ({"skv": 0}, {}),
        ({}, {"bias": torch.zeros(1, 1, 5, 7)}),
        ({}, {"softmax_type": "off_by_one"}),
        ({}, {"dropout_p": 0.1}),
        ({}, {"window_size_left": 2}),
        ({}, {"window_size_right": 2}),
        ({}, {"scale": -1.0}),
        ({}, {"scale": 1e-46}),  # 0 in float32
        ({}, {"scale": 1e39}),  # infinite in float32
        (
            {},
            {
                "attn_mask_type": "padding",
                "cu_seqlens_q": torch.tensor([0, 5, 10], dtype=torch.int32),
                "cu_seqlens_kv": torch.tensor([0, 7, 9], dtype=torch.int32),
            },
        ),
    ],
)
def test_other_attention_stays_with_the_portable_kernels(
    shapes: dict[str, Any], kwargs: dict[str, Any], taken: list[tuple[Any, ...]]
) -> None:
    out, _ = flagos.fused_attn_fwd(*tokens(**shapes), **kwargs)
    assert out.shape[:3] == (2, 5, 4)
    assert taken == []


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_gpus_have_the_portable_kernels(
    capability: int, taken: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = _launch.Limits(132, 232_448, 32, 65_536, capability)
    monkeypatch.setattr(_launch, "limits", lambda device: limits)
    flagos.fused_attn_fwd(*tokens())
    assert taken == []


def test_only_tensors_that_tma_cannot_load_are_copied() -> None:
    dense = torch.arange(2 * 3 * 4 * 64, dtype=torch.bfloat16).view(2, 3, 4, 64)
    assert hopper._loadable("fused_attn_fwd", dense) is dense
    assert hopper._loadable("fused_attn_fwd", dense[:, 1:]).data_ptr() == dense[:, 1:].data_ptr()
    shifted = torch.ones(dense.numel() + 1, dtype=dense.dtype)[1:].view(dense.shape)
    odd = torch.ones(2, 3, 4, 65, dtype=dense.dtype)[..., :64]
    expanded = dense[:, :, :1].expand(dense.shape)
    for tensor in (shifted, odd, expanded, dense.transpose(2, 3)):
        copied = hopper._loadable("fused_attn_fwd", tensor)
        assert copied.is_contiguous()
        assert copied.data_ptr() % 16 == 0
        assert torch.equal(copied, tensor)


# ------------------------------------------------------------------------- on such a GPU


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that Hopper's kernels served."""
    if torch.cuda.get_device_capability() != (9, 0) or not _launch.has_gluon():
        pytest.skip("needs a Hopper GPU and a Triton whose Gluon is known")
    done: list[str] = []
    for name in ("forward", "backward"):
        kernel = getattr(hopper, name)

        def spied(*args: Any, name: str = name, kernel: Any = kernel) -> Any:
            done.append(name)
            return kernel(*args)

        monkeypatch.setattr(hopper, name, spied)
    return done


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("lengths", [(128, 128), (300, 417), (417, 130), (7, 1000), (64, 2)])
@pytest.mark.parametrize("width", [64, 128])
def test_values_on_hopper(
    width: int, lengths: tuple[int, int], mask: str, on_hopper: list[str]
) -> None:
    sq, skv = lengths
    for dtype, qkv_format in ((torch.bfloat16, "bshd"), (torch.float16, "sbhd")):
        q, k, v = tokens(
            sq=sq, skv=skv, width=width, dtype=dtype, qkv_format=qkv_format, device="cuda"
        )
        check_both(q, k, v, attn_mask_type=mask, qkv_format=qkv_format)
    assert on_hopper == ["forward", "backward"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_a_single_key_has_all_the_weight_on_hopper(width: int, on_hopper: list[str]) -> None:
    q, k, v = tokens(sq=64, skv=1, width=width, device="cuda")
    out, lse = check("fused_attn_fwd", q, k, v)
    assert out is not None
    grad = torch.randn_like(out)
    dq, dk, dv, *_ = flagos.fused_attn_bwd(grad, q, k, v, out, lse)
    # The gradients of scores are 0, but for rounding in float32.
    assert max(dq.abs().max(), dk.abs().max()) < 1e-4
    expected = contracts.fused_attn_bwd.oracle(grad, q, k, v, out, lse)[2]
    assert compare(dv, expected, contracts.fused_attn_bwd.tolerance["bfloat16"]).ratio <= 1
    assert on_hopper == ["forward", "backward"]


@pytest.mark.gpu
def test_a_nan_query_gives_a_nan_output_on_hopper(on_hopper: list[str]) -> None:
    q, k, v = tokens(device="cuda")
    q[:, 3] = torch.nan
    check("fused_attn_fwd", q, k, v, **CAUSAL)
    assert on_hopper == ["forward"]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_a_thousand_blocks_of_keys_add_up_to_no_error_on_hopper(
    width: int, on_hopper: list[str]
) -> None:
    q, k, v = tokens(b=1, sq=64, skv=131_072, heads=1, groups=1, width=width, device="cuda")
    q *= 4
    _, lse = flagos.fused_attn_fwd(q, k, v)
    scores = q[0, :, 0].double() @ k[0, :, 0].double().T * width**-0.5
    assert (lse[0, 0] - scores.logsumexp(-1)).abs().max() < 1e-4
    assert on_hopper == ["forward"]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_a_query_with_scores_too_large_to_weigh_is_not_one_without_keys_on_hopper(
    width: int, on_hopper: list[str]
) -> None:
    q, k, v = tokens(sq=300, skv=417, width=width, device="cuda")
    q, k = q * 2**19, k * 2**19
    out, _ = flagos.fused_attn_fwd(q, k, v)
    right = (out - of_the_highest(q, k, v)).abs() <= 0.02 * v.abs().amax()
    assert (right | out.isnan()).all()
    assert on_hopper == ["forward"]


@pytest.mark.gpu
def test_more_tiles_than_multiprocessors_on_hopper(on_hopper: list[str]) -> None:
    q, k, v = tokens(b=3, sq=1100, skv=1300, heads=12, groups=3, device="cuda")
    check_both(q, k, v, **CAUSAL)
    assert on_hopper == ["forward", "backward"]


@pytest.mark.gpu
def test_tensors_with_strides_that_tma_cannot_load_on_hopper(on_hopper: list[str]) -> None:
    q, k, v = (torch.nn.functional.pad(it, (0, 1))[..., :-1] for it in tokens(device="cuda"))
    check_both(q, k, v)
    assert on_hopper == ["forward", "backward"]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_a_sequence_has_the_same_bits_whatever_else_is_in_the_batch_on_hopper(
    width: int, on_hopper: list[str]
) -> None:
    q, k, v = tokens(b=5, sq=1500, skv=1500, heads=16, groups=16, width=width, device="cuda")

    def both(*tensors: Tensor) -> tuple[Tensor, ...]:
        out, lse = flagos.fused_attn_fwd(*tensors, **CAUSAL)
        gradients = flagos.fused_attn_bwd(out, *tensors, out, lse, **CAUSAL)
        return out, lse, *gradients[:3]

    together = both(q, k, v)
    assert all(map(torch.equal, together, both(q, k, v)))
    alone = both(q[3:4], k[3:4], v[3:4])
    assert all(torch.equal(one[3:4], other) for one, other in zip(together, alone, strict=True))
    assert on_hopper == ["forward", "backward"] * 3

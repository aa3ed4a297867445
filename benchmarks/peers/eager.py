"""The operators as formulas in torch, as a user would write them without this project.

The formulas are the peers torch.eager and torch.compile. They take tensors that a user has at
hand, such as the cosines of the angles or a causal mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from workloads.loss import LINEAR_CROSS_ENTROPY
from workloads.softmax import future

from peers.peer import Peer, Table, Work, autograd, compiled

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Formula:
    """A forward that is timed, or the forward whose backward is timed.

    Attributes:
        function: the formula.
        inputs: makes the formula's inputs from the operator's arguments, before the timing; by
            default they are the operator's arguments.
        leaves: for a backward, the number of leading inputs to differentiate; 0 for a forward.
        grads: for a backward, makes the gradients of the outputs from the operator's arguments;
            by default the first argument.
        values: as in Work.
        note: as in Peer.
        fused: the formula for torch.compile, where another one suits it better.
        compile: whether torch.compile is measured with the formula.
    """

    function: Callable[..., Any]
    inputs: Callable[..., tuple[Any, ...]] = lambda *args, **options: args
    leaves: int = 0
    grads: Callable[..., Any] = lambda *args, **options: args[0]
    values: Callable[[Any], Any] = lambda result: result
    note: str = ""
    fused: Callable[..., Any] | None = None
    compile: bool = True

    def peer(self, compile: bool) -> Peer:
        """The peer torch.compile or torch.eager."""

        def make(*args: Any, **options: Any) -> Work:
            function = compiled(self.fused or self.function) if compile else self.function
            inputs = self.inputs(*args, **options)
            if not self.leaves:
                return Work(lambda: function(*inputs), self.values)
            leaves, others = inputs[: self.leaves], inputs[self.leaves :]
            grads = self.grads(*args, **options)
            return Work(autograd(function, leaves, grads, *others), self.values)

        return Peer(make, self.note)


# ------------------------------------------------------------------------ normalization


def _rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _rmsnorm_formula(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype) * weight


def _rmsnorm_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rmsnorm(total, weight), total


def _rmsnorm_add_formula(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rmsnorm_formula(total, weight), total


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _with_itself(norm: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A norm and a copy of its input: the residual sum also goes on past the block."""
    return lambda x, weight: (norm(x, weight), x.clone())


NORMALIZATION = {
    "rmsnorm_fwd": Formula(_rmsnorm, fused=_rmsnorm_formula),
    "rmsnorm_bwd": Formula(_rmsnorm, lambda dy, x, _, gamma: (x, gamma), 2, fused=_rmsnorm_formula),
    "rmsnorm_fwd_add": Formula(_rmsnorm_add, fused=_rmsnorm_add_formula),
    "rmsnorm_bwd_add": Formula(
        _with_itself(_rmsnorm),
        lambda dz, x, add, _, gamma: (x, gamma),
        2,
        lambda dz, x, add, *_: (dz, add),
        fused=_with_itself(_rmsnorm_formula),
    ),
    "layernorm_fwd": Formula(_layernorm),
    "layernorm_bwd": Formula(
        _layernorm, lambda dy, x, mu, _, gamma: (x, gamma, torch.zeros_like(gamma)), 3
    ),
}


# ------------------------------------------------------------------------------ softmax


def _softmax(scores: Tensor, scale: float = 1.0) -> Tensor:
    return torch.softmax(scores if scale == 1.0 else scores * scale, -1)


def _hidden_softmax(scores: Tensor, hidden: Tensor, scale: float = 1.0) -> Tensor:
    return torch.softmax((scores * scale).masked_fill(hidden, -torch.inf), -1)


def _softmax_backward(grad: Tensor, output: Tensor, scale: float = 1.0) -> Tensor:
    dx = torch._softmax_backward_data(grad, output, -1, output.dtype)
    return dx if scale == 1.0 else dx * scale


def _softmax_backward_formula(grad: Tensor, output: Tensor, scale: float = 1.0) -> Tensor:
    grad, y = grad.float(), output.float()
    return (y * (grad - (grad * y).sum(-1, keepdim=True)) * scale).to(output.dtype)


def _under_the_diagonal(scores: Tensor, scale: float = 1.0) -> tuple[Any, ...]:
    return scores, future(scores), scale


SOFTMAX = {
    "scaled_softmax_forward": Formula(_softmax),
    "scaled_masked_softmax_forward": Formula(_hidden_softmax),
    **{
        f"scaled_{form}masked_softmax_forward": Formula(_hidden_softmax, _under_the_diagonal)
        for form in ("upper_triang_", "aligned_causal_")
    },
    **{
        f"scaled_{form}softmax_backward": Formula(
            _softmax_backward, fused=_softmax_backward_formula
        )
        for form in ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_")
    },
}


# --------------------------------------------------------------------------- activation


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _clamped_swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
    return a * torch.sigmoid(1.702 * a) * (b + 1)


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return function(a) * b

    return gated


def _plus(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, bias: function(x + bias)


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "relu": F.relu,
    "srelu": _srelu,
    "silu": F.silu,
}
GATED = {
    "glu": _gated(torch.sigmoid),
    "geglu": _gated(_gelu),
    "qgeglu": _gated(_qgelu),
    "reglu": _gated(F.relu),
    "sreglu": _gated(_srelu),
    "swiglu": _gated(F.silu),
}


def _forward_input(grad: Tensor, fwd_input: Tensor) -> tuple[Tensor]:
    return (fwd_input,)


ACTIVATION = {
    **{name: Formula(function) for name, function in (PLAIN | GATED).items()},
    "clamped_swiglu": Formula(_clamped_swiglu),
    **{
        f"d{name}": Formula(function, _forward_input, 1)
        for name, function in (PLAIN | GATED).items()
    },
    "clamped_dswiglu": Formula(_clamped_swiglu, _forward_input, 1),
    **{
        f"dbias_d{name}": Formula(
            _plus(function),
            lambda grad, fwd_input: (fwd_input, torch.zeros_like(fwd_input[0])),
            2,
            values=lambda grads: (grads[1], grads[0]),
        )
        for name, function in PLAIN.items()
    },
}


# --------------------------------------------------------------------------------- rope


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _rotate_half(x) * sin


def _with_cosines(x: Tensor, freqs: Tensor) -> tuple[Tensor, ...]:
    return x, freqs.cos().to(x.dtype), freqs.sin().to(x.dtype)


def _packed(packed: Tensor, cos: Tensor, sin: Tensor, split: list[int]) -> tuple[Tensor, ...]:
    q, k, v = packed.split(split, -1)
    q = q.reshape(*q.shape[:2], -1, split[1])
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v.contiguous()


def _packed_backward_inputs(
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
    freqs: Tensor,
    _: Tensor,
    *,
    qkv_split: list[int],
) -> tuple[Any, ...]:
    packed = k_grad.new_zeros(*k_grad.shape[:-1], sum(qkv_split))
    return *_with_cosines(packed, freqs), qkv_split


_COSINES = "takes cosines and sines of the angles, in the dtype of the tokens"

ROPE = {
    "fused_rope_forward": Formula(_rotated, _with_cosines, note=_COSINES),
    "fused_rope_backward": Formula(_rotated, _with_cosines, 1, note=_COSINES),
    "fused_qkv_rope_forward": Formula(
        _packed,
        lambda packed, freqs, _, *, qkv_split: (*_with_cosines(packed, freqs), qkv_split),
        note=_COSINES,
    ),
    "fused_qkv_rope_backward": Formula(
        _packed, _packed_backward_inputs, 1, lambda *grads, **_: grads[:3], note=_COSINES
    ),
}


# ------------------------------------------------------------------- dropout, cross entropy


def unpacked(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of bits as one bool for each element."""
    places = torch.arange(8, device=mask.device)
    return (mask[:, None] >> places & 1).flatten()[: like.numel()].view(like.shape).bool()


_BYTES = "a mask of one byte for each element"

DROPOUT = {
    "dropout_fwd": Formula(
        lambda x, p: torch.native_dropout(x, p, True),
        lambda x, p, *, seed: (x, p),
        values=lambda _: (),
        note=f"{_BYTES}; it draws other random numbers, so values are not compared",
    ),
    "dropout_bwd": Formula(
        lambda grad, mask, factor: grad * mask * factor,
        lambda grad, mask, p: (grad, unpacked(mask, grad), 1 / (1 - p)),
        note=_BYTES,
    ),
}


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, reduction="none")


def _mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def _linear_mean_loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(input, weight).float(), target)


def _with_gradients(loss: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Forward and backward of a loss whose last argument has the targets."""

    def both(*args: Tensor) -> tuple[Tensor, ...]:
        leaves = tuple(it.detach().requires_grad_() for it in args[:-1])
        with torch.enable_grad():
            value = loss(*leaves, args[-1])
        return torch.autograd.grad(value, leaves)

    return both


def _compiled_with_gradients(loss: Callable[..., Tensor]) -> Peer:
    def make(*args: Tensor) -> Work:
        both = _with_gradients(compiled(loss))
        return Work(lambda: both(*args))

    return Peer(make, _MEAN)


_MEAN = "F.cross_entropy of float32 logits, the mean of the losses"

LOSS = {
    "cross_entropy_fwd": Formula(
        _cross_entropy, note="F.cross_entropy of float32 logits; no lse is returned"
    ),
    "cross_entropy_bwd": Formula(
        _cross_entropy,
        lambda grad_loss, logits, target, lse: (logits, target),
        1,
        note="saves the log-probabilities in float32 instead of lse",
    ),
    "cross_entropy fwd+bwd": Formula(_with_gradients(_mean_loss), note=_MEAN, compile=False),
    **dict.fromkeys(
        LINEAR_CROSS_ENTROPY,
        Formula(
            _with_gradients(_linear_mean_loss),
            note=f"{_MEAN}; all logits are in memory at once",
            compile=False,
        ),
    ),
}


# ------------------------------------------------------------------------- quantization

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3)


def _scale(amax: Tensor) -> Tensor:
    return torch.full_like(amax, LARGEST) / amax  # LARGEST / amax would round twice


def _delayed(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return _cast(x, scale), scale.reciprocal(), x.abs().amax().float().reshape(1)


def _current(x: Tensor) -> tuple[Tensor, ...]:
    amax = x.abs().amax().float().reshape(1)
    scale = _scale(amax)
    return _cast(x, scale), scale.reciprocal(), amax


def _rows_of_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, 128))
    scale = _scale(blocks.abs().amax(-1, keepdim=True).float())
    return _cast(blocks, scale).view(x.shape), scale.reciprocal().squeeze(-1)


def _squares(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, 128)).unflatten(0, (-1, 128))
    scale = _scale(blocks.abs().amax((1, 3), keepdim=True).float())
    return _cast(blocks, scale).view(x.shape), scale.reciprocal()[:, 0, :, 0]


def _microscaled(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True).float()
    exponent = torch.ceil(torch.log2(amax / LARGEST)).clamp(-127, 127)
    data = _cast(blocks, torch.exp2(-exponent)).view(x.shape)
    return data, (exponent + 127).to(torch.uint8).squeeze(-1).view(torch.float8_e8m0fnu)


QUANTIZATION = {
    "quantize delayed scaling": Formula(_delayed),
    "quantize current scaling": Formula(_current, lambda x: (x,)),
    "quantize 1x128": Formula(_rows_of_blocks, lambda x, **_: (x,)),
    "quantize 128x128": Formula(_squares, lambda x, **_: (x,)),
    "quantize mxfp8": Formula(_microscaled, lambda x, **_: (x,)),
    "dequantize current scaling": Formula(
        lambda data, scale_inv: (data.float() * scale_inv).bfloat16(),
        lambda data, scale_inv, _, *, out_dtype: (data, scale_inv),
    ),
    "dequantize 1x128": Formula(
        lambda data, scale_inv: (
            (data.float().unflatten(-1, (-1, 128)) * scale_inv[..., None])
            .bfloat16()
            .view(data.shape)
        ),
        lambda data, scale_inv, _, *, format, out_dtype: (data, scale_inv),
    ),
    "compute_amax": Formula(lambda x: x.abs().amax().float().reshape(1)),
    "fp8_transpose": Formula(lambda data: data.t().contiguous()),
    "swap_first_dims": Formula(lambda x: x.transpose(0, 1).contiguous()),
}


# ------------------------------------------------------------ norms and activations, cast


def _delayed_after(function: Callable[..., Tensor]) -> Formula:
    return Formula(
        lambda *args: _delayed(function(*_wide(args[:-1])), args[-1]),
        lambda *args, scale: (*args, scale),
        note=_IN_FLOAT32,
    )


def _microscaled_after(function: Callable[..., Tensor]) -> Formula:
    return Formula(
        lambda *args: _microscaled(function(*_wide(args))),
        lambda *args, format: args,
        note=_IN_FLOAT32,
    )


_IN_FLOAT32 = "computed in float32, then quantised"


def _wide(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(it.float() for it in args)


EPILOGUE = {
    **{
        f"{name}_quantize {form}": after(function)
        for name, function in {"rmsnorm_fwd": _rmsnorm_formula, **PLAIN, **GATED}.items()
        for form, after in (("delayed scaling", _delayed_after), ("mxfp8", _microscaled_after))
    },
}


# ------------------------------------------------------------------------------ products


def _linear_gelu(weight: Tensor, input: Tensor, bias: Tensor) -> tuple[Tensor, None, Tensor]:
    z = F.linear(input, weight, bias)
    return _gelu(z), None, z


def _accumulated(weight: Tensor, input: Tensor, total: Tensor) -> tuple[Any, ...]:
    total += input.t() @ weight
    return None, None, None, total


def _each(weights: list[Tensor], parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part @ weight.t() for weight, part in zip(weights, parts, strict=True)])


PRODUCTS = {
    "generic_gemm bias gelu": Formula(
        _linear_gelu, lambda weight, input, *, bias, gelu: (weight, input, bias)
    ),
    "generic_gemm wgrad, accumulated in float32": Formula(
        _accumulated,
        lambda weight, input, *, accumulate_into, **_: (weight, input, accumulate_into),
        note="the product is rounded to bfloat16 before it is added",
        compile=False,
    ),
    **dict.fromkeys(
        ("te_general_grouped_gemm", "te_general_grouped_gemm weights of one tensor"),
        Formula(
            _each,
            lambda weights, inputs, splits: (weights, inputs[0].split(splits)),
            note="one product for each group",
            compile=False,
        ),
    ),
}


# -------------------------------------------------------------------------- moves, experts


def _prepare(qkv: Tensor) -> Tensor:
    return qkv.unflatten(-1, (3, -1)).permute(3, 1, 0, 2, 4).contiguous()


def _permute(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.argsort(indices.flatten(), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return input[order // indices.shape[1]], places.view(indices.shape).t().int()


def _weighted(rows: Tensor, probs: Tensor, places: Tensor) -> Tensor:
    return (rows[places] * probs[..., None].to(rows.dtype)).sum(1)


def _permute_mask(input: Tensor, routing_map: Tensor, probs: Tensor, pairs: int) -> Any:
    by_expert = routing_map.t().flatten()
    # The number of pairs is known beforehand, so the host does not wait for the device.
    order = torch.argsort(by_expert.to(torch.uint8), descending=True, stable=True)[:pairs]
    return input[order % len(input)], probs.t().flatten()[order]


def _route(logits: Tensor, topk: int) -> tuple[Tensor, ...]:
    values, chosen = logits.topk(topk, -1)
    scores = values.softmax(-1)
    probs = torch.zeros_like(logits).scatter(1, chosen, scores)
    return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True), probs


def _aux_loss(probs: Tensor, counts: Tensor, tokens: int, topk: int, coeff: float) -> Tensor:
    return (probs.sum(0) * counts).sum() * (probs.shape[1] * coeff / (topk * tokens**2))


def _weighted_by_mask(rows: Tensor, probs: Tensor, places: Tensor, experts: Tensor) -> Tensor:
    return _weighted(rows, probs.gather(1, experts), places)


def _unpermute_mask_inputs(rows: Tensor, row_id_map: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
    """The inputs from a row map in which every token has the same number of rows."""
    experts, topk = row_id_map.shape[1] // 2, rows.shape[0] // row_id_map.shape[0]
    map = row_id_map.long()
    return rows, probs, map[:, :topk], map[:, experts : experts + topk]


def _route_backward(grad: Tensor, chosen: Tensor, probs: Tensor) -> Tensor:
    grad = grad.masked_fill(~chosen, 0)
    return probs * (grad - (grad * probs).sum(-1, keepdim=True))


def _rows_of_sequences(offsets: Tensor, length: int) -> Tensor:
    """The row of each token, if every sequence is padded to ``length`` rows."""
    counts = offsets.diff()
    tokens = torch.arange(int(offsets[-1]), device=offsets.device)
    sequence = torch.repeat_interleave(counts)
    return sequence * length + tokens - offsets[sequence]


def _padded(tensor: Tensor, places: Tensor, batch: int, length: int) -> Tensor:
    output = tensor.new_zeros(batch * length, *tensor.shape[1:])
    output[places] = tensor
    return output.unflatten(0, (batch, length))


def _among_zeros(tensor: Tensor, places: Tensor, count: int) -> Tensor:
    output = tensor.new_zeros(count, *tensor.shape[1:])
    output[places] = tensor
    return output


def _block_places(input: Tensor, *, row_list: list[int], padded_row_list: list[int]) -> Any:
    starts = [0, *itertools.accumulate(padded_row_list)]
    places = [torch.arange(n) + start for n, start in zip(row_list, starts, strict=False)]
    return input, torch.cat(places).to(input.device), starts[-1]


def _cache_inputs(
    new_k: Tensor, new_v: Tensor, k_cache: Tensor, v_cache: Tensor, new: Tensor, cached: Tensor
) -> tuple[Tensor, ...]:
    sequence = torch.repeat_interleave(new.diff())
    tokens = torch.arange(len(new_k), device=new.device)
    already = (cached.diff() - new.diff())[sequence]
    return new_k, new_v, k_cache, v_cache, sequence, tokens - new[sequence] + already


def _cached(
    new_k: Tensor, new_v: Tensor, k_cache: Tensor, v_cache: Tensor, row: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    k_cache[row, place] = new_k
    v_cache[row, place] = new_v
    return k_cache, v_cache


def _corrected(out: Tensor, step: Tensor, lse: Tensor, lse_per_step: Tensor) -> Tensor:
    out += (lse_per_step - lse).exp().t()[..., None] * step
    return out


_PLACES = "takes the indices of the rows, computed beforehand"

MOVES = {
    "fa_prepare_fwd": Formula(_prepare),
    "moe_permute_fwd": Formula(_permute),
    "moe_permute_bwd": Formula(
        lambda grad, places: grad[places].sum(1),
        lambda grad, row_id_map: (grad, row_id_map.t().long()),
    ),
    "moe_unpermute_fwd": Formula(
        _weighted, lambda rows, row_id_map, probs: (rows, probs, row_id_map.t().long())
    ),
    "moe_unpermute_bwd": Formula(
        _weighted,
        lambda grad, row_id_map, rows, probs, *, num_rows: (rows, probs, row_id_map.t().long()),
        2,
    ),
    "moe_permute_mask_fwd": Formula(
        _permute_mask,
        lambda input, routing_map, probs, *, num_out_tokens: (
            input,
            routing_map,
            probs,
            num_out_tokens,
        ),
        note="returns no map for the unpermutation",
    ),
    "moe_unpermute_mask_fwd": Formula(_weighted_by_mask, _unpermute_mask_inputs, note=_PLACES),
    "convert_thd_to_bshd": Formula(
        _padded,
        lambda tensor, offsets, length: (
            tensor,
            _rows_of_sequences(offsets, length),
            len(offsets) - 1,
            length,
        ),
        note=_PLACES,
    ),
    "copy_to_kv_cache": Formula(_cached, _cache_inputs, note=_PLACES, compile=False),
    "thd_out_correction": Formula(_corrected, lambda *args, lse_packed: args[:4], compile=False),
    "fused_multi_row_padding": Formula(_among_zeros, _block_places, note=_PLACES),
    "fused_topk_with_score_function_bwd": Formula(
        _route_backward, lambda grad, chosen, intermediate, topk: (grad, chosen, intermediate)
    ),
    "fused_topk_with_score_function_fwd": Formula(
        _route, note="may choose another expert where scores are equal"
    ),
    "fused_moe_aux_loss_fwd": Formula(_aux_loss),
}

FORMULAS: dict[str, Formula] = {
    **NORMALIZATION,
    **SOFTMAX,
    **ACTIVATION,
    **ROPE,
    **DROPOUT,
    **LOSS,
    **QUANTIZATION,
    **EPILOGUE,
    **PRODUCTS,
    **MOVES,
}

EAGER: Table = {name: formula.peer(compile=False) for name, formula in FORMULAS.items()}
COMPILE: Table = {
    **{name: formula.peer(compile=True) for name, formula in FORMULAS.items() if formula.compile},
    "cross_entropy fwd+bwd": _compiled_with_gradients(_mean_loss),
    **dict.fromkeys(LINEAR_CROSS_ENTROPY, _compiled_with_gradients(_linear_mean_loss)),
}

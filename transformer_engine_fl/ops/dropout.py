"""Dropout with the same mask in every implementation.

The mask is a function of the probability, the seed, the offset and an element's index alone. The
random numbers come from Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
as easy as 1, 2, 3", SC 2011), a function of a 128-bit counter and a 64-bit key. All words below
are unsigned 32-bit; ``lo`` and ``hi`` are the lower and upper word of a 64-bit number.

**The generator.** The block of four words for the counter ``(c0, c1, c2, c3)`` and the key
``(k0, k1)`` is the counter after ten rounds. A round is

    ``c0, c1, c2, c3 = hi(M1 * c2) ^ c1 ^ k0, lo(M1 * c2), hi(M0 * c0) ^ c3 ^ k1, lo(M0 * c0)``

with M0 = 0xD2511F53 and M1 = 0xCD9E8D57; after each round ``k0 += 0x9E3779B9`` and
``k1 += 0xBB67AE85``, modulo 2**32.

**The number of an element.** The element with the index i, counted in row-major order
whatever the strides are, takes 16 bits of the block with the counter
``(lo(i // 8), hi(i // 8), lo(offset), hi(offset))`` and the key ``(lo(seed), hi(seed))``: of
word ``i % 8 // 2``, the lower half if i is even, the upper half if it is odd. Calls with
different offsets therefore share no block.

**The threshold.** The element is kept if its number is at least ``floor(p * 2**16)``, where p
is the probability as a float64; the product is exact. For p = 1 no element is kept. With sixteen
bits for an element, one block yields one byte of the mask, and the probability of keeping an
element exceeds 1 - p by less than 2**-16.

**The mask.** Bit ``i % 8`` of byte ``i // 8`` is 1 if element i is kept, the lowest bit first;
the bits after the last element are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformer_engine_fl.core.contract import Backward, Sample, Tolerance, contract
from transformer_engine_fl.ops import _checks as check

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["dropout_bwd", "dropout_fwd"]

DTYPES = ("float32", "bfloat16", "float16", "float64")

TOLERANCE = {
    "float32": Tolerance(rtol=5e-7, atol=0.0),
    "bfloat16": Tolerance(rtol=2**-8, atol=0.0),
    "float16": Tolerance(rtol=2**-10, atol=2**-20),
    "float64": Tolerance(rtol=1e-15, atol=0.0),
}

_LIMIT = 2**63


def mask_bytes(elements: int) -> int:
    """The size in bytes of the mask of ``elements`` elements."""
    return (elements + 7) // 8


# ------------------------------------------------------------------------------ checks


def _check_forward(op: str, input: Any, dropout_probability: Any, seed: Any, offset: Any) -> None:
    check.is_tensor(op, "input", input, dtypes=DTYPES)
    check.is_number(op, "dropout_probability", dropout_probability, at_least=0, at_most=1)
    check.is_integer(op, "seed", seed, below=_LIMIT)
    check.is_integer(op, "offset", offset, below=_LIMIT)


def _check_backward(op: str, grad_output: Any, mask: Any, dropout_probability: Any) -> None:
    tensor = check.is_tensor(op, "grad_output", grad_output, dtypes=DTYPES)
    mask = check.is_tensor(op, "mask", mask, dtypes=("uint8",))
    shape = (mask_bytes(tensor.numel()),)
    check.has_shape(op, "mask", mask, shape, "a bit for each element of 'grad_output'")
    check.is_number(op, "dropout_probability", dropout_probability, at_least=0, at_most=1)
    check.same_device(op, "grad_output", {"grad_output": tensor, "mask": mask})


# ------------------------------------------------------------------------------ oracles


def philox_block(counter: int, key: int) -> list[int]:
    """Philox4x32-10 in Python integers: from a 128-bit counter and a 64-bit key to four words."""
    word = 0xFFFFFFFF
    c0, c1, c2, c3 = (counter >> shift & word for shift in (0, 32, 64, 96))
    k0, k1 = key & word, key >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = second >> 32 ^ c1 ^ k0, second & word
        c2, c3 = first >> 32 ^ c3 ^ k1, first & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return [c0, c1, c2, c3]


def scale_of_kept(probability: float) -> float:
    """The factor of kept elements: ``1 / (1 - p)``, or 0 for p = 1, where none is kept."""
    return 1 / (1 - probability) if probability < 1 else 0.0


def _scaled(tensor: Tensor, kept: Tensor, probability: float) -> Tensor:
    import torch

    return torch.where(kept.view(tensor.shape), tensor * scale_of_kept(probability), 0.0)


def _dropout_fwd_oracle(
    input: Tensor, dropout_probability: float, *, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    import torch

    count = input.numel()
    numbers: list[int] = []
    for block in range(mask_bytes(count)):
        for word in philox_block(block + (offset << 64), seed):
            numbers += [word & 0xFFFF, word >> 16]
    kept = [number >= int(dropout_probability * 2**16) for number in numbers[:count]]
    packed = [0] * mask_bytes(count)
    for index, keep in enumerate(kept):
        packed[index // 8] |= keep << index % 8
    device = input.device
    flags = torch.tensor(kept, dtype=torch.bool, device=device)
    mask = torch.tensor(packed, dtype=torch.float64, device=device)
    return _scaled(input.double(), flags, dropout_probability), mask


def _dropout_bwd_oracle(grad_output: Tensor, mask: Tensor, dropout_probability: float) -> Tensor:
    """Differentiates the forward; it is linear, so any input will do."""
    import torch

    packed = mask.tolist()
    kept = [bool(packed[i // 8] >> i % 8 & 1) for i in range(grad_output.numel())]
    flags = torch.tensor(kept, dtype=torch.bool, device=grad_output.device)
    with torch.enable_grad():
        leaf = torch.zeros_like(grad_output, dtype=torch.float64).requires_grad_()
        output = _scaled(leaf, flags, dropout_probability)
        (gradient,) = torch.autograd.grad(output, leaf, grad_output.double())
    return gradient


# ------------------------------------------------------------------------------ samples

_SHAPES: dict[str, tuple[int, ...]] = {
    "typical": (4, 64),
    "odd sizes": (5, 3, 43),
    "one element": (1,),
    "a scalar": (),
    "nine elements": (9,),
    "many rows": (257, 7),
    "no elements": (0, 64),
}

_CALLS: dict[str, tuple[float, dict[str, int]]] = {
    "nothing dropped": (0.0, {"seed": 1}),
    "everything dropped": (1.0, {"seed": 1}),
    "half dropped": (0.5, {"seed": 1}),
    "a number at the threshold": (0xE8D5 / 2**16, {"seed": 0}),  # the number of element 0
    "a probability below 16 bits": (2.0**-17, {"seed": 1}),
    "nearly everything dropped": (0.99, {"seed": 1}),
    "a seed of 32 bits": (0.3, {"seed": 0x87654321}),
    "an offset of 32 bits": (0.3, {"seed": 1, "offset": 0x87654321}),
    "a seed of 63 bits": (0.3, {"seed": 0x7EDCBA9876543210}),
    "an offset": (0.3, {"seed": 1, "offset": 1}),
    "an offset of 63 bits": (0.3, {"seed": 1, "offset": 0x7123456789ABCDEF}),
}


def _inputs(dtype: str, device: str) -> Iterator[tuple[str, Tensor, float, dict[str, int]]]:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(50)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    usual = {"seed": 1234}
    for label, shape in _SHAPES.items():
        yield label, normal(*shape).to(device, kind), 0.1, usual
    for label, (probability, options) in _CALLS.items():
        yield label, normal(3, 41).to(device, kind), probability, options
    large = 3e4 if dtype == "float16" else 1e30
    special = normal(6, 16)
    special[::2, ::3] = torch.inf
    special[1::2, ::4] = torch.nan
    yield "transposed", normal(24, 13).to(device, kind).t(), 0.25, usual
    yield "strided columns", normal(8, 96).to(device, kind)[:, ::2], 0.25, usual
    yield "unaligned start", normal(8 * 33 + 1).to(device, kind)[1:].view(8, 33), 0.25, usual
    yield "expanded", normal(1, 64).to(device, kind).expand(6, 64), 0.25, usual
    yield "large values", (normal(4, 16).clamp(-2, 2) * large / 2).to(device, kind), 0.25, usual
    yield "infinite and missing values", special.to(device, kind), 0.5, usual


def _forward_samples(dtype: str, device: str) -> Iterator[Sample]:
    for label, input, probability, options in _inputs(dtype, device):
        yield Sample(label, (input, probability), options)


def _backward_samples(dtype: str, device: str) -> Iterator[Sample]:
    import torch

    generator = torch.Generator().manual_seed(51)
    for label, grad, probability, _ in _inputs(dtype, device):
        size = (mask_bytes(grad.numel()),)
        mask = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).to(device)
        yield Sample(label, (grad, mask, probability))
    grad, mask = torch.ones(16, device=device), torch.full((4,), 0x5A, dtype=torch.uint8)
    strided = mask.to(device)[::2]
    yield Sample("strided mask", (grad.to(getattr(torch, dtype)), strided, 0.5))


# ---------------------------------------------------------------------------- contracts


@contract(
    family="dropout",
    check=_check_forward,
    samples=_forward_samples,
    tolerance=TOLERANCE,
    oracle=_dropout_fwd_oracle,
    backward=Backward(
        "dropout_bwd",
        saves={"mask": "output[1]"},
        gradients=("input",),
        options=("dropout_probability",),
    ),
)
def dropout_fwd(
    input: Tensor, dropout_probability: float, *, seed: int, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Dropout (Srivastava et al., 2014, JMLR 15), scaled so that the mean is kept.

    ``output = input / (1 - p)`` where an element is kept, and 0 where it is dropped, even if the
    input is NaN there. The head of this module defines bit by bit which elements are kept; it
    depends only on their index, p, the seed and the offset.
    The factor ``1 / (1 - p)`` is computed in float64, the product with it in float32 (float64 for
    float64), and rounded once.

    Args:
        input: any shape; float32, bfloat16, float16 or float64.
        dropout_probability: p, from 0 to 1.
        seed: at least 0 and below 2**63.
        offset: at least 0 and below 2**63. Calls with the same seed and different offsets are
            independent; increase it by one from call to call.

    Returns:
        output: shape and dtype of ``input``, contiguous.
        mask: ``[ceil(elements / 8)]``, uint8, a bit for each element; saved for the backward.

    Raises:
        ArgumentError: a dtype or a number is not as above.
    """
    import torch

    mask = input.new_empty((mask_bytes(input.numel()),), dtype=torch.uint8)
    return input.new_empty(input.shape), mask


@contract(
    family="dropout",
    check=_check_backward,
    samples=_backward_samples,
    tolerance=TOLERANCE,
    oracle=_dropout_bwd_oracle,
)
def dropout_bwd(grad_output: Tensor, mask: Tensor, dropout_probability: float) -> Tensor:
    """Gradient of :func:`dropout_fwd` with respect to its input.

    ``grad_output / (1 - p)`` where the mask has a 1, and 0 where it has a 0. For p = 1 the
    factor is 0 instead.

    Args:
        grad_output: any shape; float32, bfloat16, float16 or float64.
        mask: ``[ceil(elements / 8)]``, uint8, as the forward returned it; bits after the last
            element are ignored.
        dropout_probability: as in the forward.

    Returns:
        grad_input: shape and dtype of ``grad_output``, contiguous.

    Raises:
        ArgumentError: a shape, dtype, number or device does not agree.
    """
    return grad_output.new_empty(grad_output.shape)

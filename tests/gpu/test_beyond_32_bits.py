"""Operators on tensors of more than 2**31 and more than 2**32 elements.

The inputs repeat the same rows, so the outputs must repeat, too: every element is compared with
the operator's result for one period of rows. The period is no power of two, so a row number that
is truncated to 31 or 32 bits leads to a different row. Outputs are poisoned, so that elements
which are never written are found.
"""

from __future__ import annotations

import fcntl
import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import functional
from transformer_engine_fl.backends import _repeats
from transformer_engine_fl.backends.reference.dropout import words_of_blocks
from transformer_engine_fl.core.errors import StrictModeError
from transformer_engine_fl.testing.allocation import Guarded

pytestmark = pytest.mark.gpu

# With smaller numbers and DEVICE = "cpu" the tests' own logic runs in Triton's interpreter.
DEVICE = "cuda"
HALF = 2**31
"""One more than the largest int32."""
WHOLE = 2**32
"""One more than the largest number of 32 bits."""
PERIOD = 251
"""Number of rows after which the rows of an input repeat."""
COLUMNS = 4096
VOCABULARY = 131_072
HIDDEN = 64
"""Input features of a layer whose outputs are the large tensor."""
HEADS, WIDTH = 16, 128
QUERIES = 128
"""Tokens of a sequence, where there are many sequences."""
LONG = 8192
"""Tokens of a sequence, where there are few."""
TILE = 128
"""Rows and columns of the largest blocks with one scale."""
CHUNK = 2**28
"""Elements that are compared at a time."""

SETS = {"default.flagos": "flagos", "vendor.cuda": "vendor:nvidia"}
LOW = torch.bfloat16
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GIB = 2**30
LOCK = Path(tempfile.gettempdir(), "te-fl-tests-of-large-tensors.lock")


# ------------------------------------------------------------------------------- calling


def registry() -> te.OpRegistry:
    made = te.OpRegistry()
    te.OpManager(made, plugins=False).ensure_initialized()
    return made


REGISTRY = registry()


def of_sets(*cases: Any) -> Any:
    """Parameters (set, name, ...) for each case and each set that implements its operator."""
    params = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        for impl in SETS:
            if impl in {it.impl_id for it in REGISTRY.get_implementations(values[0])}:
                label = "-".join(it for it in values if isinstance(it, str))
                params.append(pytest.param(impl, *values, id=f"{impl}-{label}"))
    return params


def call(impl: str, name: str, *args: Any, **options: Any) -> Any:
    with te.policy_context(prefer=SETS[impl], strict=True):
        return te.get_default_manager().call(name, *args, **options)


def poisoned(impl: str, name: str, *args: Any, **options: Any) -> Any:
    """Make the call with poisoned, guarded outputs: finds what is unwritten or out of bounds."""
    with Guarded() as guard:
        found = call(impl, name, *args, **options)
    assert guard.broken() is None
    return found


def is_exact(impl: str, name: str) -> bool:
    """Whether a row's result does not depend on the other rows of the call."""
    found = {it.impl_id: it for it in REGISTRY.get_implementations(name)}[impl]
    return "batch_invariant" in found.traits


def several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


# ------------------------------------------------------------------------------ memory


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """Free memory before and after each test, and run one such test at a time on the machine."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        forget()
        yield
        forget()


def forget() -> None:
    _repeats.forget()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def need(gib: float) -> None:
    """Skip if the device has less free memory."""
    if DEVICE == "cuda":
        free = torch.cuda.mem_get_info()[0] / GIB
        if free < gib:
            pytest.skip(f"needs {gib} GiB of memory, {free:.0f} are free")


def normal(*shape: int, dtype: torch.dtype = LOW, seed: int = 1) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def on_device(number: float) -> Tensor:
    return torch.full((1,), number, device=DEVICE)


def repeated(block: Tensor, rows: int) -> Tensor:
    """``rows`` rows that repeat those of ``block``."""
    period = block.shape[0]
    whole = torch.empty((rows, *block.shape[1:]), dtype=block.dtype, device=block.device)
    to, source = as_bits(whole), as_bits(block)
    done = min(period, rows)
    to[:done] = source[:done]
    while done < rows:
        more = min(done, rows - done)
        to[done : done + more] = to[:more]
        done += more
    return whole


def rows_beyond(elements: int, of_row: int) -> int:
    """A number of rows that have slightly more than ``elements`` elements."""
    return elements // of_row + 3


def as_bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.element_size()])


# --------------------------------------------------------------------------- comparing


def check_again(found: Tensor, expected: Tensor, dim: int = 0, exact: bool = True) -> None:
    """Check that ``found`` repeats ``expected`` along ``dim``."""
    assert found.dtype == expected.dtype
    if found.shape == expected.shape:
        period, each, many = expected.shape[dim], expected.shape[dim], expected
    else:
        period = expected.shape[dim]
        of_one = max(1, expected.numel() // period)
        each = max(1, min(CHUNK // (of_one * period), -(-found.shape[dim] // period))) * period
        turned = repeated(expected.movedim(dim, 0).contiguous(), each)
        many = turned.movedim(0, dim).contiguous()
    for start in range(0, found.shape[dim], each):
        part = found.narrow(dim, start, min(each, found.shape[dim] - start))
        wanted = many.narrow(dim, 0, part.shape[dim])
        if exact:
            if torch.equal(as_bits(part), as_bits(wanted)):
                continue
            wrong = as_bits(part) != as_bits(wanted)
        else:
            part, wanted = part.float(), wanted.float()
            bound = 2**-6 * wanted.abs() + 2**-6 * wanted.square().mean().sqrt()
            wrong = ~((part - wanted).abs() <= bound) & ~(part == wanted)
            if not wrong.any():
                continue
        rows = wrong.movedim(dim, 0).flatten(1).any(1) if wrong.dim() > 1 else wrong
        first = int(rows.nonzero()[0])
        pytest.fail(
            f"{int(wrong.sum())} elements from {start} on along dimension {dim} of "
            f"{tuple(found.shape)} are wrong, first at {start + first}"
        )


def check_equal(found: Tensor, expected: Tensor) -> None:
    """Check that two tensors of the same shape have the same bits."""
    assert found.shape == expected.shape
    each = max(1, CHUNK // max(1, found[:1].numel()))
    for start in range(0, found.shape[0], each):
        one, other = found[start : start + each], expected[start : start + each]
        assert torch.equal(as_bits(one), as_bits(other)), f"from {start} on"


def check_zero(found: Tensor) -> None:
    each = max(1, CHUNK // max(1, found[:1].numel()))
    for start in range(0, found.shape[0], each):
        assert not as_bits(found[start : start + each]).any(), f"from {start} on"


def check_numbers(found: Tensor) -> None:
    """Check that no poison (NaN) is left."""
    each = max(1, CHUNK // max(1, found[:1].numel()))
    for start in range(0, found.shape[0], each):
        assert not found[start : start + each].isnan().any(), f"from {start} on"


def check_sum(found: Tensor, terms: Tensor, rows: int, rounding: float = 2**-8) -> None:
    """Check a sum over repeating rows; ``terms`` are those of the first period, in float64."""
    period = terms.shape[0]
    times, rest = divmod(rows, period)
    expected = times * terms.sum(0) + terms[:rest].sum(0)
    sizes = (times + 1) * terms.abs().sum(0)
    error = (found.double() - expected).abs()
    bound = rounding * expected.abs() + 2**-14 * sizes
    assert bool((error <= bound).all()), f"{float((error / bound).max())} times what is allowed"


@dataclass
class Rows:
    """The block of rows that an argument of the large call repeats."""

    block: Tensor


def check_rows(
    impl: str,
    name: str,
    args: Sequence[Any],
    rows: int,
    *,
    along: Mapping[int, int] | None = None,
    sums: Mapping[int, Callable[..., Tensor]] | None = None,
    **options: Any,
) -> None:
    """Check a call of ``rows`` rows against a call of one period of them.

    Args:
        args: the arguments, with :class:`Rows` for those that are repeated.
        along: by output index, the dimension that runs along the rows, if not the first.
        sums: by index of an output that is a sum over the rows, a function that computes its terms
            in float64 from the arguments of the small call.
        options: keyword arguments of both calls.
    """
    few = [it.block if isinstance(it, Rows) else it for it in args]
    expected = several(call(impl, name, *few, **options))
    many = [repeated(it.block, rows) if isinstance(it, Rows) else it for it in args]
    found = several(poisoned(impl, name, *many, **options))
    exact = is_exact(impl, name)
    assert len(found) == len(expected)
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if other is None:
            assert one is None
        elif place in (sums or {}):
            assert sums is not None
            check_sum(one, sums[place](*few), rows)
        else:
            check_again(one, other, (along or {}).get(place, 0), exact)


# --------------------------------------------------------------------------- activations


@pytest.mark.parametrize(("impl", "name"), of_sets("gelu", "relu"))
def test_activations(impl: str, name: str) -> None:
    need(26)
    check_rows(impl, name, [Rows(normal(PERIOD, COLUMNS))], rows_beyond(WHOLE, COLUMNS))


@pytest.mark.parametrize(("impl", "name"), of_sets("dsilu"))
def test_gradients_of_activations(impl: str, name: str) -> None:
    need(34)
    grad, x = (Rows(normal(PERIOD, COLUMNS, seed=seed)) for seed in (1, 2))
    check_rows(impl, name, [grad, x], rows_beyond(WHOLE, COLUMNS))


@pytest.mark.parametrize(("impl", "name"), of_sets("swiglu", "clamped_swiglu"))
def test_gated_activations(impl: str, name: str) -> None:
    need(50)
    check_rows(impl, name, [Rows(normal(PERIOD, 2 * COLUMNS))], rows_beyond(WHOLE, COLUMNS))


@pytest.mark.parametrize(("impl", "name"), of_sets("dswiglu", "clamped_dswiglu"))
def test_gradients_of_gated_activations(impl: str, name: str) -> None:
    need(60)
    args = [Rows(normal(PERIOD, COLUMNS)), Rows(normal(PERIOD, 2 * COLUMNS, seed=2))]
    check_rows(impl, name, args, rows_beyond(WHOLE, COLUMNS))


@pytest.mark.parametrize(("impl", "name"), of_sets("dbias_dgelu"))
def test_gradients_of_a_bias(impl: str, name: str) -> None:
    need(34)
    grad, x = (normal(PERIOD, COLUMNS, seed=seed) for seed in (1, 2))

    def terms(grad: Tensor, x: Tensor) -> Tensor:
        found: Tensor = REGISTRY.contracts[name].oracle(grad, x)[1]
        return found

    rows = rows_beyond(WHOLE, COLUMNS)
    check_rows(impl, name, [Rows(grad), Rows(x)], rows, sums={0: terms})


# -------------------------------------------------------------------------------- norms


def columns_of_norms() -> dict[str, int]:
    """Columns by label: several rows for each program, one, and a row over several programs."""
    return {"narrow": COLUMNS // 64, "whole": COLUMNS, "wide": VOCABULARY}


SHAPES = ("narrow", "whole", "wide")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("impl", "name"), of_sets("rmsnorm_fwd", "layernorm_fwd"))
def test_norms(impl: str, name: str, shape: str) -> None:
    need(30)
    columns = columns_of_norms()[shape]
    weight = normal(columns, seed=3)
    args = [Rows(normal(PERIOD, columns)), weight]
    args += [normal(columns, seed=4)] if name == "layernorm_fwd" else []
    check_rows(impl, name, args, rows_beyond(WHOLE, columns))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("impl", "name"), of_sets("rmsnorm_fwd_add"))
def test_norms_of_sums(impl: str, name: str, shape: str) -> None:
    need(56)
    columns = columns_of_norms()[shape]
    x, residual = (Rows(normal(PERIOD, columns, seed=seed)) for seed in (1, 2))
    check_rows(impl, name, [x, residual, normal(columns, seed=3)], rows_beyond(WHOLE, columns))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("impl", "name"), of_sets("rmsnorm_bwd", "rmsnorm_bwd_add", "layernorm_bwd")
)
def test_gradients_of_norms(impl: str, name: str, shape: str) -> None:
    need(50)
    columns = columns_of_norms()[shape]
    dy, x, add = (normal(PERIOD, columns, seed=seed) for seed in (1, 2, 3))
    gamma = normal(columns, seed=4)
    wide = x.float()
    centred = name == "layernorm_bwd"
    mu = wide.mean(1) if centred else torch.zeros_like(wide[:, 0])
    rsigma = (wide - mu[:, None]).square().mean(1).rsqrt()
    args: list[Any] = [Rows(dy), Rows(x)]
    args += [Rows(mu)] if centred else [Rows(add)] if name == "rmsnorm_bwd_add" else []
    args += [Rows(rsigma), gamma]

    def of_gamma(*given: Tensor) -> Tensor:
        return dy.double() * (x.double() - mu.double()[:, None]) * rsigma.double()[:, None]

    def of_beta(*given: Tensor) -> Tensor:
        return dy.double()

    sums: dict[int, Callable[..., Tensor]] = {1: of_gamma}
    if centred:
        sums[2] = of_beta
    check_rows(impl, name, args, rows_beyond(WHOLE, columns), sums=sums)


# ------------------------------------------------------------------------------ softmax


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("impl", "name"), of_sets("scaled_softmax_forward", "scaled_softmax_backward")
)
def test_softmax(impl: str, name: str, shape: str) -> None:
    need(34)
    columns = columns_of_norms()[shape]
    blocks = [normal(PERIOD, columns)]
    if name.endswith("backward"):
        blocks.append(normal(PERIOD, columns, seed=2).float().softmax(-1).to(LOW))
    check_rows(impl, name, [*map(Rows, blocks), 0.5], rows_beyond(WHOLE, columns))


@pytest.mark.parametrize("few", [True, False], ids=["long", "many"])
@pytest.mark.parametrize(
    ("impl", "name"),
    of_sets(
        "scaled_upper_triang_masked_softmax_forward",
        "scaled_upper_triang_masked_softmax_backward",
        "scaled_aligned_causal_masked_softmax_forward",
        "scaled_aligned_causal_masked_softmax_backward",
    ),
)
def test_causal_softmax(impl: str, name: str, few: bool) -> None:
    need(38)
    period, queries = (3, LONG) if few else (PERIOD, QUERIES)
    shape = (period, queries, queries)
    if "aligned" in name:
        shape = (period, 2, queries, queries // 2) if few else (period, 1, queries, queries)
    blocks = [normal(*shape)]
    if name.endswith("backward"):
        hidden = torch.ones(shape[-2:], dtype=torch.bool, device=DEVICE)
        hidden = hidden.triu(1 + shape[-1] - shape[-2])
        scores = normal(*shape, seed=2).float().masked_fill(hidden, -torch.inf)
        blocks.append(scores.softmax(-1).nan_to_num(0).to(LOW))
        del scores
    rows = rows_beyond(WHOLE, blocks[0][0].numel())
    check_rows(impl, name, [*map(Rows, blocks), 0.5], rows)


@pytest.mark.parametrize(("impl", "name"), of_sets("scaled_masked_softmax_forward"))
def test_masked_softmax(impl: str, name: str) -> None:
    need(40)
    scores = normal(PERIOD, 2, QUERIES // 2, 4 * QUERIES)
    mask = normal(PERIOD, 1, QUERIES // 2, 4 * QUERIES, seed=2) > 0.5  # more than HALF
    rows = rows_beyond(WHOLE, scores[0].numel())
    check_rows(impl, name, [Rows(scores), Rows(mask), 0.5], rows)


@pytest.mark.parametrize(("impl", "name"), of_sets("scaled_masked_softmax_backward"))
def test_gradients_of_masked_softmax(impl: str, name: str) -> None:
    need(40)
    grad, scores = (normal(PERIOD, 2, QUERIES // 2, 4 * QUERIES, seed=seed) for seed in (1, 2))
    softmax = scores.float().softmax(-1).to(LOW)
    check_rows(impl, name, [Rows(grad), Rows(softmax), 0.5], rows_beyond(WHOLE, grad[0].numel()))


# ------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize(("impl", "name"), of_sets("dropout_fwd"))
def test_dropout(impl: str, name: str) -> None:
    """The mask is the contract's at both ends and around elements 2**31 and 2**32."""
    need(54)
    size = WHOLE + 8 * PERIOD + 5
    block = normal(PERIOD * COLUMNS).abs() + 1
    x = repeated(block, size)
    seed, offset, probability = 0x7EDCBA9876543210, 3, 0.3
    y, mask = poisoned(impl, name, x, probability, seed=seed, offset=offset)
    threshold = int(probability * 2**16)
    each = 1024  # bytes of the mask
    for place in (0, HALF // 8 - each // 2, WHOLE // 8 - each // 2, mask.numel() - each):
        words = words_of_blocks(torch.arange(place, place + each, device=DEVICE), seed, offset)
        kept = torch.stack([words & 0xFFFF, words >> 16], -1).flatten() >= threshold
        elements = slice(8 * place, min(8 * (place + each), size))
        kept = kept[: elements.stop - elements.start]
        wanted = torch.where(kept, x[elements].float() * (1 / (1 - probability)), 0).to(LOW)
        torch.testing.assert_close(y[elements], wanted, rtol=2**-7, atol=0)
        bits = torch.nn.functional.pad(kept.int(), (0, -kept.numel() % 8)).view(-1, 8)
        packed = (bits << torch.arange(8, device=DEVICE)).sum(1).to(torch.uint8)
        assert torch.equal(mask[place : place + each], packed)
    # Everywhere: a value is 0 exactly where its mask bit is 0.
    step = CHUNK // 8
    for place in range(0, mask.numel(), step):
        some = mask[place : place + step]
        bits = (some[:, None] >> torch.arange(8, dtype=torch.uint8, device=DEVICE)) & 1
        values = y[8 * place : 8 * (place + step)]
        assert torch.equal(values != 0, bits.flatten()[: values.numel()] != 0)
        assert not values.isnan().any()
    dx = poisoned(impl, "dropout_bwd", x, mask, probability)
    check_equal(dx, y)  # the gradient passed in is x itself


# ------------------------------------------------------------------------ quantisation


def rows_of_tiles(elements: int, columns: int, period: int = 3) -> int:
    """Rows of whole tiles with slightly more elements; their tiles repeat after ``period``."""
    tiles = max(elements // columns // TILE, period) + 1
    return (tiles + (not tiles % period)) * TILE


FORMATS = ("per_tensor", "mxfp8", "block_1x128", "block_128x128", "nvfp4")


@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("impl", "name"), of_sets("quantize"))
def test_quantize(impl: str, name: str, form: str, columnwise: bool) -> None:
    need(40)
    x = Rows(normal(3 * TILE, COLUMNS))
    rows = rows_of_tiles(WHOLE, COLUMNS)
    options = {"format": form, "columnwise": columnwise}
    along = {4: 1, 5: 1} if form != "per_tensor" else {4: 1}
    check_rows(impl, name, [x], rows, along=along, **options)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("impl", "name"), of_sets("multi_tensor_quantize", "group_quantize"))
def test_quantize_several(impl: str, name: str, form: str, columnwise: bool) -> None:
    """Tensors of a list, each beyond 2**31, and groups, of which one alone is beyond 2**32."""
    need(50)
    x, rows = normal(3 * TILE, COLUMNS), rows_of_tiles(WHOLE, COLUMNS)
    options = {"format": form, "columnwise": columnwise}
    if name == "group_quantize":
        sizes = [torch.tensor(it, device=DEVICE) for it in ([len(x)], [len(x), rows])]
        expected = call(impl, name, x, sizes[0], **options)
        found = [poisoned(impl, name, repeated(x, len(x) + rows), sizes[1], **options)]
    else:
        expected = [it[0] if it else None for it in call(impl, name, [x], **options)]
        many = [repeated(x, it) for it in (rows_of_tiles(HALF, COLUMNS), rows)]
        lists = poisoned(impl, name, many, **options)
        found = [[it[place] if it else None for it in lists] for place in range(2)]
    for outputs in found:
        for place, (one, wanted) in enumerate(zip(outputs, expected, strict=True)):
            if wanted is None:
                assert one is None
            else:
                check_again(one, wanted, int(place > 3 and wanted.dim() > 1))


@pytest.mark.parametrize("columnwise", [False, True], ids=["rows", "both"])
@pytest.mark.parametrize(("impl", "name"), of_sets("quantize"))
def test_quantize_with_a_scale(impl: str, name: str, columnwise: bool) -> None:
    """The columns of a row are not a multiple of a vector."""
    need(40)
    scale = torch.full((1,), 3.0, device=DEVICE)
    x = Rows(normal(PERIOD, COLUMNS + 3))
    rows = rows_beyond(WHOLE, COLUMNS + 3)
    check_rows(impl, name, [x, scale], rows, along={4: 1}, columnwise=columnwise)


@pytest.mark.parametrize("form", ["per_tensor", "mxfp8"])
@pytest.mark.parametrize(("impl", "name"), of_sets("bgrad_quantize"))
def test_quantize_with_sums(impl: str, name: str, form: str) -> None:
    need(30)
    x = normal(PERIOD, COLUMNS)
    rows = rows_beyond(WHOLE, COLUMNS)
    check_rows(impl, name, [Rows(x)], rows, sums={0: lambda x: x.double()}, format=form)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("impl", "name"), of_sets("dequantize"))
def test_dequantize(impl: str, name: str, form: str) -> None:
    need(36)
    quantized = call(impl, "quantize", normal(3 * TILE, COLUMNS), format=form)
    data, scales = quantized[:2]
    rows = rows_of_tiles(WHOLE, COLUMNS)
    expected = call(impl, name, data, scales, quantized[3], format=form, out_dtype=LOW)
    lines = {"per_tensor": 1, "block_128x128": rows // TILE}.get(form, rows)
    many = (repeated(data, rows), repeated(scales, lines), quantized[3])
    found = poisoned(impl, name, *many, format=form, out_dtype=LOW)
    check_again(found, expected)


@pytest.mark.parametrize("step", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize(("impl", "name"), of_sets("fp8_transpose"))
def test_transposes(impl: str, name: str, step: int) -> None:
    need(20)
    block = normal(PERIOD, COLUMNS + step).to(torch.float8_e4m3fn)
    rows = rows_beyond(WHOLE, COLUMNS + step)
    check_rows(impl, name, [Rows(block)], rows + -rows % 16, along={0: 1})


@pytest.mark.parametrize("inner", [1, 64])
@pytest.mark.parametrize(("impl", "name"), of_sets("swap_first_dims"))
def test_swapped_dimensions(impl: str, name: str, inner: int) -> None:
    need(40)
    block = normal(PERIOD, COLUMNS // inner, inner)
    check_rows(impl, name, [Rows(block)], rows_beyond(WHOLE, COLUMNS), along={0: 1})


@pytest.mark.parametrize(("impl", "name"), of_sets("compute_amax"))
def test_the_largest_is_found_wherever_it_is(impl: str, name: str) -> None:
    need(12)
    x = repeated(normal(PERIOD, COLUMNS).clamp(-4, 4), rows_beyond(WHOLE, COLUMNS))
    flat = x.flatten()
    for size, place in enumerate((0, HALF - 1, HALF, WHOLE - 1, WHOLE, flat.numel() - 1), 10):
        flat[place] = -size
        assert poisoned(impl, name, x).item() == size


@pytest.mark.parametrize(("impl", "name"), of_sets("split_quantize"))
def test_split_quantize(impl: str, name: str) -> None:
    """The last part begins beyond 2**32 elements; the middle part alone has more than 2**32."""
    need(30)
    x = normal(PERIOD, COLUMNS)
    sizes = [2 * PERIOD, (rows_beyond(WHOLE, COLUMNS) // PERIOD + 1) * PERIOD, PERIOD + 1]
    expected = call(impl, name, x, [PERIOD], format="mxfp8")
    found = poisoned(impl, name, repeated(x, sum(sizes)), sizes, format="mxfp8")
    for outputs, wanted in zip(found, expected, strict=True):
        if wanted:
            for one in outputs:
                check_again(one, wanted[0][: one.shape[0]] if len(one) < PERIOD else wanted[0])


@pytest.mark.parametrize(("impl", "name"), of_sets("fp8_block_scaling_compute_partial_amax"))
def test_partial_blocks(impl: str, name: str) -> None:
    need(24)
    x, rows = normal(3 * TILE, COLUMNS), rows_of_tiles(WHOLE, COLUMNS)
    whole = repeated(x, rows).flatten()
    expected = call(impl, name, x.flatten(), 3 * TILE, COLUMNS, 0, TILE)
    amaxes = poisoned(impl, name, whole, rows, COLUMNS, 0, TILE)
    check_again(amaxes, expected)
    # A small part that begins near element 2**32.
    start = WHOLE // (TILE * COLUMNS) * TILE * COLUMNS
    part = poisoned(impl, name, whole[start:], rows, COLUMNS, start, TILE)
    first = start // COLUMNS // TILE
    check_equal(part[first:], amaxes[first:])
    check_zero(part[:first])
    other = "fp8_block_scaling_partial_cast"
    scales = 448 / amaxes
    cast = poisoned(impl, other, whole, scales, rows, COLUMNS, 0, TILE)
    wanted = call(impl, other, x.flatten(), scales[:3].contiguous(), 3 * TILE, COLUMNS, 0, TILE)
    check_again(cast, wanted)
    check_equal(
        poisoned(impl, other, whole[start:], scales, rows, COLUMNS, start, TILE), cast[start:]
    )


@pytest.mark.parametrize(
    ("impl", "name"), of_sets("swiglu_quantize", "dswiglu_quantize", "gelu_quantize")
)
def test_activations_that_are_quantised(impl: str, name: str) -> None:
    need(40)
    gated = 1 + ("glu" in name)
    args = [Rows(normal(PERIOD, COLUMNS))] if name.startswith("d") else []
    args.append(Rows(normal(PERIOD, gated * COLUMNS, seed=2)))
    check_rows(impl, name, args, rows_beyond(WHOLE, gated * COLUMNS), format="mxfp8")


@pytest.mark.parametrize(("impl", "name"), of_sets("dbias_dgelu_quantize"))
def test_gradients_of_a_bias_that_are_quantised(impl: str, name: str) -> None:
    need(40)
    grad, x = (normal(PERIOD, COLUMNS, seed=seed) for seed in (1, 2))

    def terms(grad: Tensor, x: Tensor) -> Tensor:
        found: Tensor = REGISTRY.contracts["dbias_dgelu"].oracle(grad, x)[1]
        return found

    rows = rows_beyond(WHOLE, COLUMNS)
    check_rows(impl, name, [Rows(grad), Rows(x)], rows, sums={0: terms}, format="mxfp8")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("impl", "name"), of_sets("rmsnorm_fwd_add_quantize", "layernorm_fwd_quantize")
)
def test_norms_that_are_quantised(impl: str, name: str, shape: str) -> None:
    need(50)
    columns = columns_of_norms()[shape]
    args: list[Any] = [Rows(normal(PERIOD, columns))]
    args += [Rows(normal(PERIOD, columns, seed=2))] if "add" in name else []
    args += [normal(columns, seed=3)]
    check_rows(impl, name, args, rows_beyond(WHOLE, columns), format="mxfp8")


# -------------------------------------------------------------------------------- losses


def logits_and_targets() -> tuple[Tensor, Tensor, int]:
    logits = normal(PERIOD, VOCABULARY)
    target = torch.arange(PERIOD, device=DEVICE) * 521 % VOCABULARY
    target[-1] = VOCABULARY - 1
    return logits, target, rows_beyond(WHOLE, VOCABULARY) + PERIOD


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-4}])
@pytest.mark.parametrize(("impl", "name"), of_sets("cross_entropy_fwd", "cross_entropy_fwd_bwd"))
def test_losses(impl: str, name: str, options: dict[str, float]) -> None:
    need(36)
    logits, target, rows = logits_and_targets()
    args = [Rows(logits), Rows(target)]
    if name.endswith("bwd"):
        args.append(Rows(normal(PERIOD, dtype=torch.float32)))
    check_rows(impl, name, args, rows, **options)


@pytest.mark.parametrize(("impl", "name"), of_sets("cross_entropy_bwd"))
def test_gradients_of_losses(impl: str, name: str) -> None:
    need(36)
    logits, target, rows = logits_and_targets()
    lse = logits.float().logsumexp(1)
    grad = normal(PERIOD, dtype=torch.float32)
    check_rows(impl, name, [*map(Rows, (grad, logits, target, lse))], rows)


@pytest.mark.parametrize(("impl", "name"), of_sets("cross_entropy_partial_fwd"))
def test_statistics_of_shards(impl: str, name: str) -> None:
    need(12)
    logits, target, rows = logits_and_targets()
    check_rows(impl, name, [Rows(logits), Rows(target)], rows, vocab_start=VOCABULARY // 2)


@pytest.mark.parametrize(("impl", "name"), of_sets("cross_entropy_merge"))
def test_merged_statistics(impl: str, name: str) -> None:
    """The statistics of all shards together are more than 2**31 numbers."""
    need(40)
    shards, rows = 64, HALF // 64 // 4 + PERIOD + 3
    stats = normal(PERIOD, shards, 4, dtype=torch.float32).abs() + 1
    target = torch.arange(PERIOD, device=DEVICE)
    options = {"vocab_size": VOCABULARY, "label_smoothing": 0.1}
    few = stats.transpose(0, 1).contiguous()
    expected = call(impl, name, few, target, **options)
    many = repeated(stats, rows).transpose(0, 1).contiguous()
    found = poisoned(impl, name, many, repeated(target, rows), **options)
    for one, other in zip(found, expected, strict=True):
        check_again(one, other)


@pytest.mark.parametrize("at_once", [False, True], ids=["backward", "in forward"])
@pytest.mark.parametrize(("impl", "name"), of_sets("cross_entropy_fwd"))
def test_a_mean_of_losses_and_its_gradient(impl: str, name: str, at_once: bool) -> None:
    need(40)
    block, target, rows = logits_and_targets()
    logits = repeated(block, rows).requires_grad_()
    targets = repeated(target, rows)
    with te.policy_context(prefer=SETS[impl], strict=True):
        loss = functional.cross_entropy(logits, targets, gradient_in_forward=at_once)
        (gradient,) = torch.autograd.grad(loss, logits)
    losses = torch.nn.functional.cross_entropy(block.double(), target, reduction="none")
    check_sum(loss.detach()[None] * rows, losses[:, None], rows, rounding=1e-5)
    factor = torch.full((PERIOD,), 1 / rows, device=DEVICE)
    *_, wanted = call(impl, "cross_entropy_fwd_bwd", block, target, factor)
    check_again(gradient, wanted, exact=False)


@pytest.mark.parametrize(
    ("impl", "name"),
    of_sets(
        "fused_linear_cross_entropy_fwd",
        "fused_linear_cross_entropy_bwd",
        "fused_linear_cross_entropy_fwd_bwd",
    ),
)
def test_losses_of_a_linear_layer(impl: str, name: str) -> None:
    """The layer has more than 2**32 logits."""
    need(60)
    _, target, rows = logits_and_targets()
    x, weight = normal(PERIOD, HIDDEN), normal(VOCABULARY, HIDDEN, seed=2)
    grad = normal(PERIOD, dtype=torch.float32)
    blocks = {"input": x, "target": target}
    if name.endswith("bwd"):
        blocks["grad_loss"] = grad
    if name == "fused_linear_cross_entropy_bwd":
        blocks["lse"] = (x.float() @ weight.float().t()).logsumexp(1)
    expected = list(call(impl, name, weight=weight, **blocks))
    many = {key: repeated(it, rows) for key, it in blocks.items()}
    found = list(poisoned(impl, name, weight=weight, **many))
    if name.endswith("bwd"):  # approximate: rows is not a multiple of PERIOD
        place = len(found) - 2
        weights = expected.pop(place).float() * (rows / PERIOD)
        error = (found.pop(place).float() - weights).norm() / weights.norm()
        assert error < 0.1 + 3 * PERIOD / rows
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        else:
            check_again(one, other, exact=False)


# ----------------------------------------------------------------------------- optimizers


def lists_beyond(*dtypes: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Blocks of these dtypes, and for each a list of two tensors that repeat it.

    Each tensor has more than HALF elements, so a list has more than WHOLE.
    """
    blocks = [
        normal(PERIOD * COLUMNS, dtype=torch.float32, seed=seed).abs().to(dtype)
        for seed, dtype in enumerate(dtypes, 1)
    ]
    sizes = (HALF + 8 * PERIOD + 5, HALF + 16)
    return blocks, [[repeated(it, size) for size in sizes] for it in blocks]


@pytest.mark.parametrize(
    ("impl", "name"), of_sets("multi_tensor_scale", "multi_tensor_scale_tensor")
)
def test_scaled_lists(impl: str, name: str) -> None:
    need(20)
    blocks, lists = lists_beyond(LOW, LOW)
    flags = [torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    scale = on_device(0.3) if name.endswith("tensor") else 0.3
    call(impl, name, blocks[:1], blocks[1:], scale, noop_flag=flags[0])
    call(impl, name, *lists, scale, noop_flag=flags[1])
    for one in lists[1]:
        check_again(one, blocks[1])
    assert not flags[1].item()
    lists[0][1][-1] = torch.inf
    call(impl, name, *lists, scale, noop_flag=flags[1])
    assert flags[1].item()


@pytest.mark.parametrize(
    ("impl", "name"), of_sets("multi_tensor_l2norm", "multi_tensor_unscale_l2norm")
)
def test_norms_of_lists(impl: str, name: str) -> None:
    need(12)
    (block,), (tensors,) = lists_beyond(LOW)
    unscaled = "unscale" in name
    scales = [on_device(0.5)] if unscaled else []
    norm, norms = poisoned(impl, name, tensors, *scales, per_tensor=True)
    squares = (block.double() * (0.5 if unscaled else 1)).square()
    for one, tensor in zip(norms, tensors, strict=True):
        check_sum(one.square()[None], squares[:, None], tensor.numel(), rounding=1e-4)
    torch.testing.assert_close(norm.reshape(()), norms.square().sum().sqrt(), rtol=1e-4, atol=0)


def check_step(
    impl: str,
    name: str,
    blocks: list[Tensor],
    lists: list[list[Tensor]],
    *numbers: float | Tensor,
    masters: bool = False,
) -> None:
    """Take a step on blocks and on the lists that repeat them; the last of each may be masters."""
    for given in ([[it] for it in blocks], lists[:]):
        options = {"master_params": given.pop()} if masters else {}
        call(impl, name, *given, *numbers, **options)
    for repeats, block in zip(lists[1:], blocks[1:], strict=True):
        for one in repeats:
            check_again(one, block)


@pytest.mark.parametrize(("impl", "name"), of_sets("multi_tensor_adam"))
def test_adam(impl: str, name: str) -> None:
    need(44)
    check_step(impl, name, *lists_beyond(LOW, LOW, LOW, LOW), 1e-2, 3)


@pytest.mark.parametrize(("impl", "name"), of_sets("multi_tensor_adam"))
def test_adam_with_masters(impl: str, name: str) -> None:
    need(80)
    given = lists_beyond(LOW, LOW, LOW, LOW, torch.float32)
    check_step(impl, name, *given, 1e-2, 3, masters=True)


@pytest.mark.parametrize(
    ("impl", "name"),
    of_sets("multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"),
)
def test_adam_in_a_graph(impl: str, name: str) -> None:
    need(80)
    dtypes = [LOW, LOW, LOW, LOW] + [torch.float32] * name.endswith("master")
    check_step(impl, name, *lists_beyond(*dtypes), on_device(1e-2), on_device(3))


@pytest.mark.parametrize(("impl", "name"), of_sets("multi_tensor_adam_param_remainder"))
def test_adam_with_remainders(impl: str, name: str) -> None:
    need(60)
    blocks, lists = lists_beyond(LOW, LOW, LOW, LOW, torch.int16)
    check_step(impl, name, blocks, lists, 1e-2, 3)


@pytest.mark.parametrize(("impl", "name"), of_sets("multi_tensor_adam_fp8"))
def test_adam_with_float8_parameters(impl: str, name: str) -> None:
    need(80)
    wide = [torch.float32] * 3
    blocks, lists = lists_beyond(LOW, torch.float8_e4m3fn, *wide)
    for number in (8.0, 0.0, 1.0):  # scales, amaxes and inverses of scales
        blocks.append(on_device(number))
        lists.append([on_device(number) for _ in lists[0]])
    check_step(impl, name, blocks, lists, 1e-2, 3)
    assert blocks[6].item() > 0
    assert blocks[7].item() == 1 / 8


@pytest.mark.parametrize(("impl", "name"), of_sets("multi_tensor_sgd"))
def test_sgd(impl: str, name: str) -> None:
    need(40)
    check_step(impl, name, *lists_beyond(LOW, LOW, LOW), 1e-2, 1e-3, 0.9)


# ---------------------------------------------------------------------------------- moe

EXPERTS, TOPK = 8, 2


def pairs_of(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices ``[T, TOPK]``, the token of each row, and the row of each pair, ``[TOPK, T]``."""
    token = torch.arange(tokens, device=DEVICE)
    first = token * 7 // 3 % EXPERTS
    indices = torch.stack([first, (first + 1 + token % (EXPERTS - 1)) % EXPERTS], 1)
    order = indices.flatten().argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.numel(), device=DEVICE)
    return indices, order // TOPK, rows.view(tokens, TOPK).t().contiguous()


def check_gathered(found: Tensor, source: Tensor, places: Tensor) -> None:
    """Check that row i of ``found`` is row ``places[i]`` of ``source``."""
    each = max(1, CHUNK // source.shape[1])
    for start in range(0, found.shape[0], each):
        wanted = source[places[start : start + each]]
        assert torch.equal(as_bits(found[start : start + each]), as_bits(wanted)), start


def check_collected(
    found: Tensor, rows: Tensor, places: Tensor, probs: Tensor | None = None
) -> None:
    """Check the sums of each token's rows."""
    each = max(1, CHUNK // rows.shape[1])
    for start in range(0, found.shape[0], each):
        total: Any = 0
        for k in range(TOPK):
            part = rows[places[k, start : start + each]].float()
            total = total + (part if probs is None else part * probs[start : start + each, k, None])
        torch.testing.assert_close(found[start : start + each].float(), total, rtol=2**-7, atol=0.1)


def check_spread(rows: Tensor, tokens: Tensor, token_of: Tensor, weights: Tensor) -> None:
    """Check that each row is its token times its weight."""
    each = max(1, CHUNK // tokens.shape[1])
    for start in range(0, rows.shape[0], each):
        part = tokens[token_of[start : start + each]].float() * weights[start : start + each, None]
        assert torch.equal(rows[start : start + each], part.to(LOW)), start


def check_squares(found: Tensor, tokens: Tensor) -> None:
    """Check that the numbers in each row are the sum of its token's squares."""
    each = max(1, CHUNK // tokens.shape[1])
    for start in range(0, tokens.shape[0], each):
        wanted = tokens[start : start + each].float().square().sum(1, keepdim=True)
        part = found[start : start + each]
        torch.testing.assert_close(part, wanted.expand_as(part), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("impl", "name"), of_sets("moe_permute_fwd"))
def test_rows_by_index(impl: str, name: str) -> None:
    """The tokens have more than HALF elements, the rows more than WHOLE."""
    need(60)
    tokens = rows_beyond(HALF, COLUMNS) + PERIOD
    x = repeated(normal(PERIOD, COLUMNS), tokens)
    indices, token_of, rows_of = pairs_of(tokens)
    y, row_id_map = poisoned(impl, name, x, indices.int())
    assert torch.equal(row_id_map.long(), rows_of)
    check_gathered(y, x, token_of)
    probs = torch.rand(tokens, TOPK, device=DEVICE)
    collected = poisoned(impl, "moe_permute_bwd", y, row_id_map)
    check_collected(collected, y, rows_of)
    del collected
    collected = poisoned(impl, "moe_unpermute_fwd", y, row_id_map, probs)
    check_collected(collected, y, rows_of, probs)
    del collected
    dx, dprobs = poisoned(impl, "moe_unpermute_bwd", x, row_id_map, y, probs, num_rows=y.shape[0])
    check_spread(dx, x, token_of, probs.flatten()[indices.flatten().argsort(stable=True)])
    check_squares(dprobs, x)  # a token's rows are its copies
    del dx, dprobs
    (dx, _) = poisoned(impl, "moe_unpermute_bwd", x, row_id_map, num_rows=y.shape[0] + PERIOD)
    check_gathered(dx[: y.shape[0]], x, token_of)
    check_zero(dx[y.shape[0] :])


@pytest.mark.parametrize(("impl", "name"), of_sets("moe_permute_mask_fwd"))
def test_rows_by_mask(impl: str, name: str) -> None:
    need(60)
    tokens = rows_beyond(HALF, COLUMNS) + PERIOD
    x = repeated(normal(PERIOD, COLUMNS), tokens)
    indices, token_of, rows_of = pairs_of(tokens)
    routed = torch.zeros(tokens, EXPERTS, dtype=torch.bool, device=DEVICE)
    routed.scatter_(1, indices, True)
    probs = torch.rand(tokens, EXPERTS, device=DEVICE)
    count = tokens * TOPK
    y, permuted, row_id_map = poisoned(impl, name, x, routed, probs, num_out_tokens=count + PERIOD)
    check_gathered(y[:count], x, token_of)
    check_zero(y[count:])
    order = indices.flatten().argsort(stable=True)
    check_equal(permuted[:count], probs.gather(1, indices).flatten()[order])
    check_zero(permuted[count:])
    merged = poisoned(impl, "moe_unpermute_mask_fwd", y, row_id_map, probs)
    check_collected(merged, y, rows_of, probs.gather(1, indices))
    del merged
    options = {"input": y, "probs": probs, "num_rows": y.shape[0]}
    dx, dprobs = poisoned(impl, "moe_unpermute_mask_bwd", x, row_id_map, **options)
    check_spread(dx[:count], x, token_of, permuted[:count])
    check_zero(dx[count:])
    check_squares(dprobs.gather(1, indices), x)
    check_zero(torch.where(routed, 0, dprobs))
    del dx, dprobs
    dx, dprobs = poisoned(impl, "moe_permute_mask_bwd", y, row_id_map, permuted)
    check_collected(dx, y, rows_of)
    check_equal(dprobs, torch.where(routed, probs, 0))


@pytest.mark.parametrize(("impl", "name"), of_sets("fused_multi_row_padding"))
def test_padded_rows(impl: str, name: str) -> None:
    need(44)
    rows = rows_beyond(WHOLE, COLUMNS)
    sizes = [rows // 2 - 5, 7, rows - rows // 2 - 9, PERIOD]
    padded = [it + -it % 16 for it in sizes]
    x = repeated(normal(PERIOD, COLUMNS), sum(sizes))
    lists = {"row_list": sizes, "padded_row_list": padded}
    y = poisoned(impl, name, x, **lists)
    place = start = 0
    for size, room in zip(sizes, padded, strict=True):
        check_equal(y[place : place + size], x[start : start + size])
        check_zero(y[place + size : place + room])
        place, start = place + room, start + size
    check_equal(poisoned(impl, "fused_multi_row_unpadding", y, **lists), x)


@pytest.mark.parametrize(
    ("impl", "name"),
    of_sets("fused_topk_with_score_function_fwd", "fused_score_for_moe_aux_loss_fwd"),
)
def test_routers(impl: str, name: str) -> None:
    need(70)
    logits = normal(PERIOD, HIDDEN)
    check_rows(impl, name, [Rows(logits), 4], rows_beyond(HALF, HIDDEN))


@pytest.mark.parametrize(
    ("impl", "name"),
    of_sets("fused_topk_with_score_function_bwd", "fused_score_for_moe_aux_loss_bwd"),
)
def test_gradients_of_routers(impl: str, name: str) -> None:
    need(50)
    logits = normal(PERIOD, HIDDEN)
    _, routing, scores = call(impl, name.removesuffix("bwd") + "fwd", logits, 4)
    saved = [routing, scores] if "topk" in name else [scores]
    args = [Rows(normal(PERIOD, HIDDEN, seed=2)), *map(Rows, saved), 4]
    check_rows(impl, name, args, rows_beyond(HALF, HIDDEN))


@pytest.mark.parametrize(("impl", "name"), of_sets("fused_moe_aux_loss_fwd"))
def test_the_loss_of_routers(impl: str, name: str) -> None:
    need(30)
    probs, rows = normal(PERIOD, HIDDEN).abs(), rows_beyond(WHOLE, HIDDEN)
    counts = torch.arange(1, HIDDEN + 1, dtype=torch.int32, device=DEVICE)
    whole = repeated(probs, rows)
    loss, const = poisoned(impl, name, whole, counts, rows, 2, 0.1)
    del whole
    factor = HIDDEN * 0.1 / (2 * rows**2)
    terms = (probs.double() * counts).sum(1, keepdim=True) * factor
    check_sum(loss.reshape(1), terms, rows)
    other = "fused_moe_aux_loss_bwd"
    grad = torch.ones((), dtype=LOW, device=DEVICE)
    few = call(impl, other, grad, const, counts, PERIOD)
    check_again(poisoned(impl, other, grad, const, counts, rows), few)


# -------------------------------------------------------------------- layouts and angles


@pytest.mark.parametrize(("impl", "name"), of_sets("fa_prepare_fwd"))
def test_packed_projections(impl: str, name: str) -> None:
    need(40)
    block = normal(PERIOD, 2, HEADS, 3 * WIDTH)
    rows = rows_beyond(WHOLE, block[0].numel())
    check_rows(impl, name, [Rows(block)], rows, along={0: 2})
    forget()
    parts = [normal(PERIOD, 2, HEADS, WIDTH, seed=seed) for seed in (1, 2, 3)]
    other = "fa_prepare_bwd"
    expected = call(impl, other, *(it.transpose(0, 1) for it in parts))
    many = [repeated(it, rows).transpose(0, 1) for it in parts]
    check_again(poisoned(impl, other, *many), expected)


@pytest.mark.parametrize(("impl", "name"), of_sets("convert_thd_to_bshd"))
def test_sequences_apart_and_together(impl: str, name: str) -> None:
    need(60)
    tokens = rows_beyond(WHOLE, HEADS * WIDTH)
    ends = [0, 5, tokens // 2 + 1, tokens // 2 + 9, tokens - 2]
    lengths = [end - begin for begin, end in itertools.pairwise(ends)]
    x = repeated(normal(PERIOD, HEADS, WIDTH), tokens)
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    y = poisoned(impl, name, x, offsets, max(lengths))
    for sequence, (begin, length) in enumerate(zip(ends, lengths, strict=False)):
        check_equal(y[sequence, :length], x[begin : begin + length])
        check_zero(y[sequence, length:])
    back = poisoned(impl, "convert_bshd_to_thd", y, offsets, tokens)
    check_equal(back[: ends[-1]], x[: ends[-1]])
    check_zero(back[ends[-1] :])


@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize(("impl", "name"), of_sets("copy_to_kv_cache"))
def test_a_cache_of_keys_and_values(impl: str, name: str, paged: bool) -> None:
    need(30)
    slots = rows_beyond(HALF, 3 * HEADS * WIDTH) + 64
    page = 64 if paged else slots
    pages = 3 * -(-slots // page)
    block = normal(PERIOD, HEADS, WIDTH)
    caches = [repeated(block, pages * page).view(pages, page, HEADS, WIDTH) for _ in range(2)]
    new = [normal(12, HEADS, WIDTH, seed=seed) for seed in (2, 3)]
    added = [0, 2, 2, 12]
    lengths = [6, 9, slots - 1]
    cached = [0, *itertools.accumulate(lengths)]
    if cached[-1] >= 2**31:
        pytest.skip("more tokens than offsets count")
    numbers = [torch.tensor(it, dtype=torch.int32, device=DEVICE) for it in (added, cached)]
    table = None
    if paged:  # each sequence has its pages in descending order
        table = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=DEVICE)
        table = table.view(3, -1).contiguous()
    call(impl, name, *new, *caches, *numbers, page_table=table)
    for cache, tokens in zip(caches, new, strict=True):
        for sequence, (begin, end) in enumerate(itertools.pairwise(added)):
            for token in range(begin, end):
                slot = lengths[sequence] - (end - token)
                number = sequence
                if paged:
                    number, slot = pages - 1 - sequence * (pages // 3) - slot // page, slot % page
                assert torch.equal(cache[number, slot], tokens[token])
                at = number * page + slot
                cache[number, slot] = block[at % PERIOD]  # restored, for the check below
        check_again(cache.view(-1, HEADS, WIDTH), block)


@pytest.mark.parametrize(("impl", "name"), of_sets("thd_read_half_tensor"))
def test_halves_of_sequences(impl: str, name: str) -> None:
    need(60)
    tokens = rows_beyond(WHOLE, HEADS * WIDTH) // 2 * 2
    ends = [0, 6, tokens // 4 * 2, tokens // 4 * 2 + 4, tokens]
    x = repeated(normal(PERIOD, HEADS, WIDTH), tokens)
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    half = poisoned(impl, name, x, offsets, 1)
    for begin, end in itertools.pairwise(ends):
        check_equal(half[begin // 2 : end // 2], x[(begin + end) // 2 : end])
    options = {"first_half": "none", "second_half": "copy"}
    call(impl, "thd_grad_correction", x, torch.zeros_like(half), offsets, **options)
    for begin, end in itertools.pairwise(ends):
        check_zero(x[(begin + end) // 2 : end])
    assert x[ends[-2]].any()


def offsets_of(sequences: int) -> Tensor:
    """Offsets of sequences of QUERIES tokens each."""
    places = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE)
    return places * QUERIES


@pytest.mark.parametrize(("impl", "name"), of_sets("thd_out_correction"))
def test_steps_of_a_ring(impl: str, name: str) -> None:
    need(40)
    blocks = [normal(PERIOD, QUERIES, HEADS, WIDTH, seed=seed) for seed in (1, 2)]
    lses = [normal(PERIOD, HEADS, QUERIES, dtype=torch.float32, seed=seed) for seed in (3, 4)]
    sequences = rows_beyond(WHOLE, blocks[0][0].numel())
    many = [repeated(it, sequences) for it in (*blocks, *lses)]
    for out, step, *of_keys in ((*blocks, *lses), many):
        call(impl, name, out.flatten(0, 1), step.flatten(0, 1), *of_keys, offsets_of(len(out)))
    check_again(many[0], blocks[0])


@pytest.mark.parametrize("packed", [False, True], ids=["sequences", "packed"])
@pytest.mark.parametrize(("impl", "name"), of_sets("thd_second_half_lse_correction"))
def test_sums_of_exponentials_of_halves(impl: str, name: str, packed: bool) -> None:
    need(40)
    blocks = [
        normal(PERIOD, HEADS, it, dtype=torch.float32, seed=it) for it in (QUERIES, QUERIES // 2)
    ]
    sequences = rows_beyond(HALF, blocks[0][0].numel())

    def arranged(lse: Tensor) -> Tensor:
        return lse.transpose(0, 1).flatten(1) if packed else lse

    few = [arranged(it) for it in blocks]
    lse, step = (arranged(repeated(it, sequences)) for it in blocks)
    forget()
    small, large = offsets_of(PERIOD), offsets_of(sequences)
    call(impl, name, *few, small, lse_packed=packed)
    call(impl, name, lse, step, large, lse_packed=packed)
    along = int(packed)
    check_again(lse, few[0], along)
    half = "thd_read_second_half_lse"
    wanted = call(impl, half, few[0], small, few[1].shape[-1], lse_packed=packed)
    found = poisoned(impl, half, lse, large, step.shape[-1], lse_packed=packed)
    check_again(found, wanted, along)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("impl", "name"), of_sets("fused_rope_forward", "fused_rope_backward"))
def test_angles_of_many_sequences(impl: str, name: str, interleaved: bool) -> None:
    need(30)
    block = normal(PERIOD, QUERIES // 2, HEADS, WIDTH)
    freqs = normal(QUERIES // 2, 1, 1, WIDTH // 2, dtype=torch.float32, seed=2)
    rows = rows_beyond(WHOLE, block[0].numel())
    options = {"qkv_format": "bshd", "interleaved": interleaved}
    check_rows(impl, name, [Rows(block), freqs], rows, **options)


@pytest.mark.parametrize(("impl", "name"), of_sets("fused_rope_forward"))
def test_angles_of_a_long_sequence(impl: str, name: str) -> None:
    """Angles grow with the position, so only some of the tokens are compared."""
    need(34)
    heads = 2
    tokens = rows_beyond(WHOLE, heads * WIDTH)
    x = repeated(normal(PERIOD, 1, heads, WIDTH), tokens)
    freqs = repeated(normal(PERIOD + 2, 1, 1, 4, dtype=torch.float32, seed=2), tokens)
    y = poisoned(impl, name, x, freqs)
    of_token = heads * WIDTH
    for place in (0, HALF // of_token - 8, WHOLE // of_token - 16, tokens - 16):
        few = slice(place, place + 16)
        wanted = call(impl, name, x[few].contiguous(), freqs[few].contiguous())
        check_equal(y[few], wanted)
    check_numbers(y)


@pytest.mark.parametrize(
    ("impl", "name"), of_sets("fused_qkv_rope_forward", "fused_qkv_rope_backward")
)
def test_angles_of_packed_projections(impl: str, name: str) -> None:
    need(40)
    split = [2 * WIDTH, WIDTH, WIDTH]
    tokens, groups = QUERIES // 4, HEADS // 2
    if name.endswith("forward"):
        blocks = [normal(PERIOD, tokens, groups, sum(split))]
    else:
        heads = (2 * groups, groups, groups)
        blocks = [normal(PERIOD, tokens, it, WIDTH, seed=seed) for seed, it in enumerate(heads)]
    freqs = normal(tokens, 1, 1, WIDTH, dtype=torch.float32, seed=2)
    rows = rows_beyond(WHOLE, tokens * groups * sum(split))
    options = {"qkv_split": split, "qkv_format": "bshd"}
    check_rows(impl, name, [*map(Rows, blocks), freqs, freqs], rows, **options)


# ----------------------------------------------------------------- products, attention


def check_product(found: Tensor, terms: Tensor, times: int) -> None:
    """Check a product against ``times`` times ``terms``, a product in float64."""
    expected = terms * times
    error = (found.double() - expected).abs()
    assert bool((error <= 2**-6 * (expected.abs() + expected.square().mean().sqrt())).all())


@pytest.mark.parametrize("dtype", [LOW, torch.float8_e4m3fn], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("large", ["output", "operand"])
@pytest.mark.parametrize(("impl", "name"), of_sets("generic_gemm"))
def test_products(impl: str, name: str, large: str, dtype: torch.dtype) -> None:
    need(30)
    n, k = (COLUMNS * 8, HIDDEN) if large == "output" else (HIDDEN, COLUMNS)
    weight, block = normal(n, k, seed=2).to(dtype), normal(PERIOD, k).to(dtype)
    options: dict[str, Any] = {}
    if dtype != LOW:
        scales = {"A_scale_inv": on_device(0.5), "B_scale_inv": on_device(2.0)}
        options = {**scales, "out_dtype": LOW}
    rows = rows_beyond(WHOLE, max(n, k))
    expected = call(impl, name, weight, block, **options)[0]
    found = poisoned(impl, name, weight, repeated(block, rows), **options)[0]
    check_again(found, expected, exact=False)


@pytest.mark.parametrize(("impl", "name"), of_sets("generic_gemm"))
def test_products_over_many_terms(impl: str, name: str) -> None:
    """Gradients of a weight sum over the rows."""
    need(30)
    x, dy = normal(PERIOD, HIDDEN), normal(PERIOD, COLUMNS, seed=2)
    rows = rows_beyond(WHOLE, COLUMNS) // PERIOD * PERIOD + PERIOD
    many = repeated(x, rows), repeated(dy, rows)
    options = {"transa": False, "transb": True, "out_dtype": torch.float32}
    found = poisoned(impl, name, *many, **options)[0]
    check_product(found, dy.double().t() @ x.double(), rows // PERIOD)


@pytest.mark.parametrize(("impl", "name"), of_sets("te_general_grouped_gemm"))
def test_grouped_products(impl: str, name: str) -> None:
    need(40)
    rows = rows_beyond(WHOLE, COLUMNS) + 4 * PERIOD
    groups = [PERIOD + 9, rows // 2, PERIOD]
    groups.insert(2, rows - sum(groups))
    weights = [normal(HIDDEN, COLUMNS, seed=seed) for seed in range(4)]
    x = repeated(normal(PERIOD, COLUMNS), rows)
    found = poisoned(impl, name, weights, [x], groups)[0]
    begin = 0
    for count, weight in zip(groups, weights, strict=True):
        for first in (begin, begin + count - PERIOD):
            few = slice(first, first + PERIOD)
            wanted = x[few].double() @ weight.double().t()
            check_product(found[few], wanted, 1)
        begin += count
    assert begin == rows
    check_numbers(found)
    del x, found
    # Now the output is the large tensor.
    weights = [it.t().contiguous() for it in weights]
    y = repeated(normal(PERIOD, HIDDEN), rows)
    found = poisoned(impl, name, weights, [y], groups)[0]
    begin = 0
    for count, weight in zip(groups, weights, strict=True):
        for first in (begin, begin + count - PERIOD):
            few = slice(first, first + PERIOD)
            check_product(found[few], y[few].double() @ weight.double().t(), 1)
        begin += count
    check_numbers(found)


@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding_causal"])
def test_attention(mask: str) -> None:
    """With padding_causal, the tokens of all sequences follow one another."""
    impl, name = "default.flagos", "fused_attn_fwd"  # cuDNN declines so many elements
    need(80)
    blocks = [normal(PERIOD, QUERIES, HEADS, WIDTH, seed=seed) for seed in range(4)]
    rows = rows_beyond(HALF, blocks[0][0].numel())
    together = mask == "padding_causal"

    def arguments(tensors: list[Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
        if not together:
            return tensors, {"attn_mask_type": mask}
        offsets = offsets_of(len(tensors[0]))
        keys = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
        options = dict(zip(keys, (offsets, offsets, QUERIES, QUERIES), strict=True))
        options |= {"attn_mask_type": mask, "qkv_format": "thd"}
        return [it.flatten(0, 1) for it in tensors], options

    (dout, *few), options = arguments(blocks)
    wanted, lse = call(impl, name, *few, **options)
    (many_dout, *many), many_options = arguments([repeated(it, rows) for it in blocks])
    out, found_lse = poisoned(impl, name, *many, **many_options)
    check_again(out, wanted, exact=False)
    check_again(found_lse, lse, int(together), exact=False)
    backward = "fused_attn_bwd"
    gradients = call(impl, backward, dout, *few, wanted, lse, **options)
    found = poisoned(impl, backward, many_dout, *many, out, found_lse, **many_options)
    for one, other in zip(found[:3], gradients[:3], strict=True):
        check_again(one, other, exact=False)


# ------------------------------------------------------------------------ beyond limits


def many_rows(columns: int) -> Tensor:
    """More rows than an int32 counts, uninitialised."""
    return torch.empty(HALF + 8, columns, dtype=LOW, device=DEVICE)


def one_row_each(columns: int) -> tuple[Any, ...]:
    return (many_rows(columns),)


def norm_of_many() -> tuple[Any, ...]:
    return many_rows(4), torch.ones(4, dtype=LOW, device=DEVICE)


def pairs_of_many() -> tuple[Any, ...]:
    count = HALF // 2 + 8
    indices = torch.zeros(count, 1, dtype=torch.int32, device=DEVICE)
    return torch.empty(count, 1, dtype=LOW, device=DEVICE), indices


def odd_columns() -> tuple[Any, ...]:
    columns = COLUMNS + 1
    return (torch.empty(WHOLE // columns + 2, 2 * columns, dtype=LOW, device=DEVICE),)


def attention_of_many() -> tuple[Any, ...]:
    q = torch.empty(HALF // QUERIES // WIDTH + 1, QUERIES, 1, WIDTH, dtype=LOW, device=DEVICE)
    return q, q, q


LIMITS: dict[tuple[str, str], tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    ("default.flagos", "rmsnorm_fwd"): (norm_of_many, {}),
    ("default.flagos", "swiglu"): (lambda: one_row_each(2), {}),
    ("default.flagos", "scaled_softmax_forward"): (lambda: one_row_each(2), {}),
    ("vendor.cuda", "scaled_softmax_forward"): (lambda: one_row_each(2), {}),
    ("default.flagos", "quantize"): (lambda: one_row_each(2), {"columnwise": True}),
    ("vendor.cuda", "quantize"): (lambda: one_row_each(2), {"columnwise": True}),
    ("default.flagos", "fp8_transpose"): (
        lambda: (many_rows(1).view(torch.uint8),),
        {},
    ),
    ("vendor.cuda", "moe_permute_fwd"): (pairs_of_many, {}),
    ("vendor.cuda", "swiglu"): (odd_columns, {}),
    ("vendor.cuda", "fused_attn_fwd"): (attention_of_many, {}),
}


@pytest.mark.parametrize(("impl", "name"), LIMITS)
def test_what_is_beyond_a_limit_is_declined(impl: str, name: str) -> None:
    """Nothing is written out of bounds either: the device still works afterwards."""
    need(60)
    make, options = LIMITS[impl, name]
    args = make()
    with pytest.raises(StrictModeError, match=r"exceed the kernel's limit|cuDNN's limit"):
        call(impl, name, *args, **options)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("odd", [False, True], ids=["whole", "odd"])
@pytest.mark.parametrize(("impl", "name"), of_sets("rmsnorm_fwd", "rmsnorm_bwd"))
def test_more_rows_than_an_int32_counts(impl: str, name: str, odd: bool) -> None:
    if (impl, "rmsnorm_fwd") in LIMITS:
        pytest.skip("declines so many")
    need(100)
    columns = 3 if odd else 4
    x, gamma = normal(PERIOD, columns), normal(columns, seed=2)
    rows = HALF + PERIOD + 3
    if name == "rmsnorm_fwd":
        check_rows(impl, name, [Rows(x), gamma], rows)
    else:
        rsigma = x.float().square().mean(1).rsqrt()

        def terms(*given: Tensor) -> Tensor:
            return x.double().square() * rsigma.double()[:, None]

        check_rows(impl, name, [Rows(x), Rows(x), Rows(rsigma), gamma], rows, sums={1: terms})

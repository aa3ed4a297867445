"""A small GPT served on a real GPU from its cache, and unmodified models, compiled and not.

The expected values are those of the same model run without a cache by the definitions in float32,
or of the same unmodified model in float64. The error allowed to a set is relative to the error of
the definitions, or of torch, in bfloat16.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_gpt import GPT, IDS, LARGE, SETS, TIMES, Cache, batches, error, exact, suited
from torch import Tensor, nn

import transformer_engine_fl as te
from transformer_engine_fl.integrations.aten import use_aten_ops

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DTYPE = torch.bfloat16
SHAPE = LARGE
PROMPTS = [9, 3, 5, 1, 7, 2, 8, 4]
SIZES = [8, 3, 1, 7, 2, 5, 6, 4]
"""Sizes of consecutive batches."""
STEPS = 4


@contextmanager
def model_served(prefer: str, *traits: str) -> Iterator[GPT]:
    """The model in inference mode; not strict, as cuDNN has no attention to a cache."""
    model = GPT(suited(SHAPE, prefer), DEVICE, DTYPE).eval()
    wanted = frozenset(traits)
    with torch.inference_mode(), te.policy_context(prefer=prefer, require=wanted):
        yield model


@functools.cache
def words() -> Tensor:
    """``[8, context]``: prompts and the fixed words that follow, whatever the model predicts."""
    return torch.cat([it for it, _ in batches(SHAPE, -(-8 // SHAPE.batch), DEVICE, seed=3)])[:8]


@functools.cache
def narrow_error() -> float:
    """The error of the definitions' logits in bfloat16, without a cache."""
    with torch.inference_mode(), te.with_preference("reference"):
        model = GPT(SHAPE, DEVICE, DTYPE).eval()
        return error([model.logits(words())], [exact(model).logits(words())])


@functools.cache
def all_logits() -> Tensor:
    """The expected logits after each word, ``[8, context, words]``."""
    with torch.inference_mode(), te.with_preference("reference"):
        return exact(GPT(SHAPE, DEVICE, DTYPE)).eval().logits(words())


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def prefill(model: GPT, cache: Cache, rows: Tensor, lengths: list[int]) -> Tensor:
    """Prompts of several lengths; what follows the end of a prompt in its row is arbitrary."""
    return model.serve(rows[:, : max(lengths)], int32(lengths), cache)


def behind(rows: list[int], lengths: list[int]) -> Tensor:
    """The expected logits after the first ``lengths`` words of each row."""
    return all_logits()[rows, [it - 1 for it in lengths]]


def check(found: list[Tensor], right: list[Tensor]) -> None:
    for one, two in zip(found, right, strict=True):
        assert error([one], [two]) <= TIMES * narrow_error()


# -------------------------------------------------------------------------- from the cache


@pytest.mark.parametrize("prefer", SETS)
def test_batches_of_every_size_are_served_from_the_cache(prefer: str) -> None:
    """Batches run one after another through the same kernels, each with an empty cache."""
    found, right = [], []
    with model_served(prefer) as model:
        for size in SIZES:
            cache, rows = Cache(model, size), words()[:size]
            lengths = PROMPTS[:size]
            found.append(prefill(model, cache, rows, lengths))
            right.append(behind(list(range(size)), lengths))
            for step in range(STEPS):
                places = torch.tensor([it + step for it in lengths], device=DEVICE)
                one = rows.gather(1, places[:, None])
                found.append(model.serve(one, int32([1] * size), cache))
                right.append(behind(list(range(size)), [it + step + 1 for it in lengths]))
        check(found, right)


@pytest.mark.parametrize("prefer", SETS)
def test_steps_of_several_tokens_and_of_no_tokens(prefer: str) -> None:
    """As in speculative decoding, and in a long prompt that is processed in parts."""
    rows, lengths = words()[:4], [0, 0, 0, 0]
    with model_served(prefer) as model:
        cache = Cache(model, 4)
        for new in ([3, 1, 4, 2], [2, 5, 1, 4], [1, 1, 6, 1]):
            widest = max(new)
            places = torch.tensor(lengths, device=DEVICE)[:, None] + torch.arange(
                widest, device=DEVICE
            )
            found = model.serve(rows.gather(1, places), int32(new), cache)
            lengths = [a + b for a, b in zip(lengths, new, strict=True)]
            assert cache.lengths.tolist() == lengths
            check([found], [behind([0, 1, 2, 3], lengths)])
        before = [it.clone() for it in (*cache.keys, *cache.values)]
        model.serve(rows[:, :2], int32([0, 1, 0, 2]), cache)
        for one, two in zip((*cache.keys, *cache.values), before, strict=True):
            assert one[::2].nan_to_num(3.0).equal(two[::2].nan_to_num(3.0))
            assert not one[1::2].nan_to_num(3.0).equal(two[1::2].nan_to_num(3.0))


@pytest.mark.parametrize("prefer", SETS)
def test_sequences_end_and_the_others_go_on_in_other_rows(prefer: str) -> None:
    with model_served(prefer) as model:
        cache, alive, lengths = Cache(model, 8), list(range(8)), list(PROMPTS)
        prefill(model, cache, words(), lengths)
        for keep in ([7, 0, 5, 2, 3], [4, 1, 0], [1]):
            cache.keep(int32(keep))
            alive, lengths = [alive[it] for it in keep], [lengths[it] for it in keep]
            one = words()[alive, lengths][:, None]
            found = model.serve(one, int32([1] * len(keep)), cache)
            lengths = [it + 1 for it in lengths]
            check([found], [behind(alive, lengths)])


@pytest.mark.parametrize("size", [1, 5, 8])
@pytest.mark.parametrize("prefer", SETS)
def test_a_decoding_step_in_a_graph_goes_on_as_lengths_grow(prefer: str, size: int) -> None:
    """The captured step reads words and lengths on the device and writes the next words there."""
    with model_served(prefer, "deterministic", "graph_safe") as model:
        ones, prompts = int32([1] * size), words()[:size]

        def step(one: Tensor, cache: Cache) -> Tensor:
            logits = model.serve(one, ones, cache)
            one.copy_(logits.argmax(-1)[:, None])
            return logits

        def begin(cache: Cache, one: Tensor) -> None:
            cache.lengths.zero_()
            one.copy_(prefill(model, cache, prompts, PROMPTS[:size]).argmax(-1)[:, None])

        cache = Cache(model, size)
        one = torch.zeros((size, 1), dtype=torch.int64, device=DEVICE)
        begin(cache, one)
        right = [(step(one, cache).clone(), one.clone()) for _ in range(2 * STEPS)]
        lengths = cache.lengths.tolist()
        assert lengths == [it + 2 * STEPS for it in PROMPTS[:size]]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step(one, cache)
        for _ in range(2):  # the second time, the cache holds old tokens
            begin(cache, one)
            for expected_logits, expected_words in right:
                graph.replay()
                assert logits.equal(expected_logits)
                assert one.equal(expected_words)
            assert cache.lengths.tolist() == lengths


# ------------------------------------------------------------------------ unmodified models


class Norm(nn.Module):
    """RMS norm as such models write it, in plain torch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    """Attention with rotary embedding and grouped queries, and a gated feed-forward layer."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (
            nn.Linear(width, kv_heads * self.head, bias=False) for _ in range(2)
        )
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[Tensor] | None) -> Any:
        h = self.input_layernorm(x)
        q, k, v = (
            it(h).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for it in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (it * cos + _half_turned(it) * sin for it in (q, k))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        k_all, v_all = (it.repeat_interleave(self.heads // self.kv_heads, 1) for it in (k, v))
        mixed = F.scaled_dot_product_attention(q, k_all, v_all, is_causal=past is None)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h)), [k, v]


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Llama(nn.Module):
    """A model written without regard to this package: words in, logits and a cache out."""

    def __init__(self, words: int = 256, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, 2) for _ in range(layers))
        self.norm, self.lm_head = Norm(width), nn.Linear(width, words, bias=False)
        self.head = width // heads

    def forward(self, tokens: Tensor, past: list[list[Tensor]] | None = None) -> Any:
        x = self.embed_tokens(tokens)
        begin = 0 if past is None else past[0][0].shape[2]
        places = torch.arange(begin, begin + tokens.shape[1], device=x.device, dtype=torch.float32)
        speeds = torch.arange(0, self.head, 2, device=x.device, dtype=torch.float32)
        angles = places[:, None] * torch.exp(-math.log(10_000) / self.head * speeds)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        now = []
        for number, layer in enumerate(self.layers):
            x, kept = layer(x, cos, sin, None if past is None else past[number])
            now.append(kept)
        return self.lm_head(self.norm(x)), now


def llama() -> tuple[Llama, Tensor]:
    torch.manual_seed(0)
    model = Llama().to(DEVICE, DTYPE).eval()
    return model, torch.randint(256, (4, 20), device=DEVICE)


def generated(model: Callable[..., Any], tokens: Tensor) -> list[Tensor]:
    """Logits of a prompt, and of the words that follow it one by one."""
    logits, past = model(tokens[:, :16])
    found = [logits.clone()]
    for place in range(16, tokens.shape[1]):
        logits, past = model(tokens[:, place : place + 1], past)
        found.append(logits.clone())
    return found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("prefer", SETS)
def test_an_unmodified_model_generates_as_it_does_without(prefer: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model, tokens = llama()
    with torch.inference_mode():
        right = generated(copy.deepcopy(model).double(), tokens)
        bound = TIMES * error(generated(model, tokens), right)
        called = torch.compile(model) if compiled else model
        ran: set[tuple[str, str]] = set()
        undo = te.get_default_manager().monitor(lambda name, impl: ran.add((name, impl.impl_id)))
        try:
            with use_aten_ops(), te.with_preference(prefer):
                found = generated(called, tokens)
        finally:
            undo()
        assert error(found, right) <= bound
    if not compiled:
        # Not by cuDNN, which needs tokens before heads in memory; repeated keys have heads first.
        attention = {"aten::scaled_dot_product_attention"}
        assert attention <= {name for name, _ in ran}, ran
        served = {name for name, impl in ran if impl == IDS[prefer]}
        assert {"aten::mm", "aten::silu"} <= served, ran


def encoder(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    x = torch.randn(3, 20, 128, device=DEVICE)
    padded = torch.arange(20, device=DEVICE) >= torch.tensor([[20], [7], [13]], device=DEVICE)
    return layer.to(DEVICE, dtype), x.to(dtype), padded


@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("prefer", SETS)
# A warning of torch's, whose CUDA graphs begin with an empty one.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_layer_of_torchs_trains_as_it_does_without(prefer: str, mode: str | None) -> None:
    torch._dynamo.reset()
    layer, x, padded = encoder(DTYPE)
    visible = ~padded[..., None]

    def results(layer: nn.Module, called: Callable[..., Any], x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        output = called(x, src_key_padding_mask=padded) * visible
        grads = torch.autograd.grad(output.square().sum(), (x, *layer.parameters()))
        return [output.detach().clone(), *(it.clone() for it in grads)]

    double = copy.deepcopy(layer).double()
    right = results(double, double, x.double())
    own = results(layer, layer, x)
    called = layer if mode is None else torch.compile(layer, mode=mode)
    with use_aten_ops(), te.with_preference(prefer):
        for _ in range(1 if mode is None else 4):
            torch.compiler.cudagraph_mark_step_begin()
            found = results(layer, called, x)
            for one, mine, exactly in zip(found, own, right, strict=True):
                narrow = max(error([mine], [exactly]), 2.0**-8)
                assert error([one], [exactly]) <= TIMES * narrow


@pytest.mark.parametrize("prefer", SETS)
def test_a_layer_of_torchs_is_served_without_gradients(prefer: str) -> None:
    """In evaluation mode torch runs the whole layer as one operator."""
    layer, x, padded = encoder(DTYPE)
    layer.eval()
    with torch.inference_mode():
        right = copy.deepcopy(layer).double()(x.double(), src_key_padding_mask=padded)
        visible = ~padded
        bound = error([layer(x, src_key_padding_mask=padded)[visible]], [right[visible]])
        with use_aten_ops(), te.with_preference(prefer):
            found = layer(x, src_key_padding_mask=padded)
    assert error([found[visible]], [right[visible]]) <= TIMES * bound

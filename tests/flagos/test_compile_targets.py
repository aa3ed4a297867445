"""Every kernel compiles for every kind of GPU, on a machine that has none.

The kernels are compiled as the operators launch them: this file, run as a program, calls
the operators with a recorder in place of the launch and compiles what it recorded. It is a
program of its own because the tests around it run Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# name -> backend, architecture, warp size, shared memory of a program
TARGETS = {
    "sm_80": ("cuda", 80, 32, 166_912),
    "sm_90": ("cuda", 90, 32, 232_448),
    "sm_100": ("cuda", 100, 32, 232_448),
    "gfx942": ("hip", "gfx942", 64, 65_536),
}
# One width for each way a row is handled: tiles of several rows, one row in registers, wide.
FORWARD_WIDTHS = {"bfloat16": (1024, 4096, 32768, 65536), "float32": (4096, 65536)}
BACKWARD_WIDTHS = {"bfloat16": (1024, 8192, 16384, 32768, 131072), "float32": (4096, 131072)}
# Of the families whose kernels are many operators' each: one for each way through a kernel.
ACTIVATIONS = (
    "gelu", "qgelu", "srelu", "swiglu", "glu", "clamped_swiglu",
    "dgelu", "dreglu", "dswiglu", "dglu", "clamped_dswiglu", "dbias_dgelu", "dbias_dsrelu",
)  # fmt: skip
SOFTMAX = (
    "scaled_softmax",
    "scaled_masked_softmax",
    "scaled_aligned_causal_masked_softmax",
)
# Kernels that read and write each number once, so by whole vectors.
STREAMING = {
    "_forward_rows", "_backward_rows", "_elementwise", "_with_bias",
    "_regroup", "_convert", "_append", "_read_half", "_add_or_copy", "_add_share", "_rotate",
}  # fmt: skip
# Kernels that go through lists of tensors, but those of a few numbers.
TABLES = {"_scale", "_squares", "_adam", "_sgd"}
# Several rows in a tile; one by the chunk; one whose rows begin anywhere.
LOSS_WIDTHS = (96, 32000, 50257)
SOFTMAX_WIDTHS = (1024, 16384, 65536)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, __file__, target],
        cwd=root,
        env={**environment, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["never launched"] == [], "a kernel has no case among the widths above"
    shared_limit = TARGETS[target][3]
    for case in report["cases"]:
        assert case["binary"] > 0, case
        assert case["shared"] <= shared_limit, case
    if target == "sm_90":
        forward = [
            case
            for case in report["cases"]
            if case["kernel"] in STREAMING and case["dtype"] in ("bf16", "i16")
        ]
        assert {case["kernel"] for case in forward} == STREAMING
        for case in forward:
            assert case["wide loads"] > 0, case
            assert case["wide stores"] > 0, case
            assert case["narrow accesses"] == 0, case
        loss = [case for case in report["cases"] if case["vector"] == 8]
        assert {case["kernel"] for case in loss} == {"_forward", "_backward"}
        for case in loss:
            assert case["wide loads"] >= 2, case
            assert case["wide stores"] >= (case["kernel"] == "_backward"), case
        lists = [case for case in report["cases"] if case["run"] in (4, 8)]
        assert {case["kernel"] for case in lists} >= TABLES
        for case in lists:
            if case["kernel"] in TABLES:
                assert case["wide loads"] >= 2, case
                assert case["wide stores"] >= 2 * (case["kernel"] != "_squares"), case
                # No tile is spread over the threads anew: only sums go through there.
                assert case["shared"] < 1024, case


class Recorder:
    """Stands in for the launch: keeps what would be compiled, once each."""

    def __init__(self) -> None:
        self.kernels: dict[int, Any] = {}
        self.cases: dict[str, tuple[Any, dict[str, Any], dict[Any, Any], dict[str, Any]]] = {}

    def record(
        self, launch: Any, grid: tuple[int, int], tensors: Any, numbers: tuple[Any, ...]
    ) -> None:
        from triton.runtime.jit import mangle_type

        kernel = launch._kernel
        signature, constants = {}, {}
        for place, parameter in enumerate(kernel.params):
            if parameter.is_constexpr:
                value = launch._constants[parameter.name]
            elif place < len(tensors):
                value = tensors[place]
                if value is not None:
                    signature[parameter.name] = mangle_type(value)
                    continue
            else:
                number = numbers[place - len(tensors)]
                # In a tuple there are integers that need 64 bits.
                several = ("i64",) * len(number) if isinstance(number, tuple) else None
                signature[parameter.name] = several or parameter.annotation_type
                continue
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        case = (kernel, signature, constants, launch._options)
        self.kernels[id(kernel)] = kernel
        self.cases[repr((kernel.module, kernel.__name__, *case[1:]))] = case


def call_operators() -> None:
    """Launch each kernel in each way that matters to the compiler."""
    call_normalization()
    call_activation()
    call_softmax()
    call_dropout()
    call_gemm()
    call_loss()
    call_optimizer()
    call_attention_layout()
    call_context_parallel()
    call_rope()


def call_gemm() -> None:
    import torch

    from transformer_engine_fl.backends.flagos import gemm as flagos
    from transformer_engine_fl.core.errors import NotSupportedError

    def product(dtype: torch.dtype, m: int, n: int, k: int, **options: Any) -> None:
        a = torch.empty((n, k) if options.get("transa", True) else (k, n), dtype=dtype)
        b = torch.empty((k, m) if options.get("transb", False) else (m, k), dtype=dtype)
        flagos.generic_gemm(a, b, **options)

    wgrad = {"transa": False, "transb": True}
    grad = {"grad": True, "bias_grad": True}
    bfloat16, float8 = torch.bfloat16, torch.float8_e4m3fn
    bias, total = torch.empty(4096, dtype=bfloat16), torch.empty(4096, 4096)
    saved = torch.empty(4096, 4096, dtype=bfloat16)
    product(bfloat16, 4096, 4096, 4096, bias=bias, gelu=True)
    product(bfloat16, 4096, 4096, 4096, transa=False)
    product(bfloat16, 4096, 4096, 4096, transa=False, gelu=True, gelu_input=saved, **grad)
    product(bfloat16, 4096, 4096, 4096, accumulate_into=total, **wgrad)
    for rows in (1024, 256, 16):
        product(bfloat16, rows, 2048, 4096)
    product(bfloat16, 4095, 4095, 4095, **wgrad)
    for rows in (4096, 16):
        product(torch.float32, rows, 4096, 1024)
    one, matrix = torch.empty(1), torch.empty(4096, 4096).to(float8)
    rows_scale, blocks_scale = torch.empty(4096, 32), torch.empty(32, 32)
    exponents = torch.empty(4096, 128, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for a_scale, b_scale, options in (
        (one, one, {}),
        (blocks_scale, rows_scale, {}),
        (exponents, exponents, {}),
        (blocks_scale, rows_scale, {**wgrad, **grad}),
    ):
        scales = {"A_scale_inv": a_scale, "B_scale_inv": b_scale}
        with contextlib.suppress(NotSupportedError):  # older devices have no float8
            flagos.generic_gemm(matrix, matrix, **scales, **options)  # type: ignore[arg-type]
    weights = [torch.empty(4096, 4096, dtype=bfloat16) for _ in range(4)]
    flagos.te_general_grouped_gemm(weights, [saved], [1024] * 4, bias=[bias] * 4, gelu=True)
    flagos.te_general_grouped_gemm(
        [saved], [saved], [1000, 24, 3000, 72], accumulate_into=[total] * 4, **wgrad
    )


def call_attention_layout() -> None:
    import torch

    from transformer_engine_fl.backends.flagos import attention_layout as flagos

    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tokens = torch.zeros(6, 8, 128, dtype=dtype)
        qkv = torch.zeros(6, 2, 8, 384, dtype=dtype)
        flagos.fa_prepare_bwd(*flagos.fa_prepare_fwd(qkv).unbind())
        flagos.convert_bshd_to_thd(flagos.convert_thd_to_bshd(tokens, lengths, 4), lengths, 6)
        # With dense heads, and side by side in one tensor, where heads are apart.
        caches = torch.zeros(2, 2, 8, 8, 128, dtype=dtype)
        beside = torch.zeros(2, 8, 8, 256, dtype=dtype)
        for cache in (caches.unbind(), beside.chunk(2, -1)):
            for options in ({"page_table": lengths[:2, None]}, {"batch_indices": lengths[1:]}):
                flagos.copy_to_kv_cache(tokens, tokens, *cache, lengths, lengths, **options)
        padded = tokens.view(3, 2, 8, 128)
        flagos.copy_to_kv_cache(
            padded, padded, *caches.unbind(), lengths, lengths, qkv_format="sbhd"
        )


def call_rope() -> None:
    import torch

    from transformer_engine_fl.backends.flagos import rope as flagos

    freqs = torch.zeros(6, 1, 1, 128)
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    x = torch.zeros(6, 2, 8, 128, dtype=torch.bfloat16)
    flagos.fused_rope_forward(x, freqs, start_positions=lengths[1:])
    flagos.fused_rope_backward(x, freqs[..., :64], interleaved=True)
    flagos.fused_rope_forward(x[:, 0], freqs, qkv_format="thd", cu_seqlens=lengths)
    flagos.fused_rope_forward(x.double(), freqs)
    split = (512, 128, 128)
    qkv = torch.zeros(6, 2, 4, sum(split), dtype=torch.bfloat16)
    parts = flagos.fused_qkv_rope_forward(qkv, freqs, freqs, qkv_split=split)
    flagos.fused_qkv_rope_backward(
        *parts, freqs, freqs[..., :64], qkv_split=split, interleaved=True
    )


def call_context_parallel() -> None:
    import torch

    from transformer_engine_fl.backends.flagos import context_parallel as flagos

    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    flagos.thd_get_partitioned_indices(lengths, 8, 2, 0)
    for dtype, kind in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        tokens = torch.zeros(6, 8, 128, dtype=dtype)
        half = flagos.thd_read_half_tensor(tokens, lengths, 1)
        for ways in (("add", "copy"), ("copy", "copy"), ("none", "add")):
            step = half if "none" in ways else tokens
            flagos.thd_grad_correction(
                tokens, step, lengths, first_half=ways[0], second_half=ways[1]
            )
        for packed, shape in ((True, (8, 6)), (False, (2, 8, 4))):
            lse = torch.zeros(shape, dtype=kind)
            halves = flagos.thd_read_second_half_lse(
                lse, lengths, shape[-1] // 2, lse_packed=packed
            )
            flagos.thd_second_half_lse_correction(lse, halves, lengths, lse_packed=packed)
            step, its = (half, halves) if packed else (tokens, lse)
            flagos.thd_out_correction(
                tokens, step, lse, its, lengths, only_second_half=packed, lse_packed=packed
            )


def call_dropout() -> None:
    import torch

    from transformer_engine_fl.backends.flagos import dropout as flagos

    for dtype in (torch.bfloat16, torch.float64):
        for width in (4096, 4097):
            x = torch.zeros(3, width, dtype=dtype)
            _, mask = flagos.dropout_fwd(x, 0.1, seed=1)
            flagos.dropout_bwd(x, mask, 0.1)


def call_optimizer() -> None:
    import torch

    from transformer_engine_fl.backends.flagos import optimizer as flagos

    float32, bfloat16, float64 = torch.float32, torch.bfloat16, torch.float64
    number, flag = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    count = torch.ones(1, dtype=torch.int32)

    def some(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(4096, dtype=dtype)]

    def states(grad: torch.dtype, param: torch.dtype, moment: torch.dtype) -> Any:
        return some(grad), some(param), some(moment), some(moment)

    for dtype in (float32, bfloat16, float64):
        flagos.multi_tensor_scale(some(dtype), some(dtype), 2.0, noop_flag=flag)
        flagos.multi_tensor_unscale_l2norm(some(dtype), number, per_tensor=True, noop_flag=flag)
        wide = torch.float64 if dtype == float64 else float32
        flagos.multi_tensor_adam(*states(dtype, dtype, wide), 0.1, 1, noop_flag=flag)
        flagos.multi_tensor_sgd(*states(dtype, dtype, dtype)[:3], 0.1, 0.1, 0.9)
    odd = [torch.zeros(4097)[1:]]
    flagos.multi_tensor_adam(odd, odd, some(float32), some(float32), 0.1, 1)
    mixed = states(bfloat16, bfloat16, float32)
    masters = some(float32)
    flagos.multi_tensor_l2norm(mixed[0])
    flagos.multi_tensor_adam(*states(float32, bfloat16, bfloat16), 0.1, 1, master_params=masters)
    flagos.multi_tensor_adam(*mixed, 0.1, 1, master_params=masters)
    options: Any = {"inv_scale": number, "noop_flag": flag, "decoupled_weight_decay": False}
    flagos.multi_tensor_adam_capturable_master(*mixed, masters, number, count, 0.2, **options)
    halves = some(torch.int16)
    flagos.multi_tensor_adam_param_remainder(*mixed, halves, 0.1, 1)
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        of_each = [torch.ones(1)], [torch.ones(1)], [torch.ones(1)]
        flagos.multi_tensor_adam_fp8(*states(bfloat16, kind, float32), masters, *of_each, 0.1, 1)
    steps: Any = {"nesterov": True, "wd_after_momentum": True, "model_params": some(bfloat16)}
    flagos.multi_tensor_sgd(*states(float32, float32, float32)[:3], 0.1, 0.1, 0.9, **steps)
    flagos.multi_tensor_sgd(*states(float32, float32, float32)[:3], 0.1)
    for powers in (False, True):
        flagos.multi_tensor_compute_scale_and_scale_inv(
            some(float32), some(float32), some(float32), 448.0, force_pow_2_scales=powers
        )
    flagos.multi_tensor_compute_scale_inv_e8m0(some(bfloat16), some(torch.uint8), noop_flag=flag)


def call_activation() -> None:
    import torch

    from transformer_engine_fl import ops
    from transformer_engine_fl.backends.flagos import activation as flagos

    for name in ACTIVATIONS:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.zeros(3, 8192, dtype=dtype)
            if ops.CATALOGUE[name].backward is not None:
                getattr(flagos, name)(x)
            else:
                half = x[:, :4096].contiguous()
                getattr(flagos, name)(half if "glu" in name else x, x)


def call_softmax() -> None:
    import torch

    from transformer_engine_fl.backends.flagos import softmax as flagos

    for name in SOFTMAX:
        for width in SOFTMAX_WIDTHS:
            scores = torch.zeros(3, width, dtype=torch.bfloat16)
            mask = (scores != 0,) if name == "scaled_masked_softmax" else ()
            getattr(flagos, f"{name}_forward")(scores, *mask)
            getattr(flagos, f"{name}_backward")(scores, scores)


def call_loss() -> None:
    import torch

    from transformer_engine_fl.backends.flagos import loss as flagos

    target, row = torch.zeros(3, dtype=torch.int64), torch.zeros(3)
    for width in LOSS_WIDTHS:
        logits = torch.zeros(3, width, dtype=torch.bfloat16)
        for options in ({}, {"softcap": 30.0, "label_smoothing": 0.1}):
            flagos.cross_entropy_fwd(logits, target, **options)
            flagos.cross_entropy_bwd(row, logits, target, row, row, **options)
    flagos.cross_entropy_partial_fwd(logits.float(), target)
    flagos.cross_entropy_bwd(row.double(), logits.double(), target, row.double())
    flagos.cross_entropy_merge(torch.zeros(2, 3, 4), target, vocab_size=8, label_smoothing=0.1)
    for dtype in (torch.bfloat16, torch.float16):
        input, weight = torch.zeros(3, 16, dtype=dtype), torch.zeros(5001, 16, dtype=dtype)
        bias = torch.zeros(5001, dtype=dtype)
        flagos.fused_linear_cross_entropy_fwd(input, weight, target, bias)
        flagos.fused_linear_cross_entropy_bwd(row, input, weight, target, row, bias)


def call_normalization() -> None:
    import torch

    from transformer_engine_fl.backends.flagos import normalization as flagos

    for name, widths in FORWARD_WIDTHS.items():
        for width in widths:
            x = torch.zeros(3, width, dtype=getattr(torch, name))
            weight = torch.zeros(width, dtype=x.dtype)
            flagos.rmsnorm_fwd(x, weight)
            flagos.layernorm_fwd(x, weight, weight)
    for name, widths in BACKWARD_WIDTHS.items():
        for width in widths:
            x = torch.zeros(3, width, dtype=getattr(torch, name))
            weight, saved = torch.zeros(width, dtype=x.dtype), torch.zeros(3)
            flagos.rmsnorm_bwd(x, x, saved, weight)
            flagos.layernorm_bwd(x, x, saved, saved, weight)


def kernels_of(module: Any) -> Iterator[Any]:
    """The kernels of a module, less the functions that kernels call."""
    from triton.runtime import JITFunction

    functions = [value for value in vars(module).values() if isinstance(value, JITFunction)]
    for function in functions:
        call = re.compile(rf"\b{function.__name__}\(")
        if not any(call.search(other.src) for other in functions if other is not function):
            yield function


def compile_for(name: str) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from transformer_engine_fl.backends.flagos import (
        _launch,
        _numbers,
        _products,
        _sums,
        activation,
        attention_layout,
        context_parallel,
        dropout,
        loss,
        normalization,
        optimizer,
        rope,
        softmax,
    )

    backend, arch, warp_size, shared = TARGETS[name]
    limits = _launch.Limits(
        132, shared, warp_size, *((65536, arch) if backend == "cuda" else (0, 0))
    )
    recorder = Recorder()
    _launch.limits = lambda device: limits  # type: ignore[assignment]
    _launch.unsupported_device = lambda device: None
    _launch.has_ptx = lambda: backend == "cuda"
    _launch.Launch.__call__ = lambda *call: recorder.record(*call)  # type: ignore[method-assign]
    call_operators()
    cases = []
    for kernel, signature, constants, options in recorder.cases.values():
        attributes = {
            (place,): [["tt.divisibility", 16]]
            for place, kind in enumerate(signature.values())
            if kind[0] == "*"
        }
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget(backend, arch, warp_size),
            options=options,
        )
        ptx, names = compiled.asm.get("ptx", ""), kernel.arg_names
        aligned = "ALIGNED" in names and constants[(names.index("ALIGNED"),)]
        cases.append(
            {
                "kernel": kernel.__name__,
                "dtype": next(iter(signature.values()))[1:],
                "constants": str(constants),
                # elements, where a kernel has them laid out in vectors itself
                "vector": constants.get((names.index("VEC"),)) if "VEC" in names else None,
                # elements that lie side by side in each of a row's tensors
                "run": constants[(names.index("RUN"),)] if aligned else None,
                "binary": len(compiled.asm["cubin" if backend == "cuda" else "hsaco"]),
                "shared": compiled.metadata.shared,
                "wide loads": len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\S* .*0x10", ptx)),
                "wide stores": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
                # one 2-byte element at a time
                "narrow accesses": len(re.findall(r"(?:ld|st)\.global(?!\S*\.v4)\S*\.b16", ptx)),
            }
        )
    modules = (
        _numbers,
        _products,
        _sums,
        activation,
        attention_layout,
        context_parallel,
        dropout,
        loss,
        normalization,
        optimizer,
        rope,
        softmax,
    )
    kernels = [kernel for module in modules for kernel in kernels_of(module)]
    missing = [f"{it.module}.{it.__name__}" for it in kernels if id(it) not in recorder.kernels]
    return {"cases": cases, "never launched": missing}


if __name__ == "__main__":
    print(json.dumps(compile_for(sys.argv[1])))

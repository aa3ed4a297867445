"""Quantization: each format by rows and both ways, groups, transposes and shards."""

from __future__ import annotations

import torch

from transformer_engine_fl.backends.flagos import quantization as flagos
from transformer_engine_fl.ops._formats import FORMATS

MODULES = ("_casting", "quantization")


def launch() -> None:
    x, scale = torch.zeros(256, 4096, dtype=torch.bfloat16), torch.ones(1)
    sizes = torch.zeros(8, dtype=torch.int64)
    for name, form in FORMATS.items():
        flagos.quantize(x, format=name)
        flagos.quantize(x, format=name, columnwise=True)
        flagos.group_quantize(x, sizes, format=name, columnwise=True)
        kind: torch.dtype = getattr(torch, form.dtypes[0])
        data = torch.zeros(256, 4096, dtype=torch.uint8).view(kind)
        shape = form.scale_shape(256, 4096 * form.values_per_byte)
        inverse = torch.zeros(shape).to(getattr(torch, form.scale_dtype))
        whole = scale if form.global_scale else None
        for dtype in (torch.bfloat16, torch.float32):
            flagos.dequantize(data, inverse, whole, format=name, out_dtype=dtype)
    # Large enough for staged scales.
    for name in ("mxfp8", "block_1x128"):
        flagos.quantize(torch.empty(8192, 4096, dtype=x.dtype), format=name, columnwise=True)
    flagos.quantize(x, scale, dtype=torch.float8_e5m2, columnwise=True)
    flagos.bgrad_quantize(x, format="mxfp8")
    for rows in (254, 255):
        flagos.quantize(x[:rows, :4095], format="block_1x128", columnwise=True)
    data = torch.zeros(256, 4096, dtype=torch.uint8)
    flagos.fp8_transpose(data)
    for tensor in (x, x.float(), x.view(16, 16, 4096), data.view(16, -1, 8)):
        flagos.swap_first_dims(tensor)
    flagos.fp8_block_scaling_compute_partial_amax(x.view(-1), 512, 4096, 4096)
    flagos.fp8_block_scaling_partial_cast(x.view(-1), torch.zeros(4, 32), 512, 4096, 4096)
    for algorithm in ("max", "most_recent"):
        flagos.fused_amax_and_scale_update_after_reduction(
            scale, [torch.zeros(1024, 1)], [scale], amax_compute_algo=algorithm
        )

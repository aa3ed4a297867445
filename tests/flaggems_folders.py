"""Vendors' folders in FlagGems' style, as its guides describe them, for tests to write.

The folders do not refer to this project. In the form ``OLD`` a folder lists its operators with
functions, in the form ``NEW`` with its exports. The kernels are plain torch for any device, and
record their runs in ``CALLS``; ``POINTWISE`` has a Triton kernel.
"""

from __future__ import annotations

from pathlib import Path

DECLARATION = """\
from {backend_utils} import VendorInfoBase

vendor_info = VendorInfoBase(
    vendor_name="{vendor}",
    device_name="{device}",
    device_query_cmd="{command}",
    dispatch_key={key!r},
)

CUSTOMIZED_UNUSED_OPS = {unused!r}

__all__ = ["*"]
"""

OLD = """\
from backend_utils import Autograd

from . import add, gelu


def get_specific_ops():
    return (
        ("add.Tensor", add.add, Autograd.disable),
        ("gelu", gelu.gelu, Autograd.enable),
        ("silu", gelu.silu, Autograd.disable),
    )


def get_unused_ops():
    return ("cumsum", "silu")


__all__ = ["get_specific_ops", "get_unused_ops"]
"""

NEW = """\
from .add import add
from .gelu import gelu
from .gelu import silu
from .norm import layer_norm
from .norm import zeta_norm

__all__ = ["add", "gelu", "silu", "layer_norm", "zeta_norm"]
"""

ADD = """\
import torch

CALLS = []


def add(x, y, *, alpha=1):
    CALLS.append("add")
    return torch.sub(x, y, alpha=-alpha)
"""

GELU = """\
import torch
from flag_gems import runtime
from flag_gems.runtime import device, torch_device_fn

CALLS = []


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, approximate):
        CALLS.append("gelu")
        ctx.save_for_backward(A)
        ctx.approximate = approximate
        with torch_device_fn.device(A.device):
            return torch.nn.functional.gelu(A.float(), approximate=approximate).to(A.dtype)

    @staticmethod
    def backward(ctx, out_grad):
        (inp,) = ctx.saved_tensors
        with torch.enable_grad():
            x = inp.detach().float().clamp(-50, 50).requires_grad_()  # beyond it is flat
            y = torch.nn.functional.gelu(x, approximate=ctx.approximate)
        return torch.autograd.grad(y, x, out_grad.float())[0].to(inp.dtype), None


def gelu(A, *, approximate="none"):
    return Gelu.apply(A, approximate)


def silu(A):
    CALLS.append("silu")
    return (A.float() * torch.sigmoid(A.float())).to(A.dtype)
"""

NORM = """\
import torch

CALLS = []


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    CALLS.append("layer_norm")
    x = input.float()
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight.float()
    y = y if bias is None else y + bias.float()
    return y.to(input.dtype), mean.to(input.dtype), rstd.to(input.dtype)


def zeta_norm(x, factor=2.0):
    CALLS.append("zeta_norm")
    return x * factor
"""

FUSED = """\
import torch

CALLS = []


class SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, B):
        CALLS.append("silu_and_mul")
        return (torch.nn.functional.silu(A.float()) * B.float()).to(A.dtype)


def silu_and_mul(A, B):
    return SiluAndMul.apply(A, B)


__all__ = ["silu_and_mul"]
"""

POINTWISE = """\
import triton
import triton.language as tl
from flag_gems import runtime
from flag_gems.utils import libentry, pointwise_dynamic
from flag_gems.utils import triton_lang_extension as tle
from flag_gems.runtime import torch_device_fn
import torch


@pointwise_dynamic(promotion_methods=[(0, "DEFAULT")])
@triton.jit
def silu_forward(x):
    x_fp32 = x.to(tl.float32)
    return x_fp32 / (1.0 + tl.exp(-x_fp32))


@pointwise_dynamic(
    is_tensor=[True, True, False], promotion_methods=[(0, 1, "DEFAULT"), (0, "ALWAYS_BOOL")]
)
@triton.jit
def scaled_sum(x, y, factor):
    return (x + y) * factor, x > y


@libentry()
@triton.autotune(configs=runtime.get_tuned_config("softmax_inner"), key=["N"])
@triton.heuristics(runtime.get_heuristic_config("double"))
@triton.jit
def double_kernel(out, inp, N, TILE_N: tl.constexpr, FACTOR: tl.constexpr):
    column = tle.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    tl.store(out + column, tl.load(inp + column, mask=column < N) * FACTOR, mask=column < N)


def double(x):
    out = torch.empty_like(x)
    with torch_device_fn.device(x.device):
        double_kernel[lambda meta: (triton.cdiv(x.numel(), meta["TILE_N"]),)](out, x, x.numel())
    return out


def silu(self):
    return silu_forward(self)


__all__ = ["double", "scaled_sum", "silu"]
"""

CONFIGS = """\
cross_entropy_loss:
- META:
    BLOCK_C: 1024
    BLOCK_D: 1
  num_warps: 4
- gen: true
  param_map:
    META:
      BLOCK_C: block_c
      BLOCK_D: 1
    num_warps: warps
  block_c:
  - 512
  - 2048
  warps:
  - 4
  - 8
softmax_inner:
- META:
    TILE_N: 32
- META:
    TILE_N: 64
"""

HEURISTICS = """\
def simple_elementwise_blocksize_heur(args):
    return 1024


HEURISTICS_CONFIGS = {
    "elementwise_generic": {
        "BLOCK_SIZE": simple_elementwise_blocksize_heur,
        "num_warps": lambda args: 8,
    },
    "double": {"FACTOR": lambda args: 2},
    "dropout": {"BLOCK": lambda args: 512 if args["N"] <= 512 else 1024},
}
"""


def declaration(
    vendor: str = "zeta",
    device: str = "cpu",
    command: str = "true",
    *,
    key: str | None = None,
    unused: object = (),
    backend_utils: str = "backend_utils",
) -> str:
    """The ``__init__.py`` of a folder."""
    return DECLARATION.format(
        vendor=vendor,
        device=device,
        command=command,
        key=key,
        unused=unused,
        backend_utils=backend_utils,
    )


def write(
    parent: Path,
    name: str = "_zeta",
    init: str | None = None,
    *,
    ops: str = NEW,
    configs: str = CONFIGS,
    heuristics: str = HEURISTICS,
    **modules: str,
) -> Path:
    """Write a folder; ``modules`` are added to its ``ops``, or replace modules there."""
    folder = parent / name
    (folder / "ops").mkdir(parents=True)
    (folder / "fused").mkdir()
    (folder / "__init__.py").write_text(declaration() if init is None else init)
    (folder / "heuristics_config_utils.py").write_text(heuristics)
    (folder / "tune_configs.yaml").write_text(configs)
    (folder / "ops" / "__init__.py").write_text(ops)
    for module, text in ({"add": ADD, "gelu": GELU, "norm": NORM} | modules).items():
        (folder / "ops" / f"{module}.py").write_text(text)
    (folder / "fused" / "__init__.py").write_text(FUSED)
    return folder

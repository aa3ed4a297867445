"""Vendors' packages in Liger-Kernel's style, as its guide describes them, for tests to write.

The packages do not refer to this project. Their kernels are plain torch for any device, and
record their runs in ``CALLS``.
"""

from __future__ import annotations

from pathlib import Path

IMPL_INFO = """\
from liger_kernel.ops.backends.registry import ImplInfo
from liger_kernel.ops.backends.registry import register_impl

register_impl(ImplInfo(
    name="{name}",
    devices={devices!r},
    default_devices={default_devices!r},
    module_path=f"{{__name__}}.ops",
))
"""

VENDOR_INFO = """\
from liger_kernel.ops.backends.registry import VendorInfo, register_vendor

register_vendor(VendorInfo(vendor="{name}", device="cpu"))
"""

OPS = '''\
"""Operators of a vendor."""

from .kernels import LigerGELUMulFunction
from .kernels import LigerRMSNormFunction
from .kernels import LigerFancyFunction
from .kernels import fancy_forward
from .kernels import rms_norm_backward

__all__ = [
    "LigerFancyFunction",
    "LigerGELUMulFunction",
    "LigerRMSNormFunction",
    "fancy_forward",
    "rms_norm_backward",
]
'''

KERNELS = """\
import torch
from liger_kernel.ops.utils import calculate_settings, ensure_contiguous
from liger_kernel.utils import infer_device

CALLS = []


class LigerGELUMulFunction(torch.autograd.Function):
    @staticmethod
    @ensure_contiguous
    def forward(ctx, a, b):
        CALLS.append("LigerGELUMulFunction")
        ctx.save_for_backward(a, b)
        return (torch.nn.functional.gelu(a.float(), approximate="tanh") * b.float()).to(a.dtype)

    @staticmethod
    @ensure_contiguous
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        with torch.enable_grad():
            x, y = (it.detach().float().requires_grad_() for it in (a, b))
            c = torch.nn.functional.gelu(x, approximate="tanh") * y
            da, db = torch.autograd.grad(c, (x, y), dc.float())
        a.copy_(da)  # as a kernel that saves memory
        b.copy_(db)
        return a, b


def rms_norm_backward(
    dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode
):
    assert casting_mode == 1 and BLOCK_SIZE >= X.shape[-1]
    dy = dY.reshape(X.shape).float()
    x_hat = X.float() * RSTD[:, None]
    m = dy * (W.float() + offset)
    dx = (m - x_hat * (m * x_hat).mean(-1, keepdim=True)) * RSTD[:, None]
    return dx.to(X.dtype).view(dY.shape), (dy * x_hat).sum(0).to(W.dtype)


class LigerRMSNormFunction(torch.autograd.Function):
    @staticmethod
    @ensure_contiguous
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        CALLS.append("LigerRMSNormFunction")
        x = X.float()
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(X, W, rstd)
        ctx.offset = offset
        return (x * rstd * (W.float() + offset)).to(X.dtype)

    @staticmethod
    @ensure_contiguous
    def backward(ctx, dY):
        X, W, rstd = ctx.saved_tensors
        flat = X.view(-1, X.shape[-1])
        BLOCK_SIZE, num_warps = calculate_settings(X.shape[-1])
        dX, dW = rms_norm_backward(
            dY, flat, W, rstd.view(-1), ctx.offset, 1, BLOCK_SIZE, num_warps, False, None
        )
        return dX, dW, None, None, None, None, None


def fancy_forward(x, times=2):
    return x * times


class LigerFancyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, times=2):
        ctx.times = times
        return x * times

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.times, None
"""


def write(
    folder: Path,
    name: str,
    declaration: str,
    *,
    ops: str = OPS,
    kernels: str = KERNELS,
) -> Path:
    """Write a package ``name`` into ``folder``."""
    package = folder / name
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text(declaration)
    (package / "ops" / "__init__.py").write_text(ops)
    (package / "ops" / "kernels.py").write_text(kernels)
    return package


def impl_info(
    name: str, devices: tuple[str, ...] = ("cpu",), default_devices: tuple[str, ...] | None = None
) -> str:
    """The declaration of an implementation; ``default_devices`` are all its devices if None."""
    default = devices if default_devices is None else default_devices
    return IMPL_INFO.format(name=name, devices=devices, default_devices=default)


def vendor_info(name: str) -> str:
    """The declaration of a vendor, in the older form."""
    return VENDOR_INFO.format(name=name)

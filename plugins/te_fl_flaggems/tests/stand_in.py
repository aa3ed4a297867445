"""A stand-in for flag_gems 5.0.2: its signatures in plain torch, as strict as its kernels.

It tests how arguments are passed and results returned; FlagGems' own kernels are tested only on a
GPU.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pytest

functional = torch.nn.functional
NARROW = (torch.float16, torch.bfloat16, torch.float32)


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert not tensor.requires_grad
        assert tensor.is_contiguous()
        assert tensor.dtype in NARROW
        assert tensor.numel()


def _like(value: Tensor, x: Tensor) -> Tensor:
    return value.to(x.dtype)


def gelu(self: Tensor, *, approximate: str = "none") -> Tensor:
    _check(self)
    return _like(functional.gelu(self.float(), approximate=approximate), self)


def gelu_backward(grad_output: Tensor, self: Tensor, *, approximate: str = "none") -> Tensor:
    x, dy = self.float(), grad_output.float()
    return _like(torch.ops.aten.gelu_backward(dy, x, approximate=approximate), self)


def silu(self: Tensor) -> Tensor:
    _check(self)
    return _like(functional.silu(self.float()), self)


def silu_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    _check(grad_output, self)
    x, s = self.float(), torch.sigmoid(self.float())
    return _like(grad_output.float() * s * (1 + x * (1 - s)), self)


def relu(self: Tensor) -> Tensor:
    _check(self)
    return torch.relu(self)


def _gated(unit: Any) -> Any:
    def forward(input_tensor: Tensor, quantizer: Any = None) -> Tensor:
        _check(input_tensor)
        a, b = input_tensor.float().chunk(2, -1)
        return _like(unit(a) * b, input_tensor)

    def backward(grad_output: Tensor, input_tensor: Tensor, quantizer: Any = None) -> Tensor:
        _check(grad_output, input_tensor)
        a, b = input_tensor.float().chunk(2, -1)
        with torch.enable_grad():
            bounded = a.clamp(-100, 100).requires_grad_()  # beyond, the derivative is constant
            slope = torch.autograd.grad(unit(bounded).sum(), bounded)[0]
        dy = grad_output.float()
        return _like(torch.cat([dy * b * slope, dy * unit(a)], -1), input_tensor)

    return forward, backward


swiglu, dswiglu = _gated(functional.silu)
geglu, dgeglu = _gated(lambda a: functional.gelu(a, approximate="tanh"))
reglu, dreglu = _gated(torch.relu)


def rms_norm_forward(
    x: Tensor, normalized_shape: Any, weight: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    _check(x, weight)
    inv_rms = torch.rsqrt(x.float().square().mean(-1) + eps)
    return _like(x.float() * inv_rms[..., None] * weight.float(), x), inv_rms.view(-1)


def rms_norm_backward(
    dy: Tensor, x: Tensor, inv_rms: Tensor, normalized_shape: Any, weight: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    _check(dy, x, weight)
    assert inv_rms.dtype is torch.float32
    scale = inv_rms.view(*x.shape[:-1], 1)
    x_hat, m = x.float() * scale, dy.float() * weight.float()
    dx = (m - x_hat * (m * x_hat).mean(-1, keepdim=True)) * scale
    dw = (dy.float() * x_hat).reshape(-1, x.shape[-1]).sum(0)
    return _like(dx, x), _like(dw, x)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, normalized_shape: Any, weight: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight)
    total = x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    x.copy_(total * scale * weight.float())
    residual.copy_(total)
    return x, residual


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(input)
    x = input.float()
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight.float()
    y = y if bias is None else y + bias.float()
    return _like(y, input), _like(mean.view(-1), input), _like(rstd.view(-1), input)


def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Any,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    output_mask: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert weight is not None
    assert bias is not None
    _check(grad_out, input, weight)
    assert input.dim() == 2  # the first dimension is the rows
    x_hat = (input.float() - mean[:, None]) * rstd[:, None]
    m = grad_out.float() * weight.float()
    dx = m - m.mean(-1, keepdim=True) - x_hat * (m * x_hat).mean(-1, keepdim=True)
    dw, db = (grad_out.float() * x_hat).sum(0), grad_out.float().sum(0)
    return _like(dx * rstd[:, None], input), _like(dw, weight), _like(db, bias)


def softmax(self: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    _check(self)
    return _like(torch.softmax(self.float(), dim), self)


def softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    _check(grad_output, output)
    dy, y = grad_output.float(), output.float()
    return (y * (dy - (dy * y).sum(dim, keepdim=True))).to(input_dtype)


def log_softmax(self: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    return torch.log_softmax(self, dim)


def log_softmax_backward(
    grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    return grad_output - output.exp() * grad_output.sum(dim, keepdim=True)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """As in the folder for Hopper: strict about TMA, and one column computed in the given dtype."""
    assert a.dim() == b.dim() == 2
    assert a.dtype is b.dtype
    if b.shape[1] == 1:
        terms = (a * b.t()).unbind(1)
        return functools.reduce(torch.add, terms)[:, None]
    if all(it.shape[1] * it.element_size() % 16 == 0 for it in (a, b)):
        _describe(a)
        _describe(b)
    return _like(torch.mm(a.float(), b.float()), a)


mm.__module__ = "hopper.ops.mm"


def _describe(matrix: Tensor) -> None:
    rows = matrix if matrix.stride(1) == 1 else matrix.T
    assert matrix.numel(), "shape must be positive"
    assert matrix.data_ptr() % 16 == 0, "base must be 16-byte aligned"
    assert rows.stride(0) * rows.element_size() % 16 == 0, "strides must be 16-byte aligned"
    assert rows.stride(1) == 1, "Last dimension must be contiguous"


def addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return alpha * torch.mm(mat1, mat2) + beta * bias


def bmm(A: Tensor, B: Tensor) -> Tensor:
    return torch.bmm(A, B)


def dropout(input: Tensor, p: float, train: bool = True) -> tuple[Tensor, Tensor]:
    kept = torch.rand_like(input) > p if train else torch.ones_like(input, dtype=torch.bool)
    return input * kept / (1 - p if train else 1), kept


def dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad_output * mask * scale


def install(monkeypatch: pytest.MonkeyPatch, vendor: str = "nvidia", **own: Any) -> ModuleType:
    """Install a flag_gems with these functions, for one vendor with functions of its ``own``."""
    here = sys.modules[__name__]
    modules = {
        name: ModuleType(name)
        for name in ("flag_gems", "flag_gems.ops", "flag_gems.fused", "flag_gems.runtime.backend")
    }
    fused = ("swiglu", "dswiglu", "geglu", "dgeglu", "reglu", "dreglu", "fused_add_rms_norm")
    for name, value in vars(here).items():
        if callable(value) and not name.startswith("_") and name not in ("install", "Any"):
            setattr(modules[f"flag_gems.{'fused' if name in fused else 'ops'}"], name, value)
    root = modules["flag_gems"]
    root.vendor_name, root.__version__ = vendor, "5.0.2"
    for name, value in own.items():
        setattr(root, name, value)
    modules["flag_gems.runtime.backend"].get_unused_ops = lambda name: ["silu", "mm"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return root

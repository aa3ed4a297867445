"""quack's CuTe kernels, called without autograd."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from workloads.loss import mean_grad

from peers.peer import Peer, Table, Work

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-5


def _module(name: str) -> Any:
    # Some modules are hidden by a function of the same name in the package.
    return importlib.import_module(f"quack.{name}")


def _rmsnorm_fwd(x: Tensor, weight: Tensor) -> Work:
    rmsnorm = _module("rmsnorm")
    return Work(lambda: rmsnorm.rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)[:1])


def _rmsnorm_bwd(dy: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor) -> Work:
    rmsnorm = _module("rmsnorm")
    return Work(lambda: rmsnorm.rmsnorm_bwd(x, gamma, dy, rsigma)[:2])


def _rmsnorm_fwd_add(x: Tensor, residual: Tensor, weight: Tensor) -> Work:
    rmsnorm = _module("rmsnorm")
    return Work(
        lambda: rmsnorm.rmsnorm_fwd(x, weight, residual=residual, eps=EPS, store_rstd=True)[:2]
    )


def _rmsnorm_bwd_add(dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor) -> Work:
    rmsnorm = _module("rmsnorm")
    return Work(lambda: rmsnorm.rmsnorm_bwd(x, gamma, dz, rsigma, dresidual_out=add)[:2])


def _layernorm_fwd(x: Tensor, weight: Tensor, bias: Tensor) -> Work:
    rmsnorm, wide = _module("rmsnorm"), (weight.float(), bias.float())
    return Work(lambda: rmsnorm.layernorm_fwd(x, *wide, eps=EPS))


def _layernorm_bwd(dy: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor) -> Work:
    rmsnorm = _module("rmsnorm")
    return Work(lambda: rmsnorm.layernorm_bwd(x, gamma, dy, rsigma, mu))


def _softmax(x: Tensor) -> Work:
    softmax = _module("softmax")
    return Work(lambda: softmax.softmax_fwd(x))


def _softmax_backward(grad: Tensor, output: Tensor) -> Work:
    softmax = _module("softmax")
    return Work(lambda: softmax.softmax_bwd(grad, output))


def _cross_entropy_fwd(logits: Tensor, target: Tensor) -> Work:
    cross_entropy = _module("cross_entropy")
    return Work(lambda: cross_entropy.cross_entropy_fwd(logits, target, return_lse=True))


def _cross_entropy_bwd(grad_loss: Tensor, logits: Tensor, target: Tensor, lse: Tensor) -> Work:
    cross_entropy = _module("cross_entropy")
    return Work(lambda: cross_entropy.cross_entropy_bwd(logits, target, grad_loss, lse))


def _cross_entropy(logits: Tensor, target: Tensor) -> Work:
    cross_entropy = _module("cross_entropy")

    def both() -> Any:
        loss, lse = cross_entropy.cross_entropy_fwd(logits, target, return_lse=True)
        grad = mean_grad(target)
        return cross_entropy.cross_entropy_bwd(logits, target, grad, lse), loss

    return Work(both)


def _cross_entropy_at_once(logits: Tensor, target: Tensor) -> Work:
    cross_entropy = _module("cross_entropy")
    return Work(
        lambda: cross_entropy.cross_entropy_fwd(logits, target, return_lse=True, return_dx=True),
        lambda results: (results[2] / target.numel(), results[0]),
    )


QUACK: dict[str, Table] = {
    "quack": {
        "rmsnorm_fwd": Peer(_rmsnorm_fwd),
        "rmsnorm_bwd": Peer(_rmsnorm_bwd),
        "rmsnorm_fwd_add": Peer(_rmsnorm_fwd_add, "the sum is not rounded before the norm"),
        "rmsnorm_bwd_add": Peer(_rmsnorm_bwd_add),
        "layernorm_fwd": Peer(_layernorm_fwd, "with float32 parameters"),
        "layernorm_bwd": Peer(_layernorm_bwd),
        "scaled_softmax_forward": Peer(_softmax),
        "scaled_softmax_backward": Peer(_softmax_backward),
        "cross_entropy_fwd": Peer(_cross_entropy_fwd),
        "cross_entropy_bwd": Peer(_cross_entropy_bwd),
        "cross_entropy fwd+bwd": Peer(_cross_entropy, "a kernel for each direction"),
    },
    "quack, one kernel": {
        "cross_entropy fwd+bwd": Peer(
            _cross_entropy_at_once,
            "its forward computes the gradient of the sum of the losses, which is divided by the "
            "number of rows for the comparison only",
        )
    },
}

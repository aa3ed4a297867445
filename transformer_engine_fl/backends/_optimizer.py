"""The optimizer's operators, over the kernels of a set.

This module holds what all sets with kernels for lists of tensors share: which lists an operator
has, what its numbers are, and which launches it consists of. A set defines how a kernel is launched
(:class:`ListOperators`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_engine_fl.backends._arguments import check_fresh
from transformer_engine_fl.backends._lists import Demand, Group, ListPreparer, Tiles
from transformer_engine_fl.core.errors import NotSupportedError
from transformer_engine_fl.ops import optimizer as contracts
from transformer_engine_fl.ops._dtypes import math_dtype

if TYPE_CHECKING:
    from transformer_engine_fl.core.contract import Contract

__all__ = ["ListOperators"]

Cut = Callable[[torch.device, int, int], Tiles]

_MANTISSAS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_FORMS = {
    "plain": (),
    "master": ("master_params",),
    "remainder": ("param_remainders",),
    "fp8": ("master_params", "scales", "amaxes", "scale_invs"),
}
"""How a parameter is stored -> the further list for it, and lists of numbers."""
_STATES = ("grads", "params", "exp_avgs", "exp_avg_sqs")


def _launch_all(launches: list[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


class ListOperators:
    """The operators of a set.

    Args:
        preparer: how the set prepares lists.
        cuts: how lists are cut: for "scale", "l2norm", "adam", "sgd" and "compute_scale".
        refusal: gives why the set's kernels cannot run on a device; None if they can.
    """

    def __init__(
        self,
        preparer: ListPreparer,
        cuts: Mapping[str, Cut],
        refusal: Callable[[torch.device], str | None],
    ) -> None:
        self._preparer = preparer
        self._cuts = cuts
        self._refusal = refusal

    def _launch_of(
        self,
        name: str,
        demand: Demand,
        group: Group,
        others: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        **constants: Any,
    ) -> Callable[[], None]:
        """The launch of a kernel on a group's rows, to be made once those of all groups are ready.

        If making this function fails, nothing has been written.

        Args:
            name: the kernel's name.
            demand: the demand for which the table was made.
            group: the rows.
            others: pointers after the table's.
            numbers: numbers after the number of rows.
            constants: what the kernel depends on; a type is given as the dtype, and int16 and
                uint8 stand for bits.
        """
        raise NotImplementedError

    def _finish_norms(
        self,
        sums: Tensor,
        chunk_starts: Tensor | None,
        norm: Tensor,
        norms: Tensor | None,
        flag: Tensor | None,
    ) -> None:
        """Launch the kernel that computes norms from the sums of squares of all chunks.

        Args:
            sums: one for each chunk.
            chunk_starts: the first chunk of each row, then the number of chunks; None without rows.
            norm: the norm of all.
            norms: the norm of each row, if wanted and there are rows.
            flag: set if the norm is not finite.
        """
        raise NotImplementedError

    # ------------------------------------------------------------- scaling and norms

    def _scaled(self, contract: Contract[..., Any], **arguments: Any) -> None:
        demand = Demand(("inputs", "outputs"), self._cuts["scale"])
        lists = self._preparer.prepare(contract, demand, **arguments)
        scale, flag = lists.others["scale"], lists.others["noop_flag"]
        on_device = scale if isinstance(scale, Tensor) else None
        number = 1.0 if isinstance(scale, Tensor) else float(scale)
        launches = [
            self._launch_of(
                "scale", demand, group, (flag, on_device), (number,), X=x, Y=y, ACC=math_dtype(x)
            )
            for group in lists.groups
            for x, y in (group.dtypes,)
        ]
        _launch_all(launches)
        lists.finish()

    def multi_tensor_scale(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        scale: float,
        *,
        noop_flag: Tensor | None = None,
    ) -> None:
        """``multi_tensor_scale`` of the contract."""
        self._scaled(
            contracts.multi_tensor_scale,
            inputs=inputs,
            outputs=outputs,
            scale=scale,
            noop_flag=noop_flag,
        )

    def multi_tensor_scale_tensor(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        scale: Tensor,
        *,
        noop_flag: Tensor | None = None,
    ) -> None:
        """``multi_tensor_scale_tensor`` of the contract."""
        self._scaled(
            contracts.multi_tensor_scale_tensor,
            inputs=inputs,
            outputs=outputs,
            scale=scale,
            noop_flag=noop_flag,
        )

    def _norms_of(
        self, contract: Contract[..., Any], **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The norm of all inputs, and the norms of each."""
        op, inputs = contract.name, arguments["inputs"]
        demand = Demand(("inputs",), self._cuts["l2norm"], chunk_starts=True)
        lists = self._preparer.prepare(contract, demand, **arguments)
        flag, scale = lists.others["noop_flag"], lists.others.get("inv_scale")
        device = lists.device
        if device is None:
            beside = [it.device for it in (scale, flag) if it is not None]
            device = (*beside, torch.device("cpu"))[0]
            reason = self._refusal(device)
            if reason:
                raise NotSupportedError(f"{op}: without inputs the norm is on {device}: {reason}")
        wide = any(it.dtype == torch.float64 for it in inputs)
        dtype = torch.float64 if wide else torch.float32
        norm = torch.empty((1,), dtype=dtype, device=device)
        check_fresh(op, norm)
        sums = torch.empty((lists.chunks,), dtype=dtype, device=device)
        norms = None
        if lists.others["per_tensor"]:
            norms = torch.empty((len(inputs),), dtype=dtype, device=device)
        launches = [
            self._launch_of(
                "squares", demand, group, (scale, sums), (), X=group.dtypes[0], ACC=dtype
            )
            for group in lists.groups
        ]
        _launch_all(launches)
        # Without tensors there is no table either.
        self._finish_norms(sums, lists.chunk_starts, norm, norms if inputs else None, flag)
        lists.finish()
        return norm, norms

    def multi_tensor_l2norm(
        self, inputs: list[Tensor], *, per_tensor: bool = False, noop_flag: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``multi_tensor_l2norm`` of the contract."""
        return self._norms_of(
            contracts.multi_tensor_l2norm,
            inputs=inputs,
            per_tensor=per_tensor,
            noop_flag=noop_flag,
        )

    def multi_tensor_unscale_l2norm(
        self,
        inputs: list[Tensor],
        inv_scale: Tensor,
        *,
        per_tensor: bool = False,
        noop_flag: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``multi_tensor_unscale_l2norm`` of the contract."""
        return self._norms_of(
            contracts.multi_tensor_unscale_l2norm,
            inputs=inputs,
            inv_scale=inv_scale,
            per_tensor=per_tensor,
            noop_flag=noop_flag,
        )

    # ---------------------------------------------------------------------------------- Adam

    def _stepped(self, contract: Contract[..., Any], form: str, **arguments: Any) -> None:
        """A step of Adam."""
        demand = Demand(
            (*_STATES, *_FORMS[form]), self._cuts["adam"], numbers=3 if form == "fp8" else 0
        )
        lists = self._preparer.prepare(contract, demand, **arguments)
        if not lists.groups:
            return
        given = lists.others
        lr, step = given["lr"], given["step"]
        beta1, beta2 = float(given["beta1"]), float(given["beta2"])
        rate_there = step_there = None
        if isinstance(lr, Tensor):
            rate_there, lr = lr, 0.0
        powers = [1.0, 1.0]
        if given["bias_correction"]:
            if isinstance(step, Tensor):
                step_there = step
                powers = [math.log(it) if it else -math.inf for it in (beta1, beta2)]
            else:
                powers = [1 - it**step for it in (beta1, beta2)]
        numbers = (beta1, beta2, 1 - beta1, 1 - beta2, float(given["eps"]))
        launches = []
        for group in lists.groups:
            g, p, m, _, *w = group.dtypes
            bits = torch.int16 if form == "remainder" else torch.uint8
            whole = w[0] if form in ("master", "fp8") else p
            launch = self._launch_of(
                "adam",
                demand,
                group,
                (given["noop_flag"], rate_there, step_there, given.get("inv_scale")),
                (*numbers, float(given["weight_decay"]), float(lr), *powers),
                G=g,
                P=p if form in ("plain", "master") else bits,
                M=m,
                W=w[0] if w else None,
                ACC=math_dtype(whole),
                FORM=form,
                DECOUPLED=given["decoupled_weight_decay"],
                SHORT=beta1 < 0.5,
                MANTISSA=_MANTISSAS.get(p),
            )
            launches.append(launch)
        _launch_all(launches)
        lists.finish()

    def multi_tensor_adam(
        self,
        grads: list[Tensor],
        params: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        lr: float,
        step: int,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        master_params: list[Tensor] | None = None,
        noop_flag: Tensor | None = None,
    ) -> None:
        """``multi_tensor_adam`` of the contract."""
        self._stepped(
            contracts.multi_tensor_adam,
            "plain" if master_params is None else "master",
            grads=grads,
            params=params,
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            lr=lr,
            step=step,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            bias_correction=bias_correction,
            master_params=master_params,
            noop_flag=noop_flag,
        )

    def multi_tensor_adam_capturable(
        self,
        grads: list[Tensor],
        params: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        lr: Tensor,
        step: Tensor,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        inv_scale: Tensor | None = None,
        noop_flag: Tensor | None = None,
    ) -> None:
        """``multi_tensor_adam_capturable`` of the contract."""
        self._stepped(
            contracts.multi_tensor_adam_capturable,
            "plain",
            grads=grads,
            params=params,
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            lr=lr,
            step=step,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            bias_correction=bias_correction,
            inv_scale=inv_scale,
            noop_flag=noop_flag,
        )

    def multi_tensor_adam_capturable_master(
        self,
        grads: list[Tensor],
        params: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        master_params: list[Tensor],
        lr: Tensor,
        step: Tensor,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        inv_scale: Tensor | None = None,
        noop_flag: Tensor | None = None,
    ) -> None:
        """``multi_tensor_adam_capturable_master`` of the contract."""
        self._stepped(
            contracts.multi_tensor_adam_capturable_master,
            "master",
            grads=grads,
            params=params,
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            master_params=master_params,
            lr=lr,
            step=step,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            bias_correction=bias_correction,
            inv_scale=inv_scale,
            noop_flag=noop_flag,
        )

    def multi_tensor_adam_param_remainder(
        self,
        grads: list[Tensor],
        params: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        param_remainders: list[Tensor],
        lr: float,
        step: int,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        noop_flag: Tensor | None = None,
    ) -> None:
        """``multi_tensor_adam_param_remainder`` of the contract."""
        self._stepped(
            contracts.multi_tensor_adam_param_remainder,
            "remainder",
            grads=grads,
            params=params,
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            param_remainders=param_remainders,
            lr=lr,
            step=step,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            bias_correction=bias_correction,
            noop_flag=noop_flag,
        )

    def multi_tensor_adam_fp8(
        self,
        grads: list[Tensor],
        params: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        master_params: list[Tensor],
        scales: list[Tensor],
        amaxes: list[Tensor],
        scale_invs: list[Tensor],
        lr: float,
        step: int,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        noop_flag: Tensor | None = None,
    ) -> None:
        """``multi_tensor_adam_fp8`` of the contract."""
        self._stepped(
            contracts.multi_tensor_adam_fp8,
            "fp8",
            grads=grads,
            params=params,
            exp_avgs=exp_avgs,
            exp_avg_sqs=exp_avg_sqs,
            master_params=master_params,
            scales=scales,
            amaxes=amaxes,
            scale_invs=scale_invs,
            lr=lr,
            step=step,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            bias_correction=bias_correction,
            noop_flag=noop_flag,
        )

    # ----------------------------------------------------------------------- SGD

    def multi_tensor_sgd(
        self,
        grads: list[Tensor],
        params: list[Tensor],
        momentum_buffers: list[Tensor],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        *,
        nesterov: bool = False,
        first_run: bool = False,
        wd_after_momentum: bool = False,
        scale: float = 1.0,
        model_params: list[Tensor] | None = None,
        noop_flag: Tensor | None = None,
    ) -> None:
        """``multi_tensor_sgd`` of the contract."""
        momentum_lists = ("momentum_buffers",)
        copies = () if model_params is None else ("model_params",)
        demand = Demand(("grads", "params", *momentum_lists, *copies), self._cuts["sgd"])
        lists = self._preparer.prepare(
            contracts.multi_tensor_sgd,
            demand,
            grads=grads,
            params=params,
            momentum_buffers=momentum_buffers,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            first_run=first_run,
            wd_after_momentum=wd_after_momentum,
            scale=scale,
            model_params=model_params,
            noop_flag=noop_flag,
        )
        launches = []
        for group in lists.groups:
            g, p, b, *c = group.dtypes
            launch = self._launch_of(
                "sgd",
                demand,
                group,
                (lists.others["noop_flag"],),
                (
                    float(lr),
                    float(weight_decay),
                    float(momentum),
                    1 - float(dampening),
                    float(scale),
                ),
                G=g,
                P=p,
                B=b if momentum else None,
                C=c[0] if c else None,
                ACC=math_dtype(p),
                FIRST=first_run,
                NESTEROV=nesterov,
                DECAY_LAST=wd_after_momentum,
            )
            launches.append(launch)
        _launch_all(launches)
        lists.finish()

    # -------------------------------------------------------------------- scales

    def multi_tensor_compute_scale_and_scale_inv(
        self,
        amaxes: list[Tensor],
        scales: list[Tensor],
        scale_invs: list[Tensor],
        max_fp8: float,
        *,
        force_pow_2_scales: bool = False,
        epsilon: float = 0.0,
        noop_flag: Tensor | None = None,
    ) -> None:
        """``multi_tensor_compute_scale_and_scale_inv`` of the contract."""
        demand = Demand(("amaxes", "scales", "scale_invs"), self._cuts["compute_scale"])
        lists = self._preparer.prepare(
            contracts.multi_tensor_compute_scale_and_scale_inv,
            demand,
            amaxes=amaxes,
            scales=scales,
            scale_invs=scale_invs,
            max_fp8=max_fp8,
            force_pow_2_scales=force_pow_2_scales,
            epsilon=epsilon,
            noop_flag=noop_flag,
        )
        numbers = (float(max_fp8), float(epsilon))
        flag, powers = lists.others["noop_flag"], force_pow_2_scales
        launches = [
            self._launch_of("float_scales", demand, group, (flag,), numbers, POWERS=powers)
            for group in lists.groups
        ]
        _launch_all(launches)
        lists.finish()

    def multi_tensor_compute_scale_inv_e8m0(
        self, amaxes: list[Tensor], scale_invs: list[Tensor], *, noop_flag: Tensor | None = None
    ) -> None:
        """``multi_tensor_compute_scale_inv_e8m0`` of the contract."""
        demand = Demand(("amaxes", "scale_invs"), self._cuts["compute_scale"])
        lists = self._preparer.prepare(
            contracts.multi_tensor_compute_scale_inv_e8m0,
            demand,
            amaxes=amaxes,
            scale_invs=scale_invs,
            noop_flag=noop_flag,
        )
        flag = lists.others["noop_flag"]
        _launch_all(
            [self._launch_of("e8m0_scales", demand, it, (flag,), ()) for it in lists.groups]
        )
        lists.finish()

"""Quantised epilogues: which operators they compose, and that their bounds admit no wrong value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_engine_fl as te
from transformer_engine_fl import ops, testing
from transformer_engine_fl.ops._formats import FORMATS
from transformer_engine_fl.ops.epilogue import EPILOGUES

NAMES = ("rmsnorm_fwd_quantize", "layernorm_fwd_quantize", "swiglu_quantize", "dgelu_quantize")


def values(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(value: Any) -> Any:
    return value if value is None else (value.dtype, value.view(torch.uint8).tolist())


# --------------------------------------------------------- what they compose


def norm(x: Tensor, w: Tensor) -> tuple[Any, Any]:
    return ops.rmsnorm_fwd(x, w, out_dtype=torch.float32)[0], ops.rmsnorm_fwd_quantize


def gated(x: Tensor, w: Tensor) -> tuple[Any, Any]:
    return ops.swiglu(x.float()), lambda x, w, **how: ops.swiglu_quantize(x, **how)


@pytest.mark.parametrize("made", [norm, gated])
@pytest.mark.parametrize("format", FORMATS)
def test_it_is_the_operator_in_float32_and_then_the_cast(made: Any, format: str) -> None:
    x, w = values(34, 192).bfloat16(), values(192, seed=4).bfloat16()
    with te.with_preference("reference"):
        plain, both = made(x, w)
        found = both(x, w, format=format, columnwise=True)
        expected = ops.quantize(plain, format=format, columnwise=True)
    assert [bits(it) for it in found[:6]] == [bits(it) for it in expected]


def test_the_other_outputs_are_the_operators_own() -> None:
    x, residual, w = values(6, 64), values(6, 64, seed=5), values(64, seed=4)
    *_, total, rsigma = ops.rmsnorm_fwd_add_quantize(x, residual, w)
    assert torch.equal(total, x + residual)
    assert torch.equal(rsigma, ops.rmsnorm_fwd_add(x, residual, w)[2])
    grad = values(6, 64, seed=6).bfloat16()
    dbias, data, *_ = ops.dbias_dgelu_quantize(grad, x.bfloat16())
    assert torch.equal(dbias, ops.dbias_dgelu(grad, x.bfloat16())[0])
    assert data.dtype == torch.float8_e4m3fn


def test_every_norm_and_activation_has_a_quantizing_form() -> None:
    forward = {it.name for it in ops.CATALOGUE.values() if it.family == "activation"}
    forward |= {
        it.name for it in ops.CATALOGUE.values() if "norm" in it.family and "fwd" in it.name
    }
    assert {it.base.name for it in EPILOGUES.values()} == forward
    assert all(ops.CATALOGUE[name] is it.contract for name, it in EPILOGUES.items())


def test_the_signature_is_of_both() -> None:
    assert list(ops.rmsnorm_fwd_quantize.signature.parameters) == [
        *("input", "weight", "eps", "zero_centered_gamma"),
        *("scale", "format", "dtype", "columnwise", "force_pow_2_scales", "amax_epsilon"),
    ]
    with pytest.raises(te.ArgumentError, match=r"rmsnorm_fwd_quantize: argument 'weight'"):
        ops.rmsnorm_fwd_quantize(values(4, 8), values(7))
    with pytest.raises(te.ArgumentError, match=r"swiglu_quantize: argument 'input'.*2 columns"):
        ops.swiglu_quantize(values(4, 6), format="nvfp4")
    with pytest.raises(te.ArgumentError, match=r"gelu_quantize: argument 'input'.*float64.*one of"):
        ops.gelu_quantize(values(4, 6).double())
    with pytest.raises(te.ArgumentError, match="'out_dtype'"):
        ops.rmsnorm_fwd_quantize(values(4, 8), values(8), out_dtype=torch.float32)


# ------------------------------------------------------------------ the bounds


def calls(name: str) -> list[tuple[str, te.Sample]]:
    contract = ops.CATALOGUE[name]
    return [(it.label, it) for it in contract.samples("float32", "cpu")]


@pytest.mark.parametrize("name", NAMES)
def test_nearly_every_value_has_one_right_code(name: str) -> None:
    for label, sample in calls(name):
        if not label.startswith("typical"):
            continue
        data, scale_inv, *_ = ops.CATALOGUE[name].oracle(*sample.args, **sample.kwargs)
        assert (data.low != data.high).double().mean() < 0.01, label
        assert (scale_inv.high > scale_inv.low * 1.00002).double().mean() < 0.02, label


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("direction", [-1.0, 0.0, 1.0, None])
def test_whatever_is_within_the_error_is_within_the_bounds(
    name: str, direction: float | None
) -> None:
    from transformer_engine_fl.ops.epilogue import error_of

    epilogue = EPILOGUES[name]
    for label, sample in calls(name):
        given = epilogue.contract.bind(*sample.args, **sample.kwargs)
        arguments, scale, options = epilogue.divided(given)
        exact = epilogue.of(epilogue.base.oracle(**arguments))
        if not exact.numel():
            continue
        moves = torch.rand(exact.shape, dtype=torch.float64) * 2 - 1
        moves = moves if direction is None else torch.full_like(moves, direction)
        moved = (exact + 0.98 * moves * error_of(exact, epilogue.base)).float()
        with te.with_preference("reference"):
            found = ops.quantize(moved, scale, **options)
        expected = epilogue.contract.oracle(*sample.args, **sample.kwargs)
        for place, value in enumerate(found):
            if value is not None:
                worst = testing.compare(value, expected[place], te.Tolerance(0.0, 0.0))
                assert worst.ratio == 0, (label, place, worst)


# ------------------------------------------------------- wrong results are found

Change = Callable[[list[Any]], None]


def through_bfloat16(epilogue: Any, given: dict[str, Any]) -> list[Any]:
    """The unfused pair of operators, which rounds to the input's dtype before the cast."""
    arguments, scale, options = epilogue.divided(given)
    outputs = epilogue.base(**arguments)
    rounded = epilogue.of(outputs).bfloat16().float()
    return list(epilogue.outputs(outputs, ops.quantize(rounded, scale, **options)))


def first_code_moved(outputs: list[Any]) -> None:
    outputs[0].view(torch.uint8).view(-1)[:1] ^= 1


def nibbles_swapped(outputs: list[Any]) -> None:
    if outputs[0].dtype == torch.uint8:
        outputs[0].copy_((outputs[0] << 4) | (outputs[0] >> 4))


def adjacent_scale_changed(outputs: list[Any]) -> None:
    outputs[1].view(torch.uint8).view(-1)[-1:] ^= 1


def columns_of_the_rows(outputs: list[Any]) -> None:
    if outputs[4] is not None:
        outputs[4].copy_(outputs[4].flip(0))


def amax_of_nothing(outputs: list[Any]) -> None:
    if outputs[2] is not None:
        outputs[2].mul_(1.001)


def global_scale_inverted(outputs: list[Any]) -> None:
    if outputs[3] is not None:
        outputs[3].reciprocal_()


WRONG: dict[str, tuple[Change, str]] = {
    "a code moved": (first_code_moved, "output 0"),
    "nibbles swapped": (nibbles_swapped, "output 0"),
    "an adjacent scale": (adjacent_scale_changed, "output 1"),
    "an amax that is not the output's": (amax_of_nothing, "output 2"),
    "a global scale inverted": (global_scale_inverted, "output 3"),
    "a transposed copy out of order": (columns_of_the_rows, "output 4"),
}


def failures(name: str, run: Callable[[Any, dict[str, Any]], list[Any]]) -> list[str]:
    epilogue = EPILOGUES[name]

    @torch.no_grad()
    def implementation(*args: Any, **kwargs: Any) -> Any:
        given = epilogue.contract.check(*args, **kwargs)
        with te.with_preference("reference"):
            return tuple(run(epilogue, given))

    implementation.__signature__ = epilogue.contract.signature  # type: ignore[attr-defined]
    registry = te.OpRegistry({name: epilogue.contract})
    registry.register_impl(
        te.OpImpl(name, "vendor.other", "vendor", implementation, vendor="other")
    )
    manager = te.OpManager(registry, builtins=False, plugins=False)
    found = []
    for case in testing.cases("vendor.other", dtypes=["float32"], manager=manager):
        if "/values/typical" in case.name:
            try:
                case.run()
            except testing.ConformanceError as error:
                found.append(str(error))
    return found


def rightly(epilogue: Any, given: dict[str, Any]) -> list[Any]:
    return list(epilogue.contract(**given))


@pytest.mark.parametrize("name", ["rmsnorm_fwd_quantize", "swiglu_quantize"])
def test_what_has_been_rounded_on_the_way_is_caught_in_every_format(name: str) -> None:
    assert failures(name, rightly) == []
    found = " ".join(failures(name, through_bfloat16))
    for format in FORMATS:
        assert f"typical, {format}:" in found


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_output_is_caught(fault: str) -> None:
    change, words = WRONG[fault]

    def run(epilogue: Any, given: dict[str, Any]) -> list[Any]:
        outputs = rightly(epilogue, given)
        change(outputs)
        return outputs

    found = failures("rmsnorm_fwd_quantize", run)
    assert any(words in failure for failure in found), found


def test_a_format_that_an_implementation_does_not_fuse_is_served_by_another() -> None:
    manager = te.get_default_manager()
    manager.ensure_initialized()
    served: list[str] = []

    def fused(
        input: Tensor, weight: Tensor, eps: float = 1e-5, *, scale: Tensor | None = None
    ) -> Any:
        served.append("fused")
        raise te.NotSupportedError("not today")

    manager.registry.register_impl(
        te.OpImpl("rmsnorm_fwd_quantize", "vendor.few", "vendor", fused, vendor="few", priority=999)
    )
    with te.with_preference("vendor:few"):
        data = manager.call("rmsnorm_fwd_quantize", values(4, 64), values(64), format="mxfp8")[0]
        assert (served, data.shape) == ([], (4, 64))
        manager.call("rmsnorm_fwd_quantize", values(4, 64), values(64))
    assert served == ["fused"]

"""Tests liger-kernel's kernels against the contracts, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import te_fl_liger
import torch

from transformer_engine_fl import NotSupportedError, OpManager, OpRegistry
from transformer_engine_fl.testing import verify

HERE = te_fl_liger.is_available()
runs = pytest.mark.skipif(HERE is not True, reason=str(HERE))


def manager() -> OpManager:
    """A manager that has the package, whether it is installed or not."""
    made = OpManager(OpRegistry(), plugins=False)
    te_fl_liger.register(made.registry)
    return made


@runs
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("op_name", te_fl_liger.OPERATORS)
def test_it_keeps_the_contract(op_name: str) -> None:
    card = verify("vendor.liger", operators=[op_name], manager=manager())
    assert not card.failures
    assert card.total("passed") > card.total("declined")


@runs
def test_rows_wider_than_a_block_are_declined() -> None:
    from te_fl_liger import kernels

    wide = torch.ones(1, kernels.MOST_COLUMNS + 1)
    with pytest.raises(NotSupportedError, match="65537 columns; a block of liger-kernel's holds"):
        kernels.rmsnorm_fwd(wide, wide[0])


@pytest.mark.parametrize("op_name", te_fl_liger.WIDE_ONLY)
def test_what_liger_rounds_in_between_is_offered_in_float32_alone(op_name: str) -> None:
    (impl,) = manager().registry.get_implementations(op_name)
    assert impl.supported_dtypes == {"float32"}


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_without_liger_another_serves_and_the_reason_says_what_to_install() -> None:
    without = manager()
    output, _ = without.call("rmsnorm_fwd", torch.ones(2, 8), torch.ones(8))
    assert output.shape == (2, 8)
    said = str(without.explain("rmsnorm_fwd"))
    assert "liger_kernel is not installed: pip install liger-kernel" in said

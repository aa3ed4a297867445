"""The second stage of sums: partial sums of any number of programs are added up."""

from __future__ import annotations

import pytest
import torch

from transformer_engine_fl.backends.flagos._sums import SumOfPrograms


# Numbers of programs at the limits of each tile, and more than the largest tile holds.
@pytest.mark.parametrize(
    "programs", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1100]
)
@pytest.mark.parametrize("columns", [7, 1040])
def test_any_number_of_programs_is_added_up(programs: int, columns: int, device: str) -> None:
    # Memory after the partial sums must not be added.
    memory = torch.full((2, 3 * programs * columns + 4096), float("nan"), device=device)
    partial = memory[0, : 3 * programs * columns].view(3, programs, columns)
    partial.copy_(torch.randn(partial.shape))
    add = SumOfPrograms(columns, 16 if columns % 16 == 0 else 1, partial.device)
    expected = partial.double().sum(1)
    three = torch.full((3, columns), float("nan"), device=device)
    add(partial, three, None, programs)
    first, second = torch.full((2, columns), float("nan"), device=device)
    add(partial[:2], first, second, programs)
    for found, of in ((three, expected), (torch.stack((first, second)), expected[:2])):
        error = (found.double() - of).abs().amax()
        assert error <= 1e-6 * programs, error


def test_one_result_of_a_wider_dtype(device: str) -> None:
    partial = torch.randn(12, 40, dtype=torch.float64, device=device)
    sums = torch.empty(40, dtype=torch.float64, device=device)
    SumOfPrograms(40, 8, partial.device)(partial, sums, None, 12)
    torch.testing.assert_close(sums, partial.sum(0), rtol=1e-13, atol=1e-13)

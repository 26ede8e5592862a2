"""The token that is drawn. test_conformance.py checks the distribution of the draws on whole engines."""

from __future__ import annotations

import pytest
import torch

from unstable_lite.engines.sampling import draw

ULP = 2.0**-24


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (0.49, 1), (0.5, 3), (1 - 2 * ULP, 3), (1 - ULP, 3)])
def test_zero_weight_token_is_never_drawn_despite_rounded_sums(uniform: float, expected: int) -> None:
    prob_BV = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]] * 2)
    sequential = prob_BV[0].cumsum(-1)
    parallel = torch.tensor([0.0, 0.5 - ULP / 2, 0.5, 1 - 3 * ULP, 1 - 2 * ULP, 1 - 3 * ULP, 1 - ULP, 1.0])
    id_B1 = draw(prob_BV, torch.stack((sequential, parallel)), torch.tensor([[uniform], [uniform]]))
    assert id_B1.tolist()[0] == [expected]
    assert prob_BV.gather(-1, id_B1).tolist() == [[0.5], [0.5]]

"""The learner's metric names that the reference implementation also reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

REINFORCE = "loss logp_mean avg_train_len pct_truncated step samples_seen lr policy_grad_norm"
A2C = (
    "policy_loss value_loss logp_mean logp_std value_mae value_dir_acc num_steps avg_train_len pct_truncated "
    "grad_norm critic_lr critic_grad_norm"
)


@pytest.mark.parametrize(("algorithm", "names"), [("reinforce", REINFORCE), ("a2c", A2C)])
def test_update_reports_every_metric_name_of_the_reference(
    make_learner: Callable[..., Any], make_items: Callable[..., Any], algorithm: str, names: str
) -> None:
    updated = make_learner(algorithm).update(make_items(4, turns=2), 1)
    assert updated.skipped is None
    assert set(names.split()) - set(updated.metrics) == set()

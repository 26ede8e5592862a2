"""Two ranks compared with one: the same update, even when either of them fails. Real processes, gloo, float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fakes import two_ranks
from fakes.two_ranks import Job, Outcome
from fakes.unrolled import is_equal, largest_difference
from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.learner.batching import length
from unstable_lite.learner.model import Policy
from unstable_lite.transport.messages import LoadLearner, Update, Updated
from unstable_lite.types import TrainItem

MakeItems = Callable[..., list[TrainItem]]
MakeConfig = Callable[..., Config]

pytestmark = pytest.mark.nightly
ALGORITHMS = ["reinforce", "ppo"]
"""Both functions that make an update, one without a critic and one with it."""
LEARNER: dict[str, Any] = {
    "max_tokens_per_micro_batch": 60,
    "kl_coefficient": 0.5,
    "ppo_epochs": 2,
    "ppo_minibatches": 2,
    "critic_learning_rate": 2e-3,
    "gamma": 0.9,
    "gae_lambda": 0.7,
    "max_train_len": 18,
}
EXECUTION_METRICS = {"seconds", "tokens_per_s", "padding_share", "oom_retries", "max_tokens_per_micro_batch"}
"""Metrics of the execution of an update, not of its result."""


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory, make_config: MakeConfig, make_items: MakeItems
) -> Callable[..., Outcome]:
    """Return a function for the outcome of a job by name and number of ranks. The same two processes run all jobs."""
    directory = tmp_path_factory.mktemp("ranks")

    def update(version: int, items: Sequence[TrainItem]) -> Update:
        path = f"{directory}/adapter-RANKS-{version}"
        return Update(request_id=version, items=tuple(items), version=version, path=path)

    first, second = make_items(9, turns=3), make_items(9, seed=1, turns=3)
    shortest = min(map(length, first))
    poisoned = [replace(item, reward=float("nan")) if length(item) == shortest else item for item in first]
    alone = [replace(first[0], prompt_ids=np.arange(4, dtype=np.int32))]
    several = [update(1, first), update(2, poisoned), update(2, second), update(3, alone)]
    jobs: dict[str, tuple[Config, Job, Sequence[Any]]] = {}

    def add(name: str, algorithm: str, messages: Sequence[Any], config: Any = None, **job: Any) -> None:
        made = make_config(algorithm, **{"learner": LEARNER} | (config or {}))
        two_ranks.write(directory, name, Job(config_json=made.model_dump_json(), **job), messages)
        jobs[name] = made, job, messages

    for algorithm in ALGORITHMS:
        add(algorithm, algorithm, several)
    roomy = {"learner": {"ppo_epochs": 2}}
    for algorithm in ("reinforce", "ppo"):
        updates = [update(1, first), update(2, second)]
        add(f"starved {algorithm}", algorithm, updates, roomy, starved=1, starved_tokens=40)
    add("starved step", "ppo", [update(1, first)], roomy, starved_step=1)
    dropout = {"lora": {"lora_dropout": 0.2}}
    add("dropout", "reinforce", [update(1, first), update(2, second)], dropout)
    add(
        "resumed",
        "reinforce",
        [LoadLearner(request_id=9, path=f"{directory}/adapter-RANKS-1.state"), update(2, second)],
        dropout,
    )
    start = directory / "start"
    policy = Policy(make_config("reinforce"), "cpu")
    for number, parameter in enumerate(policy.parameters.values()):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    peft_files.write_adapter(start, *policy.adapter_state())
    initial = {"learner": LEARNER, "lora": {"initial_lora_path": str(start)}}
    add("initial", "reinforce", [update(1, first), update(2, second)], initial)
    magnet = {"kl_reference": "average", "entropy_coefficient": 0.1, "entropy_target": 1.0}
    magnet |= {"importance_weight_level": "sequence", "kl_average_decay": 0.5}
    halved = [replace(item, weight=0.5 * (index % 3)) for index, item in enumerate(first)]
    add("magnet", "grpo", [update(1, halved), update(2, second)], {"learner": LEARNER | magnet})
    flat = [replace(item, reward=0.0) for item in second]
    add("signal", "grpo", [update(1, first)], roomy)
    add("signal, then none", "grpo", [update(1, first), update(2, flat)], roomy)
    add("broken", "reinforce", [update(1, first)], broken=1)
    add("strayed", "reinforce", [update(1, first)], strayed=1)
    add("strayed critic", "a2c", [update(1, first)], strayed_critic=1)
    add("seeds", "a2c", [update(1, first)], has_seeds=True)
    add("ignorant", "fakes.two_ranks:Alone", [update(1, first)])
    two_ranks.run(directory, list(jobs), num_ranks=2)
    for name in (*ALGORITHMS, "initial", "magnet", "starved reinforce", "starved ppo", "starved step"):
        two_ranks.perform(directory, name)
    return partial(two_ranks.outcome, directory)


def result_metrics(updated: Updated) -> dict[str, float]:
    return {name: value for name, value in updated.metrics.items() if name not in EXECUTION_METRICS}


@pytest.mark.parametrize("name", [*ALGORITHMS, "initial", "magnet"])
def test_two_ranks_make_the_same_update_as_one(outcome, name):
    """The updates are of a full batch, of one skipped for one bad item, and of one that leaves a rank without work.

    Others have penalties, weights, or an entropy target.
    """
    one, two = outcome(name, 1), outcome(name, 2)
    assert two.error == ""
    assert largest_difference(one.tensors, two.tensors) < 1e-10
    for ours, theirs in zip(two.updates, one.updates, strict=True):
        assert result_metrics(ours) == pytest.approx(result_metrics(theirs), rel=1e-6, abs=1e-9, nan_ok=True)
        for logprobs, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert logprobs == pytest.approx(expected, abs=1e-6)
    first, second = (update.metrics for update in two.updates[:2])
    if name in ALGORITHMS:
        assert [update.skipped is None for update in two.updates] == [True, False, True, True]
        assert first["dropped_too_long"] > 0 and first["pct_truncated"] > 0
    elif name == "initial":
        assert second["kl_to_initial"] > 1e-6
    else:
        assert second["kl_to_average"] > 1e-8
        assert 0 < first["weight_zero"] < 1
        assert {"weight_mean", "entropy_coefficient"} <= first.keys()


@pytest.mark.parametrize("name", [*ALGORITHMS, "starved ppo", "starved step", "dropout", "resumed", "seeds"])
def test_all_ranks_hold_identical_tensors(outcome, name):
    assert is_equal(outcome(name, 2, 0).tensors, outcome(name, 2, 1).tensors)


@pytest.mark.parametrize("name", ["starved reinforce", "starved ppo", "starved step"])
def test_oom_on_one_rank_restarts_all_with_smaller_micro_batches(outcome, name):
    one, two = outcome(name, 1), outcome(name, 2)
    assert two.error == ""
    assert two.updates[-1].metrics["oom_retries"] >= 1
    assert one.updates[-1].metrics["oom_retries"] == 0
    assert largest_difference(one.tensors, two.tensors) < 1e-10


def test_two_ranks_with_dropout_resume_bit_for_bit(outcome):
    for rank in (0, 1):
        assert is_equal(outcome("dropout", 2, rank).tensors, outcome("resumed", 2, rank).tensors)


@pytest.mark.parametrize("rank", [0, 1])
def test_update_without_an_advantage_changes_no_rank(outcome, rank):
    before, after = outcome("signal", 2, rank), outcome("signal, then none", 2, rank)
    assert is_equal(before.tensors, after.tensors)
    if rank == 0:
        assert [update.metrics["step"] for update in after.updates] == [1, 2]


@pytest.mark.parametrize(
    ("name", "of_rank_0", "of_rank_1"),
    [
        ("broken", "RankFailed", "RuntimeError: shapes do not fit"),
        ("strayed", "RankFailed: 1 of 2", "RankFailed"),
        ("strayed critic", "RankFailed: 1 of 2", "RankFailed"),
        ("ignorant", "ConfigError: Alone", "ConfigError"),
    ],
)
def test_failure_on_one_rank_ends_both(outcome, name, of_rank_0, of_rank_1):
    assert outcome(name, 2, 0).error.startswith(of_rank_0)
    assert outcome(name, 2, 1).error.startswith(of_rank_1)

"""Two ranks compared with one: the same update, even when either of them fails. Real processes, gloo, float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes import two_ranks
from fakes.two_ranks import Job, Outcome
from fakes.unrolled import is_equal, largest_difference
from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.learner.batching import Share, cut, length, make_micro_batches, make_prompt_batches
from unstable_lite.learner.model import Policy
from unstable_lite.planning.memory import learner_memory, shape_of
from unstable_lite.transport.messages import LoadLearner, Score, ScoreAnswers, Update, Updated
from unstable_lite.types import TrainItem

MakeItems = Callable[..., list[TrainItem]]
MakeConfig = Callable[..., Config]

ALGORITHMS = ["reinforce", "a2c", "ppo", "grpo"]
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
        add(
            f"starved {algorithm}",
            algorithm,
            [update(1, first), update(2, second)],
            roomy,
            starved=1,
            starved_tokens=40,
        )
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
    for algorithm in ("a2c", "grpo"):
        for name, is_sharded in (("whole", False), ("sharded", True)):
            settings = {"learner": LEARNER | {"shard_base": is_sharded}}
            score = Score(request_id=8, items=tuple(first))
            one = Score(request_id=8, items=tuple(first[:1]))  # one rank has no work
            frozen = Score(request_id=8, items=tuple(first), adapter=str(start))
            questions = (("Your move:", ("[0]", "[1 2]")), ("It is your turn, player 1:", ("fold",)))
            answers = ScoreAnswers(request_id=8, questions=questions, stop=())
            messages = [score, *several, score, one, frozen, answers]
            add(f"{name} {algorithm}", algorithm, messages, settings, is_double=False)
    initial = {"learner": LEARNER, "lora": {"initial_lora_path": str(start)}}
    add("initial", "reinforce", [update(1, first), update(2, second)], initial)
    magnet = {"kl_reference": "average", "entropy_coefficient": 0.1, "entropy_target": 1.0}
    magnet |= {"importance_weight_level": "sequence", "kl_average_decay": 0.5}
    halved = [replace(item, weight=0.5 * (index % 3)) for index, item in enumerate(first)]
    add("magnet", "grpo", [update(1, halved), update(2, second)], {"learner": LEARNER | magnet})
    for name, is_sharded in (("whole", False), ("sharded", True)):
        settings = initial | {"learner": LEARNER | {"shard_base": is_sharded}}
        messages = [Score(request_id=8, items=tuple(first)), update(1, first), update(2, second)]
        add(f"{name} initial", "reinforce", messages, settings, is_double=False)
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_ranks_make_the_same_update_as_one(outcome: Callable[..., Outcome], algorithm: str) -> None:
    """The updates are of a full batch, of one skipped for one bad item, and of one that leaves a rank without work."""
    one, two = outcome(algorithm, 1), outcome(algorithm, 2)
    assert two.error == ""
    assert largest_difference(one.tensors, two.tensors) < 1e-10
    assert [update.skipped is None for update in two.updates] == [True, False, True, True]
    assert one.updates[0].metrics["dropped_too_long"] > 0
    assert one.updates[0].metrics["pct_truncated"] > 0
    for ours, theirs in zip(two.updates, one.updates, strict=True):
        assert result_metrics(ours) == pytest.approx(result_metrics(theirs), rel=1e-6, abs=1e-9, nan_ok=True)
        for logprobs, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert logprobs == pytest.approx(expected, abs=1e-6)


def test_two_ranks_apply_the_same_kl_to_the_initial_adapter(
    outcome: Callable[..., Outcome],
) -> None:
    one, two = outcome("initial", 1), outcome("initial", 2)
    assert two.error == ""
    assert largest_difference(one.tensors, two.tensors) < 1e-10
    ours, theirs = two.updates[1].metrics, one.updates[1].metrics
    assert ours["kl_to_initial"] == pytest.approx(theirs["kl_to_initial"], rel=1e-6)
    assert ours["kl_to_initial"] > 1e-6


def test_two_ranks_apply_the_same_weights_magnet_and_entropy_target(outcome: Callable[..., Outcome]) -> None:
    one, two = outcome("magnet", 1), outcome("magnet", 2)
    assert two.error == ""
    assert largest_difference(one.tensors, two.tensors) < 1e-10
    for ours, theirs in zip(two.updates, one.updates, strict=True):
        for name in ("weight_mean", "weight_zero", "kl_to_average", "entropy_coefficient"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-6), name
    assert 0 < two.updates[0].metrics["weight_zero"] < 1
    assert two.updates[1].metrics["kl_to_average"] > 1e-8


@pytest.mark.parametrize("algorithm", ["a2c", "grpo", "initial"])
def test_sharded_ranks_make_the_same_update_as_whole_ones(outcome: Callable[..., Outcome], algorithm: str) -> None:
    """Equal to the last bit: the shares are equal, and a rank with one micro-batch less makes an empty pass."""
    for rank in (0, 1):
        whole, sharded = outcome(f"whole {algorithm}", 2, rank), outcome(f"sharded {algorithm}", 2, rank)
        assert sharded.error == ""
        assert is_equal(whole.tensors, sharded.tensors)
        for ours, theirs in zip(sharded.updates, whole.updates, strict=True):
            assert result_metrics(ours) == pytest.approx(result_metrics(theirs), nan_ok=True)
        assert sharded.base_bytes <= 0.51 * whole.base_bytes


@pytest.mark.parametrize("algorithm", ["a2c", "grpo"])
def test_sharded_ranks_score_as_whole_ones(outcome: Callable[..., Outcome], algorithm: str) -> None:
    whole, sharded = outcome(f"whole {algorithm}", 2).scores, outcome(f"sharded {algorithm}", 2).scores
    assert [len(scored.logprobs) for scored in sharded] == [9, 9, 1, 9]
    for ours, theirs in zip(sharded, whole, strict=True):
        for logprobs, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert logprobs.adapter == pytest.approx(expected.adapter, abs=1e-5)
            assert logprobs.base == pytest.approx(expected.base, abs=1e-5)
            assert logprobs.adapter != pytest.approx(logprobs.base, abs=1e-3)


@pytest.mark.parametrize("algorithm", ["a2c", "grpo"])
def test_sharded_ranks_score_answers_as_whole_ones(outcome: Callable[..., Outcome], algorithm: str) -> None:
    (whole,), (sharded,) = (outcome(f"{name} {algorithm}", 2).answers for name in ("whole", "sharded"))
    assert [len(of_question) for of_question in sharded.logprobs] == [2, 1]
    for ours, theirs in zip(sharded.logprobs, whole.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
        assert (ours < 0).all()


def test_memory_lent_to_a_sharded_rank_matches_the_computation(
    outcome: Callable[..., Outcome], make_config: MakeConfig
) -> None:
    config = make_config("a2c", learner={"shard_base": True})
    shape = shape_of(config.model_name)
    assert shape is not None
    computed = learner_memory(shape, config.learner, config.lora, num_ranks=2)
    for rank in (0, 1):
        whole, sharded = outcome("whole a2c", 2, rank), outcome("sharded a2c", 2, rank)
        assert sharded.base_bytes == pytest.approx(computed.base, rel=0.02)
        assert sharded.pass_bytes - whole.pass_bytes == pytest.approx(computed.lent, rel=0.2)


@pytest.mark.parametrize(
    "name", [*ALGORITHMS, "starved ppo", "starved step", "dropout", "resumed", "sharded a2c", "seeds"]
)
def test_all_ranks_hold_identical_tensors(outcome: Callable[..., Outcome], name: str) -> None:
    assert is_equal(outcome(name, 2, 0).tensors, outcome(name, 2, 1).tensors)


@pytest.mark.parametrize("name", ["starved reinforce", "starved ppo", "starved step"])
def test_oom_on_one_rank_restarts_all_with_smaller_micro_batches(outcome: Callable[..., Outcome], name: str) -> None:
    one, two = outcome(name, 1), outcome(name, 2)
    assert two.error == ""
    assert two.updates[-1].metrics["oom_retries"] >= 1
    assert one.updates[-1].metrics["oom_retries"] == 0
    assert largest_difference(one.tensors, two.tensors) < 1e-10


def test_two_ranks_with_dropout_resume_bit_for_bit(outcome: Callable[..., Outcome]) -> None:
    for rank in (0, 1):
        assert is_equal(outcome("dropout", 2, rank).tensors, outcome("resumed", 2, rank).tensors)


@pytest.mark.parametrize("rank", [0, 1])
def test_update_without_an_advantage_changes_no_rank(outcome: Callable[..., Outcome], rank: int) -> None:
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
def test_failure_on_one_rank_ends_both(
    outcome: Callable[..., Outcome], name: str, of_rank_0: str, of_rank_1: str
) -> None:
    assert outcome(name, 2, 0).error.startswith(of_rank_0)
    assert outcome(name, 2, 1).error.startswith(of_rank_1)


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 8))
def test_parts_of_a_batch_are_disjoint_complete_and_balanced(lengths: list[int], num_parts: int) -> None:
    parts = cut(lengths, num_parts)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in part) for part in parts]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@pytest.mark.parametrize("num", [1, 9])
def test_ranks_in_step_make_equally_many_micro_batches(make_items: MakeItems, num: int) -> None:
    items = make_items(num)
    for make in (make_micro_batches, make_prompt_batches):
        shares = [Share(rank=rank, num_ranks=3, in_step=True) for rank in range(3)]
        of_ranks = [make(items, 40, None, share) for share in shares]
        assert len(set(map(len, of_ranks))) == 1
        assert sorted(row for batches in of_ranks for batch in batches for row in batch.rows) == list(range(num))
    assert all(length(item) <= 40 for item in items)

"""Several policies in one learner process: one base, and each policy as it would be alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_learner_memory import starve
from test_learner_worker import start  # noqa: F401

from fakes.learner_fixtures import update_and_save
from fakes.unrolled import is_equal, snapshot
from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.config.games import PolicyConfig
from unstable_lite.learner import load_learner, worker
from unstable_lite.learner.batching import length
from unstable_lite.transport.messages import (
    AdapterDigest,
    Failed,
    LoadLearner,
    SaveLearner,
    Score,
    Scored,
    Update,
    Updated,
    WriteAdapter,
)

Workers = dict[str, worker._Worker]

POLICIES = {
    "main": PolicyConfig(learner={"kl_coefficient": 0.1, "kl_reference": "average", "kl_average_decay": 0.5}),
    "exploiter": PolicyConfig(
        algorithm="ppo", learner={"learning_rate": 5e-3, "ppo_epochs": 2, "ppo_minibatches": 2, "kl_coefficient": 0.1}
    ),
    "third": PolicyConfig(
        algorithm="a2c", learner={"entropy_coefficient": 0.01, "kl_coefficient": 0.1, "kl_reference": "average"}
    ),
}
"""Different algorithms; two have a critic, and two a moving reference."""
NAMES = [*POLICIES]


@pytest.fixture
def config(make_config) -> Config:
    """Dropout, so that updates draw random numbers too."""
    config: Config = make_config(lora={"lora_dropout": 0.2})
    return config.changed(policies=POLICIES)


def alone(config: Config, name: str) -> worker._Worker:
    own = config.of_policy(name)
    return worker._Worker(load_learner(own, "cpu"), own)


def update(one: worker._Worker, items: Sequence[Any], version: int, place: Path, name: str = "") -> Updated:
    place.mkdir(exist_ok=True)
    path = str(place / f"{name}-{version}")
    reply = update_and_save(one, Update(request_id=1, items=tuple(items), version=version, path=path, policy=name))
    assert isinstance(reply, Updated), reply
    return reply


def files(directory: Path) -> dict[str, bytes]:
    """Return the files of a saved state, except the one with the metrics, which have times."""
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != "updated.json"}


def test_policies_that_take_turns_learn_as_each_does_alone(config, make_items, tmp_path):
    """Adapters, critics, moments, random states and files are equal bit for bit."""
    for name in NAMES:
        one = alone(config, name)
        for version in (1, 2, 3):
            update(one, make_items(6, seed=version, turns=2), version, tmp_path / "alone", name)
    workers = worker.make_workers(config, "cpu")
    for version in (1, 2, 3):
        for name in NAMES[version:] + NAMES[:version]:
            score = Score(request_id=2, items=tuple(make_items(2)), policy="main")
            assert isinstance(workers["main"].answer(score), Scored)
            update(workers[name], make_items(6, seed=version, turns=2), version, tmp_path / "together", name)
            for other in {*NAMES} - {name}:
                assert not any(p.requires_grad for p in workers[other].policy.parameters.values())
                assert all(p.grad is None for p in workers[other].learner.training.parameters.values())
    for name in NAMES:
        for version in ("1", "2", "3", "3.state"):
            expected = files(tmp_path / "alone" / f"{name}-{version}")
            assert files(tmp_path / "together" / f"{name}-{version}") == expected and expected, (name, version)
    assert {*files(tmp_path / "together" / "third-3.state")} >= {
        "average/adapter_config.json",
        "critic/adapter_config.json",
    }


def test_base_is_in_memory_once(config):
    workers = worker.make_workers(config, "cpu")
    policies = [one.policy for one in workers.values()]
    main = policies[0]
    base = {id(weight) for weight in main.base_weights}
    assert all({id(weight) for weight in policy.base_weights} == base for policy in policies)
    num_adapters = 1 + 1 + 1 + 1 + 1 + 1 + 1  # three policies, two critics, two references
    size = sum(parameter.numel() for parameter in main.parameters.values())
    base_size = sum(weight.numel() for weight in main.base_weights)
    assert sum(p.numel() for p in main.model.parameters()) == base_size + num_adapters * size
    assert [policy.adapter_bytes for policy in policies] == [4 * size] * 3


def test_policies_divide_the_past_adapters_by_share(config):
    policies = {**POLICIES, "main": POLICIES["main"].model_copy(update={"share": 0.75})}
    workers = worker.make_workers(config.changed(policies=policies, buffer={"max_staleness": 7}), "cpu")
    for one in workers.values():
        for version in range(1, 20):
            one.past_adapters.hold(version)
    held = {name: [*one.past_adapters] for name, one in workers.items()}
    assert held == {"main": [14, 15, 16, 17, 18, 19], "exploiter": [17, 18, 19], "third": [17, 18, 19]}


def test_fresh_adapters_differ_and_later_policies_elsewhere_have_their_own_base(config):
    workers = worker.make_workers(config, "cpu")
    first, second = (workers[name].policy for name in NAMES[:2])
    assert first.parameters.keys() == second.parameters.keys()
    assert not is_equal(dict(first.parameters), dict(second.parameters))
    assert alone(config, "main").policy.base is not first.base


def test_states_of_all_policies_resume_bit_for_bit(config, make_items, tmp_path):
    def step(workers: Workers, version: int) -> None:
        for name in NAMES:
            update(workers[name], make_items(6, seed=version, turns=2), version, tmp_path, name)

    first = worker.make_workers(config, "cpu")
    for version in (1, 2, 3):
        step(first, version)
    expected = {name: files(tmp_path / f"{name}-3.state") for name in NAMES}
    second = worker.make_workers(config, "cpu")
    for name in reversed(NAMES):
        second[name].answer(LoadLearner(request_id=3, path=str(tmp_path / f"{name}-2.state"), policy=name))
    step(second, 3)
    for name in NAMES:
        assert is_equal(snapshot(first[name].learner), snapshot(second[name].learner)), name
        assert files(tmp_path / f"{name}-3.state") == expected[name], name
        assert second[name].learner.training.step == 3


def test_policy_that_runs_out_of_memory_changes_no_other(config, make_items, tmp_path):
    items = make_items(8, turns=2)
    longest = max(map(length, items))
    workers = worker.make_workers(config, "cpu")
    main, exploiter = workers["main"], workers["exploiter"]
    update(main, items, 1, tmp_path, "main")
    before = snapshot(main.learner)
    is_short = True
    starve(main.learner, lambda size: is_short and size > 3 * longest)
    found = update(exploiter, items, 1, tmp_path, "exploiter").metrics
    is_short = False
    assert found["oom_retries"] >= 1
    assert found["max_tokens_per_micro_batch"] < main.policy.max_tokens_per_micro_batch
    assert is_equal(before, snapshot(main.learner))
    metrics = update(main, items, 2, tmp_path, "main").metrics
    expected = alone(config, "main")
    for version in (1, 2):
        update(expected, items, version, tmp_path / "alone", "main")
    assert metrics["oom_retries"] == 0
    assert is_equal(snapshot(main.learner), snapshot(expected.learner))


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_training_that_begins_again_is_that_of_a_new_learner(config, make_items, tmp_path, name, is_fresh):
    """The state, with the random states, equals that of a learner with another history; so does the next update."""
    workers, own = worker.make_workers(config, "cpu"), config.of_policy(name)
    other = next(other for other in NAMES if other != name)
    update(workers[other], make_items(6, turns=2), 1, tmp_path, other)
    adapter = None if is_fresh else str(tmp_path / f"{other}-1")
    before = snapshot(workers[other].learner)
    (tmp_path / "alone").mkdir()
    for place, one in (("shared", workers[name]), ("alone", worker._Worker(load_learner(own, "cpu"), own))):
        for version in range(1, 3 if place == "shared" else 1):
            update(one, make_items(6, seed=version, turns=2), version, tmp_path / place, name)
        path = tmp_path / place / "again"
        message = WriteAdapter(request_id=1, version=9, path=str(path), adapter=adapter, seed=5, policy=name)
        digest = one.answer(message)
        assert isinstance(digest, AdapterDigest) and digest.digest == peft_files.adapter_digest(path)
        one.answer(SaveLearner(request_id=2, path=str(tmp_path / place / "state"), policy=name))
        assert [*one.past_adapters] == [9]
        assert update(one, make_items(6, seed=7, turns=2), 10, tmp_path / place, name).metrics["step"] == 1
    for saved in ("again", "state", f"{name}-10.state"):
        assert files(tmp_path / "shared" / saved) == files(tmp_path / "alone" / saved), saved
    assert is_equal(before, snapshot(workers[other].learner))
    tensors, _, _ = peft_files.read_adapter(tmp_path / "shared" / "again")
    if is_fresh:
        assert not any(tensor.any() for key, tensor in tensors.items() if ".lora_B." in key)
    else:
        assert is_equal(tensors, peft_files.read_adapter(tmp_path / f"{other}-1")[0])


def test_unfit_adapter_of_a_new_training_fails_the_request_and_changes_nothing(config, make_items, tmp_path):
    one = worker.make_workers(config, "cpu")["third"]
    update(one, make_items(6, turns=2), 1, tmp_path, "third")
    update(alone(config.changed(lora={"lora_rank": 2}), "third"), make_items(6, turns=2), 1, tmp_path / "other")
    before = snapshot(one.learner)
    for directory in (tmp_path / "missing", tmp_path / "other" / "-1"):
        again = {"version": 2, "path": str(tmp_path / "again"), "adapter": str(directory), "seed": 5}
        reply = one.answer(WriteAdapter(request_id=1, policy="third", **again))
        assert isinstance(reply, Failed) and str(directory) in reply.error
        assert is_equal(before, snapshot(one.learner))


async def test_process_carries_out_a_request_for_the_policy_that_it_names(start, config, tmp_path):  # noqa: F811
    process = await start(config)
    await process.ready(120)
    for name in reversed(NAMES):
        path = str(tmp_path / name)
        written = await process.channel.ask(WriteAdapter, 120, version=7, path=path, policy=name)
        tensors, stored = alone(config, name).policy.adapter_state()
        assert written.digest == peft_files.digest_of(stored, peft_files.serialized(tensors)), name

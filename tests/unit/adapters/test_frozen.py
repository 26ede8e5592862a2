"""Names of frozen players, the adapters that they stand for, the best of a run, and the copies that a run keeps."""

import json
import os
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fakes.handmade_adapters import small, write_adapter
from unstable_lite.adapters import frozen
from unstable_lite.adapters.frozen import find_adapter, keep_copy, members, read_facts, slug, with_members
from unstable_lite.adapters.peft_files import CONFIG, WEIGHTS
from unstable_lite.config.games import parse_player
from unstable_lite.errors import AdapterError, ConfigError, UnstableError
from unstable_lite.tracking.run_directory import to_toml

ENVS = (("Nim-v0-train", "scripted:random"), ("TicTacToe-v0-train", "base"))
NIM = {"env_id": "Nim-v0-train", "num_players": 2, "fixed_opponent": "scripted:random"}


def write_run(directory: Path, updates: tuple[int, ...], lines: list[dict[str, Any]], *eval_envs: Any) -> Path:
    for update in updates:
        write_adapter(directory / "checkpoints" / f"ckpt-{update}", small(update))
    eval_envs = eval_envs or tuple(NIM | {"env_id": env_id, "fixed_opponent": opponent} for env_id, opponent in ENVS)
    (directory / "config.toml").write_text(to_toml({"eval_envs": list(eval_envs)}))
    (directory / "eval.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return directory


def line(update: int, env: int, points: float | None, label: str = "update", reward: float = 0.0) -> dict[str, Any]:
    env_id, opponent = (*ENVS, (ENVS[0][0], "scripted:random, greedy"))[env]
    of = {"label": label, "model": f"ckpt-{update}", "step": update, "env_id": env_id, "opponent": opponent}
    return of | {"points": points, "mean_reward": reward}


def found(word: str) -> str:
    return find_adapter(f"run:{word}").path.name


def test_names_of_frozen_players_differ_from_others_and_have_their_own_copies():
    assert all(parse_player(name).is_frozen for name in ("base", "adapter:x", "run:x/best", "adapter:Capital"))
    others = ("scripted:random", "my_module:MyPlayer", "vendor/model:free", "./base")
    assert not any(parse_player(name).is_frozen for name in others)
    names = ["run:a/b/best", "run:a-b/best", "adapter:a/b/best", "run:a/b/newest", f"run:{'x' * 300}/best"]
    slugs = set(map(slug, names))
    assert len(slugs) == len(names)
    assert all(len(one) < 80 and "/" not in one for one in slugs)


def test_newest_is_the_highest_number_and_kept_adapters_count(tmp_path):
    run = write_run(tmp_path, (2, 10), [])
    assert (found(f"{run}/newest"), found(f"{run}/ckpt-2")) == ("ckpt-10", "ckpt-2")
    write_adapter(run / "adapters" / "ckpt-11", small(11))
    assert (found(f"{run}/newest"), found(f"{run}/ckpt-11/")) == ("ckpt-11", "ckpt-11")


BOTH, GREEDY = [line(2, 0, 0.5), line(2, 1, 0.5)], NIM | {"temperature": 0.0, "error_allowance": 1, "new_key": 1}


@pytest.mark.parametrize(
    ("lines", "eval_envs"),
    [
        pytest.param(
            [line(1, 0, 0.9), line(1, 1, 0.0), *BOTH, line(3, 0, 0.4), line(3, 1, 0.4)], (), id="highest mean over all"
        ),
        pytest.param([*BOTH, line(3, 0, 1.0)], (), id="not evaluated on all envs"),
        pytest.param([*BOTH, *(line(3, env, 1.0, "concurrent") for env in (0, 1))], (), id="without a quota"),
        pytest.param([*BOTH, line(9, 0, 1.0), line(9, 1, 1.0)], (), id="not saved"),
        pytest.param([*BOTH, line(1, 0, 0.5), line(1, 1, 0.5)], (), id="older of two equal ones"),
        pytest.param(
            [line(1, 0, 0.6), line(1, 2, 0.1), line(2, 0, 0.5), line(2, 2, 0.9)], (NIM, GREEDY), id="over all samplings"
        ),
        pytest.param(
            [line(update, env, None, reward=-abs(update - 2)) for update in (1, 2, 3) for env in (0, 1)],
            (),
            id="by reward",
        ),
    ],
)
def test_best_checkpoint_has_the_highest_mean(tmp_path, lines, eval_envs):
    assert found(f"{write_run(tmp_path, (1, 2, 3), lines, *eval_envs)}/best") == "ckpt-2"


@pytest.mark.parametrize("env", [NIM | {"temperature": "x"}, {"env_id": "Nim-v0-train"}, {}, 3])
def test_damaged_config_of_a_run_is_named(tmp_path, env):
    with pytest.raises(ConfigError, match=r"config\.toml is not the config of a run"):
        found(f"{write_run(tmp_path, (1,), [line(1, 0, 0.6)], env)}/best")


@pytest.mark.parametrize("text", ["null", "[]", "7", "{}", '{"model": 1}', '{"model": "ckpt-1", "points": "x"}'])
def test_evaluation_that_no_run_writes_is_named(tmp_path, text):
    run = write_run(tmp_path, (1,), [line(1, 0, 0.6)])
    with (run / "eval.jsonl").open("a") as file:
        file.write(f"{text}\n")
    with pytest.raises(UnstableError, match=r"eval\.jsonl, line 2\b"):
        found(f"{run}/best")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("adapter:{}/nowhere", "no directory"),
        ("adapter:{}/empty", "adapter_model.safetensors"),
        ("run:{}/nowhere/best", "not a run directory"),
        ("run:{}/none/newest", "no checkpoint yet"),
        ("run:{}/run/ckpt-7", "no ckpt-7; its newest are ckpt-1, ckpt-2"),
        ("run:{}/run/best", "none is the best"),
        ("run:{}/run", "write run:DIRECTORY/ckpt-N"),
        ("run:{}/run/oldest", "write run:DIRECTORY/ckpt-N"),
        ("run:best", "write run:DIRECTORY/ckpt-N"),
    ],
)
def test_name_that_stands_for_no_adapter_is_refused(tmp_path, name, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "none" / "checkpoints").mkdir(parents=True)
    write_run(tmp_path / "run", (1, 2), [])
    with pytest.raises((ConfigError, AdapterError), match=says) as caught:
        find_adapter(name.format(tmp_path))
    assert str(tmp_path) in str(caught.value) or name == "run:best"


def test_copy_stands_for_the_name_after_the_original_changed_or_went(tmp_path):
    run, copies = write_run(tmp_path / "run", (1,), []), tmp_path / "opponents"
    name = f"run:{run}/newest"
    kept = keep_copy(name, copies)
    assert kept.path == (copies / slug(name)).resolve()
    assert kept.key == find_adapter(name).key
    write_adapter(run / "checkpoints" / "ckpt-2", small(2))
    assert find_adapter(name, copies) == keep_copy(name, copies) == kept
    assert find_adapter(name).key != kept.key
    shutil.rmtree(run)
    assert keep_copy(name, copies) == kept
    assert json.loads((kept.path / "opponent.json").read_text())["source"].endswith("ckpt-1")


def test_unfinished_copy_is_made_again_and_a_damaged_one_is_an_error(tmp_path):
    adapter, copies = write_adapter(tmp_path / "a", small()), tmp_path / "opponents"
    name = f"adapter:{adapter}"
    (copies / f".{slug(name)}.unfinished").mkdir(parents=True)
    assert keep_copy(name, copies).key == read_facts(adapter).key
    copy = keep_copy(f"adapter:{adapter}", copies).path
    content = bytearray((copy / WEIGHTS).read_bytes())
    content[-4] ^= 1
    (copy / WEIGHTS).write_bytes(content)
    with pytest.raises(AdapterError, match="is damaged"):
        find_adapter(f"adapter:{adapter}", copies)
    (copy / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=str(copy)):
        keep_copy(f"adapter:{adapter}", copies)


def test_copy_is_synced_to_disk_before_it_has_its_name(tmp_path, monkeypatch):
    name, copies = f"adapter:{write_adapter(tmp_path / 'a', small())}", tmp_path / "run" / "opponents"
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    keep_copy(name, copies)
    unfinished = copies / f".{slug(name)}.unfinished"
    files = {str(unfinished / file) for file in (CONFIG, WEIGHTS, "opponent.json")}
    assert files | {str(unfinished)} <= set(synced[:-1])
    assert (synced[0], synced[-1]) == (str(tmp_path / "run"), str(copies))


def test_adapter_that_vanishes_while_it_is_copied_is_named(tmp_path, monkeypatch):
    adapter, copies = write_adapter(tmp_path / "a", small()), tmp_path / "opponents"

    def find_and_remove(*names: Any) -> Any:
        found = find_adapter(*names)
        shutil.rmtree(adapter)
        return found

    monkeypatch.setattr(frozen, "find_adapter", find_and_remove)
    with pytest.raises(AdapterError, match=rf"^{adapter}/\S+ cannot be read: .*No such file"):
        keep_copy(f"adapter:{adapter}", copies)
    assert not copies.exists()


def test_average_has_the_saved_adapters_as_members_with_equal_or_rising_weights(tmp_path):
    for place, update in (("adapters", 2), ("checkpoints", 5), ("checkpoints", 10)):
        write_adapter(tmp_path / place / f"ckpt-{update}", small(update))
    run, name = f"run:{tmp_path}", f"average:{tmp_path}"
    assert members(name) == {f"{run}/ckpt-2": 1.0, f"{run}/ckpt-5": 1.0, f"{run}/ckpt-10": 1.0}
    assert members(f"{name}/linear") == {f"{run}/ckpt-2": 2.0, f"{run}/ckpt-5": 5.0, f"{run}/ckpt-10": 10.0}
    assert members(f"{name}/linear/ckpt-5,10") == {f"{run}/ckpt-5": 5.0, f"{run}/ckpt-10": 10.0}
    assert with_members(f"{name}/linear/") == f"{name}/linear/ckpt-2,5,10"
    write_adapter(tmp_path / "checkpoints" / "ckpt-20", small(20))
    for kept in (f"{name}/ckpt-2,5", "base", f"{run}/newest", "vendor/average:model"):
        assert with_members(kept) == kept
    assert len(members(name)) == 4 and members("base") == {"base": 1.0}
    assert parse_player(name).is_frozen and parse_player(name).has_adapter
    with pytest.raises(ConfigError, match=r"average:nowhere.* is not a run directory"):
        members("average:nowhere")
    with pytest.raises(ConfigError, match="names no run"):
        members("average:")
    for twice in ("/ckpt-5,5", "/linear/ckpt-0"):
        with pytest.raises(ConfigError, match="each checkpoint once"):
            members(name + twice)
    with pytest.raises(ConfigError, match="name one of them"):
        find_adapter(name)


POLICY_ENVS = (NIM, NIM | {"fixed_opponent": "policy:exploiter"})


def write_policies(directory: Path, *lines: tuple[str, int, str, float]) -> Path:
    """Write a run of two policies; a line has model, update of the run, opponent and points."""
    write_run(directory, (), [], *POLICY_ENVS)
    policies = {"exploiter": {}, "main": {}}
    (directory / "config.toml").write_text(to_toml({"policies": policies, "eval_envs": list(POLICY_ENVS)}))
    for seed, (update, policy) in enumerate(product((4, 10), policies)):
        write_adapter(directory / "checkpoints" / f"ckpt-{update}" / policy, small(seed))
    known = (line(0, 0, points) | {"model": m, "step": at, "opponent": of} for m, at, of, points in lines)
    (directory / "eval.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in known))
    return directory


def place(word: str) -> str:
    return "/".join(find_adapter(f"run:{word}").path.parts[-2:])


def test_a_checkpoint_of_several_policies_means_main_unless_it_names_another(tmp_path):
    run = write_policies(tmp_path)
    assert (place(f"{run}/ckpt-4"), place(f"{run}/newest/")) == ("ckpt-4/main", "ckpt-10/main")
    assert (place(f"{run}/ckpt-4/exploiter"), place(f"{run}/newest/exploiter/")) == (
        "ckpt-4/exploiter",
        "ckpt-10/exploiter",
    )
    assert list(map(place, (name.removeprefix("run:") for name in members(f"average:{run}")))) == [
        "ckpt-4/main",
        "ckpt-10/main",
    ]
    (run / "config.toml").write_text(to_toml({"policies": {"exploiter": {}, "b": {}}}))
    assert place(f"{run}/newest") == "ckpt-10/exploiter"
    with pytest.raises(ConfigError, match="has no policy 'main'; it has exploiter, b"):
        place(f"{run}/newest/main")
    single = write_run(tmp_path / "single", (2,), [])
    with pytest.raises(ConfigError, match="has no policy 'main'; it has only one"):
        place(f"{single}/newest/main")


def test_the_best_of_a_policy_is_by_its_own_results_against_players_that_do_not_learn(tmp_path):
    run = write_policies(
        tmp_path,
        *(("main/ckpt-3", 4, "scripted:random", 0.9), ("main/ckpt-7", 10, "scripted:random", 0.8)),
        *(("main/ckpt-3", 4, "policy:exploiter", 0.1), ("main/ckpt-7", 10, "policy:exploiter", 0.9)),
        *(("exploiter/ckpt-1", 4, "scripted:random", 0.2), ("exploiter/ckpt-3", 10, "scripted:random", 0.3)),
    )
    assert (place(f"{run}/best"), place(f"{run}/best/exploiter")) == ("ckpt-4/main", "ckpt-10/exploiter")
    assert frozen.find_best(run)[1].startswith("ckpt-4/main, best of 2")


def test_policies_of_a_foreign_config_are_no_paths(tmp_path):
    run = write_policies(tmp_path)
    for foreign in ({"../../main": {}}, ["main"], 3):
        (run / "config.toml").write_text(to_toml({"policies": foreign}))
        assert frozen.policies_of(run) == [""]

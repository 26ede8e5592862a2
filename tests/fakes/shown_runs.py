"""Small run directories for what a person sees: one function for each case, without any process.

Each function gets an output directory and returns the run directory that it wrote there. The same call always writes
the same numbers.
"""

import json
import math
import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from unstable_lite.tracking.evaluations import Deals, Evaluation, Tally
from unstable_lite.types import Outcome

NIM = "Nim-v0-train"
BEGAN = 1_795_780_000.0
"""Start time of each run, in seconds since the epoch: 2026-11-27, 11:46:40 UTC."""
SECONDS_PER_UPDATE, GAMES_PER_UPDATE = 1.4, 100
QUICKSTART = {
    "scripted:random": (0.54, 0.8, 0.8525, 0.9),
    "scripted:optimal": (0.0125, 0.015, 0.025, 0.0275),
    "scripted:blind-random": (0.4125, 0.7675, 0.965, 0.9),
    "base": (0.505, 0.7425, 0.8375, 0.8725),
}
"""Points against each opponent, at the updates 0, 85, 170 and 255."""
LONG = "vendor/a-model-with-a-name-of-60-characters-and-not-one-less"
MANY = (
    *((NIM, opponent) for opponent in ("scripted:random", "scripted:optimal", LONG)),
    *(("KuhnPoker-v0-train", opponent) for opponent in ("scripted:random", "vendor/model[/INST]:fire:", "base")),
    *(("openspiel:liars_dice(dice_sides=3)", opponent) for opponent in ("scripted:random", "厂商/模型-七十亿-指令")),
)
"""Three envs with eight opponents: a long name, one with markup, and one of wide characters."""


def quickstart(outputs: Path) -> Path:
    """Write the finished quickstart, with a spike of the KL divergence at update 188 and one alarm."""
    return _nim(outputs, "quickstart-example", 255, alarms=["collapse: a test"])


def running(outputs: Path) -> Path:
    """Write the quickstart at update 128, running in this process."""
    return _nim(outputs, "running", 128, live={"has_ended": False, "time": time.time(), "pid": os.getpid()})


def without_evaluation(outputs: Path) -> Path:
    """Write a run at update 2, in this process, before its first evaluation has ended."""
    live = {"has_ended": False, "time": time.time(), "pid": os.getpid()}
    return _write(outputs, "without-evaluation", _config(_envs(NIM, QUICKSTART), 255), [], 2, live)


def failed(outputs: Path) -> Path:
    """Write a run that failed at update 3, after the evaluations before training."""
    return _nim(outputs, "failed", 3, live={"has_failed": True})


def resumed(outputs: Path) -> Path:
    """Write a run that was killed after update 100, resumed a day later, and has ended at update 170."""
    directory = _nim(outputs, "resumed", 170, learning_steps=170, paused_after=100)
    (directory / "config-100.toml").write_text(tomli_w.dumps(_config(_envs(NIM, QUICKSTART), 255)))
    return directory


def one_player(outputs: Path) -> Path:
    """Write a run of a game of one player, whose results are mean rewards."""
    env_id = "FrozenLake-v0-train"
    results = [_of_rewards(step, env_id, mean) for step, mean in ((0, -0.12), (10, 0.31), (20, 0.402))]
    return _write(outputs, "one-player", _config(_envs(env_id, ["none"], num_players=1), 20), results, 20)


def questions(outputs: Path) -> Path:
    """Write a run of questions, which are right or wrong."""
    env_id = "questions:/data/arithmetic.jsonl"
    results = [of_points(step, env_id, "none", right, seats=1) for step, right in ((0, 0.215), (20, 0.64))]
    return _write(outputs, "questions", _config(_envs(env_id, ["none"], num_players=1), 20), results, 20)


def many_opponents(outputs: Path) -> Path:
    """Write a run with the envs and opponents `MANY`; some of its games are void or ended by an invalid move."""
    envs = [env for env_id, opponent in MANY for env in _envs(env_id, [opponent])]
    results = [
        of_points(step, env_id, opponent, 0.3 + 0.02 * number + step / 100, games=100)
        for step in (0, 20)
        for number, (env_id, opponent) in enumerate(MANY)
    ]
    results[-1] = replace(results[-1], ended_invalid=30, void=6, reasons={"vendor/model[/INST] does not answer": 6})
    return _write(outputs, "many[/opponents]", _config(envs, 20), results, 20)


def of_97857f1(outputs: Path) -> Path:
    """Write the quickstart as version 97857f1 did, with other intervals and without the reasons of ends."""
    directory = quickstart(outputs)
    path, lines = directory / "eval.jsonl", []
    for line in map(json.loads, (directory / "eval.jsonl").read_text().splitlines()):
        for name in ("reasons", "full_points", "ended_invalid", "remarks"):
            del line[name]
        old = {"interval": [0.25, 0.75], "points_interval": [0.25, 0.75], "reward_interval": [-0.5, 0.5]}
        lines.append(line | old | {"points_over_deals": None, "reward_over_deals": None})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    live = json.loads((directory / "live.json").read_text())
    del live["has_failed"]
    (directory / "live.json").write_text(json.dumps(live))
    return directory


CASES = (quickstart, running, without_evaluation, failed, resumed, one_player, questions, many_opponents, of_97857f1)


def of_points(step: int, env_id: str, opponent: str, points: float, games: int = 400, seats: int = 2) -> Evaluation:
    """Return an evaluation with exactly this share of points."""
    outcomes = [1.0] * round(points * games) + [0.0] * (games - round(points * games))
    random.Random(f"{step} {env_id} {opponent}").shuffle(outcomes)
    results: list[tuple[Outcome, float]] = [("win" if won else "loss", 2 * won - 1) for won in outcomes]
    evaluation = _evaluation(step, env_id, opponent, results)
    return replace(evaluation, scores=_by_deal(outcomes, seats))


def _of_rewards(step: int, env_id: str, mean: float, games: int = 200) -> Evaluation:
    drawn = random.Random(f"{step} {env_id}")
    rewards = [round(mean + drawn.choice((-0.4, -0.1, 0.0, 0.5)), 3) for _ in range(games)]
    evaluation = _evaluation(step, env_id, "none", [("na", reward) for reward in rewards])
    by_deal = _by_deal(rewards, 1)
    return replace(evaluation, scores=by_deal, rewards=by_deal)


def _evaluation(step: int, env_id: str, opponent: str, games: Iterable[tuple[Outcome, float]]) -> Evaluation:
    tally = Tally()
    for outcome, reward in games:
        tally.add(outcome, reward, own_invalid=False)
    label, model = (f"update {step}", f"ckpt-{step}") if step else ("before", "base")
    return tally.evaluation(label, model, step, env_id, opponent)


def _nim(outputs: Path, name: str, updates: int, learning_steps: int = 255, **more: Any) -> Path:
    """Write a run of the quickstart with the evaluations that it has made, in this order."""
    config = _config(_envs(NIM, QUICKSTART), learning_steps)
    results = [
        of_points(85 * n, NIM, opponent, points[n])
        for n in range(1 + updates // 85)
        for opponent, points in QUICKSTART.items()
    ]
    return _write(outputs, name, config, results, updates, **more)


def _by_deal(values: Sequence[float], seats: int) -> Deals:
    return tuple(tuple(values[first : first + seats]) for first in range(0, len(values), seats))


def _envs(env_id: str, opponents: Iterable[str], num_players: int = 2) -> list[dict[str, Any]]:
    env = {"env_id": env_id, "num_players": num_players, "prompt_template": "tiny"}
    return [env | ({"fixed_opponent": opponent} if num_players > 1 else {}) for opponent in opponents]


def _config(eval_envs: list[dict[str, Any]], learning_steps: int) -> dict[str, Any]:
    trained = {env["env_id"]: {"env_id": env["env_id"], "num_players": env["num_players"]} for env in eval_envs}
    run = {"learning_steps": learning_steps, "seed": 0, "eval_games": 400, "output_dir": "outputs", "name": "shown"}
    return {
        "model_name": "builtin:tiny",
        "algorithm": "reinforce",
        "run": run,
        "train_envs": [*trained.values()],
        "eval_envs": eval_envs,
    }


def _write(
    outputs: Path,
    name: str,
    config: dict[str, Any],
    evaluations: Sequence[Evaluation],
    updates: int,
    live: dict[str, Any] | None = None,
    alarms: Iterable[str] = (),
    paused_after: int | None = None,
) -> Path:
    """Write a run directory; `live`: values of live.json other than those of a run that has ended."""
    directory = outputs / "2026-11-27" / f"11-46-40-{name.replace('/', ':')}"
    saved = {f"checkpoints/ckpt-{one.step}" for one in evaluations if one.step}
    for part in ("checkpoints", "logs", "tensorboard", *saved):
        (directory / part).mkdir(parents=True)
    (directory / "config.toml").write_text(tomli_w.dumps(config))
    (directory / "versions.json").write_text(json.dumps({"commit": "0" * 40, "packages": {}, "questions": {}}))
    env_ids = [env["env_id"] for env in config["train_envs"]]
    metrics = [_metrics(update, env_ids, updates) for update in range(1, updates + 1)]
    for line in metrics:
        line["time"] = BEGAN + line["run/seconds"] + 86_400 * (paused_after is not None and line["step"] > paused_after)
    _write_lines(directory / "metrics.jsonl", metrics)
    _write_lines(directory / "league.jsonl", (_league(update) for update in range(updates + 1)))
    _write_lines(directory / "eval.jsonl", (_without_nan(one.to_json()) for one in evaluations))
    raised = [{"step": updates, "time": BEGAN, "text": text, "is_repeat": False} for text in alarms]
    _write_lines(directory / "alarms.jsonl", raised)
    stats = {"queued": 1, "running": 21, "tokens_per_s": 2400.0, "cached_share": 0.74, "oom_retries": 0}
    workers = [_worker("engine-0", stats), _worker("learner", None)]
    ended = {
        "time": metrics[-1]["time"],
        "pid": 2**22 + 1,  # no process has it
        "learning_steps": config["run"]["learning_steps"],
        "games": updates * GAMES_PER_UPDATE,
        "void_games": 0,
        "workers": workers,
        "has_ended": True,
        "has_failed": False,
    }
    (directory / "live.json").write_text(json.dumps(ended | (live or {})))
    return directory


def _worker(name: str, stats: dict[str, Any] | None) -> dict[str, Any]:
    place = {"pid": None, "device": "cpu", "gpu": "", "state": "ready", "waited_for": 0}
    return {"name": name, **place, "stats": stats}


def _metrics(update: int, env_ids: Iterable[str], updates: int) -> dict[str, Any]:
    """Return an update's metrics: points rise, with noise, and the KL divergence has a spike at update 188."""
    drawn = random.Random(update)
    share, noise = update / updates, drawn.gauss(0.0, 0.04)
    metrics: dict[str, Any] = {
        "step": update,
        "run/seconds": round(SECONDS_PER_UPDATE * update, 3),
        "run/games": GAMES_PER_UPDATE * update,
        "run/tokens_per_s": 2152.0,
        "learner/loss": round(-0.03 + noise / 10, 5),
        "learner/entropy": round(0.8 - 0.6 * share + noise / 10, 5),
        "learner/kl_to_base": 2.9 if update == 188 else round(0.06 * share + abs(noise) / 50, 5),
        "learner/policy_grad_norm": round(0.06 + abs(noise) / 4, 5),
        "learner/mismatch_mean": 3e-07,
        "learner/mismatch_tokens": 384.0,
        "learner/staleness_mean": 1.5,
        "learner/staleness_max": 2.0,
        "learner/zero_advantage": 0.0,
        "learner/importance_weight_mean": 1.0,
        "learner/importance_weight_clipped": 0.0,
        "learner/tokens_per_s": 11671.0,
        "learner/wait_for_batch_s": 0.03,
        "learner/seconds": 0.62,
        "buffer/size": 449.0,
        "buffer/dropped_stale": 0.0,
    }
    for env_id in env_ids:
        metrics |= {
            f"collection-{env_id}/reward": round(0.4 * share + noise, 4),
            f"collection-{env_id}/n": 400.0,
            f"collection-{env_id}/Points": round(0.52 + 0.25 * share + noise / 2, 4),
            f"collection-{env_id}/Format Success Rate - correct_answer_format": 1.0,
            f"collection-{env_id}/Ended by own invalid move": 0.01,
            f"collection-{env_id}/Game Length": 6.5,
            f"collection-{env_id}/Response Length (token)": 6.0,
        }
    return metrics


def _league(update: int) -> dict[str, Any]:
    """Return an update's line of league.jsonl: each checkpoint wins more games against the random player."""
    uid, won = (f"ckpt-{update}" if update else "base"), min(54 + update // 6, 95)
    models: dict[str, Any] = {uid: [round(26.0 + update / 20, 4), 1.2, 100, True, True]}
    if update:
        earlier = f"ckpt-{update - 1}" if update > 1 else "base"
        models[earlier] = [round(26.0 + (update - 1) / 20, 4), 1.2, 100, update % 50 == 1, False]
    models["fixed-scripted:random"] = [25.0, 0.0, 100 * (update + 1), True, False]
    return {"step": update, "models": models, "matches": [[uid, "fixed-scripted:random", 100, won, 0, 100 - won]]}


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Records of a run: metrics, games, batches and the league as lines of JSON, and a game as text for a person.

A batch is one compressed file for each update, written in a thread beside the event loop. The first n lines of
league.jsonl together are the league at the n-th line. Knows nothing of losses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from unstable_lite.files import AppendFile, to_line, write_whole
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.types import Batch, GameRecord, Logprobs, Step, Turn


class JsonlSink:
    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line, in which a number that is not finite is null."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._file.write(to_line({"step": step, "time": time.time(), **numbers}))

    def close(self) -> None:
        self._file.close()


def record_to_json(record: GameRecord, keep_tokens: bool) -> dict[str, Any]:
    """Return a GameRecord as one line of games.jsonl, which a person can read and which replays the game.

    A turn is `[pid, observation, text, action, format_ok, seconds]`. With `keep_tokens` it has a seventh entry: the
    sampled tokens for players that the engines serve, null for others. If a player changed its adapter during the game
    (`league.adapter_policy` "turn"), `model` is its first one, and `adapter_versions` has that of each turn. The turns
    before `branch_turn` are those of an earlier game, repeated.
    """
    spec = record.spec
    return {
        "game_idx": spec.game_idx,
        "kind": spec.kind,
        "env_id": spec.env_id,
        "seed": spec.seed,
        "eval_label": spec.eval_label,
        **({} if spec.sampling is None else {"sampling": str(spec.sampling)}),
        **({"branch_turn": len(spec.start.turns)} if spec.start is not None else {}),
        "agents": [
            {"pid": agent.pid, "model": agent.model.uid, "collect_data": agent.collect_data}
            | ({"opponent": agent.model.name} if agent.model.name else {})
            for agent in spec.agent_specs
        ],
        "turns": [
            [turn.pid, turn.observation, turn.text, turn.action, turn.format_ok, round(turn.seconds, 4)]
            + ([_sampled(turn)] if keep_tokens else [])
            for turn in record.turns
        ],
        **({"adapter_versions": record.adapter_versions} if record.changes_adapter else {}),
        "rewards": record.rewards,
        "outcomes": record.outcomes,
        **({"teams": record.teams} if record.teams else {}),
        "end": record.end,
        "reason": record.reason,
        "invalid_pids": record.invalid_pids,
        "invalid_turns": [index for index, turn in enumerate(record.turns) if turn.is_invalid],
        "error": record.error,
        "seconds": round(record.seconds, 4),
    }


def _sampled(turn: Turn) -> dict[str, Any] | None:
    generation = turn.generation
    if generation is None:
        return None
    forced = generation.forced
    return {
        "completion_ids": generation.completion_ids.tolist(),
        "logprobs": [round(logprob, 4) for logprob in generation.logprobs.tolist()],
        "adapter_version": generation.adapter_version,
        "finish_reason": generation.finish_reason,
    } | ({} if forced is None else {"forced": {"at": forced.at, "ids": forced.ids.tolist()}})


log = logging.getLogger(__name__)


class TrainDataFiles:
    """Files of training data; `step-000001.jsonl.gz` has the batch of the first update."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-data")
        self._writing: Future[None] | None = None

    async def write(self, update: int, version: int, batch: Batch, logprobs: Sequence[Logprobs] = ()) -> None:
        """Start writing after the previous file is done. Raises OSError if the previous file could not be written."""
        before, self._writing = self._writing, None
        try:
            if before is not None:
                await asyncio.wrap_future(before)
        finally:
            self._writing = self._thread.submit(self._write, update, version, batch, logprobs)

    def close(self) -> None:
        """Wait for the last file."""
        self._thread.shutdown()
        if self._writing is not None and (error := self._writing.exception()) is not None:
            log.error("%s: the last batch could not be written: %s", self._directory, error)

    def _write(self, update: int, version: int, batch: Batch, logprobs: Sequence[Logprobs | None]) -> None:
        path = self._directory / f"step-{update:06d}.jsonl.gz"
        steps = steps_of(batch)
        of_steps = logprobs or [None] * len(steps)
        write_whole(path, [step_to_json(step, version, one) for step, one in zip(steps, of_steps, strict=True)])


def train_files(directory: Path) -> dict[int, Path]:
    """Return the files of training data of a run directory by update, oldest first."""
    paths = sorted((directory / "train_data").glob("step-*.jsonl.gz"))
    return {int(path.name.removeprefix("step-").removesuffix(".jsonl.gz")): path for path in paths}


def steps_of(batch: Batch) -> list[Step]:
    return [step for entry in batch for step in (entry if isinstance(entry, list) else [entry])]


def step_to_json(step: Step, version: int, logprobs: Logprobs | None = None) -> dict[str, Any]:
    """Return a step as a row. `reward` is after all stages; `step_info` has each stage.

    `version`: of the policy that was updated. `logprobs`: of the completion's tokens under that policy; None if the
    step was too long to train on. Minus the engine's log-probabilities in games.jsonl, they are the logarithms of the
    tokens' importance weights.
    """
    generation = step.generation
    row = {
        "pid": step.pid,
        "obs": step.obs,
        "act": step.act,
        "reward": step.reward,
        "env_id": step.env_id,
        "step_info": step.step_info,
        "format_feedback": step.format_feedback,
        "prompt_tokens": len(generation.prompt_ids),
        "completion_tokens": len(generation.completion_ids),
        "finish_reason": generation.finish_reason,
        "adapter_version": generation.adapter_version,
        "staleness": version - generation.adapter_version,
    }
    if generation.forced is not None:
        row["forced_tokens"] = len(generation.forced.ids)
    if step.weight != 1:
        row["weight"] = step.weight
    if step.token_weights is not None:
        row["token_weights"] = np.asarray(step.token_weights).tolist()
    if logprobs is not None:
        row["learner_logprobs"] = [round(logprob, 4) for logprob in logprobs.tolist()]
    return row


class LeagueLog:
    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._step = 0

    def log(self, step: int, registry: ModelRegistry) -> None:
        """Write the changes.

        `models`: [μ, σ, games, active, current] by uid; `matches`: [uid, uid, games, won, drawn, lost], the results of
        the first of two different models against the second, by rank as in the ratings.
        An evaluation of an earlier step that ends now logs the league as it is now.
        """
        self._step = max(step, self._step)
        is_current = getattr(registry, "is_current", lambda uid: uid == registry.get_current_ckpt())
        models = {}
        for uid in registry.touched:
            meta = registry.get(uid)
            rating = round(meta.rating.mu, 4), round(meta.rating.sigma, 4)
            models[uid] = [*rating, meta.games, meta.active, is_current(uid)]
        matches = [
            [*pair, registry.match_counts[pair], *registry.match_results.get(pair, (0, 0, 0))]
            for pair in registry.touched_pairs
        ]
        self._file.write(to_line({"step": self._step, "models": models, "matches": matches}))
        registry.touched.clear()  # after the write: if it fails, the next line has these changes
        registry.touched_pairs.clear()

    def close(self) -> None:
        self._file.close()


MAX_TURNS = 40
MAX_TEXT, MAX_OBSERVATION = 4000, 1200
"""Most characters of one answer and of one observation; the excess is cut out of the middle."""


def transcript(record: GameRecord) -> str:
    spec = record.spec
    models = {agent.pid: agent.model.uid for agent in spec.agent_specs}
    seats = ", ".join(f"player {pid} {uid}" for pid, uid in models.items())
    results = ", ".join(
        f"player {pid} {outcome} ({record.reward_shown(pid):+g})" + " by an invalid move" * (pid in record.invalid_pids)
        for pid, outcome in record.outcomes.items()
    )
    lines = [f"{spec.env_id}, game {spec.game_idx}, seed {spec.seed}: {seats}", f"{record.end}: {results}"]
    versions = record.adapter_versions if record.changes_adapter else [None] * len(record.turns)
    for number, (turn, version) in enumerate(zip(record.turns[:MAX_TURNS], versions, strict=False)):
        model = models[turn.pid] if version is None else f"started as {models[turn.pid]}, now adapter {version}"
        lines += [
            "",
            f"==== turn {number}: player {turn.pid}, {model}, sees",
            _cut(turn.observation, MAX_OBSERVATION),
            f"---- and answers{'' if turn.format_ok else ', not in the requested format'}",
            _cut(turn.text, MAX_TEXT),
            f"---- which is the move {_cut(turn.action, MAX_OBSERVATION)}",
        ]
    if (left_out := len(record.turns) - MAX_TURNS) > 0:
        lines += ["", f"(and {left_out} more turns)"]
    # A lone surrogate, which an API's JSON may contain, cannot be encoded in UTF-8.
    return "\n".join(lines).encode("utf-8", "replace").decode()


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length // 2]} (… {len(text) - length} characters …) {text[-length // 2 :]}"

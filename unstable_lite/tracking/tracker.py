"""Metrics of a run: windows over games, one line of metrics per update, every evaluation with its interval.

Metric names follow the reference (`trackers.py`). Every mean has its sample size in its group: `n` counts games of a
player, `n (turns)` turns, `n (pid=k)` games at one seat, and `n (answered)` games in which the player sampled a token.
Sinks receive finished numbers and know nothing of games.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from unstable_lite.config.games import opponent_shown
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.files import AppendFile, RecordLog, to_line
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.rollout.in_order import InOrder
from unstable_lite.tracking.diversity import Diversity
from unstable_lite.tracking.evaluations import Evaluation, Tally
from unstable_lite.tracking.game_lines import record_to_json
from unstable_lite.tracking.league_log import LeagueLog
from unstable_lite.tracking.train_data import Batch, TrainDataFiles
from unstable_lite.tracking.transcripts import transcript
from unstable_lite.tracking.windows import WINDOW, Collected, GameWindows, collect, evaluated
from unstable_lite.tracking.write_failures import WriteFailures
from unstable_lite.types import GameRecord, GameSpec, Histogram, Logprobs

INTERFACE_MEANS = (
    ("n", "Game Length"),
    ("n (turns)", "Format Success Rate - correct_answer_format"),
    ("n (turns)", "Format Success Rate - invalid_move"),
)
"""Sample size and name of each metric that `get_interface_info` averages over all training envs."""


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class RichSink(Sink, Protocol):
    """Sink that can also show histograms and texts."""

    def log_histograms(self, step: int, histograms: Sequence[Histogram]) -> None: ...

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Show unescaped texts by name. The sink must ensure that no part of them becomes markup."""


class Tracker:
    def __init__(
        self,
        run_directory: Path,
        sinks: Sequence[Sink],
        config: TrackerConfig,
        say: Callable[[str], None] = lambda text: None,  # noqa: ARG005
    ) -> None:
        """`say`: called with text that a user should read at once."""
        self.evaluations: list[Evaluation] = []
        """Evaluations with a quota; eval.jsonl has all evaluations."""
        self.registry: ModelRegistry | None = None
        """Registry for `get_interface_info`, league.jsonl and the age of checkpoints."""
        self.games_finished = self.void_games = self.branched_games = 0
        self.alarms: list[str] = []
        self.latest: dict[str, float] = {}
        """Newest value of every metric."""
        self._sinks = list(sinks)
        self._rich_sinks = [sink for sink in self._sinks if isinstance(sink, RichSink)]
        self._newest_game: GameRecord | None = None
        """Newest training game, for the next transcript."""
        self._say = say
        self._step = 0
        self._failures = WriteFailures(lambda text: self.alarm(self._step, text))
        self._config = config
        self._games_file = RecordLog(run_directory / "games.jsonl", config.max_part_mb)
        self._eval_file = AppendFile(run_directory / "eval.jsonl")
        self._alarms_file = AppendFile(run_directory / "alarms.jsonl")
        self._league_log = LeagueLog(run_directory / "league.jsonl")
        self._train_data = TrainDataFiles(run_directory / "train_data") if config.keep_train_data else None
        self._windows = GameWindows()
        self._collected = InOrder[list[Collected]]()
        """Entries of training games, released in the order of the game numbers."""
        self._diversity: dict[str, Diversity] = defaultdict(lambda: Diversity(WINDOW))
        self._tallies: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
        """Evaluation games without a quota, by (model, env, opponent)."""
        self._started = time.monotonic()
        """Start time; in a resumed run, shifted as if there had been no break."""

    @property
    def lost_records(self) -> int:
        """Number of lines, events and files that could not be written."""
        return self._failures.lost_records

    def begin_game(self, spec: GameSpec) -> None:
        """Record that a training game begins; the windows count no later game before it ends."""
        self._collected.begin(spec.game_idx)

    def add_record(self, record: GameRecord) -> None:
        """Count a finished game and write it to games.jsonl."""
        self.games_finished += 1
        is_void = record.end == "void"
        self.void_games += is_void
        if record.spec.kind == "eval":
            self._add_evaluated(record)
        else:
            self._newest_game = self._newest_game if is_void else record
            # A game that began at a branch has neither the length nor the result of a game of the policy.
            is_left_out = is_void or record.spec.start is not None
            self.branched_games += record.spec.start is not None and not is_void
            collected = [] if is_left_out else [collect(record, trajectory) for trajectory in record.trajectories]
            for of_game in self._collected.end(record.spec.game_idx, collected):
                for of_player in of_game:
                    self._add_collected(of_player)
        if self._config.keep_games == "all" or self._config.keep_games == record.spec.kind:
            with self._failures.survived("games.jsonl"):
                self._games_file.write(record_to_json(record, self._config.keep_tokens))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation with a quota and keep it for the summary."""
        self.evaluations.append(evaluation)
        self._write_evaluation(evaluation)
        self._log_league(evaluation.step)

    def end_evaluations(self, still_playing: Collection[str]) -> None:
        """Write the results of evaluation games without a quota for each checkpoint that is not in `still_playing`."""
        for key in [key for key in self._tallies if key[0] not in still_playing]:
            model, env_id, opponent = key
            iteration = self.registry.get(model).iteration if self.registry is not None else None
            evaluation = self._tallies.pop(key).evaluation("concurrent", model, iteration or 0, env_id, opponent)
            self._write_evaluation(evaluation)

    async def add_train_data(self, update: int, version: int, batch: Batch, logprobs: Sequence[Logprobs] = ()) -> None:
        """Write the batch that update number `update` trained on; `version` is that of the policy before it.

        logprobs: of each step of the batch under this policy, or empty.

        Waits until the previous batch is on disk, but not for this one.
        """
        if self._train_data is not None:
            with self._failures.survived("train_data"):
                await self._train_data.write(update, version, batch, logprobs)

    def alarm(self, step: int, text: str, is_repeat: bool = False) -> None:
        """Report an alarm and write it to alarms.jsonl. Unless it is a repeat, count it and keep it for the summary."""
        self._say(f"alarm after update {step}: {text}")
        if not is_repeat:
            self.alarms.append(f"update {step}: {text}")
        with contextlib.suppress(OSError):  # the alarm may be about this very failure
            self._alarms_file.write(to_line({"step": step, "time": time.time(), "text": text, "is_repeat": is_repeat}))

    def log_update(self, step: int, metrics: Mapping[str, float], histograms: Sequence[Histogram] = ()) -> None:
        """Log `metrics` of this update with the windows over games, and a game every `transcript_every` updates."""
        everything = dict(metrics)
        everything |= self._windows.metrics()
        for env_id, diversity in self._diversity.items():
            everything |= {f"exploration/{env_id}/{name}": value for name, value in diversity.metrics().items()}
        everything["run/seconds"] = time.monotonic() - self._started
        everything["run/games"] = self.games_finished
        everything["run/void_games"] = self.void_games
        if self.branched_games:
            everything["run/branched_games"] = self.branched_games
        everything["run/alarms"] = len(self.alarms)
        everything["run/lost_records"] = self.lost_records
        self._send(step, everything)
        for sink in self._rich_sinks:
            with self._failures.survived(type(sink).__name__):
                self._show(sink, step, histograms)
        self._log_league(step)
        self._failures.report_recovery()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log `metrics` that belong to no update, if there are any."""
        if metrics:
            self._send(step, metrics)

    def get_interface_info(self) -> dict[str, Any]:
        """Return the data of a dashboard under the reference's keys; means over all training envs, None if empty.

        `gpu_tok_s` by engine, `TS` by model uid, `match_counts` by pair of uids, `exploration` by env.
        """
        registry = self.registry
        return {
            "gpu_tok_s": {
                name.split("/")[1]: value
                for name, value in self.latest.items()
                if name.startswith("inference/") and name.endswith("/tok_s")
            },
            "TS": {uid: asdict(meta) | {"rating": meta.rating} for uid, meta in registry.get_all_models().items()}
            if registry
            else {},
            "match_counts": dict(registry.match_counts) if registry else {},
            "exploration": {env_id: diversity.metrics() for env_id, diversity in self._diversity.items()},
        } | {name: self._windows.mean("collection-", count, name) for count, name in INTERFACE_MEANS}

    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": time.monotonic() - self._started,
            "games": self.games_finished,
            "void_games": self.void_games,
            "branched_games": self.branched_games,
            "alarms": self.alarms,
            **self._windows.state_dict(),
            "diversity": {env_id: diversity.state_dict() for env_id, diversity in self._diversity.items()},
            "tallies": [[*key, tally.state_dict()] for key, tally in self._tallies.items()],
        }

    def resume(self, state: dict[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Restore counts and windows. `evaluations`: the lines of eval.jsonl."""
        self._started -= state["seconds"]
        self.games_finished, self.void_games = state["games"], state["void_games"]
        self.branched_games = state.get("branched_games", 0)
        self.alarms = list(state["alarms"])
        self._windows.load_state_dict(state)
        for env_id, diversity in state["diversity"].items():
            self._diversity[env_id].load_state_dict(diversity)
        for *key, tally in state["tallies"]:
            self._tallies[key[0], key[1], key[2]].load_state_dict(tally)
        known = map(Evaluation.from_json, evaluations)
        self.evaluations = [evaluation for evaluation in known if evaluation.label != "concurrent"]

    def close(self) -> None:
        """Write all pending results and close all files."""
        self.end_evaluations(())
        for sink in self._sinks:
            with self._failures.survived(type(sink).__name__):
                sink.close()
        for file in (self._games_file, self._eval_file, self._alarms_file, self._league_log):
            file.close()
        if self._train_data is not None:
            self._train_data.close()

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        self.latest.update(metrics)
        self._step = step
        for sink in self._sinks:
            with self._failures.survived(type(sink).__name__):
                sink.log(step, metrics)

    def _show(self, sink: RichSink, step: int, histograms: Sequence[Histogram]) -> None:
        if histograms:
            sink.log_histograms(step, [replace(one, name=f"learner/{one.name}") for one in histograms])
        game, every = self._newest_game, self._config.transcript_every
        if game is not None and every and step % every == 0:
            sink.log_texts(step, {f"games/{game.spec.env_id}": transcript(game)})

    def _write_evaluation(self, evaluation: Evaluation) -> None:
        with self._failures.survived("eval.jsonl"):
            self._eval_file.write(to_line(evaluation.to_json()))
        self._send(evaluation.step, evaluation.metrics())

    def _log_league(self, step: int) -> None:
        if self.registry is not None:
            with self._failures.survived("league.jsonl"):
                self._league_log.log(step, self.registry)

    def _add_collected(self, collected: Collected) -> None:
        self._windows.add(f"collection-{collected.env_id}", collected.entries)
        self._diversity[collected.env_id].append(collected.states, collected.actions)

    def _add_evaluated(self, record: GameRecord) -> None:
        opponents = [agent.model.name for agent in record.spec.agent_specs if agent.model.name is not None]
        env_id = record.spec.env_id
        opponent = opponent_shown(opponents[0] if opponents else "none", record.spec.sampling)
        group = f"evaluation-{env_id} ({opponent})"
        for agent in record.spec.agent_specs:
            if agent.model.name is not None:
                continue
            if record.spec.eval_label is None:
                self._tallies[agent.model.uid, env_id, opponent].add_record(record, agent.pid)
            if record.end == "void":
                continue
            self._windows.add(group, evaluated(record, agent.pid))

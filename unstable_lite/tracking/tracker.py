"""Metrics of a run: windows over games, one line of metrics per update, every evaluation with its interval.

Metric names follow the reference (`trackers.py`). Every mean has its sample size in its group: `n` counts games of a
player, `n (turns)` turns, `n (pid=k)` games at one seat, and `n (answered)` games in which the player sampled a token.
Sinks receive finished numbers and know nothing of games. A record that cannot be written does not end the run.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from unstable_lite.config.games import opponent_shown
from unstable_lite.config.reference import TRACKER, from_reference
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.errors import Caught
from unstable_lite.files import AppendFile, RecordLog, to_line
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.rollout.back_pressure import InOrder
from unstable_lite.tracking.displayed_metrics import Totals, of_policy
from unstable_lite.tracking.evaluations import Evaluation, Tally
from unstable_lite.tracking.records import LeagueLog, TrainDataFiles, record_to_json, transcript
from unstable_lite.tracking.windows import Collected, GameWindows, Judged, collect, evaluated, judged_by_alarms
from unstable_lite.types import Batch, GameRecord, GameSpec, Histogram, Logprobs, policy_of, uid_of

log = logging.getLogger(__name__)

TRANSCRIPT_EVERY = 10
"""Number of updates between two games that TensorBoard and W&B show as text."""


class WriteFailures:
    def __init__(self, alarm: Callable[[str], None]) -> None:
        self.lost_records = 0
        """Number of lines, events and files that could not be written."""
        self._alarm = alarm
        self._failing: dict[str, str] = {}
        """Sinks and files that cannot be written at the moment, with their paths."""
        self._failed_lately: set[str] = set()
        """Sinks and files that failed since the last update."""

    @contextlib.contextmanager
    def survived(self, target: str) -> Iterator[None]:
        """Continue the run if a record cannot be written, because games and updates are worth more than their records.

        Counts the lost records and reports the first failure. The recovery is reported after an update without a
        failure, because on a nearly full disk short lines fit between long ones that fail.
        """
        caught = Caught()
        with caught:
            yield
        if (error := caught.error) is None:
            return
        self.lost_records += 1
        self._failed_lately.add(target)
        if target not in self._failing:
            line = "".join(traceback.format_exception_only(error)).strip()  # `str` of an error may raise
            path, reason, remedy = target, line[:300], "See logs/orchestrator.log"
            if isinstance(error, OSError) and error.strerror:
                path, reason, remedy = error.filename or target, error.strerror, "Free some space"
            self._failing[target] = path
            log.warning("a record for %s is lost", target, exc_info=error)
            self._alarm(
                f"cannot write {path}: {reason}. The run continues without these records "
                f"(run/lost_records counts them) and keeps trying. {remedy}"
            )

    def report_recovery(self) -> None:
        """Report the targets that failed before, but not since the last call."""
        for target in self._failing.keys() - self._failed_lately:
            where = self._failing.pop(target)
            self._alarm(f"writes work again after a failure at {where}; {self.lost_records} records were lost in all")
        self._failed_lately.clear()


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class RichSink(Sink, Protocol):
    """Sink that can also show histograms and texts."""

    def log_histograms(self, step: int, histograms: Sequence[Histogram]) -> None: ...

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Show unescaped texts by name. The sink must ensure that no part of them becomes markup."""


@from_reference(kept=TRACKER)
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
        """Registry for league.jsonl and the age of checkpoints."""
        self.games_finished = self.eval_games_finished = self.void_games = self.branched_games = 0
        self.ended: Counter[tuple[str, str, str]] = Counter()
        """Number of games whose end has a reason, by env, opponent and reason."""
        self.alarms: list[str] = []
        self.latest: dict[str, float] = {}
        """Newest value of every metric."""
        self._sinks = list(sinks)
        self._rich_sinks = [sink for sink in self._sinks if isinstance(sink, RichSink)]
        self._newest_game: GameRecord | None = None
        """Newest training game, for the next transcript."""
        self._say = say
        self._step = 0
        self.failures = WriteFailures(lambda text: self.alarm(self._step, text))
        self._config = config
        self._games_file = RecordLog(run_directory / "games.jsonl")
        self._eval_file = AppendFile(run_directory / "eval.jsonl")
        self._alarms_file = AppendFile(run_directory / "alarms.jsonl")
        self._league_log = LeagueLog(run_directory / "league.jsonl")
        self._train_data = TrainDataFiles(run_directory / "train_data")
        self.windows = GameWindows()
        self._ended = InOrder[tuple[list[Collected], list[Judged]]]()
        """Entries of training games for the windows, released in the order of the game numbers."""
        self._tallies: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
        """Evaluation games without a quota, by (model, env, opponent)."""
        self._started = time.monotonic()
        """Start time; in a resumed run, shifted as if there had been no break."""

    @property
    def totals(self) -> Totals:
        seconds = time.monotonic() - self._started
        return Totals(self.games_finished, self.eval_games_finished, self.void_games, seconds)

    def begin_game(self, spec: GameSpec) -> None:
        """Record that a training game begins; the windows count no later game before it ends."""
        self._ended.begin(spec.game_idx)

    def add_record(self, record: GameRecord) -> None:
        """Count a finished game and write it to games.jsonl."""
        self.games_finished += 1
        is_void = record.end == "void"
        self.eval_games_finished += record.spec.kind == "eval"
        self.void_games += is_void
        if record.reason:
            self.ended[record.spec.env_id, _opponent(record.spec), record.reason] += 1
        if record.spec.kind == "eval":
            env_id, opponent = record.spec.env_id, _opponent(record.spec)
            for agent in (agent for agent in record.spec.agent_specs if agent.model.name is None):
                if record.spec.eval_label is None:
                    self._tallies[agent.model.uid, env_id, opponent].add_record(record, agent.pid)
                if not is_void:
                    windows = self.windows.of(agent.model.policy)
                    windows.add(f"evaluation-{env_id} ({opponent})", evaluated(record, agent.pid))
            self._judge(judged_by_alarms(record))
        else:
            self._newest_game = self._newest_game if is_void else record
            # A game that began at a branch has neither the length nor the result of a game of the policy.
            is_left_out = is_void or record.spec.start is not None
            self.branched_games += record.spec.start is not None and not is_void
            collected = [] if is_left_out else [collect(record, trajectory) for trajectory in record.trajectories]
            for of_players, of_game in self._ended.end(record.spec.game_idx, (collected, [*judged_by_alarms(record)])):
                for of_player in of_players:
                    self.windows.of(of_player.policy).add_collected(of_player)
                self._judge(of_game)
        if self._config.keep_games == "all" or self._config.keep_games == record.spec.kind:
            with self.failures.survived("games.jsonl"):
                self._games_file.write(record_to_json(record, self._config.keep_tokens))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation with a quota and keep it for the summary."""
        self.evaluations.append(evaluation)
        self._write_evaluation(evaluation)
        self._log_league(evaluation.step)

    def end_evaluations(self, still_playing: Collection[str]) -> None:
        """Write the results of evaluation games without a quota for each checkpoint that is not in `still_playing`."""
        newest = self._step
        for model, env_id, opponent in [key for key in self._tallies if key[0] not in still_playing]:
            iteration = self.registry.get(model).iteration if self.registry is not None else None
            tally, step = self._tallies.pop((model, env_id, opponent)), iteration or 0
            step = newest if step and policy_of(model) else step  # a policy's checkpoints have its own updates
            self._write_evaluation(tally.evaluation("concurrent", model, step, env_id, opponent))

    async def add_train_data(self, update: int, version: int, batch: Batch, logprobs: Sequence[Logprobs] = ()) -> None:
        """Write the batch that update number `update` trained on; `version` is that of the policy before it.

        logprobs: of each step of the batch under this policy, or empty. Waits until the previous batch is on disk, but
        not for this one.
        """
        with self.failures.survived("train_data"):
            await self._train_data.write(update, version, batch, logprobs)

    def alarm(self, step: int, text: str, is_repeat: bool = False) -> None:
        """Report an alarm and write it to alarms.jsonl. Unless it is a repeat, count it and keep it for the summary."""
        self._say(f"alarm after update {step}: {text}")
        if not is_repeat:
            self.alarms.append(f"update {step}: {text}")
        with contextlib.suppress(OSError):  # the alarm may be about this very failure
            self._alarms_file.write(to_line({"step": step, "time": time.time(), "text": text, "is_repeat": is_repeat}))

    def log_update(
        self, step: int, metrics: Mapping[str, float], histograms: Sequence[Histogram] = (), policy: str = ""
    ) -> None:
        """Log `metrics` of this update with the windows over games, and a game every `TRANSCRIPT_EVERY` updates.

        policy: the prefix of its metrics.
        """
        everything = of_policy(policy, metrics) | self.windows.metrics()
        shown = [replace(one, name=uid_of(policy, f"learner/{one.name}")) for one in histograms]
        everything |= {
            **{f"run/{name}": total for name, total in asdict(self.totals).items()},
            **({"run/branched_games": self.branched_games} if self.branched_games else {}),
            "run/alarms": len(self.alarms),
            "run/lost_records": self.failures.lost_records,
        }
        self.log(step, everything | self._ended_metrics())
        game = self._newest_game if step % TRANSCRIPT_EVERY == 0 else None
        for sink in self._rich_sinks:
            with self.failures.survived(type(sink).__name__):
                if shown:
                    sink.log_histograms(step, shown)
                if game is not None:
                    sink.log_texts(step, {f"games/{game.spec.env_id}": transcript(game)})
        self._log_league(step)
        self.failures.report_recovery()

    def ended_early(self) -> list[str]:
        """Return the number of games for each reason of an end, by env and opponent, most games first."""
        return [f"{n} {reason} in {env_id} ({opponent})" for (env_id, opponent, reason), n in self.ended.most_common()]

    def _ended_metrics(self) -> dict[str, float]:
        return {f"ended/{env} ({opponent})/{reason}": count for (env, opponent, reason), count in self.ended.items()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log `metrics`, also those that belong to no update, if there are any."""
        if not metrics:
            return
        self.latest.update(metrics)
        self._step = step
        for sink in self._sinks:
            with self.failures.survived(type(sink).__name__):
                sink.log(step, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.totals),
            "branched_games": self.branched_games,
            "ended": [[*key, count] for key, count in self.ended.items()],
            "alarms": self.alarms,
            **self.windows.state_dict(),
            "tallies": [[*key, tally.state_dict()] for key, tally in self._tallies.items()],
        }

    def resume(self, state: dict[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Restore counts and windows. `evaluations`: the lines of eval.jsonl."""
        self._started -= state["seconds"]
        self.games_finished, self.void_games = state["games"], state["void_games"]
        played = sum(line["n"] for line in evaluations)  # runs of before recorded no other number
        self.eval_games_finished = state.get("eval_games", played)
        self.branched_games = state.get("branched_games", 0)
        self.ended.update({(env, opponent, reason): count for env, opponent, reason, count in state.get("ended", ())})
        self.alarms = list(state["alarms"])
        self.windows.load_state_dict(state)
        for *key, tally in state["tallies"]:
            self._tallies[key[0], key[1], key[2]].load_state_dict(tally)
        known = map(Evaluation.from_json, evaluations)
        self.evaluations = [evaluation for evaluation in known if evaluation.label != "concurrent"]

    def close(self) -> None:
        """Write all pending results and close all files and sinks, also if one of them raises."""
        with contextlib.ExitStack() as parts:
            for part in (self._train_data, self._league_log, self._alarms_file, self._eval_file, self._games_file):
                parts.callback(part.close)
            for sink in reversed(self._sinks):
                parts.enter_context(self.failures.survived(type(sink).__name__))
                parts.callback(sink.close)
            with contextlib.suppress(KeyError):  # the start failed before the registry had its state
                self.end_evaluations(())

    def _write_evaluation(self, evaluation: Evaluation) -> None:
        with self.failures.survived("eval.jsonl"):
            self._eval_file.write(to_line(evaluation.to_json()))
        self.log(evaluation.step, evaluation.metrics() | self._ended_metrics())

    def _log_league(self, step: int) -> None:
        if self.registry is not None:
            with self.failures.survived("league.jsonl"):
                self._league_log.log(step, self.registry)

    def _judge(self, entries: Iterable[Judged]) -> None:
        for policy, version, kind, games, value in entries:
            if version >= (windows := self.windows.of(policy)).first_version:
                windows.judged[kind, games].append(value)


def _opponent(spec: GameSpec) -> str:
    """Return the fixed opponent of a game, as results show it; without one the kind of the other players."""
    fixed = [agent.model.name for agent in spec.agent_specs if agent.model.name is not None]
    if spec.kind == "eval" or fixed:
        return opponent_shown(fixed[0] if fixed else "none", spec.sampling)
    is_mirror = len({agent.model.uid for agent in spec.agent_specs}) == 1
    return "none" if spec.num_players == 1 else "mirror" if is_mirror else "checkpoint"

"""TensorBoard event files: scalars, histograms, texts and the layout of the pages.

Uses only the `tensorboard` package; loads neither torch nor tensorflow. Owns the tag names, and ensures that no text
becomes markup on the page.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.histogram import metadata as histogram
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from unstable_lite.config import Config
from unstable_lite.config.env_ids import is_judged, slug, with_slugs
from unstable_lite.config.games import against
from unstable_lite.files import AppendFile, read_records
from unstable_lite.tracking.displayed_metrics import TOPICS, named, of_topic
from unstable_lite.tracking.evaluations import evaluation_group
from unstable_lite.tracking.result_rows import row_label, row_place
from unstable_lite.types import Histogram, uid_of

PREFIX = "events.out.tfevents."
HPARAMS = (
    *("algorithm", "model_name", "run.seed", "run.learning_steps", "run.group_size"),
    *("engine.temperature", "engine.max_generation_len", "learner.batch_size", "learner.learning_rate"),
    *("learner.importance_weight_cap", "learner.kl_coefficient", "lora.lora_rank", "lora.lora_alpha"),
    *("buffer.max_staleness", "league.opponent_sampling_strategy"),
)
"""Columns of the hyperparameter table, besides the envs."""
EVALUATION = re.compile(
    r"(?:(?P<policy>\w+)/)?evaluation-(?P<env>.*) \((?P<opponent>.*)\)/(?P<during>concurrent )?checkpoint (?P<value>.*)"
)


class TensorBoardSink:
    """Writes complete events at once, not in a thread, which a full disk would end."""

    def __init__(self, directory: Path, order: Sequence[tuple[str, str]] = ()) -> None:
        """Open the next file. `order`: the cells that number the results, `Config.eval_cells`."""
        self._order = order
        self._zeros: dict[str, int] = {}
        """Metrics that were 0 so far, which are not yet written, with their newest step."""
        self._written: set[str] = set()
        metrics = directory.parent / "metrics.jsonl"  # of a resumed run
        for line in read_records(metrics) if metrics.exists() else ():
            self._begin(line.pop("step"), line)
        # TensorBoard reads files in the order of their names. With names from the clock, which can jump, the files of
        # a resumed run could come before the earlier ones.
        numbers = [int(path.name.removeprefix(PREFIX).partition(".")[0]) for path in directory.glob(f"{PREFIX}*")]
        number = max(numbers, default=0) + 1
        self._file = AppendFile(directory / f"{PREFIX}{number:010d}.{socket.gethostname()}")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a metric that was 0 so far from its first other value on, with one 0 at the step before."""
        has_points = any(name.endswith("checkpoint Points") for name in metrics)
        rows = [(before, name, 0.0) for name, before in self._begin(step, metrics).items()]
        rows += [(step, name, value) for name, value in metrics.items() if name in self._written]
        for at, of_step in itertools.groupby(sorted(rows), key=lambda row: row[0]):
            event = Event(wall_time=time.time(), step=at)
            for _, name, value in of_step:
                event.summary.MergeFrom(scalar_pb(tag_of(name, has_points, self._order), value))
            self._write(event)

    def _begin(self, step: int, metrics: Mapping[str, float]) -> dict[str, int]:
        """Return the metrics that are no longer 0, with the newest step at which they were. Results may be 0."""
        begun = {}
        for name, value in metrics.items():
            if name not in self._written:
                if value == 0 and not EVALUATION.fullmatch(name):
                    self._zeros[name] = step
                    continue
                self._written.add(name)
                if name in self._zeros:
                    begun[name] = self._zeros.pop(name)
        return begun

    def log_histograms(self, step: int, histograms: Sequence[Histogram]) -> None:
        event = Event(wall_time=time.time(), step=step)
        for one in histograms:
            buckets = np.column_stack([one.edges[:-1], one.edges[1:], one.counts])
            tensor = make_tensor_proto(buckets, dtype=np.float64)
            metadata = histogram.create_summary_metadata(display_name=None, description=None)
            event.summary.value.add(tag=one.name, tensor=tensor, metadata=metadata)
        self._write(event)

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        event = Event(wall_time=time.time(), step=step)
        for name, text in texts.items():
            event.summary.MergeFrom(text_pb(with_slugs(name), as_code(text)))
        self._write(event)

    def lay_out(self, config: Config) -> None:
        """Write, once per run, its row of the hyperparameter table and the layout of its charts."""
        event = Event(wall_time=time.time(), step=0)
        event.summary.value.add(
            tag=custom_scalar.CONFIG_SUMMARY_TAG,
            tensor=make_tensor_proto(layout(config).SerializeToString(), dtype=np.object_),
            metadata=custom_scalar.create_summary_metadata(),
        )
        raw, train_envs = config.model_dump(mode="json"), dict.fromkeys(env.env_id for env in config.train_envs)
        values: dict[str, Any] = {"train_envs": ", ".join(train_envs)}
        for key in HPARAMS:
            section, _, name = key.rpartition(".")
            value = (raw[section] if section else raw)[name]
            values[key] = value if isinstance(value, int | float | str) else json.dumps(value)
        tags = [tag_of(f"{tag} Points", order=config.eval_cells) for _, tag in _evaluations(config)]
        tags += [uid_of(one, f"collection-{slug(env_id)}/reward") for one in config.shares for env_id in train_envs]
        columns = [hparams.HParam(name) for name in values]
        event.summary.MergeFrom(hparams.hparams_config_pb(columns, [hparams.Metric(tag) for tag in tags]))
        event.summary.MergeFrom(hparams.hparams_pb(values, start_time_secs=time.time()))
        self._write(event)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.write(record.getvalue())


def as_code(text: str) -> str:
    """Return Markdown that shows `text` verbatim: each line is indented, so it is a block of code."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def tag_of(name: str, has_points: bool = True, order: Sequence[tuple[str, str]] = ()) -> str:
    """Return the tag of a metric. The group of results sorts first on the page: a series for each result row, numbered.

    Tags of evaluations have no parentheses, with which the custom scalars page draws no line (TensorBoard 2.21).
    has_points: whether the evaluation that the metric is of can be won, else its result is the mean reward.
    """
    if (match := EVALUATION.fullmatch(name)) and match["value"] == ("Points" if has_points else "Reward"):
        key = during, env_id, opponent = bool(match["during"]), match["env"], match["opponent"]
        # With the env, because one page may show runs in different ones.
        title = named(match["policy"] or "", f"{row_place(key, order)} {row_label(slug(env_id), opponent, [('', '')])}")
        name = f"Results/{title}{', mean reward' * (not has_points)}{', while training' * during}"
    elif re.match(r"(\w+/)?evaluation-", name):
        name = with_slugs(name).replace("(", "against ", 1)
    else:
        return with_slugs(name)
    return name.replace("(", "").replace(")", "")


def layout(config: Config) -> layout_pb2.Layout:
    """Return the charts of the custom scalars page, on which tags are regular expressions: a line for each policy."""
    of_policy = f"(({'|'.join(config.policies)})/)?" * bool(config.policies)
    charts = {topic: [_lines(metric.label, of_policy + metric.name) for metric in of_topic(topic)] for topic in TOPICS}
    for title, tag in _evaluations(config):
        value, lower, upper = (tag_of(f"{tag} Points{edge}", order=config.eval_cells) for edge in ("", " low", " high"))
        series = layout_pb2.MarginChartContent.Series(value=value, lower=lower, upper=upper)
        charts["play"].append(layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=[series])))
    if config.run.exact_every:
        charts["play"].append(_lines("exploitability", f"{of_policy}exploitability(_legal)?(_low|_high)?/.*"))
    charts["play"].append(_lines("points in training games", f"{of_policy}collection-.*/Points"))
    charts["health"].append(_lines("ended by own invalid move", f"{of_policy}collection-.*/Ended by own invalid move"))
    charts["health"].append(_lines("alarms", "run/alarms"))
    charts["speed"].append(_lines("tokens/s of engines", "inference/.*/tok_s"))
    categories = [
        layout_pb2.Category(title=TOPICS[topic], chart=charts[topic], closed=topic == "speed") for topic in charts
    ]
    return layout_pb2.Layout(category=categories)


def _lines(title: str, tags: str) -> layout_pb2.Chart:
    return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{tags}$"]))


def _evaluations(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the chart's title and the tag prefix of each evaluation that can be won."""
    for policy, env in itertools.product(config.shares, config.eval_envs):
        is_other = env.fixed_opponent != f"policy:{policy}"
        if (env.num_players > 1 and is_other) or is_judged(env.env_id):
            cell = env.env_id, env.opponent, policy
            title = named(policy, f"{env.env_id}, points{against(env.opponent)}, 95 %")
            if config.run.eval_games:
                yield title, evaluation_group("", *cell)
            if config.run.num_eval_workers and config.run.schedule != "sync":
                yield f"{title}, while training", evaluation_group("concurrent", *cell)

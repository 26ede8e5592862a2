"""Summaries that `run` and `sft` print at their end."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unstable_lite.cli.options import console
from unstable_lite.errors import UnstableError

if TYPE_CHECKING:
    from unstable_lite.orchestrator.run import Summary


def print_summary(summary: Summary) -> None:
    from unstable_lite.dashboards.terminal import as_line, evaluation_tables, key_value_lines, remark_lines

    out = console()
    for table in evaluation_tables(summary.evaluations):
        out.print(table)
    for line in remark_lines(summary.evaluations):
        out.print(line, soft_wrap=True)
    planned = f" of {summary.planned_updates}" * (summary.updates < summary.planned_updates)
    skipped = f", {summary.skipped_updates} skipped" * bool(summary.skipped_updates)
    since = " since the resume" * summary.is_resumed
    directory = shlex.quote(str(summary.directory))
    dropped, played = summary.dropped_stale_steps, summary.played_steps
    dropped_shown = f"{dropped}" + (f" of {played} ({dropped / played:.1%})" if played else "")
    dropped_shown += f"; most of {summary.most_dropped}" if summary.most_dropped else ""
    rows = [
        ("updates", f"{summary.updates}{planned}{skipped}"),
        ("games", f"{summary.games}, {summary.void_games} void"),
        *[("ended early", text) for text in summary.ended_early],
        ("stale steps dropped", dropped_shown),
        ("time", f"{summary.seconds:.0f} s{since}, of which training {summary.training_seconds:.0f} s"),
        ("run directory", str(summary.directory)),
    ]
    if summary.checkpoint is not None:
        rows.append(("newest adapter", str(summary.checkpoint)))
    rows += [
        ("games, turn by turn", str(summary.directory / "games.jsonl")),
        ("curves", f"tensorboard --logdir {summary.directory / 'tensorboard'}"),
        ("report", f"unstable-lite report {directory}"),
    ]
    if planned and summary.stopped_by is None:
        rows.append(("to continue", f"unstable-lite run --resume {directory}"))
    out.print(key_value_lines(rows), soft_wrap=True)
    for line in (*(f"alarm {alarm}" for alarm in summary.alarms), *summary.collapsed):
        out.print(as_line(line), soft_wrap=True)
    if summary.stopped_by is not None:
        way_on = f"; to continue regardless: unstable-lite run --resume {directory}"
        saved = f"{summary.checkpoint}{way_on}" if summary.checkpoint else "none, because no update was made"
        raise UnstableError(f"stopped by alarm {summary.stopped_by}\nnewest checkpoint: {saved}")


def print_sft_summary(config: Path, directory: Path, record: dict[str, Any]) -> None:
    """Print the results of `sft`, whose `record` is the content of sft.json."""
    from unstable_lite.dashboards.terminal import key_value_lines

    metrics: dict[str, float] | None = record["metrics"]
    games = "" if record["games"] is None else f", from {record['games']} games, {record['void_games']} void"
    rows = [("pairs", f"{record['num_pairs']}{games}")]
    rows += [("left out", f"{count} {reason}") for reason, count in Counter(record["left_out"]).most_common()]
    if metrics is None:
        rows += [
            ("pairs file", str(directory / "pairs.jsonl")),
            ("to train on them", f"unstable-lite sft {config} sft.data={directory / 'pairs.jsonl'}"),
        ]
    else:
        first, last = metrics["train_loss_first_epoch"], metrics["train_loss_last_epoch"]
        losses = f"{first:.4f} nats a token in the first epoch, {last:.4f} in the last"
        rows.append(("trained on", f"{metrics['num_trained']:.0f} pairs; loss {losses}"))
        if metrics["num_held_out"]:
            rows.append(("held out", f"{metrics['num_held_out']:.0f} pairs whose prompts are not trained on"))
            for name, what in (("loss", "loss"), ("token_accuracy", "tokens right"), ("accuracy", "answers right")):
                form = ".4f" if name == "loss" else ".1%"
                before, after = metrics[f"{name}_before"], metrics[f"{name}_after"]
                rows.append((f"  {what}", f"{before:{form}} before, {after:{form}} after"))
        rows += [
            ("time", f"{record['seconds']:.0f} s"),
            ("adapter", str(directory)),
            ("to start from it", f"unstable-lite run {config} lora.initial_lora_path={directory}"),
        ]
    console().print(key_value_lines(rows), soft_wrap=True)

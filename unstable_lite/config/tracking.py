"""Sections of records and alarms."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from unstable_lite.config.section import Section


class TrackerConfig(Section):
    wandb_project: str | None = None
    """Project of Weights & Biases to log to as well (extra `wandb`), under the same names; empty: none."""
    keep_games: Literal["all", "eval", "none"] = "all"
    """Games whose transcripts go to games.jsonl."""
    keep_tokens: bool = False
    """Whether to keep each turn's sampled token ids with their log-probabilities in games.jsonl, and the learner's
    log-probabilities in train_data/."""


class AlarmConfig(Section):
    """One alarm about the learning."""

    threshold: float = Field(ge=0)
    """Value of the metric beyond which the alarm is on: above it, or for `entropy` below it. A share's is below 1."""
    action: Literal["off", "warn", "pause", "stop"] = "warn"
    """`warn`: report the alarm. `pause`: also save a checkpoint, stop playing and learning, and wait until the file
    PAUSED in the run directory is deleted. `stop`: also finish the update, save a checkpoint, and end with an error."""


class ShareAlarm(AlarmConfig):
    """Alarm whose metric is a share; with a threshold of 1 it could never be on."""

    threshold: float = Field(ge=0, lt=1)


class StarvedAlarm(AlarmConfig):
    """Alarm whose threshold is a time, and which would always be on with 0."""

    threshold: float = Field(gt=0)


class AlarmsConfig(Section):
    """Signs of learning gone wrong. A table changes only the keys that it names: `entropy = { action = "stop" }`.

    docs/collapse.md and each alarm's message explain the alarm's meaning and possible remedies.
    """

    mismatch: AlarmConfig = AlarmConfig(threshold=0.1)
    """Mean |Δ log p| between engine and learner over a sample of each update's steps."""
    clipping: ShareAlarm = ShareAlarm(threshold=0.2)
    """Share of an update's tokens whose importance weight is cut at `learner.importance_weight_cap`."""
    staleness: AlarmConfig = AlarmConfig(threshold=6.0)
    """Mean age of an update's tokens, in updates; `buffer.max_staleness` bounds the oldest."""
    dropped: ShareAlarm = ShareAlarm(threshold=0.05)
    """Share of the steps leaving the buffer for an update that are dropped as older than `buffer.max_staleness`."""
    entropy: AlarmConfig = AlarmConfig(threshold=0.02)
    """Mean entropy of the policy at an update's tokens, in nats; the alarm is on below the threshold."""
    high_entropy: AlarmConfig = AlarmConfig(threshold=3.0)
    """Mean entropy minus that of the run's first update; the alarm is on above the threshold."""
    repetition: ShareAlarm = ShareAlarm(threshold=0.5)
    """Share of 4-grams of tokens that occurred before in the same completion."""
    identical: ShareAlarm = ShareAlarm(threshold=0.95)
    """Share of an update's steps with the most common completion."""
    zero_advantage: ShareAlarm = ShareAlarm(threshold=0.95)
    """Share of an update's steps whose advantage is 0."""
    invalid_moves: ShareAlarm = ShareAlarm(threshold=0.9)
    """Share of an env's newest training games that the policy ended with an invalid move."""
    ended_early: ShareAlarm = ShareAlarm(threshold=0.02)
    """Share of an env's newest games, void ones included, with one reason of an end other than the rules, an invalid
    move or the turn cap."""
    collapse: AlarmConfig = AlarmConfig(threshold=0.0)
    """Distance by which the interval of the newest evaluation lies below that of the best one before it, in points (win
    1, draw 1/2), or in mean reward if the env has no winner."""
    decline: AlarmConfig = AlarmConfig(threshold=0.1)
    """Same distance for the share of points of the newest games of training and of `run.num_eval_workers` against a
    fixed opponent, and for the share of training games in which the policy made no invalid move."""
    exploitability: AlarmConfig = AlarmConfig(threshold=0.2)
    """Exploitability in an env (`run.exact_every`) minus the lowest one measured before, as a share of the highest
    utility of the game."""
    starved: StarvedAlarm = StarvedAlarm(threshold=900.0)
    """Seconds in which training games ended but none brought the learner a step and no batch waited; or in which games
    of one env ended but updates were made without a step of it."""
    skipped: AlarmConfig = AlarmConfig(threshold=9, action="stop")
    """Number of consecutive batches skipped because the loss was not finite or none of their steps could be trained
    on."""

    @model_validator(mode="before")
    @classmethod
    def _keep_what_is_not_given(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        defaults = {name: field.default.model_dump() for name, field in cls.model_fields.items()}
        return {
            name: {**defaults[name], **alarm} if name in defaults and isinstance(alarm, dict) else alarm
            for name, alarm in given.items()
        }

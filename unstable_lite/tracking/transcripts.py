"""A game as plain text, for a person to read beside the curves. A sink must escape it, because it is not markup."""

from __future__ import annotations

from unstable_lite.types import GameRecord

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
        lines += [
            "",
            f"==== turn {number}: player {turn.pid}, {_model(models[turn.pid], version)}, sees",
            _cut(turn.observation, MAX_OBSERVATION),
            f"---- and answers{'' if turn.format_ok else ', not in the requested format'}",
            _cut(turn.text, MAX_TEXT),
            f"---- which is the move {_cut(turn.action, MAX_OBSERVATION)}",
        ]
    if (left_out := len(record.turns) - MAX_TURNS) > 0:
        lines += ["", f"(and {left_out} more turns)"]
    # A lone surrogate, which an API's JSON may contain, cannot be encoded in UTF-8.
    return "\n".join(lines).encode("utf-8", "replace").decode()


def _model(uid: str, version: int | None) -> str:
    """Return the model's name. `version`: of its adapter in this turn, if it changes during the game."""
    return uid if version is None else f"started as {uid}, now adapter {version}"


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length // 2]} (… {len(text) - length} characters …) {text[-length // 2 :]}"

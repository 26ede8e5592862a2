import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from test_tracker import game

from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.errors import UnstableError
from unstable_lite.files import read_part
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.tracking.records import JsonlSink
from unstable_lite.tracking.run_directory import rewind
from unstable_lite.tracking.tensorboard import TensorBoardSink, tag_of
from unstable_lite.tracking.tracker import Tracker

WON = "evaluation-E (scripted:random)/concurrent checkpoint Win Rate"


def start(directory: Path) -> Tracker:
    (directory / "tensorboard").mkdir(exist_ok=True)
    sinks = [JsonlSink(directory / "metrics.jsonl"), TensorBoardSink(directory / "tensorboard")]
    tracker = Tracker(directory, sinks, TrackerConfig(keep_games="none"))
    tracker.registry = ModelRegistry()
    return tracker


def test_concurrent_evaluation_across_a_resume_is_recorded_once(tmp_path):
    tracker = start(tmp_path)
    over = tracker.registry.current
    for _ in range(4):
        tracker.add_record(game(over, kind="eval"))
    policy = tracker.registry.add_policy("ckpt-1", adapter_version=1, iteration=1)
    for _ in range(10):
        tracker.add_record(game(policy, kind="eval"))
    tracker.log_update(1, {"learner/loss": 0.5})
    tracker.end_evaluations(still_playing={"ckpt-1"})
    state = json.loads(json.dumps(tracker.state_dict()))
    tracker.add_record(game(policy, kind="eval"))
    tracker.close()

    unfinished = {(model, env_id, opponent) for model, env_id, opponent, _ in state["tallies"]}
    assert unfinished == {("ckpt-1", "E", "scripted:random")}
    rewind(
        tmp_path,
        update=1,
        num_games=14,
        in_flight=(),
        is_repeated=lambda line: (line["model"], line["env_id"], line["opponent"]) in unfinished,
    )
    resumed = start(tmp_path)
    policy = resumed.registry.add_policy("ckpt-1", adapter_version=1, iteration=1)
    resumed.resume(state, list(read_part(tmp_path / "eval.jsonl")))
    for _ in range(5):
        resumed.add_record(game(policy, kind="eval"))
    resumed.close()
    assert [(line["model"], line["n"]) for line in read_part(tmp_path / "eval.jsonl")] == [("base", 4), ("ckpt-1", 15)]
    lines = list(read_part(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines if "learner/loss" in line] == [1]
    assert [line["step"] for line in lines if WON in line] == [0, 1]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors(tag_of(WON))] == [0, 1]
    assert [event.step for event in events.Tensors("learner/loss")] == [1]


def test_later_games_stay_only_if_an_evaluation_includes_them(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    tracker = Tracker(tmp_path, [], TrackerConfig())
    for number, label in [(0, None), (2, None), (1, None), (3, "after update 1"), (4, None)]:
        record = game(ModelRegistry().current, kind="eval" if label else "train", label=label)
        record.spec = replace(record.spec, game_idx=number)
        tracker.add_record(record)
    tracker.close()
    rewind(tmp_path, update=1, num_games=4, in_flight={1, 3}, is_repeated=lambda line: False)
    assert [record["game_idx"] for record in read_part(tmp_path / "games.jsonl")] == [0, 2, 3]


def test_damaged_file_of_tensorboard_is_named_by_a_resume(tmp_path):
    start(tmp_path).close()
    (tmp_path / "tensorboard").mkdir(exist_ok=True)
    path = tmp_path / "tensorboard" / "events.out.tfevents.0"
    with path.open("wb") as file:
        RecordWriter(file).write(b"\xff\xff not an event")
    with pytest.raises(UnstableError, match=r"events\.out\.tfevents\.0: a record is not an event"):
        rewind(tmp_path, update=1, num_games=4, in_flight=(), is_repeated=lambda line: False)


ODD_LINES = ("null", "[1]", "3", '"x"', "{}", '{"step": [1], "model": 1, "game_idx": [], "eval_label": null}')


@pytest.mark.parametrize("line", ODD_LINES)
@pytest.mark.parametrize("name", ["metrics", "league", "alarms", "games", "eval"])
def test_line_that_no_run_writes_is_named_by_a_resume(tmp_path, name, line):
    start(tmp_path).close()
    (tmp_path / f"{name}.jsonl").write_text(f"{line}\n")
    with pytest.raises(UnstableError, match=rf"{name}\.jsonl, line 1\b"):
        rewind(tmp_path, update=1, num_games=4, in_flight=(), is_repeated=lambda line: line["model"] == "x")

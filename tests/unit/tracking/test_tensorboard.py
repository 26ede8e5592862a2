"""TensorBoard's texts, histograms, charts and run table. test_run.py checks the numbers of a real run."""

import html
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util.tensor_util import make_ndarray

from fakes.game_records import make_item
from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec, LeagueConfig, TrainEnvSpec
from unstable_lite.config.training import EngineConfig, LearnerConfig, RunConfig
from unstable_lite.files import to_line
from unstable_lite.learner import UpdateResult
from unstable_lite.learner.training_stats import BUCKETS, histograms_of
from unstable_lite.tracking.run_directory import rewind
from unstable_lite.tracking.tensorboard import TensorBoardSink, as_code, layout, tag_of
from unstable_lite.types import Histogram, TrainItem

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # from the html5lib that TensorBoard bundles
    from tensorboard import plugin_util

HOSTILE = (
    "</code></pre><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "[a link](javascript:alert(1)) ![image](http://example.org/x.png) <http://example.org>",
    "    </pre>\n<b>after a line feed</b>",
    "\r<b>after a carriage return</b>\x0b<b>after a vertical tab</b>\x0c<b>and a form feed</b>\x85<b>next line</b>",
    "line\u2028<b>separator</b>\u2029<b>paragraph</b>\x1c<b>file</b>",
    "* list\n\n1. list\n\n> quotation\n\n# heading\n\n---\n\n| a | b |\n|---|---|\n| <b>c</b> | d |",
    "\x02wzxhzdk:0\x03 klzzwxh:0000",
    "nul \x00 bell \x07 escape \x1b[31m",
)
CONFIG = Config(
    run=RunConfig(eval_games=10, num_eval_workers=2, seed=7),
    engine=EngineConfig(kind="scripted"),
    learner=LearnerConfig(learning_rate=0.25),
    league=LeagueConfig(opponent_sampling_strategy={"mirror": 0.5, "fixed": 0.5}),
    train_envs=(TrainEnvSpec(env_id="Nim-v0-train", num_players=2, num_actors=2),),
    eval_envs=(
        EvalEnvSpec(env_id="Nim-v0-train", num_players=2, fixed_opponent="scripted:random"),
        EvalEnvSpec(env_id="Blackjack-v0-train", num_players=1),
        EvalEnvSpec(env_id="Nim-v0-train", num_players=2, fixed_opponent="scripted:random", temperature=0.0),
    ),
)
WON = "evaluation-Nim-v0-train (scripted:random)/checkpoint Points"
RESULT = "Results/1 Nim-v0-train, random"


def events(directory: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


@pytest.mark.parametrize("text", HOSTILE)
def test_model_text_is_shown_as_code_and_never_as_markup(text):
    shown = plugin_util.markdowns_to_safe_html([as_code(f"a game\n\n{text}\nthe end")], "".join)
    inside = re.fullmatch(r"<pre><code>(.*)</code></pre>", shown, re.S)
    assert inside, shown
    assert not re.search(r"<|javascript:.*\"", inside[1])
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert html.unescape(inside[1]).startswith("a game")
    assert html.unescape(inside[1]).rstrip().endswith("the end")


def test_texts_and_histograms_are_logged_and_rewound(tmp_path):
    directory = tmp_path / "tensorboard"
    directory.mkdir()
    sink = TensorBoardSink(directory)
    sink.lay_out(CONFIG)
    for step in (1, 2, 3):
        sink.log(step, {"learner/loss": step})
        sink.log_histograms(step, [Histogram(name="learner/advantage", edges=(-1.0, 0.0, 1.0), counts=(step, 2))])
        sink.log_texts(step, {"games/Nim-v0-train": f"game {step}"})
    sink.close()
    rewind(tmp_path, update=2, num_games=0, in_flight=(), is_repeated=lambda line: False)
    sink = TensorBoardSink(directory)
    sink.log_texts(2, {"run/config": "seed = 7"})
    sink.close()
    seen = events(directory)
    pages = {seen.SummaryMetadata(tag).plugin_data.plugin_name: tag for tag in seen.Tags()["tensors"]}
    assert pages == {
        "scalars": "learner/loss",
        "histograms": "learner/advantage",
        "text": "run/config",
        "custom_scalars": "custom_scalars__config__",
        "hparams": hparams.SESSION_START_INFO_TAG,
    }
    histograms = seen.Tensors("learner/advantage")
    assert [event.step for event in histograms] == [1, 2]
    assert make_ndarray(histograms[-1].tensor_proto).tolist() == [[-1.0, 0.0, 2.0], [0.0, 1.0, 2.0]]
    assert [event.tensor_proto.string_val[0] for event in seen.Tensors("games/Nim-v0-train")] == [
        b"    game 1",
        b"    game 2",
    ]


def test_run_table_lists_main_keys_and_evaluation_results(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.lay_out(CONFIG)
    sink.close()
    seen = events(tmp_path)
    row = hparams.parse_session_start_info_plugin_data(
        seen.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    ).hparams
    assert row["algorithm"].string_value == "reinforce"
    assert row["learner.learning_rate"].number_value == 0.25
    assert row["run.seed"].number_value == 7
    assert row["train_envs"].string_value == "Nim-v0-train"
    assert row["league.opponent_sampling_strategy"].string_value == '{"mirror": 0.5, "fixed": 0.5}'
    table = hparams.parse_experiment_plugin_data(seen.SummaryMetadata(hparams.EXPERIMENT_TAG).plugin_data.content)
    assert {info.name for info in table.hparam_infos} == set(row)
    assert [metric.name.tag for metric in table.metric_infos] == [
        RESULT,
        "Results/5 Nim-v0-train, random, while training",
        "Results/3 Nim-v0-train, random, greedy",
        "Results/7 Nim-v0-train, random, greedy, while training",
        "collection-Nim-v0-train/reward",
    ]


def test_charts_match_the_metric_names_that_a_run_logs(tmp_path):
    charts = {chart.title: chart for part in layout(CONFIG).category for chart in part.chart}
    logged = ["learner/loss", "learner/policy_loss", "learner/lossy", "learner/staleness_mean", "learner/staleness_max"]
    found = {
        title: [tag for tag in logged if any(re.match(pattern, tag) for pattern in chart.multiline.tag)]
        for title, chart in charts.items()
    }
    assert found["loss"] == ["learner/loss"]
    assert found["staleness"] == ["learner/staleness_mean"]
    assert not any("Blackjack" in title for title in charts)  # an env without a winner
    (greedy, *_) = charts["Nim-v0-train, points against scripted:random, greedy, 95 %"].margin.series
    assert greedy.value == "Results/3 Nim-v0-train, random, greedy", "each sampling of an env has its chart"
    sink = TensorBoardSink(tmp_path, CONFIG.eval_cells)
    sink.log(1, {WON: 0.5, f"{WON} low": 0.25, f"{WON} high": 0.75, WON.replace("checkpoint ", ""): 0.625})
    sink.close()
    (won,) = charts["Nim-v0-train, points against scripted:random, 95 %"].margin.series
    tags = [won.value, won.lower, won.upper]
    seen = events(tmp_path)
    assert [float(make_ndarray(seen.Tensors(tag)[0].tensor_proto)) for tag in tags] == [0.5, 0.25, 0.75]
    assert not any("(" in tag for tag in tags)  # TensorBoard draws no line for a tag with parentheses
    group = "evaluation-Nim-v0-train against scripted:random"
    of_evaluation = [f"{group}/Points", *(f"{group}/checkpoint Points {edge}" for edge in ("low", "high"))]
    assert sorted(seen.Tags()["tensors"]) == sorted([RESULT, *of_evaluation]), "one group an opponent"


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    seen = events(directory)
    return {
        tag: [(event.step, float(make_ndarray(event.tensor_proto))) for event in seen.Tensors(tag)]
        for tag in seen.Tags()["tensors"]
    }


def test_results_have_a_group_that_sorts_first_in_the_order_of_the_config(tmp_path):
    sink = TensorBoardSink(tmp_path, CONFIG.eval_cells)
    sink.log(0, {"evaluation-Blackjack-v0-train (none)/checkpoint Reward": 0.5})
    sink.log(0, {WON: 0.0, WON.replace("Points", "Reward"): -1.0})
    sink.log(1, {"alarms/collapse": 1.0, "batch/num_4grams": 7.0})
    sink.close()
    first, second, *others = sorted(scalars(tmp_path).items())
    assert first == (RESULT, [(0, 0.0)]), "a result of 0 is a result"
    assert second == ("Results/2 Blackjack-v0-train, mean reward", [(0, 0.5)])
    assert "evaluation-Nim-v0-train against scripted:random/checkpoint Reward" in dict(others)


def test_series_begins_with_one_zero_before_its_first_other_value_also_after_a_resume(tmp_path):
    directory, path = tmp_path / "tensorboard", tmp_path / "metrics.jsonl"
    directory.mkdir()
    names = ["alarms/collapse", "alarms/decline", "alarms/entropy", "learner/loss"]
    told = {1: (0, 0, 0, 0.5), 2: (0, 1, 0, 0), 3: (2, 0, 0, 0.25), 4: (2, 1, 0, 0)}
    for steps in ((1, 2), (3, 4)):
        sink = TensorBoardSink(directory)
        for step in steps:
            sink.log(step, dict(zip(names, told[step], strict=True)))
            with path.open("ab") as file:
                file.write(to_line({"step": step, "time": 0.0} | dict(zip(names, told[step], strict=True))))
        sink.close()
    assert scalars(directory) == {
        "alarms/collapse": [(2, 0), (3, 2), (4, 2)],
        "alarms/decline": [(1, 0), (2, 1), (3, 0), (4, 1)],
        "learner/loss": [(1, 0.5), (2, 0), (3, 0.25), (4, 0)],
    }


@pytest.mark.parametrize("to_tag", [str, tag_of], ids=["of before", "of now"])
def test_repeated_evaluation_is_removed_under_its_tag(tmp_path, to_tag):
    directory = tmp_path / "tensorboard"
    directory.mkdir()
    line = {"label": "update 2", "env_id": "Nim-v0-train", "opponent": "scripted:random", "step": 2}
    (tmp_path / "eval.jsonl").write_bytes(to_line(line))
    sink = TensorBoardSink(directory)
    sink.log(2, {to_tag(WON.replace("Points", "n")): 7.0, "learner/step": 2.0})
    sink.log(2, {"learner/loss": 1.0})
    sink.close()
    rewind(tmp_path, update=2, num_games=0, in_flight=(), is_repeated=lambda line: True)
    assert [*scalars(directory)] == ["learner/loss"]


@pytest.mark.parametrize(
    ("env_id", "slug"),
    [
        ("openspiel:liars_dice(dice_sides=3)", "openspiel-liars_dice-dice_sides-3"),
        ("questions:/home/me/hard.jsonl", "questions-hard"),
    ],
)
def test_tags_of_evaluations_have_the_slug_of_the_env(env_id, slug):
    metric = f"evaluation-{env_id} (scripted:random, greedy)/concurrent checkpoint "
    assert tag_of(metric + "n") == f"evaluation-{slug} against scripted:random, greedy/concurrent checkpoint n"
    assert tag_of(metric + "Points").partition(" ")[2] == f"{slug}, random, greedy, while training"


def item(length: int, logprob: float, reward: float) -> TrainItem:
    return make_item([1], range(length), [logprob] * length, reward=reward, adapter_version=1)


def test_histograms_count_each_trained_step_and_token_once():
    items = [item(3, -1.0, -1.0), item(5, -1.0, 2.0), item(4, -1.0, 9.0)]
    logprobs = (np.full(3, -1.0, np.float32), np.full(2, 5.0, np.float32), np.empty(0, np.float32))
    result = UpdateResult(metrics={}, skipped=None, logprobs=logprobs)  # the second was cut, the third excluded
    found = {one.name: one for one in histograms_of(items, result, importance_weight_cap=2.0)}
    assert all(len(one.edges) == BUCKETS + 1 and len(one.counts) == BUCKETS for one in found.values())
    assert (found["advantage"].edges[0], found["advantage"].edges[-1]) == (-1.0, 2.0)
    assert sum(found["advantage"].counts) == sum(found["completion_tokens"].counts) == 2
    weights = found["importance_weight"]
    assert (weights.edges[0], weights.edges[-1], sum(weights.counts)) == (0.0, 2.0, 5)
    assert (weights.counts[-1], weights.counts[BUCKETS // 2]) == (2, 3)  # cut at 2; on-policy at 1
    for cap in (1.0, 3.0, 5.0, 10.0):
        result = UpdateResult(metrics={}, skipped=None, logprobs=(np.full(7, 200.0, np.float32),))
        found = {one.name: one for one in histograms_of([item(7, -1.0, 1.0)], result, importance_weight_cap=cap)}
        assert found["importance_weight"].counts[-1] == 7, "capped weights are counted at the cap"


def test_critic_advantages_replace_rewards_and_nan_is_left_out():
    items = [item(3, -1.0, 7.0), item(3, -1.0, 7.0)]
    result = UpdateResult(metrics={}, skipped=None, advantages=(0.5, float("nan")))
    found = {one.name: one for one in histograms_of(items, result, importance_weight_cap=2.0)}
    assert found.keys() == {"advantage", "completion_tokens"}  # a custom learner need not report more
    assert sum(found["advantage"].counts) == 1
    assert found["advantage"].edges[0] <= 0.5 <= found["advantage"].edges[-1]

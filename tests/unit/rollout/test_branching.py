"""Groups of games that start within an earlier game."""

import itertools
import re
from collections import Counter, defaultdict
from statistics import fmean, stdev
from typing import Any

import pytest
from msgspec.structs import replace

from examples.branching import Branching
from fakes.group_games import KUHN, group_config, played, scheduler_of
from fakes.random_policy import RandomPolicy
from unstable_lite.config import Config
from unstable_lite.config.reading import parse_config
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.dashboards.report.games import read_games
from unstable_lite.errors import ConfigError, EnvError
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.orchestrator.wiring import make_buffer
from unstable_lite.planning.defaults import resolve_defaults
from unstable_lite.planning.validation import find_problems
from unstable_lite.plugins import lasting
from unstable_lite.rng import digest_of
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.rollout.run_game import MAX_VOID_GAMES, GameRunner, new_record
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import ENV_LOST, GameRecord, GameSpec, Generation, PastTurn, Turn

NIM = "Nim-v0-train"
PIG = "openspiel:pig(winscore=10,diceoutcomes=6)"
RESTLESS = "fakes.restless_nim:RestlessNim-v0"


def config(
    env_id: str = KUHN, num_actors: int = 1, group_size: int = 4, opponent: str = "scripted:random", **branching: Any
) -> Config:
    env = {"env_id": env_id, "num_actors": num_actors, "isolated": True if env_id == RESTLESS else None}  # not tried
    league = {
        "opponent_sampling_strategy": "fixed",
        "fixed_opponents": [opponent],
        "env_sampling_strategy": {"examples.branching:Branching": {"share": 0.9} | branching},
    }
    return group_config(group_size, env, {}, algorithm="rloo", league=league)


async def play(of: Config, groups: int, seed: int = 1) -> tuple[list[list[GameRecord]], GameScheduler]:
    scheduler, factory = scheduler_of(of), PlayerFactory(RandomPolicy(of.train_envs[0].env_id, seed).generate)
    result = []
    for _ in range(groups):
        result.append([await played(spec, factory) for spec in scheduler.next_train_group()])
        for record in result[-1]:
            scheduler.update(record)
    return result, scheduler


def is_branched(group: list[GameRecord]) -> bool:
    return group[0].spec.start is not None


@pytest.mark.parametrize("env_id", [KUHN, NIM, PIG])
async def test_games_of_a_group_start_in_one_state_of_an_earlier_game(env_id):
    groups, _ = await play(config(env_id, group_size=3), 40)
    assert not is_branched(groups[0])  # no game has been played yet
    branched = [group for group in groups if is_branched(group)]
    assert 25 <= len(branched) < 40
    of_seed = defaultdict(list)
    for group in groups:
        if not is_branched(group):
            of_seed[group[0].spec.seed] += [record.turns for record in group]
    first_actions = Counter[int]()
    for group in branched:
        start = group[0].spec.start
        number = len(start.turns)
        assert number >= 1
        actions = [turn.action for turn in start.turns]
        earlier = [other for other in of_seed[group[0].spec.seed] if len(other) > number]
        assert any([turn.action for turn in other[:number]] == actions for other in earlier)
        for record in group:
            assert record.spec.seed == group[0].spec.seed
            assert [turn.action for turn in record.turns[:number]] == actions
            assert record.turns[number].observation == group[0].turns[number].observation
            assert digest_of(record.turns[number].observation) == start.digest
            assert record.turns[number].pid == start.pid == record.trajectories[0].pid
            assert all(turn.generation is None for turn in record.turns[:number])
            assert record.turns[number].generation is not None
        first_actions[len({record.turns[number].action for record in group})] += 1
    assert first_actions[2] + first_actions[3] > len(branched) / 3  # the games differ from there on


async def test_branch_is_continued_by_the_member_of_an_average_that_began_the_game():
    of = config(NIM, opponent="average:other/ckpt-1,3")
    member_of, branched = dict[int, int | None](), set[int | None]()
    for group in (await play(of, 40))[0]:
        for record in group:
            (member,) = (agent.model.adapter_version for agent in record.spec.agent_specs if not agent.collect_data)
            assert member_of.setdefault(record.spec.seed, member) == member
            branched |= {member} if is_branched(group) else set()
    assert len(branched) == 2


async def test_repeated_turns_are_not_trained_on_and_count_in_the_context():
    groups, _ = await play(config(NIM, num_actors=2), 20)
    for record in itertools.chain.from_iterable(groups):
        before = len(record.spec.start.turns) if record.spec.start is not None else 0
        for trajectory in record.trajectories:
            own = [number for number, turn in enumerate(record.turns) if turn.pid == trajectory.pid]
            assert [step.step_info["turn"] for step in trajectory.steps] == [n for n in own if n >= before]
            for step in trajectory.steps:
                assert step.context.player_turn == own.index(step.context.turn)
                assert step.context.num_player_turns == len(own)
                assert step.context.num_turns == len(record.turns)
                assert step.context.branch_turn == (before or None)


async def test_advantages_compare_the_games_of_a_branch():
    groups, _ = await play(config(NIM), 30)
    of = config(NIM)
    buffer = make_buffer(of)
    assert isinstance(buffer, StepBuffer)
    for record in itertools.chain.from_iterable(groups):
        buffer.add_game(record)
    steps = await buffer.get_batch(buffer.size(), 1)
    rewards = {record.spec.game_idx: record.trajectories[0].final_reward for group in groups for record in group}
    group_of = {record.spec.game_idx: group for group in groups for record in group}
    assert len({step.step_info["game_idx"] for step in steps if step.context.branch_turn}) > 60  # type: ignore[union-attr]
    for step in steps:
        own = step.step_info["game_idx"]
        others = [rewards[record.spec.game_idx] for record in group_of[own] if record.spec.game_idx != own]
        assert step.reward == pytest.approx(rewards[own] - fmean(others))
        error = stdev([rewards[own], *others]) / 2
        assert step.step_info["return_std_error"] == pytest.approx(error)


@pytest.mark.parametrize("env_id", [PIG, NIM])
async def test_same_chance_repeats_dice_and_opponent_and_fresh_chance_does_not(env_id):
    """The policy always takes the first legal action, which in Pig is to roll; its opponent draws."""

    class Same(RandomPolicy):
        async def generate(self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None) -> Generation:
            generation = await super().generate(prompt, version, stop, seed)
            generation.text = f"\\boxed{{{legal_actions(env_id, prompt)[0]}}}"
            return generation

    different = {}
    for chance in ("same", "fresh"):
        scheduler, factory = scheduler_of(config(env_id, chance=chance)), PlayerFactory(Same(env_id).generate)
        seen = []
        for _ in range(30):
            records = [await played(spec, factory) for spec in scheduler.next_train_group()]
            for record in records:
                scheduler.update(record)
            if is_branched(records):
                seen.append(len({tuple(turn.observation for turn in record.turns) for record in records}))
        different[chance] = fmean(seen)
    assert different["same"] == 1
    assert different["fresh"] > 1.5


async def test_opponent_that_remembers_is_asked_again():
    """MCTS follows the game from its own last move; each of its turns is taken again, with the same result."""
    groups, _ = await play(config("openspiel:nim(pile_sizes=3;4,is_misere=False)", opponent="scripted:mcts:3"), 12)
    assert sum(map(is_branched, groups)) > 5


async def test_opponent_that_does_not_repeat_is_named():
    groups, _ = await play(config(NIM), 20)
    factory = PlayerFactory(RandomPolicy(NIM).generate)
    spec = next(group[0].spec for group in groups if is_branched(group))
    at = next(number for number, turn in enumerate(spec.start.turns) if turn.pid != spec.start.pid)
    turns = list(spec.start.turns)
    turns[at] = PastTurn(turns[at].pid, turns[at].digest, "[7 7]")
    with pytest.raises(EnvError, match=rf"scripted:random played '\[7 7\]' in turn {at} and, with the same seed, "):
        await played(replace(spec, start=replace(spec.start, turns=tuple(turns))), factory)


async def test_state_that_is_not_reached_again_makes_the_game_void_and_is_forgotten():
    of = config(RESTLESS, num_actors=2)
    scheduler, factory = scheduler_of(of), PlayerFactory(RandomPolicy(NIM).generate)
    runner = GameRunner(factory, of.run)
    scheduler.update(await runner.play(scheduler.next_train_job()))
    groups = [group for group in (scheduler.next_train_group() for _ in range(30)) if group[0].start is not None]
    assert 4 * len(groups) > MAX_VOID_GAMES, "the run does not end"
    for record in [await runner.play(spec) for group in groups for spec in group]:
        assert record.end == "void"
        assert f"{RESTLESS} does not repeat: with the same seed and actions, " in str(record.error)
        scheduler.update(record)
    assert not any(scheduler.next_train_group()[0].start for _ in range(20))


async def test_game_lost_with_the_process_of_another_game_forgets_no_state():
    _, scheduler = await play(config(NIM, num_actors=2), 30)
    group = next(group for group in iter(scheduler.next_train_group, None) if group[0].start is not None)
    for spec in group:
        record = new_record(spec)
        record.reason = ENV_LOST
        scheduler.update(record)
    assert any(scheduler.next_train_group()[0].start for _ in range(20))


async def test_state_of_an_env_that_is_played_in_another_way_is_not_used():
    _, scheduler = await play(config(NIM), 30)
    saved = lasting("scheduler", scheduler.state_dict())  # as of a custom scheduler
    for changes in ({}, {"observation": "first-last"}, {"env_kwargs": (("piles", (3, 3)),)}, {"max_turns": 4}):
        of = config(NIM)
        of = of.model_copy(update={"train_envs": (of.train_envs[0].model_copy(update=changes),)})
        other = scheduler_of(of)
        other.load_state_dict(saved)
        assert any(other.next_train_group()[0].start for _ in range(20)) == (not changes)


async def test_branched_games_change_neither_ratings_nor_samplers():
    groups, scheduler = await play(config(NIM), 40)
    counted = sum(len(group) for group in groups if not is_branched(group))
    assert sum(scheduler.registry.match_counts.values()) == counted
    # The shares of samplers by steps (`league.shares_by`) count every game's steps.
    n, mean = scheduler.state_dict()["steps_of"][f"{NIM} scripted:random"]
    lengths = [len(record.trajectories[0].steps) for group in groups for record in group]
    assert n == len(lengths)
    assert mean == pytest.approx(fmean(max(length, 1) for length in lengths))


def game_of(spec: GameSpec, num_turns: int, reward: float = 0.0) -> GameRecord:
    record = new_record(spec)
    record.turns = [Turn(pid=n % 2, observation=str(n), text="x", action="x", format_ok=True) for n in range(num_turns)]
    record.end, record.rewards = "natural", {0: reward, 1: reward}
    return record


async def test_uncertain_branches_start_where_returns_differ():
    """A game whose third turn decides it, and whose others do nothing."""
    points = Branching(config().train_envs, share=0.9, at="uncertain")
    scheduler = scheduler_of(config(NIM, num_actors=2))
    (first, *_rest) = scheduler.next_train_group()
    points.add_record(game_of(first, num_turns=6))
    chosen = Counter[int]()
    for number in range(1500):
        pair = [replace(first, game_idx=2 * number + own, group_idx=2 * number) for own in (0, 1)]
        forked = points.fork(pair)
        if forked[0].start is None:
            continue
        turn = len(forked[0].start.turns)
        chosen[turn] += number >= 500
        for spec, reward in zip(forked, (1.0, -1.0 if turn == 3 else 1.0), strict=True):
            points.add_record(game_of(spec, num_turns=6, reward=reward))
    assert chosen.keys() == {1, 2, 3, 4, 5}
    assert chosen[3] > 0.7 * chosen.total()
    assert min(chosen.values()) > 0.02 * chosen.total()  # every turn is measured again


async def test_branched_game_is_in_the_report_but_not_in_the_metrics_of_games(tmp_path):
    groups, _ = await play(config(NIM), 12)
    void = next(new_record(replace(group[0].spec, game_idx=999)) for group in groups if is_branched(group))
    tracker = Tracker(tmp_path, [], TrackerConfig())
    for group in groups:
        for record in group:
            tracker.begin_game(record.spec)
            tracker.add_record(record)
    tracker.begin_game(void.spec)
    tracker.add_record(void)
    tracker.log_update(1, {})
    num_branched = 4 * sum(map(is_branched, groups))
    assert tracker.latest["run/branched_games"] == num_branched > 0
    assert tracker.latest["run/games"] == 49
    assert tracker.latest[f"collection-{NIM}/n"] == 48 - num_branched
    resumed = Tracker(tmp_path, [], TrackerConfig())
    resumed.resume(tracker.state_dict(), [])
    assert resumed.branched_games == num_branched
    tracker.close()
    resumed.close()
    games = read_games(tmp_path, None, 100)
    begins = {r.spec.game_idx: r.spec.start and len(r.spec.start.turns) for r in itertools.chain(*groups, [void])}
    assert {game["game_idx"]: game.get("branch_turn") for game in games.kept} == begins


def problems(env: dict[str, Any] | None = None, **options: Any) -> list[str]:
    spec = {"env_id": NIM, "num_players": 2, "num_actors": 1, "prompt_template": "tiny"} | (env or {})
    sampler = {"examples.branching:Branching": options}
    raw = {"algorithm": "rloo", "run": {"group_size": 4}, "league": {"env_sampling_strategy": sampler}}
    of, wrong = parse_config(raw | {"train_envs": [spec]})
    assert of is not None and not wrong
    return [problem for problem in find_problems(of) if "branching" in problem]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"env": {"max_turns": 1}}, "branching: train_envs.0: Nim-v0-train has max_turns = 1, so no group"),
        ({"env": {"env_id": RESTLESS}}, f"branching: train_envs.0: {RESTLESS} does not repeat: with the same seed and"),
        (
            {"env": {"env_id": "questions:examples/arithmetic.jsonl", "num_players": 1}},
            "branching: a question is one turn",
        ),
        ({"share": 1.0}, r"branching: share = 1\.0"),
        ({"share": -0.1}, r"branching: share = -0\.1"),
        ({"at": "late"}, "branching: at = 'late'"),
        ({"chance": "none"}, "branching: .* chance = 'none'"),
    ],
)
def test_contradiction_is_refused_by_check(given, says):
    (problem,) = problems(**given)
    assert re.match(says, problem), problem
    assert problems() == []


@pytest.mark.parametrize(
    "sections", [{"run": {}}, {"rewards": {"group_baseline": "duplicate"}, "run": {"group_size": 4}}]
)
def test_games_without_a_group_that_starts_in_one_state_are_refused(sections):
    of = config().model_dump(exclude_unset=True) | {"algorithm": "reinforce", "rewards": {}} | sections
    scheduler = scheduler_of(resolve_defaults(Config.model_validate(of)))
    with pytest.raises(ConfigError, match=r"so it needs run\.group_size of 2 or more, .* not 'duplicate'"):
        scheduler.next_train_group()

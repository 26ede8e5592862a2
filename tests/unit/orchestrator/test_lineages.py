"""Rules by which a policy begins again."""

from types import SimpleNamespace
from typing import Any

import pytest

from fakes.game_records import make_record, make_spec
from unstable_lite.config import Config
from unstable_lite.config.games import RestartConfig
from unstable_lite.orchestrator.lineages import Lineages, _reason
from unstable_lite.types import ModelRef


def policy_of(points: list[float] = (), updates: int = 10, began: int = 4, group: int = 1) -> Any:  # type: ignore[assignment]
    """Return a policy with these results, each `group` of them of one deal."""
    results = [(number // group, each) for number, each in enumerate(points)]
    return SimpleNamespace(results=results, updates=updates, began=began)


@pytest.mark.parametrize(
    ("rule", "points", "reason"),
    [
        ({"at_updates": 6}, [], "6 updates"),
        ({"at_updates": 7}, [], None),
        (
            {"at_points": 0.6, "games": 100},
            [1.0] * 75 + [0.0] * 25,
            "75.0 % of the points in 100 games (95 %: 65.5–82.6)",
        ),
        ({"at_points": 0.66, "games": 100}, [1.0] * 75 + [0.0] * 25, None),  # the lower end is 65.5 %
        ({"at_points": 0.6, "games": 100}, [1.0] * 99, None),
        ({"at_points": 0.6, "games": 100, "at_updates": 50}, [1.0] * 60 + [0.5] * 40, "80.0 % of the points"),
    ],
)
def test_lineage_ends_after_its_updates_or_if_its_points_are_surely_high(rule, points, reason):
    found = _reason(policy_of(points), RestartConfig(**rule))
    assert found == reason if reason is None else found.startswith(reason)


def test_games_of_one_deal_are_not_counted_as_independent_ones():
    rule, points = RestartConfig(at_points=0.6, games=96), [1.0] * 72 + [0.0] * 24
    assert _reason(policy_of(points), rule) is not None
    assert _reason(policy_of(points, group=8), rule) is None


async def test_policy_does_not_begin_again_after_its_own_last_update():
    policies = {name: {"opponents": "mirror", "restart": {"at_updates": 99}} for name in ("main", "exploiter")}
    config = Config.model_validate({"policies": policies, "train_envs": [ENV], "run": {"learning_steps": 200}})
    made = {"main": 100, "exploiter": 99}
    trained = {name: SimpleNamespace(name=name, results=[], updates=n, began=0) for name, n in made.items()}
    parts: Any = SimpleNamespace(plan=SimpleNamespace(config=config), policies=trained)
    await Lineages(parts).restart_if_due(parts.policies["main"])
    parts.policies["main"].updates = 99
    with pytest.raises(AttributeError, match="next_version"):  # it begins: these policies are not whole
        await Lineages(parts).restart_if_due(parts.policies["main"])


ENV = {"env_id": "E", "num_players": 2, "num_actors": 1}


def checkpoint(uid: str, version: int) -> ModelRef:
    return ModelRef(uid=uid, kind="checkpoint", adapter_version=version)


def test_points_are_those_of_whole_games_of_this_lineage_against_named_policies_and_kept_players():
    rule = {"from": "base", "at_points": 0.7, "games": 20}
    policies: dict[str, Any] = {
        "main": {"opponents": {"policy:exploiter": 1.0, "mirror": 1.0}},
        "exploiter": {"opponents": {"policy:main/past": 1.0, "population": 1.0}, "restart": rule},
        "third": {"opponents": "mirror"},
    }
    config = Config.model_validate({"policies": policies, "train_envs": [ENV]})
    trained = {
        name: SimpleNamespace(name=name, results=[], buffer=SimpleNamespace(first_version=5)) for name in policies
    }
    registry = SimpleNamespace(population={"third/ckpt-1": None})
    parts: Any = SimpleNamespace(plan=SimpleNamespace(config=config), policies=trained, registry=registry)
    lineages, own = Lineages(parts), checkpoint("exploiter/ckpt-6", 6)
    main, kept, other = checkpoint("main/ckpt-2", 2), checkpoint("third/ckpt-1", 1), checkpoint("third/ckpt-2", 2)
    random_player = ModelRef(uid="fixed-scripted:random", kind="fixed", name="scripted:random")

    def play(*models: ModelRef, rewards=(1.0, -1.0), trained=(0,), kind="train", **changes: Any) -> list[float]:
        num_before = len(parts.policies["exploiter"].results)
        lineages.add_record(make_record(make_spec(*models, trained=trained, kind=kind), *rewards, **changes))
        return [points for _, points in parts.policies["exploiter"].results[num_before:]]

    assert play(own, main) == [1.0]
    assert play(main, own, trained=(0, 1)) == [0.0]
    assert play(own, kept, rewards=(0.0, 0.0)) == [0.5]
    assert not play(own, other) and not play(own, random_player) and not play(own, own, trained=(0, 1))
    assert not play(checkpoint("exploiter/ckpt-4", 4), main), "of the lineage before"
    assert not play(own, main, end="void") and not play(own, main, kind="eval") and not play(own, main, trained=())
    for _ in range(30):
        play(own, main)
    assert [points for _, points in parts.policies["exploiter"].results] == [1.0] * 20, "the newest games"
    assert not parts.policies["main"].results and not parts.policies["third"].results

    parts.policies["exploiter"].results = []
    two_seats = play(own, main, own, trained=(0, 2), rewards=(1.0, -1.0, -1.0))
    assert two_seats == [0.5], "one result for a game of two seats"
    policies["exploiter"]["opponents"] = "policy:main"
    parts.plan.config = Config.model_validate({"policies": policies, "train_envs": [ENV]})
    lineages = Lineages(parts)
    assert play(own, main) == [1.0] and not play(own, kept), "its opponents do not name the population"

"""Rules of a run with several policies: their shares, seats, opponents and restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from unstable_lite.config import Config
from unstable_lite.config.games import is_policy, parse_player
from unstable_lite.league.opponents import draws_population, kept_policies, policies_met, strategies
from unstable_lite.plugins import suggestion
from unstable_lite.types import BASE, INITIAL

SHARE_ROUNDING = 1e-6


def policy_rules(config: Config) -> Iterator[str]:
    """Yield each reason why the policies of a run cannot learn, or cannot play each other."""
    known = config.policies
    if len(known) > 31:
        yield f"policies: there are {len(known)}, but at most 31 have ids for their adapters"
    shares, given = config.shares.values(), sum(policy.share or 0 for policy in known.values())
    if abs(sum(shares) - 1) > SHARE_ROUNDING or min(shares) < SHARE_ROUNDING:  # the rest may be negative
        yield f"policies: the shares sum to {given:g}; let all of them sum to 1, or leave one out to take the rest"
    for name in known.keys() & {BASE, INITIAL}:
        yield f"policies.{name}: a lineage may begin from {name!r}, so give the policy another name"
    for key, name in _policies_named(config):
        if name not in known:
            yield f"{key}: there is no [policies.{name}]; {suggestion(name, known)}"
    yield from _restart_rules(config)
    for index, spec in enumerate(config.train_envs):
        if spec.seats is not None and not len(spec.seats) == spec.num_actors == spec.num_players:
            yield (
                f"train_envs.{index}.seats: name a policy for each of num_players = {spec.num_players} seats, and "
                "leave num_actors out"
            )
    fixed = {"league": config.league.fixed_opponents}
    fixed |= {f"train_envs.{index}": env.fixed_opponents or () for index, env in enumerate(config.train_envs)}
    for where, name in ((where, name) for where, names in fixed.items() for name in filter(is_policy, names)):
        yield f"{where}.fixed_opponents: {name!r} learns, so it is not fixed; name it in `opponents` of a policy"
    for name in known:
        if not config.of_policy(name).train_envs:
            yield f"policies.{name}: it has no game: in some train env give it a seat, or remove the policy"


def _restart_rules(config: Config) -> Iterator[str]:
    """Yield each reason why a policy cannot begin again, or why a population stays empty."""
    rules = {name: policy.restart for name, policy in config.policies.items() if policy.restart is not None}
    if draws_population(config) and not kept_policies(config):
        yield "'population' draws kept players, but no policy keeps any; set policies.NAME.restart"
    for name, rule in rules.items():
        where = f"policies.{name}.restart"
        if rule.at_points is None and rule.at_updates is None:
            yield f"{where}: no restart can happen: set at_updates, or at_points"
        own = config.of_policy(name)
        if rule.at_points is not None and not policies_met(own) and not draws_population(own):
            yield (
                f"{where}.at_points counts games against policies in policies.{name}.opponents, but no training "
                "env lets it meet one: name 'policy:OTHER' there, or set at_updates"
            )
        if rule.start not in (BASE, INITIAL, *config.policies):
            hint = suggestion(rule.start, config.policies)
            yield f"{where}.from = {rule.start!r}: write 'base', 'initial' or the name of a policy; {hint}"
        passed = [name]
        while (begins := rules.get(passed[-1])) is not None and begins.start in config.policies:
            if begins.start in passed:
                yield f"{where}.from: {' from '.join([*passed, begins.start])} is a cycle; let one begin from 'base'"
                break
            passed.append(begins.start)


def _policies_named(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that names a policy, and the name."""
    leagues = {f"policies.{name}.opponents": config.of_policy(name).league for name in config.policies}
    for key, league in (leagues or {"league.opponent_sampling_strategy": config.league}).items():
        for name in filter(is_policy, strategies(league)):
            yield key, parse_player(name).rest.removesuffix("/past")
    for index, env in enumerate(config.eval_envs):
        if is_policy(env.fixed_opponent):
            yield f"eval_envs.{index}.fixed_opponent", parse_player(env.fixed_opponent).rest
    for index, spec in enumerate(config.train_envs):
        yield from ((f"train_envs.{index}.seats", name) for name in spec.seats or ())


def policy_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each policy that only itself plays, and for each rule that is not reached."""
    met = kept_policies(config) | {name.removesuffix("/past") for name in policies_met(config)}
    met |= {parse_player(env.fixed_opponent).rest for env in config.eval_envs if is_policy(env.fixed_opponent)}
    for seats in ({*(env.seats or ())} for env in config.train_envs):
        met |= seats if len(seats) > 1 else set()
    for name in config.policies if len(config.policies) > 1 else ():
        if name not in met:
            yield (
                f"policies.{name}: no other policy plays it; name 'policy:{name}' in the opponents of another or as "
                "fixed_opponent of an eval env, or give it a seat"
            )
    rules = {name: policy.restart for name, policy in config.policies.items() if policy.restart is not None}
    final = final_updates(config, dict.fromkeys(config.shares, 0)) if rules else {}
    for name, rule in rules.items():
        if rule.at_points is None and (rule.at_updates or 0) >= final[name]:
            yield (
                f"policies.{name}.restart.at_updates = {rule.at_updates}: the policy makes only {final[name]} updates, "
                "so it does not begin again; lower at_updates, or set at_points"
            )


def furthest_behind(updates: Mapping[str, int], shares: Mapping[str, float]) -> str:
    """Return the policy whose number of updates is the furthest behind its share; the first one of equals."""
    return min(updates, key=lambda name: (updates[name] + 0.5) / shares[name])


def final_updates(config: Config, updates: Mapping[str, int]) -> Counter[str]:
    """Return the number of updates that each policy will have made at the run's end, if it has made `updates`."""
    final, shares = Counter(updates), config.shares
    for _ in range(config.run.learning_steps - final.total()):
        final[furthest_behind(final, shares)] += 1
    return final

"""Commands that measure models: eval, play, probe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unstable_lite.cli.options import Debug, ModelsOfRun, SetKeys, TrustConfig, console, errors_as_messages

if TYPE_CHECKING:
    from unstable_lite.evaluation.plan import EvaluationPlan

GAMES = 200
"""Default number of games of each model, opponent and env."""


def evaluate_models(
    models: Annotated[
        list[str],
        typer.Argument(
            help="'base', run directories (all their checkpoints), adapters' directories, 'run:DIRECTORY/best', "
            "'scripted:…', 'module:Class', 'vendor/model'."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Games and tables; the same one again continues it. Optional with --exact."),
    ] = None,
    games: Annotated[
        int, typer.Option(min=1, help="Games of each model, opponent and env; seats are balanced.")
    ] = GAMES,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="env_id[:players[:template]], repeated for more; default: the config's eval (else train) envs."
        ),
    ] = None,
    opponent: Annotated[
        list[str] | None,
        typer.Option(help="As for MODELS, repeated for more; default: the opponent of each eval env."),
    ] = None,
    tournament: Annotated[bool, typer.Option("--tournament", help="All pairs of models; a ladder.")] = False,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Rate the models and base against random and MCTS: an absolute scale.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="A TOML file; default: the first run's own config.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature, 0: greedy; default: the eval env's, else the run's."),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Games in flight; default: the run's.")] = None,
    override: SetKeys = None,
    trust_config: TrustConfig = False,
    probe_games: Annotated[
        int,
        typer.Option("--probe", metavar="GAMES", help="Also probe, at positions of this many random games."),
    ] = 0,
    exact: Annotated[
        bool, typer.Option("--exact", help="Play nothing: compute exploitability in games of OpenSpiel.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="With --exact: games of any size.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors and the tables.")] = False,
    debug: Debug = False,
) -> None:
    """Evaluate checkpoints on disk: models × opponents × envs, a tournament or a ladder. Starts engines, no learner."""
    with errors_as_messages(debug):
        if exact:
            if opponent or tournament or probe_games or concurrency or games != GAMES or temperature is not None:
                raise typer.BadParameter("--exact plays no games: leave out options about games, opponents, sampling")
            _evaluate_exactly(models, output, env, config, override, trust_config, force, quiet)
            return
        if output is None or force:
            raise typer.BadParameter("--force is for --exact" if force else "--output is needed, for games and tables")
        from unstable_lite.dashboards.terminal import TerminalInterface
        from unstable_lite.evaluation.absolute_ladder import places_tables
        from unstable_lite.evaluation.evaluator import evaluate
        from unstable_lite.evaluation.plan import plan_evaluation
        from unstable_lite.evaluation.results import ladder_table, results_tables
        from unstable_lite.orchestrator.event_loop import run_in_loop

        evaluation = plan_evaluation(
            models,
            output=output,
            config=config,
            envs=env or (),
            opponents=opponent or (),
            games=games,
            concurrency=concurrency,
            tournament=tournament,
            ladder=ladder,
            temperature=temperature,
            overrides=override or (),
            trusts_config=trust_config,
        )
        evaluated = run_in_loop(evaluate(evaluation, TerminalInterface(quiet=quiet).say))
        out = console()
        if evaluated.ladder:
            out.print(ladder_table(evaluated.ladder))
        elif evaluated.places:
            out.print(*places_tables(evaluated.places), sep="\n")
        else:
            out.print(*results_tables(evaluated.evaluations), sep="\n")
        if probe_games:
            from unstable_lite.evaluation.probing import probe_tables, write_probes
            from unstable_lite.evaluation.scoring import probe_models

            probes = probe_models(evaluation.cells, evaluation.plan.config, probe_games, out.print)
            if probes:
                write_probes(output / "probe.csv", probes)
                out.print(*probe_tables(probes), sep="\n")
        out.print(f"{evaluated.played} games played; tables and games in {evaluated.output}", soft_wrap=True)


def _evaluate_exactly(
    models: list[str],
    output: Path | None,
    envs: list[str] | None,
    config: Path | None,
    overrides: list[str] | None,
    trust_config: bool,
    is_forced: bool,
    is_quiet: bool,
) -> None:
    from unstable_lite.dashboards.terminal import TerminalInterface
    from unstable_lite.evaluation.exact import exact_tables, write_exact
    from unstable_lite.evaluation.plan import plan_evaluation
    from unstable_lite.evaluation.scoring import evaluate_exactly

    evaluation = plan_evaluation(
        models,
        output=output or Path(),
        config=config,
        envs=envs or (),
        opponents=["base"],
        overrides=overrides or (),
        trusts_config=trust_config,
    )
    results = evaluate_exactly(
        evaluation.cells, evaluation.plan.config, is_forced, TerminalInterface(quiet=is_quiet).say
    )
    console().print(*exact_tables(results), sep="\n")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_exact(output / "exact.csv", results)
        console().print(f"table in {output / 'exact.csv'}", soft_wrap=True)


def play(
    models: Annotated[
        list[str], typer.Argument(help="The opponent, as for eval; with --watch two models, or one for both seats.")
    ],
    env: Annotated[str | None, typer.Option(help="env_id[:players[:template]]; default: the config's first.")] = None,
    seat: Annotated[int | None, typer.Option(min=0, help="Your seat, or the first model's; default: random.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Two models play.")] = False,
    config: Annotated[Path | None, typer.Option(help="A TOML file; default: the first run's own config.")] = None,
    override: SetKeys = None,
    trust_config: TrustConfig = False,
    debug: Debug = False,
) -> None:
    """Play one game against a model, or watch two models play."""
    with errors_as_messages(debug):
        from unstable_lite.evaluation.playing import HUMAN, plan_game
        from unstable_lite.evaluation.playing import play as play_one
        from unstable_lite.orchestrator.event_loop import run_in_loop

        game = plan_game(models if watch else [HUMAN, *models], config, env, tuple(override or ()), trust_config)
        record = run_in_loop(play_one(game, seat, console()))
        raise typer.Exit(0 if record.end != "void" else 1)


def _plan_on_kept_config(
    run_directory: Path,
    models: list[str],
    output: Path,
    envs: list[str] | None,
    overrides: list[str] | None,
    trust_config: bool,
) -> EvaluationPlan:
    """Plan an evaluation of `models` with the run's config."""
    from unstable_lite.evaluation.plan import plan_evaluation
    from unstable_lite.planning.trust import run_config

    return plan_evaluation(
        models,
        output=output,
        config=run_config(run_directory, overrides or (), trust_config),
        envs=envs or (),
        opponents=["base"],
        overrides=overrides or (),
    )


def probe(
    run: Annotated[Path, typer.Argument(help="Run whose config names base and envs, or one of its checkpoints.")],
    models: ModelsOfRun = None,
    output: Annotated[Path | None, typer.Option(help="A CSV file; default: RUN/probe.csv.")] = None,
    games: Annotated[int, typer.Option(min=2, help="Number of random legal games with the positions.")] = 20,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Count sampled answers instead, this many at each position.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="As for eval; default: the run's eval envs.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; default: cuda if available.")] = None,
    override: SetKeys = None,
    trust_config: TrustConfig = False,
    debug: Debug = False,
) -> None:
    """Compute each model's choices at the same positions: legal and optimal share, entropy, state dependence."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.terminal import TerminalInterface
        from unstable_lite.evaluation.models import find_run
        from unstable_lite.evaluation.probing import probe_tables, write_probes
        from unstable_lite.evaluation.sampled import probe_by_samples
        from unstable_lite.evaluation.scoring import probe_models
        from unstable_lite.orchestrator.event_loop import run_in_loop

        run_directory = find_run([str(run)]) or run
        target = output or run_directory / "probe.csv"
        compared = models or ["base", str(run)]
        evaluation = _plan_on_kept_config(run_directory, compared, target, env, override, trust_config)
        say = TerminalInterface().say
        if samples is None:
            probes = probe_models(evaluation.cells, evaluation.plan.config, games, say, device)
        else:
            (logs := run_directory / "logs" / "probe").mkdir(parents=True, exist_ok=True)
            probes = run_in_loop(probe_by_samples(evaluation, games, samples, logs, say))
        write_probes(target, probes)
        console().print(*probe_tables(probes), sep="\n")
        console().print(f"table in {target}", soft_wrap=True)

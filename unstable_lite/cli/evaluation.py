"""Commands that measure models: eval, play, probe."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from unstable_lite.cli.options import Debug, ModelsOfRun, SetKeys, TrustConfig, console, errors_as_messages

DEFAULT_GAMES = 200
TomlFile = Annotated[Path | None, typer.Option("--config", help="A TOML file; default: the first run's own config.")]
Envs = Annotated[
    list[str] | None,
    typer.Option(
        "--env", help="env_id[:players[:template]], repeated for more; default: the config's eval (else train) envs."
    ),
]


def evaluate_models(
    models: Annotated[
        list[str],
        typer.Argument(
            help="'base', run directories (all their checkpoints), adapters' directories, 'run:DIRECTORY/best', "
            "'average:DIRECTORY', 'scripted:…', 'module:Class', 'vendor/model'."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Games and tables; the same one again continues it. With --exact optional, not continued."),
    ] = None,
    games: Annotated[
        int, typer.Option(min=1, help="Games of each model, opponent and env; seats are balanced.")
    ] = DEFAULT_GAMES,
    env: Envs = None,
    opponent: Annotated[
        list[str] | None, typer.Option(help="As for MODELS, repeated for more; default: the opponent of each eval env.")
    ] = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Rate the models and base against random and MCTS: an absolute scale.")
    ] = False,
    config: TomlFile = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature, 0: greedy; default: the eval env's, else the run's.")
    ] = None,
    override: SetKeys = None,
    trust_config: TrustConfig = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Play nothing: compute exploitability in games of OpenSpiel.")
    ] = False,
    samples: Annotated[
        int | None, typer.Option(min=2, help="With --exact: estimate from this many answers in each decision state.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With --exact: games of any size.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors and the tables.")] = False,
    debug: Debug = False,
) -> None:
    """Evaluate checkpoints on disk: models × opponents × envs, or a ladder. Starts engines, no learner."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.terminal import TerminalInterface, remark_lines
        from unstable_lite.evaluation.calls import add_exact_results
        from unstable_lite.evaluation.evaluator import evaluate
        from unstable_lite.evaluation.exact import ExactResult, exact_tables
        from unstable_lite.evaluation.ladder import places_tables
        from unstable_lite.evaluation.plan import plan_evaluation
        from unstable_lite.evaluation.results import results_tables, write_csv
        from unstable_lite.orchestrator.event_loop import run_in_loop

        say, out = TerminalInterface(quiet=quiet).say, console()
        planned = partial(
            plan_evaluation, models, config=config, envs=env or (), overrides=override or (), trusts_config=trust_config
        )
        if exact:
            if opponent or ladder or games != DEFAULT_GAMES or temperature is not None:
                raise typer.BadParameter("--exact plays no games: leave out options about games, opponents, sampling")
            results: list[ExactResult] = []
            try:
                add_exact_results(results, planned(opponents=["base"]), samples, force, say)
            finally:  # an error costs no result that was computed, or paid, before it
                if results:
                    out.print(*exact_tables(results), sep="\n")
                if results and output is not None:
                    output.mkdir(parents=True, exist_ok=True)
                    write_csv(output / "exact.csv", list(asdict(results[0])), map(asdict, results))
                    out.print(f"table in {output / 'exact.csv'}", soft_wrap=True)
        elif force or samples:
            raise typer.BadParameter(f"{'--force' if force else '--samples'} is for --exact")
        elif output is None:
            raise typer.BadParameter("--output is needed, for games and tables")
        else:
            plan = planned(opponents=opponent or (), ladder=ladder, temperature=temperature)
            evaluated = run_in_loop(evaluate(plan, output, games, say))
            out.print(*(places_tables(evaluated.places) or results_tables(evaluated.evaluations)), sep="\n")
            for line in remark_lines(evaluated.evaluations):
                out.print(line, soft_wrap=True)
            out.print(f"{evaluated.played} games played; tables and games in {output}", soft_wrap=True)


def play(
    models: Annotated[
        list[str], typer.Argument(help="The opponent, as for eval; with --watch two models, or one for both seats.")
    ],
    env: Annotated[str | None, typer.Option(help="env_id[:players[:template]]; default: the config's first.")] = None,
    seat: Annotated[int | None, typer.Option(min=0, help="Your seat, or the first model's; default: random.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Two models play.")] = False,
    config: TomlFile = None,
    override: SetKeys = None,
    trust_config: TrustConfig = False,
    debug: Debug = False,
) -> None:
    """Play one game against a model, or watch two models play."""
    with errors_as_messages(debug):
        from unstable_lite.evaluation.evaluator import HUMAN, plan_game
        from unstable_lite.evaluation.evaluator import play as play_one
        from unstable_lite.orchestrator.event_loop import run_in_loop

        game = plan_game(models if watch else [HUMAN, *models], config, env, tuple(override or ()), trust_config)
        record = run_in_loop(play_one(game, seat, console()))
        raise typer.Exit(0 if record.end != "void" else 1)


def probe(
    run: Annotated[Path, typer.Argument(help="Run whose config names base and envs, or one of its checkpoints.")],
    models: ModelsOfRun = None,
    output: Annotated[Path | None, typer.Option(help="A CSV file; default: RUN/probe.csv.")] = None,
    games: Annotated[int, typer.Option(min=2, help="Number of random legal games with the positions.")] = 20,
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
        from unstable_lite.evaluation.plan import plan_evaluation
        from unstable_lite.evaluation.probing import probe_tables, write_probes
        from unstable_lite.planning.trust import run_config

        run_directory, changes, say = find_run([str(run)]) or run, override or (), TerminalInterface().say
        plan = plan_evaluation(
            models or ["base", str(run)],
            config=run_config(run_directory, changes, trust_config),
            envs=env or (),
            opponents=["base"],
            overrides=changes,
        )
        from unstable_lite.evaluation.scoring import probe_models  # loads torch: after every refusal

        probes = probe_models(replace(plan, run=run_directory), games, say, device)
        write_probes(target := output or run_directory / "probe.csv", probes)
        console().print(*probe_tables(probes), sep="\n")
        console().print(f"table in {target}", soft_wrap=True)

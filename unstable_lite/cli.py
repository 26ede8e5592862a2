"""The command line: every command, and how its errors are told."""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.visible_text import visible

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.console import Console

    from unstable_lite.evaluation.evaluator import EvaluationPlan
    from unstable_lite.runtime import Summary
    from unstable_lite.sft.session import SftSummary

app = typer.Typer(
    name="unstable-lite",
    help="Reinforcement learning of language models on multi-agent text games.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(help="A TOML file; examples/ has some.")]
TrustConfig = Annotated[
    bool, typer.Option("--trust-config", help="Use a run's config.toml from elsewhere: the code and servers it names.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value …, for example learner.batch_size=64")]
EXIT_INTERRUPTED = 130


@app.command()
def run(
    config: Annotated[str | None, typer.Argument(help="A TOML file, as in examples/; --resume has one.")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with a run, from its newest whole checkpoint.")
    ] = None,
    trust_config: TrustConfig = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors and the last table.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Train: play games, learn, evaluate, save."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.checkpoints import lasting_changes
        from unstable_lite.config import read_config
        from unstable_lite.plan import load_plan
        from unstable_lite.runtime import Run, run_in_loop
        from unstable_lite.trackers.terminal import TerminalInterface
        from unstable_lite.trust import run_config

        if resume is not None:  # its own config; what stands before it is an override
            changes = [*([config] if config is not None else []), *(overrides or [])]
            own = run_config(resume, changes, trust_config)
            changed, _ = read_config(own, tuple(changes))
            if changed is not None and (problems := [*lasting_changes(resume, changed)]):
                raise ConfigError(*problems)
            plan = load_plan(own, tuple(changes))
        elif config is not None:
            plan = load_plan(Path(config), tuple(overrides or ()))
        else:
            raise ConfigError("run needs a TOML file, or --resume RUN")
        summary = run_in_loop(Run(plan, terminal=TerminalInterface(quiet=quiet), resume=resume).execute())
        try:
            _print_summary(summary)
        except OSError as error:
            raise UnstableError(
                f"the run is over, with all that it made in {summary.directory}; "
                f"its summary could not be written to standard output: {error.strerror}"
            ) from error


@app.command()
def check(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; --memory does without.")] = None,
    overrides: Overrides = None,
    memory: Annotated[
        tuple[str, float] | None,
        typer.Option("--memory", metavar="MODEL GIB", help="Compute what fits on a GPU of so much memory."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Validate a config; print it resolved, with what would go where. Starts nothing."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.checkpoints import to_toml
        from unstable_lite.memory import describe
        from unstable_lite.plan import load_plan
        from unstable_lite.trackers.terminal import key_value_lines

        console = _console()
        plan = load_plan(config, tuple(overrides or ())) if config is not None else None
        if memory is not None:
            model_name, vram_gib = memory
            console.print(f"computed for a GPU of {vram_gib:g} GiB, {config or 'all defaults'}:\n")
            rows = (
                describe(model_name, vram_gib, plan.config, plan.num_ranks) if plan else describe(model_name, vram_gib)
            )
            console.print(key_value_lines(rows), soft_wrap=True)
        elif plan is not None:
            console.print(to_toml(plan.config.model_dump(mode="json")), soft_wrap=True)
            console.print(key_value_lines(plan.describe()), soft_wrap=True)
            console.print(f"\n{config} can run.")
        else:
            raise ConfigError("check needs a TOML file, or --memory MODEL GIB")


@app.command()
def top(
    directory: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run directory; default: the newest in --outputs.")
    ] = None,
    outputs: Annotated[Path, typer.Option("--outputs", help="Where runs are.")] = Path("outputs"),
    replay: Annotated[bool, typer.Option("--replay", help="From the first update on, as in a film.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Look on at a run from another terminal; it does not notice. Keys: ← → through the updates, space, q."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.trackers.records import understood
        from unstable_lite.trackers.run_view import RunView, newest_run
        from unstable_lite.trackers.watch import show_once, watch

        view, console = RunView(directory or newest_run(outputs)), _console()
        with understood(view.directory):
            if console.is_terminal and sys.stdin.isatty():
                watch(view, console, replay)
            else:
                show_once(view, console)


@app.command()
def sft(
    config: ConfigPath,
    overrides: Overrides = None,
    collect_only: Annotated[bool, typer.Option("--collect-only", help="Write the pairs; do not train.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors and the last table.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Warm start: collect observation-action pairs, train an adapter to imitate them, save it for `run`."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.sft.session import load_sft_plan, run_sft
        from unstable_lite.trackers.terminal import TerminalInterface

        plan = load_sft_plan(config, tuple(overrides or ()))
        summary = asyncio.run(run_sft(plan, TerminalInterface(quiet=quiet), collect_only))
        _print_sft_summary(config, summary)


@app.command()
def envs(
    pattern: Annotated[str, typer.Argument(help="Show ids that contain this.")] = "",
) -> None:
    """List TextArena's env ids for training, with players and remarks."""
    from unstable_lite.games.environments import describe_envs
    from unstable_lite.games.players.greedy import GREEDY_GAMES
    from unstable_lite.games.players.optimal import OPTIMAL_ACTIONS
    from unstable_lite.games.players.scripted import LEGAL_ACTIONS

    table = Table("env id", "players", "remark")
    for env_id, players, remark in describe_envs():
        if pattern.lower() in env_id.lower():
            family = env_id.partition("-v")[0]
            scripted: dict[str, Collection[str]] = {
                "scripted:random": LEGAL_ACTIONS,
                "scripted:greedy": GREEDY_GAMES,
                "scripted:optimal": OPTIMAL_ACTIONS,
            }
            names = [name for name, families in scripted.items() if family in families]
            table.add_row(env_id, players, remark or (f"opponents: {', '.join(names)}" if names else ""))
    _console().print(table)


@app.command()
def keys(
    directory: Annotated[Path, typer.Argument(help="Where the keys are to be.")] = Path("keys"),
    names: Annotated[list[str] | None, typer.Argument(help="A key for each worker; default: one, `worker`.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Make the keys with which workers on other machines may come to a run (remote.keys)."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.transport.keys import RUN, WORKER, make_keys

        workers = names or [WORKER]
        for path in make_keys(directory, workers):
            typer.echo(f"wrote {path}")
        theirs = ", ".join(f"{name}.key_secret" for name in workers)
        typer.echo(f"to a worker's machine, by a safe way: {RUN}.key and its own of {theirs}; the rest stays here")


@app.command()
def worker(
    connect: Annotated[str, typer.Option("--connect", metavar="tcp://HOST:PORT", help="The run's remote.bind.")],
    keys: Annotated[Path, typer.Option("--keys", help="A directory with run.key and the worker's key.")] = Path("keys"),
    name: Annotated[str, typer.Option("--name", help="Of the worker's key.")] = "worker",
    device: Annotated[str, typer.Option("--device", help="A CUDA device's number, or cpu.")] = "0",
    threads: Annotated[
        int | None,
        typer.Option("--threads", help="On a CPU, unless the run has engine.threads; default: all cores."),
    ] = None,
    patience: Annotated[float, typer.Option("--patience", help="Seconds without a connection to give up after.")] = 600,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Serve a run on another machine as one of its engines. It trusts that run: with its config comes what to load."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.engines.remote import work
        from unstable_lite.transport.keys import read_worker_keys
        from unstable_lite.workers import environment

        if device != "cpu" and not device.isdecimal():
            raise ConfigError(f"--device {device}: a CUDA device's number, or cpu")
        threads = threads or len(os.sched_getaffinity(0))
        os.environ.update(environment(device, threads))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it holds in shared memory goes with it
        work(connect, read_worker_keys(keys, name), device, threads, patience, say=typer.echo)


@app.command("eval")
def evaluate_models(
    models: Annotated[
        list[str],
        typer.Argument(
            help="'base', run directories (all their checkpoints), adapters' directories, 'scripted:…', "
            "'module:Class', 'vendor/model'."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Games and tables; the same directory again goes on with it.")],
    games: Annotated[int, typer.Option(min=1, help="Games of each model, opponent and env; seats are balanced.")] = 200,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="env_id[:players[:template]], repeated for more; default: the config's eval (else train) envs."
        ),
    ] = None,
    opponent: Annotated[
        list[str] | None,
        typer.Option(help="What MODELS may be, repeated for more; default: each eval env's own opponent."),
    ] = None,
    tournament: Annotated[bool, typer.Option("--tournament", help="Each model against each other; a ladder.")] = False,
    config: Annotated[Path | None, typer.Option(help="A TOML file; default: the first run's own config.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Games in flight; default: the run's.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, repeated for more; engine.temperature=0.6")
    ] = None,
    trust_config: TrustConfig = False,
    probe_games: Annotated[
        int, typer.Option("--probe", metavar="GAMES", help="Also probe, at the positions of so many random games.")
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors and the tables.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Evaluate what training left on disk: models × opponents × envs, or a tournament. Starts engines, no learner."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.evaluation.evaluator import evaluate, plan_evaluation
        from unstable_lite.evaluation.results import ladder_table, results_tables
        from unstable_lite.runtime import run_in_loop
        from unstable_lite.trackers.terminal import TerminalInterface

        evaluation = plan_evaluation(
            models,
            output=output,
            config=config,
            envs=env or (),
            opponents=opponent or (),
            games=games,
            concurrency=concurrency,
            tournament=tournament,
            overrides=override or (),
            trusts_config=trust_config,
        )
        evaluated = run_in_loop(evaluate(evaluation, TerminalInterface(quiet=quiet).say))
        console = _console()
        if evaluated.ladder:
            console.print(ladder_table(evaluated.ladder))
        else:
            console.print(*results_tables(evaluated.evaluations), sep="\n")
        if probe_games:
            from unstable_lite.evaluation.probing import probe_table, write_probes
            from unstable_lite.evaluation.scoring import probe_models

            probes = probe_models(evaluation.cells, evaluation.plan.config, probe_games, console.print)
            if probes:
                write_probes(output / "probe.csv", probes)
                console.print(probe_table(probes))
        console.print(f"{evaluated.played} games played; tables and games in {evaluated.output}", soft_wrap=True)


@app.command()
def play(
    models: Annotated[
        list[str], typer.Argument(help="Who is played against, as for eval; with --watch two of them, or one for both.")
    ],
    env: Annotated[str | None, typer.Option(help="env_id[:players[:template]]; default: the config's first.")] = None,
    seat: Annotated[int | None, typer.Option(min=0, help="Yours, or the first model's; default: by chance.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Models play, you look on.")] = False,
    config: Annotated[Path | None, typer.Option(help="A TOML file; default: the first run's own config.")] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, repeated for more.")] = None,
    trust_config: TrustConfig = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Play one game against a model, or look on at two of them."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.evaluation.playing import HUMAN, plan_game
        from unstable_lite.evaluation.playing import play as play_one
        from unstable_lite.runtime import run_in_loop

        game = plan_game(models if watch else [HUMAN, *models], config, env, tuple(override or ()), trust_config)
        record = run_in_loop(play_one(game, seat, _console()))
        raise typer.Exit(0 if record.end != "void" else 1)


def _plan_on_kept_config(
    run_directory: Path,
    models: list[str] | None,
    output: Path,
    envs: list[str] | None,
    overrides: list[str] | None,
    trust_config: bool,
) -> EvaluationPlan:
    """Plan to ask `models`, by default the base and the run's last checkpoint, under the run's own config."""
    from unstable_lite.evaluation.evaluator import plan_evaluation
    from unstable_lite.trust import run_config

    return plan_evaluation(
        models or ["base", str(run_directory)],
        output=output,
        config=run_config(run_directory, overrides or (), trust_config),
        envs=envs or (),
        opponents=["base"],
        overrides=overrides or (),
    )


@app.command()
def resample(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="The run whose games hold the observations.")],
    models: Annotated[
        list[str] | None, typer.Argument(help="'base', run or adapter directories; default: base and RUN.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A CSV file; default: RUN/resampled.csv.")] = None,
    observations: Annotated[int, typer.Option(min=1, help="Of each env, at most.")] = 100,
    samples: Annotated[int, typer.Option(min=2, help="Actions for each observation.")] = 8,
    env: Annotated[list[str] | None, typer.Option(help="As for eval; default: the run's eval envs.")] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, repeated for more.")] = None,
    trust_config: TrustConfig = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Sample several actions for each of the same kept observations: how open each model's choice is."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.evaluation.resampling import resample as resample_models
        from unstable_lite.evaluation.resampling import resampled_table
        from unstable_lite.runtime import run_in_loop
        from unstable_lite.trackers.terminal import TerminalInterface

        target = output or run_directory / "resampled.csv"
        evaluation = _plan_on_kept_config(run_directory, models, target, env, override, trust_config)
        say = TerminalInterface().say
        rows = run_in_loop(resample_models(evaluation, run_directory, observations, samples, say))
        console = _console()
        console.print(resampled_table(rows))
        console.print(f"{samples} actions for each observation, entropy in nats; {target}", soft_wrap=True)


@app.command()
def probe(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="The run whose config names base and envs.")],
    models: Annotated[
        list[str] | None, typer.Argument(help="'base', run or adapter directories; default: base and RUN.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A CSV file; default: RUN/probe.csv.")] = None,
    games: Annotated[int, typer.Option(min=2, help="Games of random legal play whose positions are asked about.")] = 20,
    env: Annotated[list[str] | None, typer.Option(help="As for eval; default: the run's eval envs.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; default: cuda if there is any.")] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, repeated for more.")] = None,
    trust_config: TrustConfig = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Compute each model's exact choice at the same positions: share of optimal moves, entropy, state dependence."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.evaluation.probing import probe_table, write_probes
        from unstable_lite.evaluation.scoring import probe_models
        from unstable_lite.trackers.terminal import TerminalInterface

        target = output or run_directory / "probe.csv"
        evaluation = _plan_on_kept_config(run_directory, models, target, env, override, trust_config)
        probes = probe_models(evaluation.cells, evaluation.plan.config, games, TerminalInterface().say, device)
        write_probes(target, probes)
        _console().print(probe_table(probes))
        _console().print(f"table in {target}", soft_wrap=True)


@app.command()
def export(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    output: Annotated[Path | None, typer.Option(help="An empty or new directory; default: RUN/csv.")] = None,
    safe_for_spreadsheets: Annotated[
        bool,
        typer.Option("--safe-for-spreadsheets", help="Put an apostrophe before text that would be a formula there."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Write the CSV files that UnstableBaselines would have written: training data, evaluation, collection."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.trackers.export import export_csv

        target = output or run_directory / "csv"
        counts = export_csv(run_directory, target, safe_for_spreadsheets)
        _console().print(
            f"{target}: {', '.join(f'{count} files in {kind}/' for kind, count in counts.items())}", soft_wrap=True
        )


@app.command()
def report(
    run_directories: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run directories; several are compared.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Default: RUN/report.html, or report.html here for several runs.")
    ] = None,
    games: Annotated[
        int, typer.Option(min=1, help="Transcripts of each run and kind (training, evaluation, void), at most.")
    ] = 2000,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Write one HTML file with curves, ladder, matches and a browser of games; it needs no network to be read."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.trackers.report import write_report

        default = run_directories[0] / "report.html" if len(run_directories) == 1 else Path("report.html")
        written = write_report(run_directories, output or default, games)
        _console().print(
            f"{written.path}: {written.games:,} of {written.games_read:,} games turn by turn, "
            f"{written.size_bytes / 1e6:.1f} MB; open it in a browser",
            soft_wrap=True,
        )


Outputs = Annotated[Path, typer.Option("--outputs", help="Where runs are.")]
runs_app = typer.Typer(help="The runs on this disk: list, compare, prune.", invoke_without_command=True)
app.add_typer(runs_app, name="runs")


@runs_app.callback()
def runs(
    context: typer.Context,
    outputs: Outputs = Path("outputs"),
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """List the runs in --outputs, the newest first; or compare them, or make room."""
    if context.invoked_subcommand is None:
        with _ErrorsAsMessages(debug):
            from unstable_lite.run_directories import list_runs, runs_table

            _console().print(runs_table(list_runs(outputs)), soft_wrap=True)


@runs_app.command("compare")
def compare_runs(
    run_directories: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Run directories.")],
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """The config keys in which runs differ, and what came of each, side by side."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.run_directories import column_name, compare

        console = _console()
        directories, differing, results = compare(run_directories)
        for number, directory in enumerate(directories):
            console.print(f"{column_name(number)}  {directory}", soft_wrap=True)
        if differing.row_count:
            console.print(differing)
        else:
            console.print("their configs are the same")
        console.print(results)


@runs_app.command("prune")
def prune_runs(
    run_directories: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN…]", help="Run directories; default: all in --outputs.")
    ] = None,
    outputs: Outputs = Path("outputs"),
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would go.")] = False,
    keep: Annotated[int, typer.Option(min=1, help="Whole checkpoints to keep of each run, the newest.")] = 1,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Only runs that were not written to for so long.")
    ] = 0.0,
    train_data: Annotated[
        bool, typer.Option("--train-data", help="Also train_data/, which report and export read.")
    ] = False,
    empty: Annotated[bool, typer.Option("--empty", help="Also whole runs that have no checkpoint.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")] = False,
) -> None:
    """Make room: older checkpoints go, and none of a running run. What a resume needs stays, and the best evaluated."""
    with _ErrorsAsMessages(debug):
        from unstable_lite.run_directories import find_prunable, prune, say_prunable, size

        def say(text: str) -> None:
            _console().print(text, soft_wrap=True)

        prunables = find_prunable(outputs, run_directories or (), keep, older_than, train_data, empty)
        num_bytes = say_prunable(prunables, say)
        if not num_bytes:
            say("nothing to prune")
        elif not yes:
            say(f"{size(num_bytes)} in all; nothing was removed: with --yes it is")
        else:
            for prunable in prunables:
                if prunable.paths and (reason := prune(prunable)) is not None:
                    say(f"{prunable.directory}: nothing was removed, for {reason}")
                    num_bytes -= prunable.size_bytes
            say(f"{size(num_bytes)} freed")


class _ErrorsAsMessages:
    """Our own errors as one message and exit code 1; Ctrl-C as exit code 130; tracebacks with `--debug`."""

    def __init__(self, debug: bool) -> None:
        self._debug = debug

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or self._debug:
            return
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            raise typer.Exit(EXIT_INTERRUPTED) from None
        if isinstance(error, UnstableError | OSError):
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            for problem in problems:
                print(f"error: {visible(problem)}", file=sys.stderr)  # noqa: T201
            raise typer.Exit(1) from None


def _console() -> Console:
    from unstable_lite.trackers.terminal import VisibleConsole

    return VisibleConsole()


def _print_summary(summary: Summary) -> None:
    from unstable_lite.trackers.terminal import as_line, evaluation_tables, key_value_lines

    console = _console()
    for table in evaluation_tables(summary.evaluations):
        console.print(table)
    rows = [
        ("updates", f"{summary.updates}" + (f", {summary.skipped_updates} skipped" * bool(summary.skipped_updates))),
        ("games", f"{summary.games}, {summary.void_games} void"),
        ("stale steps dropped", _dropped(summary)),
        ("time", f"{summary.seconds:.0f} s, of which training {summary.training_seconds:.0f} s"),
        ("run directory", str(summary.directory)),
    ]
    if summary.checkpoint is not None:
        rows.append(("newest adapter", str(summary.checkpoint)))
    rows += [
        ("games, turn by turn", str(summary.directory / "games.jsonl")),
        ("curves", f"tensorboard --logdir {summary.directory / 'tensorboard'}"),
    ]
    console.print(key_value_lines(rows), soft_wrap=True)
    for alarm in summary.alarms:
        console.print(as_line(f"alarm {alarm}"), soft_wrap=True)
    for collapsed in summary.collapsed:
        console.print(as_line(f"collapsed: {collapsed}"), soft_wrap=True)
    if summary.stopped_by is not None:
        way_on = f"; to go on all the same: unstable-lite run --resume {shlex.quote(str(summary.directory))}"
        saved = f"{summary.checkpoint}{way_on}" if summary.checkpoint else "none, for no update was made"
        raise UnstableError(f"stopped by alarm {summary.stopped_by}\nnewest checkpoint: {saved}")


def _dropped(summary: Summary) -> str:
    dropped, played = summary.dropped_stale_steps, summary.played_steps
    share = f" of {played} ({dropped / played:.1%})" if played else ""
    return f"{dropped}{share}" + (f"; most of {summary.most_dropped}" if summary.most_dropped else "")


def _print_sft_summary(config: Path, summary: SftSummary) -> None:
    from unstable_lite.trackers.terminal import key_value_lines

    directory, collected, figures = summary.directory, summary.collected, summary.figures
    games = "" if collected is None else f", from {collected.games} games, {collected.void_games} void"
    rows = [("pairs", f"{summary.num_pairs}{games}")]
    rows += [("left out", f"{count} {reason}") for reason, count in summary.left_out.most_common()]
    if figures is None:
        rows += [
            ("pairs file", str(directory / "pairs.jsonl")),
            ("to train on them", f"unstable-lite sft {config} sft.data={directory / 'pairs.jsonl'}"),
        ]
    else:
        first, last = figures["train_loss_first_epoch"], figures["train_loss_last_epoch"]
        rows.append(
            (
                "trained on",
                f"{figures['num_trained']:.0f} pairs; loss {first:.4f} in the first epoch, {last:.4f} in the last",
            )
        )
        if figures["num_held_out"]:
            rows.append(("held out", f"{figures['num_held_out']:.0f} pairs with prompts of their own"))
            for name, what in (("loss", "loss"), ("token_accuracy", "tokens right"), ("accuracy", "answers right")):
                form = ".4f" if name == "loss" else ".1%"
                before, after = figures[f"{name}_before"], figures[f"{name}_after"]
                rows.append((f"  {what}", f"{before:{form}} before, {after:{form}} after"))
        rows += [
            ("time", f"{summary.seconds:.0f} s"),
            ("adapter", str(directory)),
            ("to start from it", f"unstable-lite run {config} lora.initial_lora_path={directory}"),
        ]
    _console().print(key_value_lines(rows), soft_wrap=True)


def main() -> None:
    # In the place of a standard stream that is closed the next socket would be opened, and libuv ends the process.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where its encoding lacks what is to be told: a question mark
    app()

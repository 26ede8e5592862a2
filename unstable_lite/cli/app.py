"""Command line: the commands around training with their summaries, and the list of all commands."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unstable_lite.cli import evaluation, runs
from unstable_lite.cli.options import ConfigPath, Debug, Overrides, TrustConfig, console, errors_as_messages
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.tracking.intervals import percent

if TYPE_CHECKING:
    from collections.abc import Collection

    from unstable_lite.orchestrator.run import Summary


app = typer.Typer(
    name="unstable-lite",
    help="Reinforcement learning of language models on multi-agent text games.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_versions(is_wanted: bool) -> None:
    if is_wanted:
        from unstable_lite.tracking.versions import version_lines

        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions.", callback=_print_versions, is_eager=True)
    ] = False,
) -> None:
    pass


app.command()(runs.new)


@app.command()
def run(
    config: Annotated[str | None, typer.Argument(help="A TOML file; `new` writes some. --resume has one.")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Resume a run from its newest intact checkpoint.")
    ] = None,
    trust_config: TrustConfig = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors and the last table.")] = False,
    debug: Debug = False,
) -> None:
    """Train: play games, learn, evaluate, save."""
    with errors_as_messages(debug):
        from unstable_lite.config.reading import read_config
        from unstable_lite.dashboards.terminal import TerminalInterface
        from unstable_lite.orchestrator.event_loop import run_in_loop
        from unstable_lite.orchestrator.run import Run
        from unstable_lite.planning.plan import load_plan
        from unstable_lite.planning.trust import run_config
        from unstable_lite.tracking.run_directory import lasting_changes

        if resume is not None:  # the run has its own config; a first argument is an override
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
            print_summary(summary)
        except OSError as error:
            raise UnstableError(
                f"the run is over and complete in {summary.directory}, but "
                f"its summary could not be written to standard output: {error.strerror}"
            ) from error


@app.command()
def check(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; --memory does without.")] = None,
    overrides: Overrides = None,
    memory: Annotated[
        tuple[str, float] | None,
        typer.Option("--memory", metavar="MODEL GIB", help="Compute the sizes that fit a GPU of this memory."),
    ] = None,
    model: Annotated[bool, typer.Option("--model", help="Also compare the model's weights with its type.")] = False,
    resolved: Annotated[bool, typer.Option("--resolved", help="Also print the config with every default.")] = False,
    debug: Debug = False,
) -> None:
    """Validate a config; print its processes, devices, memory and games. Only --model starts a process."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.terminal import key_value_lines, print_lines
        from unstable_lite.learner import LEARNERS, find_learner
        from unstable_lite.models.files import check_weights
        from unstable_lite.planning.defaults import policy_configs
        from unstable_lite.planning.memory import describe
        from unstable_lite.planning.plan import load_plan
        from unstable_lite.tracking.run_directory import to_toml

        out = console()
        plan = load_plan(config, tuple(overrides or ())) if config is not None else None
        for own in policy_configs(plan.config).values() if plan is not None else ():
            if own.algorithm not in LEARNERS:
                find_learner(own)  # in a run, only the learner's process imports it, and torch with it
        if memory is not None:
            model_name, vram_gib = memory
            out.print(f"computed for a GPU of {vram_gib:g} GiB, {config or 'all defaults'}:\n")
            rows = describe(model_name, vram_gib, plan.config if plan else None)
            print_lines(out, key_value_lines(rows))
        elif plan is not None:
            if resolved:
                out.print(to_toml(plan.config.model_dump(mode="json")), soft_wrap=True)
            print_lines(out, key_value_lines(plan.describe()))
            if model:
                print_lines(out, check_weights(plan.config.model_name, plan.config.trust_remote_code))
            out.print(f"\n{config} can run.")
        else:
            raise ConfigError("check needs a TOML file, or --memory MODEL GIB")


app.command()(runs.top)


@app.command()
def sft(
    config: ConfigPath,
    overrides: Overrides = None,
    collect_only: Annotated[bool, typer.Option("--collect-only", help="Write the pairs; do not train.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors and the last table.")] = False,
    debug: Debug = False,
) -> None:
    """Warm start: collect observation-action pairs, train an adapter to imitate them, save it for `run`."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.terminal import TerminalInterface
        from unstable_lite.sft.session import load_sft_plan, run_sft

        plan = load_sft_plan(config, tuple(overrides or ()))
        record = run_sft(plan, TerminalInterface(quiet=quiet), collect_only)
        print_sft_summary(config, plan.config.sft.output, record)


@app.command()
def envs(pattern: Annotated[str, typer.Argument(help="Show ids that contain this.")] = "") -> None:
    """List TextArena's env ids for training and OpenSpiel's games, with players and remarks."""
    from unstable_lite.dashboards.terminal import plain_table
    from unstable_lite.games.env_catalogue import describe_envs, env_family
    from unstable_lite.games.players.lookahead import GREEDY_GAMES, OPTIMAL_ACTIONS, has_solver
    from unstable_lite.games.players.scripted import LEGAL_ACTIONS
    from unstable_lite.plugins import suggestion

    table, described = plain_table("", ("env id", "players", "remark"), ()), describe_envs()
    table.columns[0].no_wrap, table.columns[1].max_width = True, 12  # ids are copied
    for env_id, players, remark in described:
        if pattern.lower() in env_id.lower():
            family = env_family(env_id)
            scripted: dict[str, Collection[str]] = {
                "scripted:random": LEGAL_ACTIONS,
                "scripted:greedy": GREEDY_GAMES,
                "scripted:optimal": [*filter(has_solver, OPTIMAL_ACTIONS)],
            }
            names = [name for name, families in scripted.items() if family in families]
            opponents = f"opponents: {', '.join(names)}" if names else ""
            table.add_row(env_id, players, "; ".join(filter(None, (remark, opponents))))
    with errors_as_messages(debug=False):
        if not table.row_count:
            families = {env_family(env_id) for env_id, _, _ in described}
            raise UnstableError(f"no env id contains {pattern!r}; {suggestion(pattern, families)}")
    console().print(table)


app.command("eval")(evaluation.evaluate_models)
app.command()(evaluation.play)
app.command()(evaluation.probe)
app.command()(runs.report)
app.command()(runs.push)
app.command()(runs.runs)


def main() -> None:
    # The next socket would take the number of a closed standard stream, and libuv would end the process.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters outside of its encoding become question marks
    if not sys.flags.safe_path:
        sys.path.append("")  # a config may name modules of the working directory, as with `python -m`
    app()


def print_summary(summary: Summary) -> None:
    from unstable_lite.dashboards.terminal import command, evaluation_tables, key_value_lines, print_lines, remark_lines
    from unstable_lite.tracking.displayed_metrics import duration

    out = console()
    for table in evaluation_tables(summary.results):
        out.print(table, "")
    for line in remark_lines(summary.evaluations):
        print_lines(out, line)
    planned = f" of {summary.planned_updates}" * (summary.updates < summary.planned_updates)
    skipped = f", {summary.skipped_updates} skipped" * bool(summary.skipped_updates)
    since = " since the resume" * summary.is_resumed
    dropped, played = summary.dropped_stale_steps, summary.played_steps
    dropped_shown = f"{dropped}" + (f" of {played} ({percent(dropped / played)})" if played else "")
    dropped_shown += f"; most of {summary.most_dropped}" if summary.most_dropped else ""
    rows = [
        ("updates", f"{summary.updates}{planned}{skipped}"),
        ("games", summary.games_text),
        *[("ended early", text) for text in summary.ended_early],
        ("stale steps dropped", dropped_shown),
        ("time", f"{duration(summary.seconds)}, of which training{since} {duration(summary.training_seconds)}"),
    ]
    paths = _paths(summary, is_over=not planned or summary.stopped_by is not None)
    lines = key_value_lines([*rows, *paths]).split("\n")
    print_lines(out, "\n".join(lines[: len(rows)]))
    out.print("\n".join(lines[len(rows) :]), soft_wrap=True)  # copied text must have no line breaks
    for line in (*(f"alarm {alarm}" for alarm in summary.alarms), *summary.collapsed):
        print_lines(out, line)
    if summary.stopped_by is not None:
        way_on = f"{summary.checkpoint}; to continue regardless: {command('run', '--resume', summary.directory)}"
        saved = way_on if summary.checkpoint else "none, because no update was made"
        raise UnstableError(f"stopped by alarm {summary.stopped_by}\nnewest checkpoint: {saved}")


def _paths(summary: Summary, is_over: bool) -> list[tuple[str, str]]:
    """Return where the run's files are, and the commands that come next."""
    from unstable_lite.dashboards.terminal import next_commands

    directory, steps = summary.directory, next_commands(summary.directory, summary.results, is_over)
    return [
        ("run directory", str(directory)),
        *[("newest adapter", str(path)) for path in [summary.checkpoint] if path is not None],
        ("games, turn by turn", str(directory / "games.jsonl")),
        ("curves", shlex.join(["tensorboard", "--logdir", str(directory / "tensorboard")])),
        *((name, " ".join(words)) for name, words in steps.items()),
    ]


def print_sft_summary(config: Path, directory: Path, record: dict[str, Any]) -> None:
    """Print the results of `sft`, whose `record` is the content of sft.json."""
    from unstable_lite.dashboards.terminal import command, key_value_lines, print_lines

    metrics: dict[str, float] | None = record["metrics"]
    games = "" if record["games"] is None else f", from {record['games']} games, {record['void_games']} void"
    rows = [("pairs", f"{record['num_pairs']}{games}")]
    rows += [("left out", f"{count} {reason}") for reason, count in Counter(record["left_out"]).most_common()]
    if metrics is None:
        rows += [
            ("pairs file", str(directory / "pairs.jsonl")),
            ("to train on them", command("sft", config, f"sft.data={directory / 'pairs.jsonl'}")),
        ]
    else:
        first, last = metrics["train_loss_first_epoch"], metrics["train_loss_last_epoch"]
        losses = f"{first:.4f} nats a token in the first epoch, {last:.4f} in the last"
        rows.append(("trained on", f"{metrics['num_trained']:.0f} pairs; loss {losses}"))
        if metrics["num_held_out"]:
            rows.append(("held out", f"{metrics['num_held_out']:.0f} pairs whose prompts are not trained on"))
            for name, what in (("loss", "loss"), ("token_accuracy", "tokens right"), ("accuracy", "answers right")):
                form = ".4f" if name == "loss" else ".1%"
                before, after = metrics[f"{name}_before"], metrics[f"{name}_after"]
                rows.append((f"  {what}", f"{before:{form}} before, {after:{form}} after"))
        rows += [
            ("time", f"{record['seconds']:.0f} s"),
            ("adapter", str(directory)),
            ("to start from it", command("run", config, f"lora.initial_lora_path={directory}")),
        ]
    print_lines(console(), key_value_lines(rows))

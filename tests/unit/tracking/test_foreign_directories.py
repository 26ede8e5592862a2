"""Another person's run directory may hold links and FIFOs: nothing is written through them, and no command waits."""

import contextlib
import logging
import os
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fakes import runs
from unstable_lite.cli.app import app
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.results import Results, write_csv
from unstable_lite.files import AppendFile, RecordLog, check_links, open_log, replaced
from unstable_lite.orchestrator.event_loop import log_file
from unstable_lite.tracking.run_directory import recorded_questions

COMMANDS: dict[str, tuple[str, ...]] = {
    "resume": ("run", "--resume", "RUN"),
    "report": ("report", "RUN"),
    "top": ("top", "RUN"),
    "report of several": ("report", "OTHER", "RUN", "--output", "OUT"),
    "eval": ("eval", "RUN", "--output", "OUT"),
    "eval of another config": ("eval", "RUN", "--output", "OUT", "--config", "CONFIG"),
    "eval of one checkpoint": ("eval", "run:RUN/ckpt-1", "--output", "OUT", "--config", "CONFIG"),
    "probe": ("probe", "RUN"),
    "play": ("play", "RUN"),
    "push": ("push", "RUN", "me/model", "--dry-run", "OUT"),
    "check with a player": ("check", "CONFIG", "league.fixed_opponents=['run:RUN/newest']"),
    "run with a player": ("run", "CONFIG", "league.fixed_opponents=['run:RUN/newest']"),
    "sft with a player": ("sft", "CONFIG", "sft.players=['run:RUN/newest']"),
}


def invoke(command: str, **places: Path) -> Result:
    """Run one of the commands, with these paths in place of its words."""
    words = COMMANDS[command]
    for name, place in places.items():
        words = tuple(word.replace(name, str(place)) for word in words)
    return CliRunner().invoke(app, words)


def write_run(directory: Path) -> Path:
    """Write a run directory without an adapter: every command has to refuse it before it needs one."""
    (directory / "checkpoints" / "ckpt-1").mkdir(parents=True)
    shutil.move(runs.write_small(directory), directory / "config.toml")
    (directory / "versions.json").write_text("{}")
    for name in ("games", "eval", "metrics"):
        (directory / f"{name}.jsonl").touch()
    (directory / "checkpoints" / "latest").symlink_to("ckpt-1")
    return directory


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_run_with_a_link_to_elsewhere(tmp_path, command):
    directory, victim = write_run(tmp_path / "run"), tmp_path / "victim"
    victim.write_text("mine")
    link = directory / "logs" / "deep" / "link"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../../victim")
    other, config = write_run(tmp_path / "other"), runs.write_small(tmp_path)
    done = invoke(command, RUN=directory, OTHER=other, OUT=tmp_path / "out", CONFIG=config)
    assert done.exit_code == 1 and f"{link} is a link to ../../../victim" in done.output, done.output
    assert victim.read_text() == "mine"


def test_list_of_runs_says_why_a_run_is_unreadable(tmp_path):
    directory = write_run(tmp_path / "2026-11-27" / "10-00-00-odd")
    (directory / "link").symlink_to("/etc/passwd")
    done = CliRunner().invoke(app, ("runs", "--outputs", str(tmp_path)))
    assert "unreadable" in done.output and f"{directory / 'link'} is a link to /etc/passwd" in done.output


LOG = "wandb/run-1/logs/debug-core.log"


@pytest.mark.parametrize(
    ("place", "target", "is_refused"),
    [
        pytest.param("checkpoints/odd", "/etc", True, id="absolute"),
        pytest.param("checkpoints/odd", "../../run-2", True, id="sibling"),
        pytest.param("checkpoints/odd", "absent/../../../elsewhere", True, id="dangling"),
        pytest.param("checkpoints/odd", None, True, id="FIFO"),
        pytest.param("checkpoints/odd", "../checkpoints/ckpt-1", False, id="inside"),
        pytest.param("checkpoints/odd", "latest", False, id="dangling inside"),
        pytest.param("checkpoints/odd", "odd", False, id="loop"),
        pytest.param(LOG, "/root/.cache/wandb/logs/core-debug.log", False, id="made by wandb itself"),
    ],
)
def test_only_links_that_stay_inside_the_run_are_accepted(tmp_path, place, target, is_refused):
    directory = write_run(tmp_path / "run")
    (tmp_path / "run-2").mkdir()
    (directory / place).parent.mkdir(parents=True, exist_ok=True)
    if target is None:
        os.mkfifo(directory / place)
    else:
        (directory / place).symlink_to(target)
    named = tmp_path / "link"  # a person's own link to the run
    named.symlink_to(directory)
    with pytest.raises(ConfigError, match=f"{place} is") if is_refused else contextlib.nullcontext():
        check_links(named)


@pytest.mark.parametrize("make", [lambda path, victim: path.symlink_to(victim), lambda path, _: os.mkfifo(path)])
def test_nothing_is_written_through_a_link_or_into_a_fifo(tmp_path, make):
    victim = tmp_path / "victim"
    victim.write_text('{"n": 1}\nunfinished')
    make(link := tmp_path / "link", victim)
    for write in (AppendFile, RecordLog, open_log, lambda path: write_csv(path, ["a"], [{"a": 1}])):
        with pytest.raises(OSError, match="link"):
            write(link)
    make(tmp_path / ".page.html.partial", victim)
    with replaced(tmp_path / "page.html") as partial:
        partial.write_text("page")
    assert (tmp_path / "page.html").read_text() == "page"
    make(tmp_path / ".settings.json.partial", victim)
    (tmp_path / "settings.json").symlink_to(victim)
    with pytest.raises(ConfigError):
        Results(tmp_path, {})
    assert victim.read_text() == '{"n": 1}\nunfinished'


def test_log_is_made_again_if_its_directory_was_removed(tmp_path):
    path, log = tmp_path / "logs" / "orchestrator.log", logging.getLogger("unstable_lite.x")
    with log_file(path):
        log.info("first")
        shutil.rmtree(path.parent)
        log.info("second")
    assert "second" in path.read_text()


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", ["[]", "null", DEEP, '{"packages": []}', '{"questions": 5}', "{"])
@pytest.mark.parametrize("command", ["report", "push"])
def test_odd_versions_of_a_run_end_no_command_with_a_traceback(tmp_path, command, text):
    directory = write_run(tmp_path / "run")
    (directory / "versions.json").write_text(text)
    done = invoke(command, RUN=directory, OUT=tmp_path / "out")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output
    assert recorded_questions(directory) == {}


@pytest.mark.parametrize("command", ["report", "probe", "push"])
def test_config_whose_section_is_a_number_is_refused_by_name(tmp_path, command):
    directory = write_run(tmp_path / "run")
    config = directory / "config.toml"
    config.write_text("run = 5\n" + config.read_text().replace("[run]", "[other]"))
    done = invoke(command, RUN=directory, OUT=tmp_path / "out")
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.exception
    assert str(directory) in done.output.replace("\n", ""), done.output

"""A run's output while it runs: live lines on a terminal, dated lines elsewhere. Whole runs: test_run.py."""

import io
import logging
import re
from dataclasses import asdict
from pathlib import Path

import pyte
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from unstable_lite.cli import app
from unstable_lite.dashboards.terminal import TerminalInterface, VisibleConsole, as_line, evaluation_tables
from unstable_lite.orchestrator.event_loop import log_file
from unstable_lite.orchestrator.run import Summary
from unstable_lite.printable import visible
from unstable_lite.tracking.displayed_metrics import Totals
from unstable_lite.tracking.evaluations import Tally
from unstable_lite.tracking.result_rows import result_rows


def console(is_terminal: bool) -> Console:
    return VisibleConsole(file=io.StringIO(), force_terminal=is_terminal, width=90, height=24)


def written(terminal: TerminalInterface) -> str:
    return terminal.console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def screen(terminal: TerminalInterface) -> str:
    shown = pyte.Screen(90, 24)
    pyte.Stream(shown).feed(written(terminal).replace("\n", "\r\n"))
    return "\n".join(line.rstrip() for line in shown.display if line.strip())


def refresh(terminal: TerminalInterface) -> str:
    terminal._live.refresh()
    return screen(terminal)


def test_live_line_shows_current_values_and_disappears_at_the_end():
    terminal, games, waiting = TerminalInterface(console(True)), [5], [12]
    terminal.start(20, lambda: (waiting[0], 48), completed=3, status=lambda: f"games {games[0]}")
    assert all(fact in refresh(terminal) for fact in ("3/20", "12/48 steps", "games 5"))
    games[0], waiting[0] = 7, 99
    terminal.show_update(4, 20, "final")
    assert all(fact in refresh(terminal) for fact in ("4/20", "99/48 steps", "games 7"))
    assert "final" not in written(terminal)  # no plain line in addition to the live one
    terminal.say("a line that stays")
    terminal.stop()
    assert re.fullmatch(r"\d\d:\d\d:\d\d  a line that stays", screen(terminal))
    terminal = TerminalInterface(console(True), unit="pair")
    terminal.start(20)
    terminal.show_update(4, 20, "left out 3")
    assert "4/20" in refresh(terminal) and "left out 3" in refresh(terminal), "there is nothing newer"
    terminal.stop()


def test_long_task_shows_its_progress_until_it_ends():
    terminal, done = TerminalInterface(console(True)), [1]
    with terminal.doing(lambda: f"evaluation [before]: {done[0]} of 9 games"):
        assert "evaluation [before]: 1 of 9 games  (0 s)" in refresh(terminal)
        done[0] = 2
        with terminal.doing(lambda: "another"):
            terminal.start(20)
            assert all(fact in refresh(terminal) for fact in ("2 of 9 games", "another", "0/20"))
        terminal.stop()
        assert "2 of 9 games" in refresh(terminal)
        assert "another" not in refresh(terminal) and "0/20" not in refresh(terminal)
    assert terminal._live is None
    assert screen(terminal) == ""


def test_other_outputs_get_dated_lines_and_quiet_gets_none():
    for is_terminal, quiet in ((False, False), (False, True), (True, True)):
        terminal = TerminalInterface(console(is_terminal), quiet=quiet)
        terminal.start(20, lambda: (1, 2), status=lambda: "now")
        with terminal.doing(lambda: "something"):
            terminal.say("said")
            terminal.show_update(1, 20, "games 9")
            terminal.show_update(2, 20, "games 10")  # too soon after the previous one
            terminal.show_update(20, 20, "games 11")
        terminal.stop()
        lines = [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in written(terminal).splitlines()]
        assert lines == ([] if quiet else ["said", "update 1/20  games 9", "update 20/20  games 11"])


def test_brackets_are_shown_literally_everywhere(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    message = "alarm after update 3: [/__w/gloo/pair.cc:553] Connection closed by [type=missing]"
    model, opponent = "/exp[lr=1]/:fire:/ckpt-2", "vendor/model[/INST]"
    terminal = TerminalInterface()
    terminal.say(message)
    assert message in capsys.readouterr().out
    tally = Tally()
    tally.add("win", 1.0, own_invalid=False)
    evaluation = tally.evaluation("after [all]", model, 3, "E", opponent)
    rows = result_rows([evaluation])
    counts = {"updates": 3, "skipped_updates": 0, "dropped_stale_steps": 0}
    ended = {**asdict(Totals(1, 0, 0, 1.0)), "training_seconds": 1.0, "checkpoint": None, "stopped_by": None}
    texts = {"directory": Path("/runs/[red]"), "alarms": (message,), "collapsed": (evaluation.describe(),)}
    summary = Summary(evaluations=(evaluation,), results=(*rows,), **counts, **ended, **texts)  # type: ignore[arg-type]
    terminal.console.print(*evaluation_tables(rows))
    assert model in capsys.readouterr().out
    app.print_summary(summary)
    shown = capsys.readouterr().out
    assert all(
        text in shown for text in (message, model, opponent, "after [all]", "/runs/[red]", evaluation.describe())
    )


def test_only_problems_are_red():
    reds = {
        text: [str(span.style) for span in as_line(text).spans] for text in ("an alarm", "alarm: x", "collapsed: y")
    }
    assert reds == {"an alarm": [], "alarm: x": ["red"], "collapsed: y": ["red"]}
    (span,) = as_line("games 3  alarms 2, on: kl").spans
    assert "games 3  alarms 2, on: kl"[span.start : span.end].strip() == "alarms 2, on: kl"
    terminal = TerminalInterface(console(True))
    terminal.start(20, status=lambda: "points 5% against model[/INST]  alarms 2")
    assert "points 5% against model[/INST]  alarms 2" in refresh(terminal)
    terminal.stop()


ATTACK = "so \x1b]0;OWNED\x1b\\\x1b[2J\x9b2J\x7fend"
VISIBLE_ATTACK = r"so \x1b]0;OWNED\x1b\\x1b[2J\x9b2J\x7fend"


def test_no_text_controls_the_terminal():
    cell = Table("name")
    cell.add_row(Text(ATTACK, style="red"))
    plain = console(is_terminal=False)
    for renderable in (ATTACK, Text(ATTACK), cell, Panel(Group(cell), title=Text(ATTACK))):
        plain.print(renderable)
        plain.print(renderable, style="dim", soft_wrap=True)
    shown = plain.file.getvalue()  # type: ignore[attr-defined]
    assert VISIBLE_ATTACK in shown
    assert not set(shown) & set("\x1b\x9b\x7f")
    table = [line for line in shown.splitlines() if line.startswith(("┏", "┃", "│", "└"))]
    assert {len(line) for line in table[:5]} == {len(table[0])}, "the table's edge is straight"


def test_live_lines_show_control_characters_and_still_update():
    terminal = TerminalInterface(console(True))
    terminal.start(20, status=lambda: ATTACK)
    assert VISIBLE_ATTACK in refresh(terminal)
    terminal.say(f"paused: {ATTACK}")
    terminal.stop()
    assert screen(terminal).endswith(f"paused: {VISIBLE_ATTACK}"), "the live lines were erased"
    assert "\x1b]0;" not in written(terminal)


def test_control_characters_are_escaped_and_other_text_is_unchanged():
    text = "a\n\tb äöü 漢字 🎲 \N{NO-BREAK SPACE}[0] \\x1b"
    assert visible(text) == text
    controls = [chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"]
    assert visible("".join(controls)) == "".join(f"\\x{ord(control):02x}" for control in controls)


def test_log_holds_no_control_characters(tmp_path):
    log = logging.getLogger("unstable_lite.somewhere")
    with log_file(tmp_path / "log"):
        log.warning("opponent %s", "\x1b]0;OWNED\x07")
        try:
            raise ValueError("\x9b2J")
        except ValueError:
            log.exception("failed")
    text = (tmp_path / "log").read_text()
    assert r"opponent \x1b]0;OWNED\x07" in text and r"ValueError: \x9b2J" in text
    assert not set(text) & set("\x1b\x07\x9b")

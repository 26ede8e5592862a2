"""Foreign control characters: in the log here, on the terminal in trackers/test_terminal.py."""

from __future__ import annotations

import logging
from pathlib import Path

from unstable_lite.orchestrator.event_loop import log_file
from unstable_lite.printable import visible


def test_control_characters_are_escaped_and_other_text_is_unchanged() -> None:
    text = "a\n\tb äöü 漢字 🎲 \N{NO-BREAK SPACE}[0] \\x1b"
    assert visible(text) == text
    controls = [chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"]
    assert visible("".join(controls)) == "".join(f"\\x{ord(control):02x}" for control in controls)


def test_log_holds_no_control_characters(tmp_path: Path) -> None:
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

"""A chat template that writes the date: a run keeps the text of its first day, also in all later commands."""

import shutil
from pathlib import Path

import pytest

from fakes import runs
from unstable_lite.files import read_part
from unstable_lite.games.run_prompts import FILE
from unstable_lite.models import BUILTIN, chat_template
from unstable_lite.tracking.records import train_files

SHORT = (
    "run.learning_steps=1",
    "run.checkpoint_every=1",
    "run.eval_games=0",
    "run.num_eval_workers=0",
    "buffer.max_staleness=0",
)


@pytest.mark.nightly
def test_recorded_templates_are_used_by_every_later_command(tmp_path: Path) -> None:
    model = shutil.copytree(BUILTIN["builtin:tiny"], tmp_path / "model")
    dated = "{{ strftime_now('%Y') }}, " + chat_template(model)
    (model / "chat_template.jinja").write_text(dated)
    path = runs.write_small(tmp_path)
    path.write_text(path.read_text().replace('"builtin:tiny"', f'"{model}"').replace('"tiny"', '"chat"'))
    out = runs.output_of(runs.run_torchless("run", path, *SHORT))
    assert "warning: prompt_template 'chat': the chat template of" in out
    run = runs.run_directory(tmp_path)
    assert "writes the date" in (run / "logs" / "orchestrator.log").read_text()
    text = (run / FILE).read_text()
    year = next(iter(read_part(train_files(run)[1])))["obs"][:4]
    assert f'"{year}, <|im_start|>' in text
    (run / FILE).write_text(text.replace(f'"{year}, ', '"Long ago, '))
    runs.output_of(runs.run_torchless("run", "--resume", run, "run.learning_steps=3"))
    assert all(row["obs"].startswith("Long ago, <|im_start|>") for row in read_part(train_files(run)[3]))
    (run / FILE).write_text("{")
    for command in (
        ("run", "--resume", run, "run.learning_steps=4"),
        ("eval", run, "--games", "2", "--output", tmp_path / "eval"),
        ("probe", run, "--games", "2"),
        ("play", "--watch", run),
    ):
        code, _, err = runs.invoke(*command)
        assert code == 1 and f"{run / FILE} is damaged" in err.replace("\n", ""), (command, err)

"""The standard script of UnstableBaselines, as docs/migration.md has it, without Ray's words, from start to end."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "migration.md"
NIM = 'env_id="Nim-v0-train", num_players=2, prompt_template="tiny"'
INSTEAD = {
    "import ray\n": "",
    "import unstable\n": "import unstable_lite as unstable\n",
    "import unstable\\.": "import unstable_lite.",
    r"\.options\([^)]*\)\.remote|\.remote": "",
    r"ray\.get\((.*)\)": r"\1",
    ".*(ray\\.init|ray\\.kill|ray\\.shutdown|add_checkpoint).*": "",
    "finally:": "finally:\n    print('ended')",
    r"train_env_specs=\[\.\.\.\]": f"train_env_specs=[unstable.TrainEnvSpec({NIM}, num_actors=1)]",
    r"eval_env_specs=\[\.\.\.\]": f'eval_env_specs=[unstable.EvalEnvSpec({NIM}, fixed_opponent="scripted:random")]',
    "google/gemini-2.0-flash-lite-001": "scripted:random",
    '"UnstableBaselines"': "None",
    "MODEL_NAME": '"builtin:tiny"',
    r'"target_modules": \[\.\.\.\]': '"target_modules": ["q_proj"]',
    "4096": "16",
    "8192": "512",
    "768": "64",
    "384": "32",
    r"train\(200\)": "train(2)",
}


@pytest.mark.nightly
def test_script_without_rays_words_trains(tmp_path: Path) -> None:
    block = PAGE.read_text().partition("## The standard script")[2].partition("```python\n")[2].partition("```")[0]
    for there, here in INSTEAD.items():
        block, times = re.subn(there, here, block)
        assert times, there
    script = tmp_path / "standard.py"
    script.write_text(f'if __name__ == "__main__":\n{textwrap.indent(block, "    ")}')
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended" in done.stdout
    (run,) = tmp_path.glob("outputs/*/*-test")
    assert (run / "checkpoints" / "ckpt-2").is_dir()

"""`python -m bench acceptance OUT [STAGE…]`: run the stages one after the other, and record each as soon as it ends.

Owns their processes, their limits, and in OUT the files STAGE.json and STAGE.log. Knows nothing of their content.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.acceptance.stages import STAGES
from bench.harness import REPOSITORY
from unstable_lite.engines.devices import ask_nvidia_smi, count_gpus
from unstable_lite.files import replaced
from unstable_lite.tracking.versions import versions

PASSED, FAILED, NEEDS_GPU = "passed", "failed", "needs a GPU"
PATIENCE_S = 15.0
"""Time that processes have to exit by themselves before they are killed."""
ATTEMPTS = 3
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""Environment of the stages: all that they need is on the machine. Without the last entry vLLM imports flashinfer only
to find out that its sampler cannot be used."""
PR_SET_CHILD_SUBREAPER = 36
"""Number of this request in Linux's prctl."""
TAIL_LINES = 8

Record = dict[str, Any]


def main(
    out: Annotated[Path, typer.Argument(help="Directory of the results. A stage that has one there is not repeated.")],
    stages: Annotated[
        list[str] | None, typer.Argument(metavar="[STAGE]...", help=f"Stages to run or repeat: {', '.join(STAGES)}.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, or cpu: small sizes, without the stages that need a GPU.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="Time after which the command stops; repeat it then.")] = 40,
    seed: int = 0,
) -> None:
    """Prove on this machine that engines, learner and runs work: ten stages, 40 minutes on one H100 (estimated)."""
    if unknown := [name for name in stages or () if name not in STAGES]:
        raise typer.BadParameter(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    if device is None and not count_gpus():
        raise typer.BadParameter(
            "no GPU was found (nvidia-smi lists none): --device cpu runs the stages that need none, in small sizes"
        )
    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter("--device is cpu or cuda")
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    _adopt_orphans()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _exit)
    try:
        are_passed = _run(out, stages or [], device or "cuda", seed, time.monotonic() + 60 * minutes)
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        _end_descendants(interrupts=True)
    raise typer.Exit(0 if are_passed else 1)


def _run(out: Path, named: list[str], device: str, seed: int, deadline: float) -> bool:
    """Run the named stages, or all without a result. Return whether each has passed."""
    console, records = Console(width=None if Console().is_terminal else 150), dict[str, Record]()
    requested = [name for name in STAGES if name in named or not named]
    common = {"device": device, "seed": seed, "gpus": _gpus(), **versions()}
    for name in requested:
        stage, earlier = STAGES[name], None if named else _earlier(out / f"{name}.json", common)
        if earlier is not None:
            console.print(f"{name}: {earlier['result']} at {earlier['started']}; name the stage to repeat it")
            records[name] = earlier
            continue
        console.print(f"{name}: {stage.proves} (at most {stage.limit_s:.0f} s; log: {out / f'{name}.log'})")
        record = _run_stage(name, out, common, deadline)
        if record is None:
            console.print(f"{name}: stopped, because --minutes are over; repeat the command to continue here")
            break
        with replaced(out / f"{name}.json") as partial:
            partial.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        console.print(f"{name}: {record['result']} after {record['took_s']:.0f} s. {record['reason']}", markup=False)
        records[name] = record
    _show(console, requested, records)
    return all(name in records and records[name]["result"] == PASSED for name in requested)


def _earlier(path: Path, common: Mapping[str, Any]) -> Record | None:
    """Return the record of a stage that ended on this device with this commit and these packages."""
    try:
        record: Record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_same = all(record.get(key) == common[key] for key in ("device", "commit", "gpus", "packages"))
    return record if is_same and record["commit"] is not None else None


def _run_stage(name: str, out: Path, common: Mapping[str, Any], deadline: float) -> Record | None:
    """Run one stage and return its record; None if `deadline` ended it."""
    stage, outcome, started = STAGES[name], out / f"{name}.outcome", time.monotonic()
    record: Record = {"stage": name, "proves": stage.proves, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}

    def ended(result: str, reason: str, report: Any = None) -> Record:
        took_s = time.monotonic() - started
        limits = {"took_s": took_s, "limit_s": stage.limit_s, "log": f"{name}.log"}
        return {**record, "result": result, "reason": reason, **limits, **common, "report": report}

    if stage.needs_gpu and common["device"] == "cpu":
        return ended(NEEDS_GPU, "it has no form for the CPU")
    limit_s = min(stage.limit_s, deadline - started)
    if limit_s <= (stage.limit_s / 2 if common["device"] == "cuda" else 0.0):
        return None
    outcome.unlink(missing_ok=True)
    arguments = [name, str(out), common["device"], str(common["seed"]), str(limit_s)]
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.acceptance", *arguments],
            cwd=REPOSITORY,
            env=os.environ | OFFLINE,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C at the terminal reaches this process alone, which then ends the stage
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _end_descendants(interrupts=True)
        if limit_s < stage.limit_s:
            return None
        return ended(FAILED, f"it did not end within {stage.limit_s:.0f} s and was killed; its log has the stacks")
    left = _end_descendants()
    if code or not outcome.exists():
        tail = (out / f"{name}.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return ended(FAILED, "\n".join([f"it exited with code {code}; the last lines of its log:", *tail]))
    result = json.loads(outcome.read_text())
    outcome.unlink()
    unmet = result["unmet"] + ([f"it left processes behind, which were killed: {', '.join(left)}"] if left else [])
    return ended(FAILED if unmet else PASSED, "; ".join(unmet), result["report"])


def _show(console: Console, requested: list[str], records: Mapping[str, Record]) -> None:
    table = Table(title="Acceptance", title_justify="left", title_style="bold")
    for column in ("stage", "result", "seconds", "measured against its criterion, or reason"):
        table.add_column(column, overflow="fold")
    for name in requested:
        if (record := records.get(name)) is None:
            table.add_row(name, "not run", "", "")
            continue
        ratios = (record["report"] or {"ratios": []})["ratios"]
        judged = [
            f"{row['name']}: {row['median']:.3g} {row['unit']} (n = {row['n']}; {row['target']})"
            for row in ratios
            if row["target"] and row["median"] is not None
        ]
        shown = [record["reason"].partition("\n")[0]] * bool(record["reason"]) + judged
        table.add_row(name, record["result"], f"{record['took_s']:.0f}", escape("\n".join(shown)))
    console.print(table)


def _gpus() -> list[str]:
    """Return name, driver and memory of each GPU, as nvidia-smi lists them."""
    return ask_nvidia_smi("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader").splitlines()


def _exit(signum: int, _frame: object) -> None:
    raise SystemExit(128 + signum)


def _adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that it can end them all."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_descendants(*, interrupts: bool = False) -> list[str]:
    """Wait until all descendants have exited, and kill those that do not; return the names of these.

    `interrupts`: first interrupt the stage, so that it stops its workers and removes its temporary files.
    """
    own, killed = psutil.Process(), list[str]()
    if interrupts:
        for child in own.children():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
    _, left = psutil.wait_procs(own.children(recursive=True), timeout=PATIENCE_S)
    for _ in range(ATTEMPTS):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                killed.append(process.name())
                process.kill()
        psutil.wait_procs(left, timeout=PATIENCE_S)
        left = own.children(recursive=True)  # a process may have started another one before it was killed
    return killed

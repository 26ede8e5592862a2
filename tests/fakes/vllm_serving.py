"""vLLM's own OpenAI-compatible server as a real process on loopback; its CPU build suffices."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from fakes.http_servers import reserve_port

START_TIMEOUT_S = 400.0

LORA = ("--enable-lora", "--max-loras", "64", "--max-lora-rank", "16", "--logprobs-mode", "processed_logprobs")
"""More slots than the tests load adapters: on the CPU vLLM 0.32 computes rows without an adapter with the last slot,
and an unloaded adapter stays in its slot until another one takes it."""
WHOLE_PROMPTS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096")
"""vLLM 0.32 on the CPU crashes on a request with a seed if its prompt is split."""


class VLLMServer:
    """A server that the test starts and stops; `start` restarts it at the same address."""

    def __init__(self, model: Path, log: Path, *flags: str, **environment: str) -> None:
        port = reserve_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        what = ["--port", str(port), "--model", str(model), "--dtype", "float32", "--enforce-eager"]
        self._command = [*serve, *what, *flags]
        self._environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }

    def start(self) -> None:
        with self.log.open("a") as output:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                is_over = self._process.poll() is not None or time.monotonic() > deadline
                if is_over:
                    self.kill()
                assert not is_over, self.log.read_text()[-3000:]
                time.sleep(0.5)

    def kill(self) -> None:
        """Kill the server as a failing node would, and remove the shared memory that vLLM would leave behind."""
        shared = self._shared_memory()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its engine is a separate process
        self._process.wait()
        for path in shared:
            path.unlink(missing_ok=True)

    def _shared_memory(self) -> set[Path]:
        found: set[Path] = set()
        try:
            server = psutil.Process(self._process.pid)
            for process in (server, *server.children(recursive=True)):
                found |= {Path(one.path) for one in process.memory_maps() if one.path.startswith("/dev/shm/")}
        except psutil.NoSuchProcess:
            pass
        return found

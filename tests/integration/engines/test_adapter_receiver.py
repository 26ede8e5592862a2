"""The side-car that receives adapters: a client with the secret may write whole adapters into its folder, no more."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy

from fakes import runs
from unstable_lite.adapters.peft_files import CONFIG, WEIGHTS, adapter_digest
from unstable_lite.engines.vllm_server import sidecar
from unstable_lite.engines.vllm_server.sidecar import AdapterReceiver

SECRET = "a secret"
CONFIG_CONTENT = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}).encode()
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
WEIGHTS_CONTENT = safetensors.numpy.save(
    {Q_PROJ.format("A"): np.ones((4, 6), np.float32), Q_PROJ.format("B"): np.ones((8, 4), np.float32)}
)


class Receiver(NamedTuple):
    port: int


@contextmanager
def receiving(folder: Path, **limits: int) -> Iterator[Receiver]:
    with asyncio.Runner() as runner:
        receiver = runner.run(_made(folder, limits))
        server = runner.run(receiver.listen("127.0.0.1", 0))
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield Receiver(server.sockets[0].getsockname()[1])
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            server.close()
            runner.run(receiver.close_connections())


async def _made(folder: Path, limits: dict[str, int]) -> AdapterReceiver:
    return AdapterReceiver(folder, SECRET, **limits)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "adapters").mkdir()
    (tmp_path / "outside").mkdir()
    return folder


@pytest.fixture
def receiver(folder: Path) -> Iterator[Receiver]:
    with receiving(folder, max_bytes=10_000, max_adapters=3) as receiver:
        yield receiver


def ask(
    receiver: Receiver, method: str, path: str, content: bytes | None = None, secret: str = SECRET
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=10)
    connection.putrequest(method, path, skip_accept_encoding=True)
    connection.putheader("authorization", f"Bearer {secret}")
    if content is not None:
        connection.putheader("content-length", str(len(content)))
    connection.endheaders(content)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def put(receiver: Receiver, name: str, weights: bytes = WEIGHTS_CONTENT) -> tuple[int, Any]:
    assert ask(receiver, "PUT", f"/adapters/{name}/{CONFIG}", CONFIG_CONTENT)[0] == 200
    return ask(receiver, "PUT", f"/adapters/{name}/{WEIGHTS}", weights)


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*") if path.is_file())


def test_adapter_can_be_uploaded_listed_and_deleted(receiver: Receiver, folder: Path) -> None:
    status, answer = put(receiver, "run-1.v2")
    assert status == 200
    assert answer == {"path": str(folder / "run-1.v2"), "digest": adapter_digest(folder / "run-1.v2")}
    assert (folder / "run-1.v2" / WEIGHTS).read_bytes() == WEIGHTS_CONTENT
    assert (folder / "run-1.v2" / CONFIG).read_bytes() == CONFIG_CONTENT
    assert put(receiver, "run-1.v2")[0] == 200, "a client repeats an upload whose answer was lost"
    assert ask(receiver, "GET", "/adapters") == (200, {"adapters": ["run-1.v2"]})
    for _ in range(2):
        assert ask(receiver, "DELETE", "/adapters/run-1.v2") == (200, {})
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("secret", ["", "wrong", SECRET + "x", "naïve"])
def test_without_the_secret_nothing_is_done_or_revealed(receiver: Receiver, folder: Path, secret: str) -> None:
    put(receiver, "mine")
    for method, path in (
        ("GET", "/adapters"),
        ("DELETE", "/adapters/mine"),
        ("PUT", f"/adapters/yours/{CONFIG}"),
        ("GET", "/anything"),
    ):
        status, answer = ask(receiver, method, path, b"" if method == "PUT" else None, secret)
        assert status == 401 and "mine" not in str(answer) and SECRET not in str(answer)
    assert [path.name for path in folder.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "path",
    [
        f"/adapters/../outside/{CONFIG}",
        f"/adapters/..%2foutside/{CONFIG}",
        f"/adapters/%2e%2e/{CONFIG}",
        f"/adapters//{CONFIG}",
        f"/adapters/./{CONFIG}",
        f"/adapters/.hidden/{CONFIG}",
        f"/adapters/a/../../outside/{CONFIG}",
        f"/adapters/a\\..\\b/{CONFIG}",
        f"/adapters/a\x00b/{CONFIG}".replace("\x00", "%00"),
        f"/adapters/{'a' * 300}/{CONFIG}",
        "/adapters/a/other_file.py",
        "/adapters/a/adapter_config.json/x",
        "/adapters/a/adapter_config_json",
        "/adapters/a",
        "/adapters",
        "/etc/passwd",
        f"http://elsewhere/adapters/a/{CONFIG}",
        f"/adapters/a/{CONFIG}?x=/../..",
    ],
)
def test_no_path_leads_out_of_the_folder(receiver: Receiver, folder: Path, path: str) -> None:
    assert ask(receiver, "PUT", path, CONFIG_CONTENT)[0] == 404
    directory = path.removesuffix(f"/{CONFIG}")
    if directory not in ("/adapters/a", "/adapters"):
        assert ask(receiver, "DELETE", directory)[0] == 404
    assert everything(folder) == [] and list(folder.iterdir()) == []
    assert (folder.parent / "outside").is_dir()


def test_invalid_adapter_is_not_kept(receiver: Receiver, folder: Path) -> None:
    status, answer = put(receiver, "odd", WEIGHTS_CONTENT[:-1])
    assert status == 422 and "safetensors" in answer["error"]
    status, answer = ask(receiver, "PUT", f"/adapters/late/{WEIGHTS}", WEIGHTS_CONTENT)
    assert status == 409 and "first" in answer["error"]
    assert everything(folder) == [] and list(folder.iterdir()) == []


def test_sizes_are_bounded(receiver: Receiver, folder: Path) -> None:
    assert ask(receiver, "PUT", f"/adapters/a/{CONFIG}", CONFIG_CONTENT)[0] == 200
    status, answer = ask(receiver, "PUT", f"/adapters/a/{WEIGHTS}", b"x" * 10_001)
    assert status == 413 and "10000" in answer["error"]
    assert ask(receiver, "PUT", f"/adapters/a/{CONFIG}", None)[0] == 411
    assert everything(folder) == [f"adapters/a/{CONFIG}"]


def test_oldest_adapter_makes_room(receiver: Receiver, folder: Path) -> None:
    for number in range(3):
        put(receiver, f"v{number}")
        os.utime(folder / f"v{number}", ns=(number, number))
    put(receiver, "v2")  # already there
    assert ask(receiver, "GET", "/adapters")[1]["adapters"] == ["v0", "v1", "v2"]
    put(receiver, "v3")
    assert sorted(path.name for path in folder.iterdir()) == ["v1", "v2", "v3"]


def test_disconnected_client_leaves_no_files(receiver: Receiver, folder: Path) -> None:
    with socket.create_connection(("127.0.0.1", receiver.port)) as half:
        head = f"PUT /adapters/a/{CONFIG} HTTP/1.1\r\nauthorization: Bearer {SECRET}\r\ncontent-length: 500\r\n\r\nhalf"
        half.sendall(head.encode())
    assert put(receiver, "b")[0] == 200
    runs.wait_for(lambda: [path.name for path in folder.iterdir()] == ["b"])


def test_connections_are_bounded_and_a_slow_header_times_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sidecar, "PATIENCE_S", 1.0)
    with receiving(folder, max_connections=4) as receiver, ExitStack() as opened:
        address = ("127.0.0.1", receiver.port)
        held = [opened.enter_context(socket.create_connection(address, timeout=30)) for _ in range(4)]
        with socket.create_connection(address, timeout=30) as refused:
            assert refused.recv(1) == b"", "one connection too many"
        is_open = [True] * 4
        while any(is_open):  # a byte at a time, so that no single read times out
            for index, connection in enumerate(held):
                try:
                    connection.sendall(b"G")
                    connection.settimeout(0.05)
                    is_open[index] = connection.recv(1) != b""
                except TimeoutError:
                    pass
                except ConnectionError:
                    is_open[index] = False
        assert put(receiver, "a")[0] == 200, "a connection is free again"
    assert "Traceback" not in capfd.readouterr().err


def test_client_that_hangs_up_costs_no_traceback(
    receiver: Receiver, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for request in (b"", b"GET /adapters HTTP/1.1\r\n\r\n" * 50, b"\x00" * 70_000, b"GET / HT"):
        connection = socket.create_connection(("127.0.0.1", receiver.port))
        connection.sendall(request)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
        connection.close()
    assert put(receiver, "a")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_log_holds_no_control_characters(folder: Path) -> None:
    module = "unstable_lite.engines.vllm_server.sidecar"
    command = [sys.executable, "-m", module, "--folder", str(folder), "--port", "0"]
    environment = os.environ | {"ADAPTER_RECEIVER_API_KEY": SECRET}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        started = re.search(r":(\d{4,5})\b", process.stderr.readline())
        assert started is not None
        with socket.create_connection(("127.0.0.1", int(started[1]))) as connection:
            connection.sendall(b"GET /\x1b]0;OWNED\x07\xc2\x9b2J HTTP/1.1\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.0 400")
        process.terminate()
        logged = process.stderr.read()
    assert "OWNED" in logged
    assert not set(logged) & set("\x1b\x07\x9b")


def test_total_size_of_adapters_is_bounded(folder: Path) -> None:
    size = len(CONFIG_CONTENT) + len(WEIGHTS_CONTENT)
    with receiving(folder, max_total_bytes=2 * size) as receiver:
        for number in range(3):
            assert put(receiver, f"v{number}")[0] == 200
            os.utime(folder / f"v{number}", ns=(number, number))
        assert sorted(path.name for path in folder.iterdir()) == ["v1", "v2"]
        assert put(receiver, "v2")[0] == 200, "again"
    with receiving(folder, max_total_bytes=size - 1) as receiver:
        status, answer = put(receiver, "large")
        assert status == 413 and f"{size - 1}" in answer["error"]


def test_link_in_the_folder_is_not_followed(receiver: Receiver, folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "outside")
    assert ask(receiver, "PUT", f"/adapters/link/{CONFIG}", CONFIG_CONTENT)[0] == 409
    assert ask(receiver, "DELETE", "/adapters/link")[0] == 409
    assert everything(folder) == []
    for number in range(5):
        assert put(receiver, f"v{number}")[0] == 200, "a link does not count as an adapter"


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (["--folder", "FOLDER"], None, "ADAPTER_RECEIVER_API_KEY"),
        (["--folder", "/nonexistent"], "s", "/nonexistent"),
        (["--folder", "FOLDER", "--max-adapters", "0"], "s", "at least 1"),
        ([], "s", "--folder"),
        (
            ["--folder", "FOLDER", "--port", "TAKEN"],
            "s",
            "--host 127.0.0.1 --port TAKEN",
        ),
        (["--folder", "FOLDER", "--port", "70000"], "s", "--port 70000"),
        (["--folder", "FOLDER", "--host", "no.such.invalid"], "s", "--host no.such.invalid --port 8001"),
        (["--folder", "FOLDER", "--host", "192.0.2.1"], "s", "--host 192.0.2.1 --port 8001"),
    ],
    ids=str,
)
def test_start_requires_a_secret_a_folder_and_a_port(
    receiver: Receiver, folder: Path, arguments: list[str], key: str | None, says: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ADAPTER_RECEIVER_API_KEY"}
    environment |= {"ADAPTER_RECEIVER_API_KEY": key} if key else {}
    command = [sys.executable, "-m", "unstable_lite.engines.vllm_server.sidecar"]
    taken = str(receiver.port)
    command += [argument.replace("FOLDER", str(folder)).replace("TAKEN", taken) for argument in arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and says.replace("TAKEN", taken) in done.stderr.splitlines()[-1]


def test_sidecar_imports_no_library_that_a_server_image_may_lack() -> None:
    code = (
        "import sys; import unstable_lite.engines.vllm_server.sidecar;"
        "print(*{'torch', 'transformers', 'vllm', 'numpy', 'zmq', 'textarena'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []

"""The side-car that takes adapters: whoever has the secret may write whole adapters into its folder, and no more."""

from __future__ import annotations

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
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from unstable_lite.engines import adapter_receiver
from unstable_lite.engines.adapter_receiver import AdapterReceiver
from unstable_lite.outside_files import CONFIG, WEIGHTS, adapter_digest

SECRET = "not for everybody"
CONFIG_CONTENT = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}).encode()
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
WEIGHTS_CONTENT = safetensors.numpy.save(
    {Q_PROJ.format("A"): np.ones((4, 6), np.float32), Q_PROJ.format("B"): np.ones((8, 4), np.float32)}
)


@contextmanager
def receiving(folder: Path, **limits: int) -> Iterator[AdapterReceiver]:
    receiver = AdapterReceiver(("127.0.0.1", 0), folder, SECRET, **limits)
    thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.shutdown()
        receiver.server_close()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "adapters").mkdir()
    (tmp_path / "outside").mkdir()
    return folder


@pytest.fixture
def receiver(folder: Path) -> Iterator[AdapterReceiver]:
    with receiving(folder, max_bytes=10_000, max_adapters=3) as receiver:
        yield receiver


def ask(
    receiver: AdapterReceiver, method: str, path: str, content: bytes | None = None, secret: str = SECRET
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", receiver.server_address[1], timeout=10)
    connection.putrequest(method, path, skip_accept_encoding=True)
    connection.putheader("authorization", f"Bearer {secret}")
    if content is not None:
        connection.putheader("content-length", str(len(content)))
    connection.endheaders(content)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def put(receiver: AdapterReceiver, name: str, weights: bytes = WEIGHTS_CONTENT) -> tuple[int, Any]:
    assert ask(receiver, "PUT", f"/adapters/{name}/{CONFIG}", CONFIG_CONTENT)[0] == 200
    return ask(receiver, "PUT", f"/adapters/{name}/{WEIGHTS}", weights)


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*") if path.is_file())


def test_an_adapter_arrives_is_listed_and_goes(receiver: AdapterReceiver, folder: Path) -> None:
    status, answer = put(receiver, "run-1.v2")
    assert status == 200
    assert answer == {"path": str(folder / "run-1.v2"), "digest": adapter_digest(folder / "run-1.v2")}
    assert (folder / "run-1.v2" / WEIGHTS).read_bytes() == WEIGHTS_CONTENT
    assert (folder / "run-1.v2" / CONFIG).read_bytes() == CONFIG_CONTENT
    assert put(receiver, "run-1.v2")[0] == 200, "an upload whose answer was lost is done again"
    assert ask(receiver, "GET", "/adapters") == (200, {"adapters": ["run-1.v2"]})
    for _ in range(2):
        assert ask(receiver, "DELETE", "/adapters/run-1.v2") == (200, {})
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("secret", ["", "wrong", SECRET + "x", "naïve"])
def test_without_the_secret_nothing_is_done_or_told(receiver: AdapterReceiver, folder: Path, secret: str) -> None:
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
def test_no_path_leads_out_of_the_folder(receiver: AdapterReceiver, folder: Path, path: str) -> None:
    assert ask(receiver, "PUT", path, CONFIG_CONTENT)[0] == 404
    directory = path.removesuffix(f"/{CONFIG}")
    if directory not in ("/adapters/a", "/adapters"):
        assert ask(receiver, "DELETE", directory)[0] == 404
    assert everything(folder) == [] and list(folder.iterdir()) == []
    assert (folder.parent / "outside").is_dir()


def test_what_is_no_adapter_does_not_stay(receiver: AdapterReceiver, folder: Path) -> None:
    status, answer = put(receiver, "odd", WEIGHTS_CONTENT[:-1])
    assert status == 422 and "no whole safetensors file" in answer["error"]
    status, answer = ask(receiver, "PUT", f"/adapters/late/{WEIGHTS}", WEIGHTS_CONTENT)
    assert status == 409 and "comes first" in answer["error"]
    assert everything(folder) == [] and list(folder.iterdir()) == []


def test_sizes_are_bounded(receiver: AdapterReceiver, folder: Path) -> None:
    assert ask(receiver, "PUT", f"/adapters/a/{CONFIG}", CONFIG_CONTENT)[0] == 200
    status, answer = ask(receiver, "PUT", f"/adapters/a/{WEIGHTS}", b"x" * 10_001)
    assert status == 413 and "the limit is 10000" in answer["error"]
    assert ask(receiver, "PUT", f"/adapters/a/{CONFIG}", None)[0] == 411
    assert everything(folder) == [f"adapters/a/{CONFIG}"]


def test_the_oldest_makes_room(receiver: AdapterReceiver, folder: Path) -> None:
    for number in range(3):
        put(receiver, f"v{number}")
        os.utime(folder / f"v{number}", ns=(number, number))
    put(receiver, "v2")  # is there already
    assert ask(receiver, "GET", "/adapters")[1]["adapters"] == ["v0", "v1", "v2"]
    put(receiver, "v3")
    assert sorted(path.name for path in folder.iterdir()) == ["v1", "v2", "v3"]


def test_a_client_that_goes_away_leaves_nothing(receiver: AdapterReceiver, folder: Path) -> None:
    with socket.create_connection(("127.0.0.1", receiver.server_address[1])) as half:
        head = f"PUT /adapters/a/{CONFIG} HTTP/1.1\r\nauthorization: Bearer {SECRET}\r\ncontent-length: 500\r\n\r\nhalf"
        half.sendall(head.encode())
        half.shutdown(socket.SHUT_WR)
        assert half.recv(4096).startswith(b"HTTP/1.1 400")
    assert list(folder.iterdir()) == []
    assert put(receiver, "a")[0] == 200


def test_connections_are_bounded_and_a_slow_header_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adapter_receiver, "PATIENCE_S", 1.0)
    threads = threading.active_count()
    with receiving(folder, max_connections=4) as receiver, ExitStack() as opened:
        address = ("127.0.0.1", receiver.server_address[1])
        held = [opened.enter_context(socket.create_connection(address, timeout=30)) for _ in range(4)]
        while threading.active_count() < threads + 5:
            pass
        with socket.create_connection(address, timeout=30) as refused:
            assert refused.recv(1) == b"", "one too many"
        assert threading.active_count() == threads + 5
        is_open = [True] * 4
        while any(is_open):  # a byte now and then, which no bound of a single read ends
            for index, connection in enumerate(held):
                try:
                    connection.sendall(b"G")
                    connection.settimeout(0.05)
                    is_open[index] = connection.recv(1) != b""
                except TimeoutError:
                    pass
                except ConnectionError:
                    is_open[index] = False
        assert put(receiver, "a")[0] == 200, "there is room again"
    assert "Traceback" not in capfd.readouterr().err


def test_client_that_hangs_up_costs_one_line(
    receiver: AdapterReceiver, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for request in (b"", b"GET /adapters HTTP/1.1\r\n\r\n" * 50, b"\x00" * 70_000, b"GET / HT"):
        connection = socket.create_connection(("127.0.0.1", receiver.server_address[1]))
        connection.sendall(request)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset
        connection.close()
    assert put(receiver, "a")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_log_holds_no_control_characters(folder: Path) -> None:
    command = [sys.executable, "-m", "unstable_lite.engines.adapter_receiver", "--folder", str(folder), "--port", "0"]
    environment = os.environ | {"ADAPTER_RECEIVER_API_KEY": SECRET}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        started = re.search(r":(\d+) go to", process.stderr.readline())
        assert started is not None
        with socket.create_connection(("127.0.0.1", int(started[1]))) as connection:
            connection.sendall(b"GET /\x1b]0;OWNED\x07\xc2\x9b2J HTTP/1.1\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        process.terminate()
        logged = process.stderr.read()
    assert r"/\x1b]0;OWNED\x07" in logged
    assert not set(logged) & set("\x1b\x07\x9b")


def test_all_adapters_together_are_bounded(folder: Path) -> None:
    size = len(CONFIG_CONTENT) + len(WEIGHTS_CONTENT)
    with receiving(folder, max_total_bytes=2 * size) as receiver:
        for number in range(3):
            assert put(receiver, f"v{number}")[0] == 200
            os.utime(folder / f"v{number}", ns=(number, number))
        assert sorted(path.name for path in folder.iterdir()) == ["v1", "v2"]
        assert put(receiver, "v2")[0] == 200, "once more"
    with receiving(folder, max_total_bytes=size - 1) as receiver:
        status, answer = put(receiver, "large")
        assert status == 413 and f"the limit is {size - 1}" in answer["error"]


def test_link_in_the_folder_is_not_followed(receiver: AdapterReceiver, folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "outside")
    assert ask(receiver, "PUT", f"/adapters/link/{CONFIG}", CONFIG_CONTENT)[0] == 409
    assert ask(receiver, "DELETE", "/adapters/link")[0] == 409
    assert everything(folder) == []
    for number in range(5):
        assert put(receiver, f"v{number}")[0] == 200, "it does not count as an adapter"


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (["--folder", "FOLDER"], None, "set the environment variable ADAPTER_RECEIVER_API_KEY"),
        (["--folder", "/nonexistent"], "s", "not a directory that can be written to"),
        (["--folder", "FOLDER", "--max-adapters", "0"], "s", "at least 1"),
        ([], "s", "--folder"),
        (
            ["--folder", "FOLDER", "--port", "TAKEN"],
            "s",
            "--host 127.0.0.1 --port TAKEN cannot be listened at: Address",
        ),
        (["--folder", "FOLDER", "--port", "70000"], "s", "--port 70000 cannot be listened at: "),
        (["--folder", "FOLDER", "--host", "no.such.invalid"], "s", "--host no.such.invalid --port 8001 cannot be"),
        (["--folder", "FOLDER", "--host", "192.0.2.1"], "s", "--host 192.0.2.1 --port 8001 cannot be listened at: "),
    ],
    ids=str,
)
def test_it_does_not_start_without_a_secret_a_folder_and_a_port(
    receiver: AdapterReceiver, folder: Path, arguments: list[str], key: str | None, says: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ADAPTER_RECEIVER_API_KEY"}
    environment |= {"ADAPTER_RECEIVER_API_KEY": key} if key else {}
    command = [sys.executable, "-m", "unstable_lite.engines.adapter_receiver"]
    taken = str(receiver.server_address[1])
    command += [argument.replace("FOLDER", str(folder)).replace("TAKEN", taken) for argument in arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and says.replace("TAKEN", taken) in done.stderr.splitlines()[-1]


def test_it_needs_no_library_that_a_servers_image_may_lack() -> None:
    code = (
        "import sys; import unstable_lite.engines.adapter_receiver;"
        "print(*{'torch', 'transformers', 'vllm', 'aiohttp', 'numpy', 'zmq', 'textarena'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []

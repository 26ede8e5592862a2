"""A server on loopback that plays the part of the Hugging Face hub which an upload uses."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fakes.http_servers import QuietHandler, http_server

TOKEN = "hf_token_of_the_test"


class Hub:
    def __init__(self) -> None:
        self.url = ""
        self.refuses_with: int | None = None
        """Status with which new repositories are refused."""
        self.created: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        """Large files by their SHA-256."""
        self.files: dict[str, bytes] = {}
        """Committed files by their path."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if method == "PUT":
            self.blobs[path.rpartition("/")[2]] = body
            return 200, {}
        if path.endswith("/commit/main"):
            self._commit(body)
            return 200, {
                "commitUrl": f"{self.url}/me/nim/commit/1",
                "commitOid": "1" * 40,
                "hookOutput": "",
                "success": True,
            }
        asked = json.loads(body or b"{}")
        if path == "/api/repos/create":
            if self.refuses_with is not None:
                return self.refuses_with, {"error": "You don't have the rights to create a model under this namespace"}
            self.created.append(asked)
            name = "/".join(filter(None, (asked["organization"] or "me", asked["name"])))
            return 200, {"url": f"{self.url}/{name}", "name": name, "id": "1"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in asked["files"]
            ]
            return 200, {"files": modes}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.url}/blobs/{one['oid']}"}}} for one in asked["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        return 404, {"error": f"{method} {path} is unknown to the fake hub"}

    def _commit(self, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] != "header":
                assert line["key"] == "lfsFile", line
                self.files[value["path"]] = self.blobs[value["oid"]]


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(QuietHandler):
        def _handle(self) -> None:
            body = self._body()
            is_known = self.command == "PUT" or self.headers["authorization"] == f"Bearer {TOKEN}"
            status, answer = hub.answer(self.command, self.path, body) if is_known else (401, {"error": "who?"})
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _handle

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("transfer-encoding", ""):
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

    with http_server(Handler) as hub.url:
        yield hub

"""A hub on this machine, and the real client's dealings with it in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client needs to take a snapshot."""

    files: dict[str, bytes]
    cut: set[str]
    requested: list[str]
    COMMIT = "0123456789012345678901234567890123456789"

    def _json(self, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.end_headers()
        self.wfile.write(data)

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/org/name/tree/"):
            self._json(
                [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in self.files.items()
                ]
            )
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": n} for n in self.files]
            self._json({"id": "org/name", "sha": self.COMMIT, "siblings": siblings})
        else:
            self._file(body=True)

    def _file(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        name = path.partition("/resolve/")[2].partition("/")[2]
        if not path.startswith("/org/name/resolve/") or name not in self.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = self.files[name]
        self.requested.append(name)
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if body:
            if name in self.cut:
                self.wfile.write(data[start : len(data) // 2])
                self.close_connection = True
                return
            self.wfile.write(data[start:])

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Any]:
    """The model org/name with these files; yields the handler class, whose `cut` and `requested` tests use."""
    handler: Any = type("Handler", (FakeHub,), {"files": files, "cut": set(), "requested": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def resolve_elsewhere(handler: Any, tmp_path: Path, name: str, **environment: str) -> dict[str, Any]:
    """`hub.resolve(name)` in a process of its own, since the hub's client reads its settings when imported."""
    script = (
        "import json, sys\nfrom localspec import hub\nfrom localspec.errors import LocalspecError\nseen = []\n"
        "try:\n    out = {'path': str(hub.resolve(sys.argv[1], lambda d, t: seen.append((d, t))))}\n"
        "except LocalspecError as error:\n    out = {'error': type(error).__name__, 'text': str(error)}\n"
        "print(json.dumps(out | {'seen': seen}))\n"
    )
    keep = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    settings = {
        "HF_ENDPOINT": handler.address,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "LOCALSPEC_HOME": str(tmp_path / "home"),
    }
    run = subprocess.run(
        [sys.executable, "-c", script, name],
        env=keep | settings | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    out: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return out

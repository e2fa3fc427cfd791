"""The hub source against a small hub of our own: whole, lying, breaking off, silent, offline."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PULL = """
import sys
from lumenbox.cli.models import models
from lumenbox.errors import LumenboxError
try:
    models(["pull", "me/tiny"])
except LumenboxError as error:
    sys.exit(str(error))
"""
COMMIT = "1" * 40


class Hub(ThreadingHTTPServer):
    """One repository, me/tiny, from a folder. `fault` names what goes wrong."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"pytorch_model.bin": b"no"}
        self.fault = ""
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def listing(self) -> dict[str, object]:
        siblings = []
        for name, data in self.files.items():
            entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": "b"}
            if name.endswith(".safetensors"):
                sha = hashlib.sha256(data + self.fault.encode()).hexdigest()
                entry["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 100}
            siblings.append(entry)
        return {"id": "me/tiny", "modelId": "me/tiny", "sha": COMMIT, "siblings": siblings}


class Handler(BaseHTTPRequestHandler):
    """HEAD and GET as the hub answers them."""

    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        name = self.path.rsplit("/", 1)[-1]
        self.server.asked.append(name)
        if self.path.startswith("/api/models/me/tiny"):
            data = json.dumps(self.server.listing()).encode()
        elif name in self.server.files:
            data = self.server.files[name]
        else:
            data = b"{}"
        self.send_response(404 if self.path.startswith("/api") and self.server.fault == "unknown" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        if self.server.fault == "unknown":
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if body:
            broken = self.server.fault == "breaks off" and name == "model.safetensors"
            self.wfile.write(data[: len(data) // 2] if broken else data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tiny_dir: Path) -> Iterator[Hub]:
    with Hub(tiny_dir) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def pull(cache: Path, endpoint: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`lumenbox models pull me/tiny` in a process of its own, since the hub's address is read at import."""
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache.parent / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", PULL]
    return subprocess.run(command, env=env | environment, capture_output=True, text=True, timeout=60, check=False)


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def test_repository_is_pulled(cache: Path, hub: Hub) -> None:
    done = pull(cache, hub.url)
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.strip())
    assert place == cache / "me--tiny"
    for name, data in hub.files.items():
        if name == "pytorch_model.bin":
            assert not (place / name).exists()
        else:
            assert (place / name).read_bytes() == data
    assert leftovers(cache) == ["me--tiny"]
    asked = len(hub.asked)
    assert pull(cache, hub.url).returncode == 0
    assert len(hub.asked) == asked, "what is in the cache needs no network"


@pytest.mark.parametrize(("fault", "said"), [("lies", "another sha256"), ("unknown", "refused")])
def test_hub_that_lies_or_refuses(cache: Path, hub: Hub, fault: str, said: str) -> None:
    hub.fault = fault
    done = pull(cache, hub.url)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert leftovers(cache) == []


def test_hub_that_breaks_off(cache: Path, hub: Hub) -> None:
    hub.fault = "breaks off"
    done = pull(cache, hub.url)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "me/tiny could not be pulled" in done.stderr.splitlines()[-1]
    assert leftovers(cache) == []


def test_silent_hub_costs_five_seconds(cache: Path) -> None:
    """A port that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        done = pull(cache, f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert time.monotonic() - start < 10
    assert done.returncode == 1
    assert "no answer from" in done.stderr.splitlines()[-1]
    assert leftovers(cache) == []


def test_offline(cache: Path) -> None:
    done = pull(cache, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("HF_HUB_OFFLINE is set")
    assert "no answer from" in pull(cache, "http://127.0.0.1:9").stderr

"""Real boxes and a small client for them: started as a user starts one, ended by pid, read byte by byte."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lumenbox.coordinator.control import ask, call
from lumenbox.errors import NotRunning

DEADLINE_S = 120.0
"""For what happens in a second on a quiet machine: no test is about seconds unless it says so."""
Body = dict[str, Any]


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Look at a condition until it holds; returns what it gave. The only place in these tests that sleeps."""
    deadline = time.monotonic() + timeout_s
    while not (last := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:.0f} s (last seen: {last!r})")
        time.sleep(0.005)
    return last


# -- processes -------------------------------------------------------------------------------------------------------


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat behind the command name: state, parent, …; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_alive(pid: int) -> bool:
    """Whether a process can still do anything; a zombie cannot, and not every PID 1 reaps."""
    return stat_fields(pid)[:1] not in ([], ["Z"], ["X"])


def descendants(root: int) -> set[int]:
    """All processes under `root`."""
    parents = {int(name): stat_fields(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found, todo = set(), [root]
    while todo:
        parent = str(todo.pop())
        children = [pid for pid, fields in parents.items() if fields[1:2] == [parent]]
        found.update(children)
        todo += children
    return found


def gone(pids: set[int]) -> bool:
    return not any(is_alive(pid) for pid in pids)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# -- HTTP ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reply:
    """A whole HTTP answer. `clean` if its body ended as its framing said it would."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    clean: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One request on one socket."""

    def __init__(self, port: int, method: str, path: str, body: Body | bytes | None = None) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: box\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        self.sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        self._file = self.sock.makefile("rb")

    def head(self) -> Reply:
        """Status and headers."""
        status = int(self._line().split()[1])
        headers = {}
        while line := self._line().strip():
            name, _, value = line.partition(b":")
            headers[name.decode().lower()] = value.decode().strip()
        return Reply(status, headers)

    def _line(self) -> bytes:
        line = self._file.readline()
        if not line:
            raise ConnectionResetError("the box closed the connection")
        return line

    def parts(self, reply: Reply) -> Iterator[bytes]:
        """The body as it comes; sets `reply.clean`."""
        if "chunked" in reply.headers.get("transfer-encoding", ""):
            while size := int(self._file.readline() or b"-1", 16):
                if size < 0:
                    return
                yield self._file.read(size)
                self._file.readline()
            reply.clean = self._file.readline() == b"\r\n"
        else:
            length = int(reply.headers.get("content-length", 0))
            body = self._file.read(length)
            reply.clean = len(body) == length
            yield body

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def reset(self) -> None:
        """Leave without a word."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close()


@dataclass(slots=True)
class Answer:
    """What a client got. The lists and dicts are by choice."""

    status: int = 0
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    finish: dict[int, list[str]] = field(default_factory=dict)
    usage: Any = None
    pieces: list[list[int]] = field(default_factory=list)
    """Token ids by event, and the text that came with them."""
    texts: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    error: Any = None
    recoveries: int = 0
    done: bool = False
    clean: bool = False

    @property
    def outcome(self) -> tuple[Any, ...]:
        """All that a failure must not change."""
        usage = {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return self.token_ids, self.text, self.logprobs, self.finish, usage, self.roles, self.done, self.clean

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.error is None and self.done and self.clean


def request(port: int, method: str, path: str, body: Body | bytes | None = None) -> Reply:
    """One plain call."""
    connection = Connection(port, method, path, body)
    try:
        reply = connection.head()
        reply.body = b"".join(connection.parts(reply))
        return reply
    finally:
        connection.close()


def completion(port: int, body: Body, on_event: Callable[[Answer], None] = lambda _: None) -> Answer:
    """Stream a chat completion to its end; `on_event` sees the answer after each event that brought tokens."""
    options = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    connection = Connection(port, "POST", "/v1/chat/completions", {**body, **options})
    try:
        reply = connection.head()
        answer = Answer(reply.status)
        if reply.status != 200:
            answer.error = json.loads(b"".join(connection.parts(reply)))["error"]
            return answer
        for data in events_of(connection.parts(reply)):
            if enter(answer, data):
                on_event(answer)
        answer.clean = reply.clean
        return answer
    finally:
        connection.close()


def events_of(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The `data:` payloads of an event stream."""
    rest = b""
    for part in parts:
        *blocks, rest = (rest + part).split(b"\n\n")
        for block in blocks:
            yield from (line[6:] for line in block.splitlines() if line.startswith(b"data: "))
    assert not rest, f"a torn event: {rest!r}"


def enter(answer: Answer, data: bytes) -> bool:
    """Add one event; whether it brought tokens."""
    assert not answer.done and answer.error is None, "something follows the end"
    if data == b"[DONE]":
        answer.done = True
        return False
    event = json.loads(data)
    if "error" in event:
        answer.error = event["error"]
        return False
    answer.ids.add(event["id"])
    answer.usage = event.get("usage") or answer.usage
    answer.recoveries = event.get("lumenbox", {}).get("recoveries", answer.recoveries)
    fresh = False
    for choice in event["choices"]:
        index, tokens = choice["index"], choice.get("token_ids") or []
        answer.roles += "role" in choice["delta"]
        answer.token_ids.setdefault(index, []).extend(tokens)
        answer.text[index] = answer.text.get(index, "") + (choice["delta"].get("content") or "")
        answer.logprobs.setdefault(index, []).extend((choice.get("logprobs") or {}).get("content") or [])
        if choice["finish_reason"]:
            answer.finish.setdefault(index, []).append(choice["finish_reason"])
        if tokens:
            answer.pieces.append(tokens)
            answer.texts.append(choice["delta"].get("content") or "")
            fresh = True
    return fresh


class Clients:
    """Streams that run side by side, each in a thread of its own."""

    def __init__(self, box: Box, bodies: list[Body]) -> None:
        self.answers: list[Answer | None] = [None] * len(bodies)
        self.tokens = [0] * len(bodies)
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(box, number, body), daemon=True)
            for number, body in enumerate(bodies)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, box: Box, number: int, body: Body) -> None:
        def count(answer: Answer) -> None:
            self.tokens[number] = len(answer.pieces)

        try:
            self.answers[number] = completion(box.port, body, count)
        except BaseException as error:  # noqa: BLE001 (told by `join`)
            self._errors.append(error)

    def flowing(self, tokens: int = 3) -> Clients:
        """Wait until every stream has brought some tokens."""
        wait_until(lambda: self._errors or min(self.tokens) >= tokens, "streams that flow")
        return self

    def join(self) -> list[Answer]:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a client hangs"
        assert not self._errors, self._errors
        return [answer for answer in self.answers if answer is not None]


# -- boxes -----------------------------------------------------------------------------------------------------------


class Box:
    """A box under test. `start` returns at once; `ready` waits for its line."""

    def __init__(self, *flags: str, workers: int = 2, model: str = "tiny-random", **how: Any) -> None:
        self.run_dir = Path(how.pop("run_dir", None) or tempfile.mkdtemp(prefix="lumenbox-live-"))
        self.port = int(how.pop("port", None) or free_port())
        self.workers = workers
        self.out = self.run_dir / "test.out"
        self.err = self.run_dir / "test.err"
        command = [sys.executable, "-m", "lumenbox", "up", model, "--workers", str(workers), "--port", str(self.port)]
        self.process = start([*command, "--run-dir", str(self.run_dir), "--no-tui", *flags], self.out, self.err, **how)
        self.pid = self.process.pid

    def ready(self) -> Box:
        wait_until(self._is_up, "the ready line")
        return self

    def _is_up(self) -> bool:
        assert self.process.poll() is None, f"up ended with {self.process.returncode}: {self.err.read_text()[-2000:]}"
        return self.out.read_bytes().startswith(b"lumenbox ready")

    # what it says of itself

    def state(self) -> dict[str, Any]:
        return ask(self.run_dir, "status", DEADLINE_S)

    def worker(self, worker: int) -> dict[str, Any]:
        row: dict[str, Any] = self.state()["workers"][worker]
        return row

    def pids(self) -> list[int]:
        return [row["pid"] for row in self.state()["workers"]]

    def incarnations(self) -> list[int]:
        return [row["incarnation"] for row in self.state()["workers"]]

    def busy(self) -> dict[str, Any]:
        """A worker that has requests."""
        row: dict[str, Any] = wait_until(
            lambda: next((w for w in self.state()["workers"] if w["running"] and w["pid"]), None), "a busy worker"
        )
        return row

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        return list(call(self.run_dir, "events", DEADLINE_S, since=since))

    def seq(self) -> int:
        """Number of the last event."""
        return max((event["seq"] for event in self.events()), default=0)

    def report(self, which: str | int = "last") -> dict[str, Any]:
        return ask(self.run_dir, "report", DEADLINE_S, which=str(which))

    def steer(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Call a verb of the control socket."""
        return ask(self.run_dir, verb, DEADLINE_S, **arguments)

    def fork_server(self) -> int:
        (pid,) = [p for p in descendants(self.pid) if stat_fields(p)[1:2] == [str(self.pid)] and is_alive(p)]
        return pid

    def log(self) -> str:
        return self.err.read_text()

    # what it serves

    def stream(self, body: Body, on_event: Callable[[Answer], None] = lambda _: None) -> Answer:
        return completion(self.port, body, on_event)

    def request(self, method: str, path: str, body: Body | bytes | None = None) -> Reply:
        return request(self.port, method, path, body)

    # waiting for it

    def whole(self) -> Box:
        """Every worker serves."""
        wait_until(lambda: self.state()["state"] == "ready", "a box that is whole again")
        return self

    def idle(self) -> Box:
        """No request is left, and no page of one."""
        wait_until(lambda: not any(self.load().values()), "an idle box")
        return self

    def load(self) -> dict[str, int]:
        state = self.state()
        pages = sum(row["pages_used"] for row in state["workers"])
        return {"running": state["requests"]["running"], "waiting": state["requests"]["waiting"], "pages": pages}

    def replaced(self, worker: int, incarnation: int) -> None:
        """A later incarnation of a worker serves."""

        def holds() -> bool:
            row = self.worker(worker)
            return bool(row["incarnation"] > incarnation and row["state"] == "ready")

        wait_until(holds, f"another incarnation of worker {worker}")

    # its end

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def ended(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """End it by pid, whatever state it is in, and everything that it started."""
        pids = descendants(self.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        left = {pid for pid in pids if is_alive(pid)}
        try:
            wait_until(lambda: gone(left), "an end without a process left", 10.0)
        finally:
            for pid in left:
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.run_dir, ignore_errors=True)


def start(
    command: list[str], out: Path, err: Path, env: Mapping[str, str] | None = None, **how: Any
) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to files."""
    with open(out, "wb") as out_file, open(err, "wb") as err_file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            env=clean_environment(env or {}),
            start_new_session=True,
            **how,
        )


def clean_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what would steer a box."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("LUMENBOX_")}, **more}


@contextmanager
def running(*flags: str, **how: Any) -> Iterator[Box]:
    """A ready box, stopped at the end."""
    box = Box(*flags, **how)
    try:
        yield box.ready()
    except BaseException:
        print(box.log())  # shown by pytest beside the failure
        raise
    finally:
        box.stop()


def cli(*arguments: str, env: Mapping[str, str] | None = None, **how: Any) -> subprocess.CompletedProcess[str]:
    """`lumenbox …` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "lumenbox", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=clean_environment(env or {}),
        stdin=how.pop("stdin", subprocess.DEVNULL) if "input" not in how else None,
        check=False,
        **how,
    )


def runs_in(run_dir: Path) -> bool:
    """Whether a box answers there."""
    try:
        ask(run_dir, "status", 5.0)
    except NotRunning:
        return False
    return True

"""Sockets, deadlines and bounds. Deadlines are shrunk; nothing here waits for a real one."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from api_fakes import FakeService, FakeTokenizer, RawClient, Serve, Served, chat, sampled, until, words

from lumenbox.api.app import make_app
from lumenbox.api.limits import Limits
from lumenbox.api.server import bind, start, url
from lumenbox.coordinator.streams import Delta
from lumenbox.errors import StartupError

SHORT = 0.2


def test_a_taken_port_is_named() -> None:
    (first, *others) = bind(port=0)
    port = first.getsockname()[1]
    with pytest.raises(StartupError, match=str(port)):
        bind(port=port)
    for sock in (first, *others):
        sock.close()
    with pytest.raises(StartupError, match="70000"):
        bind(port=70000)
    with pytest.raises(StartupError, match=r"no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_urls() -> None:
    sockets = bind(port=0)
    port = sockets[0].getsockname()[1]
    assert url(sockets[0]) == f"http://127.0.0.1:{port}"
    for sock in sockets:
        sock.close()
    if not has_ipv6():
        pytest.skip("no IPv6 loopback here")
    (sock,) = bind("::1", 0)
    assert url(sock).startswith("http://[::1]:")
    sock.close()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_both_families_answer(box: Served) -> None:
    if not has_ipv6():
        pytest.skip("no IPv6 loopback here")
    client = await RawClient.open(box.port, "::1")
    client.writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await client.head())[0] == 200
    client.close()


async def test_a_dribbling_header_is_cut_off(serve: Serve) -> None:
    box = await serve(Limits(header_timeout_s=SHORT))
    client = await box.raw()
    ending = asyncio.ensure_future(client.gone())
    client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
    while not ending.done():
        client.writer.write(b"X")
        await asyncio.sleep(0.02)
    assert ending.result() == b""
    client.close()


async def test_a_dribbling_second_header_is_cut_off(serve: Serve) -> None:
    box = await serve(Limits(header_timeout_s=SHORT))
    client = await box.raw()
    client.writer.write(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
    _, headers = await client.head()
    await client.reader.readexactly(int(headers["content-length"]))
    await asyncio.sleep(2 * SHORT)  # an idle connection is not a late header
    client.writer.write(b"GET /live HTTP/1.1\r\nHo")
    assert await asyncio.wait_for(client.gone(), 2) == b""
    client.close()


async def test_a_dribbling_body_is_408(serve: Serve) -> None:
    box = await serve(Limits(body_timeout_s=SHORT))
    client = await box.raw()
    client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{")
    head = asyncio.ensure_future(client.head())
    while not head.done():
        client.writer.write(b" ")
        await asyncio.sleep(0.02)
    status, headers = head.result()
    body = json.loads(await client.reader.readexactly(int(headers["content-length"])))
    assert (status, body["error"]["code"], headers["connection"]) == (408, "request_timeout", "close")
    client.close()


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_bound_is_413(serve: Serve, announced: bool) -> None:
    box = await serve(Limits(max_body_bytes=1000))
    client = await box.raw()
    how = (
        b"Content-Length: 80000000\r\n\r\n" if announced else b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n" + b" " * 2000
    )
    client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + how)
    status, headers = await client.head()  # before the rest of the body
    body = json.loads(await client.reader.readexactly(int(headers["content-length"])))
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    client.close()


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00junk\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n"]
)
async def test_what_is_no_http_gets_json(box: Served, junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    client = await box.raw()
    client.writer.write(junk)
    status, headers = await client.head()
    body = json.loads(await client.reader.readexactly(int(headers["content-length"])))
    assert status == 400 and body["error"]["code"] == "invalid_http" and headers["x-request-id"]
    assert await client.gone() == b"" and not caplog.records
    client.close()


async def test_a_body_that_is_not_what_its_header_says_is_400(box: Served) -> None:
    client = await box.raw()
    await client.post("/v1/completions", b"not gzip at all", Content_Encoding="gzip")
    status, headers = await client.head()
    body = json.loads(await client.reader.readexactly(int(headers["content-length"])))
    assert (status, body["error"]["code"]) == (400, "invalid_body")
    client.close()


async def test_a_client_that_leaves_within_its_body(box: Served, caplog: pytest.LogCaptureFixture) -> None:
    client = await box.raw()
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n{")
    await until(lambda: box.server.connections == 1)
    client.reset()
    await until(lambda: box.server.connections == 0)
    assert not caplog.records and not box.service.specs


async def test_connections_over_the_cap_are_closed_at_once(serve: Serve) -> None:
    box = await serve(Limits(max_connections=3))
    clients = [await box.raw() for _ in range(3)]
    one_more = await box.raw()
    assert await asyncio.wait_for(one_more.gone(), 2) == b""
    clients[0].reset()
    await until(lambda: box.server.connections < 3)
    again = await box.raw()
    again.writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await again.head())[0] == 200
    for client in (*clients, one_more, again):
        client.close()


async def open_deaf(box: Served) -> RawClient:
    """A streaming client that reads nothing, with small buffers on both ends."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", box.port))
    client = RawClient(*await asyncio.open_connection(sock=sock, limit=1))
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.post("/v1/chat/completions", chat(stream=True))
    return client


async def test_a_client_that_does_not_read_is_dropped(serve: Serve) -> None:
    box = await serve(Limits(write_buffer_bytes=10_000, drain_timeout_s=SHORT))
    box.service.steps = [[Delta(0, "x" * 100_000, [])] for _ in range(200)]
    client = await open_deaf(box)
    await until(lambda: bool(box.service.streams))
    await asyncio.wait_for(box.service.streams[0].closed.wait(), 3)
    assert len(box.service.streams[0].steps) > 100, "the rest was never asked for"
    box.service.steps = None
    assert (await box.post("/v1/chat/completions", chat()))[0] == 200
    client.reset()


async def test_a_finished_answer_that_nobody_reads_is_dropped(serve: Serve) -> None:
    box = await serve(Limits(write_buffer_bytes=1 << 24, drain_timeout_s=SHORT))
    box.service.steps = [[Delta(0, "x" * 8_000_000, sampled("x"), "stop")]]
    client = await open_deaf(box)
    await until(lambda: bool(box.service.streams))
    await asyncio.wait_for(box.service.streams[0].closed.wait(), 3)
    await until(lambda: box.server.connections == 0)
    client.reset()


async def test_close_lets_streams_end_then_cancels() -> None:
    service = FakeService()
    sockets = bind(port=0)
    port = sockets[0].getsockname()[1]
    server = await start(make_app(service, FakeTokenizer()), sockets)  # type: ignore[arg-type]
    gate = asyncio.Event()
    service.steps = [gate, *words(1)]
    ending, endless = await RawClient.open(port), await RawClient.open(port)
    await ending.post("/v1/chat/completions", chat(stream=True))
    await ending.head()
    service.steps = [asyncio.Event()]
    await endless.post("/v1/chat/completions", chat(stream=True))
    await endless.head()
    closing = asyncio.ensure_future(server.close(timeout_s=SHORT))
    await asyncio.sleep(0.05)
    with pytest.raises(ConnectionRefusedError):
        await RawClient.open(port)
    gate.set()
    assert (await ending.chunks())[-1] == b"data: [DONE]\n\n"
    await asyncio.wait_for(closing, 5)
    assert service.streams[1].closed.is_set() and server.connections == 0
    ending.close()
    endless.close()

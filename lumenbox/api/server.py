"""Listening sockets and the server on them.

`bind` comes first and separately: a port that is taken must stop `up` before it starts any worker.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from lumenbox.api.connection import Connection
from lumenbox.api.limits import DEFAULT_LIMITS, Limits
from lumenbox.errors import StartupError

BACKLOG = 256
RESERVED_DESCRIPTORS = 64
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def bind(host: str = "127.0.0.1", port: int = 8000) -> list[socket.socket]:
    """Listening sockets; port 0 takes any free one. Raises StartupError that names the port.

    127.0.0.1 brings ::1 along where it can, since `localhost` is either.
    """
    sockets = [listen(host, port)]
    if host == "127.0.0.1":
        try:
            sockets.append(listen("::1", sockets[0].getsockname()[1]))
        except StartupError:
            pass
    return sockets


def listen(host: str, port: int) -> socket.socket:
    """One listening socket."""
    if not 0 <= port <= 65535:
        raise StartupError(f"cannot listen on port {port}: ports are 0 to 65535; see --port")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise StartupError(f"cannot listen on {host} port {port}: no such address; see --host and --port") from None
    sock = None
    try:
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        why = "it is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        raise StartupError(f"cannot listen on {host} port {port}: {why}; choose another with --port") from None
    sock.setblocking(False)
    return sock


def url(sock: socket.socket) -> str:
    """http://HOST:PORT of a listening socket, IPv6 in brackets."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def connection_cap() -> int:
    """Connections that the descriptor limit allows beside the workers' sockets, the memfds and the pidfds."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, soft - max(RESERVED_DESCRIPTORS, soft // 8))


class Refusal(asyncio.Protocol):
    """A connection too many: accepted and closed, so that it does not wait in the dark."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class Server:
    """An app on its sockets. `connections` counts those that are open."""

    def __init__(self, app: web.Application, limits: Limits) -> None:
        self._limits = limits
        self._cap = limits.max_connections or connection_cap()
        self._runner = web.AppRunner(app, handler_cancellation=True)
        self._listeners: list[asyncio.Server] = []
        self.connections = 0

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Begin to accept."""
        self._runner.app.middlewares.insert(0, mark_busy)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for sock in sockets:
            self._listeners.append(await loop.create_server(self._connection, sock=sock, backlog=BACKLOG))

    def stop_listening(self) -> None:
        """New connections are refused by the kernel; open ones go on."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stop listening, give running handlers `timeout_s` to end, then cancel them."""
        self.stop_listening()
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()
            await self._runner.server.shutdown(timeout_s)
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        manager = self._runner.server
        if manager is None or self.connections >= self._cap:
            return Refusal()
        self.connections += 1
        return Connection(manager, self._limits, self._lost, asyncio.get_running_loop())

    def _lost(self) -> None:
        self.connections -= 1


@web.middleware
async def mark_busy(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection when a request's header is whole and when its handler has ended."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    connection.begin()
    try:
        return await handler(request)
    finally:
        connection.end()


async def start(app: web.Application, sockets: Sequence[socket.socket], limits: Limits = DEFAULT_LIMITS) -> Server:
    """Serve `app` on listening sockets (see `bind`)."""
    server = Server(app, limits)
    await server.open(sockets)
    return server

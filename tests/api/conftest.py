"""A served fake box per test, on the event loop that the product uses."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import uvloop
from api_fakes import FakeService, FakeTokenizer, RawClient

from lumenbox.api.app import make_app
from lumenbox.api.limits import Limits
from lumenbox.api.server import Server, bind, start


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@dataclass
class Served:
    """The fake box and ways to talk to it."""

    service: FakeService
    server: Server
    port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def request(self, method: str, path: str, **kwargs: Any) -> tuple[int, Any, Any]:
        """Status, headers and JSON of one answer."""
        async with self.session.request(method, self.url + path, **kwargs) as response:
            return response.status, response.headers, await response.json()

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        key = "data" if isinstance(body, bytes) else "json"
        headers = {"Content-Type": "application/json"}
        return await self.request("POST", path, **{key: body, "headers": headers, **kwargs})

    async def raw(self) -> RawClient:
        return await RawClient.open(self.port)


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a fake box; keyword arguments are make_app's, and `limits` are the server's too."""
    boxes: list[Served] = []

    async def begin(limits: Limits = Limits(), **kwargs: Any) -> Served:  # noqa: B008
        service = FakeService()
        sockets = bind(port=0)
        server = await start(make_app(service, FakeTokenizer(), limits=limits, **kwargs), sockets, limits)
        boxes.append(Served(service, server, sockets[0].getsockname()[1], aiohttp.ClientSession()))
        return boxes[-1]

    yield begin
    for box in boxes:
        await box.session.close()
        await box.server.close(timeout_s=0.1)


@pytest.fixture
async def box(serve: Serve) -> Served:
    """A fake box with everything at its default."""
    return await serve()

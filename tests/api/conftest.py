"""A served fake box per test, on the event loop that the product uses."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import uvloop
from api_fakes import FakeService, FakeTokenizer, Serve, Served

from lumenbox.api.app import make_app
from lumenbox.api.limits import Limits
from lumenbox.api.server import bind, start


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


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

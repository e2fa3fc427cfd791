"""What a forked child can be. A role gets its socket, descriptors and spec, and returns an exit code."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from lumenbox.engine import loader as engine_loader
from lumenbox.errors import LumenboxError
from lumenbox.memory import segment
from lumenbox.wire import frames, stream
from lumenbox.worker.loop import boot


def loader(sock: socket.socket, fds: list[int], spec: dict[str, Any]) -> int:
    """Fill a new weight segment and prove exactness; sends the descriptor with a first byte, then the report."""
    weights: list[int] = []

    def allocate(size: int) -> int:
        weights.append(segment.create("lumenbox-weights", size))
        return weights[0]

    try:
        report = engine_loader.load(
            Path(spec["model_dir"]),
            allocate,
            dtype=spec["dtype"],
            exact=spec["exact"],
            page_size=spec["page_size"],
            threads=spec["threads"],
        )
    except LumenboxError as error:
        sock.sendall(b"!" + stream.pack(str(error).encode()))
        return 1
    socket.send_fds(sock, [b"+"], weights)
    sock.sendall(stream.pack(frames.encode(report)))
    return 0


def worker(sock: socket.socket, fds: list[int], spec: dict[str, Any]) -> int:
    """Serve from one device until told to stop or the coordinator is gone."""
    status_fd, weight_fd, pool_fd, arena_fd = fds
    status_page = segment.attach(status_fd)
    os.close(status_fd)
    return boot(sock, status_page, weight_fd, pool_fd, arena_fd)

"""How a box comes up and how an incarnation is born: weights, pools, processes and their descriptors."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from lumenbox.config import BoxConfig
from lumenbox.coordinator.forkserver import Child, ForkServer, ForkServerGone
from lumenbox.coordinator.link import WorkerLink, socket_pair
from lumenbox.coordinator.slots import Slot
from lumenbox.core.ledger import Entry
from lumenbox.errors import ModelError, StartupError
from lumenbox.memory import segment, sizing, status
from lumenbox.memory.layout import LoadReport
from lumenbox.models.facts import ModelFacts
from lumenbox.wire import frames, stream

if TYPE_CHECKING:
    from lumenbox.coordinator.box import Box


async def load_weights(server: ForkServer, config: BoxConfig) -> tuple[LoadReport, int]:
    """Have a child fill the weight segment; returns its report and the segment's descriptor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    log_fd = open_log(config, "loader")
    spec = {
        "model_dir": str(config.model_dir),
        "dtype": config.dtype,
        "exact": config.exact,
        "page_size": config.page_size,
        "threads": config.threads,
    }
    with ours:
        try:
            with theirs:
                child = await server.fork("loader", [theirs.fileno(), log_fd], spec)
            return await asyncio.to_thread(_receive_load, ours)
        except ForkServerGone:
            raise StartupError("the fork server died while starting; see the logs in the run directory") from None
        finally:
            ours.shutdown(socket.SHUT_RDWR)  # a thread that still waits in it for a loader that hangs wakes up
            os.close(log_fd)
            if "child" in locals():
                os.close(child.pidfd)


def _receive_load(sock: socket.socket) -> tuple[LoadReport, int]:
    flag, fds, _, _ = socket.recv_fds(sock, 1, 1)
    with ExitStack() as unwanted:
        for fd in fds:
            unwanted.callback(os.close, fd)
        splitter = stream.Splitter()
        messages: list[bytes] = []
        while not messages and (data := sock.recv(1 << 20)):
            messages = splitter.feed(data)
        if flag == b"!" and messages:
            raise ModelError(messages[0].decode())
        if not messages or not fds:
            raise ModelError("the loader died before it was done; its log is loader.log in the run directory")
        try:
            report = msgspec.msgpack.decode(messages[0], type=LoadReport)
        except msgspec.DecodeError:
            raise StartupError("the code on disk has another loader than this coordinator knows; restart it") from None
        os.set_inheritable(fds[0], False)
        unwanted.pop_all()
    return report, fds[0]


def num_pages(config: BoxConfig, facts: ModelFacts, report: LoadReport) -> int:
    """Pages of one worker's pool: as asked for, but never more than its sequences can fill."""
    if config.kv_pages is not None:
        return config.kv_pages
    context = min(config.max_model_len or facts.context_length, facts.context_length)
    useful = config.max_num_seqs * (-(-context // config.page_size) + 1)
    pages = min(useful, config.kv_bytes // report.page.page_bytes)
    if pages < 2:
        raise StartupError(
            f"--kv-cache-memory {config.kv_bytes} holds less than two pages of {report.page.page_bytes} bytes; raise it"
        )
    return pages


def bound_context(config: BoxConfig, facts: ModelFacts, report: LoadReport) -> int:
    """Longest prompt + answer: the least of the model's context, the flag, and what one pool holds."""
    pool = num_pages(config, facts, report) * config.page_size
    return min(facts.context_length, pool, config.max_model_len or facts.context_length)


async def allocate_pools(config: BoxConfig, report: LoadReport, facts: ModelFacts, slots: list[Slot]) -> None:
    """Allocate every slot's KV pool, after checking that they fit together."""
    size = num_pages(config, facts, report) * report.page.page_bytes
    sizing.require(size * len(slots), f"{len(slots)} KV pools", "lower --kv-cache-memory or --workers")
    fds = await asyncio.gather(
        *(asyncio.to_thread(segment.create, f"lumenbox-kv-{slot.worker}", size) for slot in slots)
    )
    for slot, fd in zip(slots, fds, strict=True):
        slot.pool_fd, slot.pool_bytes = fd, size


async def give_birth(box: Box, slot: Slot, incarnation: int, keep_pool: bool, server: ForkServer) -> None:
    """Fork the incarnation and send it all it needs; Ready follows on its link.

    Raises ForkServerGone, OSError, StartupError: then there is no such process, and nothing is left of it.
    """
    if slot.device_lost or slot.pool_fd < 0:
        await _replace_pool(slot)
    await asyncio.shield(server.warm)
    report = box.report
    assert report is not None
    if keep_pool and slot.pool_identity != report.identity:
        raise StartupError("the weights were changed while it was to be born on its old pool")
    slot.pool_identity = report.identity
    ours, theirs = socket_pair()
    status_fd = segment.create(f"lumenbox-status-{slot.worker}", status.PAGE_BYTES)
    log_fd = open_log(box.config, f"worker-{slot.worker}")
    try:
        fds = [theirs.fileno(), log_fd, status_fd, box.weight_fd, slot.pool_fd, box.arena.fd]
        child = await server.fork("worker", fds, {})
        slot.link = _linked(box, slot, incarnation, ours, status_fd, child)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(log_fd)
        os.close(status_fd)
    slot.link.send(_boot(box, slot, incarnation, keep_pool, report))
    slot.device_lost = False


def _linked(box: Box, slot: Slot, incarnation: int, sock: socket.socket, status_fd: int, child: Child) -> WorkerLink:
    try:
        page = segment.attach(status_fd)
        return WorkerLink(slot.worker, incarnation, sock, page, child, box.on_frame, box.on_exit)
    except OSError:  # it is dead and reaped already
        os.close(child.pidfd)
        raise


async def _replace_pool(slot: Slot) -> None:
    """A lost device takes its memory along: what was in the pool must be gone, not merely unused."""
    if slot.pool_fd >= 0:
        os.close(slot.pool_fd)
        slot.pool_fd = -1
    name = f"lumenbox-kv-{slot.worker}"
    creating = asyncio.ensure_future(asyncio.to_thread(segment.create, name, slot.pool_bytes))
    try:
        slot.pool_fd = await asyncio.shield(creating)
    except asyncio.CancelledError:
        creating.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(made: asyncio.Future[int]) -> None:
    """The thread that allocates cannot be cancelled."""
    if not made.cancelled() and made.exception() is None:
        os.close(made.result())


def _boot(box: Box, slot: Slot, incarnation: int, keep_pool: bool, report: LoadReport) -> frames.Boot:
    config, mirror = box.config, slot.mirror
    returning, slot.returning = slot.returning if keep_pool else {}, {}
    entries = [box.ledger.entries[rid] for rid in returning if rid in box.ledger.entries]
    mirror.keep_only({entry.rid for entry in entries})
    return frames.Boot(
        worker=slot.worker,
        incarnation=incarnation,
        model_dir=str(config.model_dir),
        report=report,
        limits=frames.SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, box.max_model_len),
        device="cpu",
        faults=list(config.faults),
        adopted=[_adopted(box, slot, entry, returning[entry.rid]) for entry in entries],
        hashed=list(mirror.hashes.items()) if keep_pool else [],
        reload_bytes_s=config.reload_bytes_s if slot.device_lost else None,
    )


def _adopted(box: Box, slot: Slot, entry: Entry, sealed: int) -> frames.Placed:
    """A request that continues on the pool it was on."""
    crcs = box.arena.checksums(entry.slots[:sealed], slot.pool_identity)
    table, computed = slot.mirror.tables[entry.rid], slot.mirror.computed[entry.rid]
    return msgspec.structs.replace(placed(entry, crcs), page_table=table, num_computed=computed)


def placed(entry: Entry, crcs: list[int], load: bool = False, poison: bool = False) -> frames.Placed:
    """A request as it travels to a worker; `crcs` are the checksums of its sealed pages, to be loaded if `load`."""
    return frames.Placed(
        rid=entry.rid,
        epoch=entry.epoch,
        params=entry.params,
        tokens=entry.tokens,
        num_prompt=entry.num_prompt,
        priority=entry.priority,
        poison=poison,
        slots=entry.slots,
        sealed=len(crcs),
        crcs=crcs if load else [],
    )


def open_log(config: BoxConfig, name: str) -> int:
    """Descriptor of a child's log in the run directory, private and appended to."""
    return os.open(config.run_dir / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

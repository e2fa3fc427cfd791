"""The worker: read the commands that wait, plan a batch, compute it, write the frame. One thread, no surprises."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import threading
import time
from pathlib import Path

from lumenbox.core.batching import Batch, BatchScheduler, Report
from lumenbox.core.cost import Shape, StepModel
from lumenbox.engine.model import Engine, build
from lumenbox.errors import LumenboxError
from lumenbox.memory import proc
from lumenbox.memory.arena import Arena
from lumenbox.memory.status import Phase, StatusWriter
from lumenbox.wire import frames, stream
from lumenbox.worker.checkpoints import KvCheckpoints, sequence
from lumenbox.worker.faults import Faults
from lumenbox.worker.link import CoordinatorGone, Link
from lumenbox.worker.reload import read_again

ITL_TARGET_S = 0.2
"""Prefill beside running decodes is cut so that a step takes about this long at most."""


def boot(sock: socket.socket, status_page: mmap.mmap, weight_fd: int, pool_fd: int, arena_fd: int) -> int:
    """Build the engine on the segments, adopt what the former incarnation left, and serve."""
    link = Link(sock)
    status = StatusWriter(status_page, threading.get_native_id())
    status.write(Phase.STARTING, 0, time.monotonic_ns(), 0)
    try:
        (first, *rest) = link.receive(block=True)
        assert isinstance(first, frames.Boot)
        faults = Faults(first.faults, first.worker, first.incarnation)
        if faults.exits_at_start:
            return 0
        if first.reload_bytes_s is not None:
            read_again(Path(first.model_dir), first.reload_bytes_s)
        engine = build(first.report, Path(first.model_dir), weight_fd, pool_fd)
        arena = Arena(arena_fd, first.report.page.page_bytes)
        loop = WorkerLoop(link, status, engine, first, faults, KvCheckpoints(arena, engine.pool, faults))
        loop.adopt(first)
        link.send(frames.Ready(first.incarnation, engine.pool.num_pages, bool(first.adopted or first.hashed)))
        return loop.run(rest)
    except CoordinatorGone:
        return 0
    except LumenboxError as error:
        link.send(frames.Failed(str(error)))
        return 1


class WorkerLoop:
    """One incarnation at work."""

    def __init__(
        self,
        link: Link,
        status: StatusWriter,
        engine: Engine,
        boot: frames.Boot,
        faults: Faults,
        checkpoints: KvCheckpoints,
    ) -> None:
        self._link = link
        self._status = status
        self._engine = engine
        self._faults = faults
        self._checkpoints = checkpoints
        self._incarnation = boot.incarnation
        limits = boot.limits
        self._scheduler = BatchScheduler(
            engine.pool.num_pages,
            boot.report.page.page_size,
            limits.max_num_seqs,
            limits.token_budget,
            limits.max_model_len,
        )
        self._model = StepModel()
        self._pid, self._tid = os.getpid(), threading.get_native_id()
        self._step, self._step_s = 0, 0.0
        self._preemptions = 0
        self._slow_factor = faults.slow_factor
        self._stopping = False

    def adopt(self, boot: frames.Boot) -> None:
        """Continue the requests whose KV the pool holds."""
        if not (boot.adopted or boot.hashed):
            return
        self._faults.at("reattach_begun")
        copies = self._scheduler.adopt([sequence(placed) for placed in boot.adopted], boot.hashed)
        for source, target, tokens in copies:
            self._engine.pool.copy_page(source, target, tokens)
        self._faults.at("reattach_done")

    def run(self, commands: list[frames.ToWorker]) -> int:
        """Serve until told to stop; returns the exit code."""
        while True:
            for command in commands:
                self._obey(command)
            if self._stopping:
                return 0
            if self._scheduler.has_dropped:
                self._send_news()  # whoever takes over may begin now, and not a step later
            self._checkpoints.restore_some(self._scheduler, self._step_s)
            self._advance()
            idle = self._scheduler.idle and not self._scheduler.has_news and not self._checkpoints.has_news
            if idle:
                self._status.write(Phase.IDLE, self._step, time.monotonic_ns(), self._waited_ns())
            commands = self._link.receive(block=idle)

    # -- commands ------------------------------------------------------------------------------------------------

    def _obey(self, command: frames.ToWorker) -> None:
        match command:
            case frames.Assign(request=placed):
                if placed.poison:
                    os.abort()
                self._scheduler.add(sequence(placed))
            case frames.Cancel(rid=rid, epoch=epoch):
                self._checkpoints.cancel(self._scheduler, rid, epoch)
                if self._scheduler.drop(rid, epoch):
                    self._checkpoints.forget(self._scheduler, rid)
            case frames.Reserve() | frames.Release() | frames.Preload() | frames.SealRate():
                self._checkpoints.obey(self._scheduler, command)
            case frames.Disturb():
                self._disturb(command)
            case frames.Stop():
                self._stopping = True
            case frames.Boot():
                raise AssertionError("booted twice")

    def _disturb(self, command: frames.Disturb) -> None:
        slow = command.factor if command.kind == "slow" else self._faults.slow_factor
        self._slow_factor = self._status.slow_factor = slow
        self._status.write(Phase.IDLE, self._step, time.monotonic_ns(), self._waited_ns())

    # -- one step ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """One step, or, when nothing can run, the frame that lets given-back pages be used again."""
        batch = self._scheduler.plan(self._prefill_limit())
        if batch is None:
            if self._scheduler.has_news or self._checkpoints.has_news:
                self._send_news()
            return
        self._faults.at("page_taken")
        shape = Shape(batch.decodes, batch.prefill_tokens, batch.context_tokens)
        started_ns, waited_ns = time.monotonic_ns(), self._waited_ns()
        self._step += 1
        self._status.write(
            Phase.COMPUTE,
            self._step,
            started_ns,
            waited_ns,
            (shape.decodes, shape.prefill_tokens, shape.context_tokens),
        )
        self._compute(batch, started_ns)
        if batch.prefill_tokens:
            self._faults.at("prefill_chunk_done")
        ended_ns, ended_waited_ns = time.monotonic_ns(), self._waited_ns()
        seconds = (ended_ns - started_ns - (ended_waited_ns - waited_ns)) / 1e9
        self._step_s = seconds
        self._model.observe(shape, seconds)
        self._status.write(Phase.SEND, self._step, ended_ns, ended_waited_ns)
        self._send(self._frame(shape, started_ns, seconds, self._scheduler.report()))

    def _send_news(self) -> None:
        """A frame without a step."""
        self._send(self._frame(Shape(0, 0, 0), time.monotonic_ns(), 0.0, self._scheduler.report()))

    def _compute(self, batch: Batch, started_ns: int) -> None:
        self._scheduler.commit(batch, self._engine.execute(batch))
        self._checkpoints.seal_full_pages(self._scheduler)
        self._faults.at("step_computed")
        if self._slow_factor > 1.0:  # chaos asked for it
            time.sleep((self._slow_factor - 1.0) * (time.monotonic_ns() - started_ns) / 1e9)

    def _prefill_limit(self) -> int:
        running = self._scheduler.running.values()
        context = sum(len(seq.tokens) for seq in running)
        return max(self._scheduler.page_size, self._model.prefill_within(ITL_TARGET_S, len(running), context))

    def _frame(self, shape: Shape, started_ns: int, seconds: float, report: Report) -> frames.Step:
        self._preemptions += len(report.preempted)
        for rid in (*(rid for rid, _, _ in report.finished), *report.preempted):
            self._checkpoints.forget(self._scheduler, rid)
        news = self._checkpoints.collect(self._scheduler)
        pool = self._scheduler.pool
        return frames.Step(
            incarnation=self._incarnation,
            step=self._step,
            started_ns=started_ns,
            seconds=seconds,
            decodes=shape.decodes,
            prefill_tokens=shape.prefill_tokens,
            context_tokens=shape.context_tokens,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_pages=pool.num_reachable,
            cached_pages=pool.num_cached,
            preemptions=self._preemptions,
            admitted=report.admitted,
            tokens=report.tokens,
            progress=report.progress,
            taken=report.taken,
            hashed=report.hashed,
            evicted=report.evicted,
            preempted=report.preempted,
            finished=report.finished,
            dropped=report.dropped,
            replaced=report.replaced,
            sealed=news.sealed,
            quiet=news.quiet,
            restored=news.restored,
        )

    def _send(self, frame: frames.Step) -> None:
        """Commit: only once the frame is wholly in the socket may pages that it gives back be used again."""
        data = stream.pack(frames.encode(frame))
        if self._faults.armed and self._faults.due("frame_half_written"):
            self._link.write(data[: len(data) // 2])
            os.kill(self._pid, signal.SIGKILL)
        self._link.write(data)
        self._faults.at("frame_written")
        self._scheduler.sent()
        self._faults.at("page_reused")

    def _waited_ns(self) -> int:
        return proc.waited_ns(self._pid, self._tid)

"""The loop: look, draw, wait for keys. Runs in the main thread for `top`, in one of its own beside a box."""

from __future__ import annotations

import asyncio
import logging
import queue
import shutil
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lumenbox.coordinator.control import Verb
from lumenbox.errors import LumenboxError
from lumenbox.tui.box import Call, in_process, look, perform
from lumenbox.tui.keys import HANGUP, press
from lumenbox.tui.snapshot import Action, Controls, Snapshot
from lumenbox.tui.terminal import Keyboard, exits_on_signals, keyboard, log_held_back, own_stdout
from lumenbox.tui.view import render

PERIOD_S = 0.25
GIVE_UP_S = 3.0
log = logging.getLogger("lumenbox")


class App:
    """Shows a box until it is told to leave."""

    def __init__(self, call: Call, owns_box: bool) -> None:
        self._call = call
        self._snapshot: Snapshot
        self._controls = Controls(owns_box)
        self._notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._leaving = threading.Event()
        self._drawn: tuple[Text, tuple[int, int]] | None = None

    def leave(self) -> None:
        """End the loop soon; may be called from any thread."""
        self._leaving.set()

    def run(self) -> None:
        """Draw until it is time to leave; the terminal is as before when this returns or raises.

        Raises LumenboxError if there is no box at the start; one that goes away later may come back.
        """
        self._snapshot = look(self._call, None, time.time())
        keys = keyboard(sys.stdin.fileno()) if sys.stdin.isatty() else nullcontext()
        with own_stdout() as file, keys as board, _screen(file) as live:
            while not self._leaving.is_set():
                due = time.monotonic() + PERIOD_S
                self._look()
                self._draw(live)
                self._listen(board, live, due)

    def _look(self) -> None:
        if self._controls.paused:
            return
        try:
            self._snapshot = look(self._call, self._snapshot, time.time())
        except (LumenboxError, OSError) as error:
            self._snapshot = replace(self._snapshot, trouble=str(error))

    def _draw(self, live: Live) -> None:
        while not self._notices.empty():
            self._controls = replace(self._controls, notice=self._notices.get())
        size = (live.console.width, live.console.height)
        picture = render(replace(self._snapshot, controls=self._controls), *size)
        if self._drawn != (picture, size):
            live.update(picture, refresh=True)
            self._drawn = (picture, size)

    def _listen(self, board: Keyboard | None, live: Live, due: float) -> None:
        """Take keys until the next look is due."""
        while (left_s := due - time.monotonic()) > 0 and not self._leaving.is_set():
            if board is None:
                self._leaving.wait(left_s)
                return
            for key in board.wait(left_s):
                self._press(key)
                self._draw(live)

    def _press(self, key: str) -> None:
        if key == HANGUP:
            self.leave()
            return
        pressed = press(self._controls, key, self._snapshot.state)
        self._controls = pressed.controls
        if pressed.action == Action("leave"):
            self.leave()
        elif pressed.action is not None:
            threading.Thread(target=self._perform, args=[pressed.action], daemon=True).start()

    def _perform(self, action: Action) -> None:
        try:
            self._notices.put(perform(self._call, action))
        except (LumenboxError, OSError) as error:
            self._notices.put(f"{action}: {error}")


def _screen(file: TextIO) -> Live:
    console = Console(file=file, force_terminal=True, highlight=False)
    return Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


def watch(call: Call) -> None:
    """`lumenbox top` on a terminal."""
    with exits_on_signals():
        App(call, owns_box=False).run()


def one_frame(call: Call) -> str:
    """`lumenbox top --once`: plain text, as wide as the terminal, 80 columns where there is none."""
    picture = render(look(call, None, time.time()), shutil.get_terminal_size().columns)
    return "\n".join(line.rstrip() for line in picture.plain.split("\n"))


async def beside(verbs: dict[str, Verb]) -> None:
    """Show the box of this loop until cancelled; in a thread of its own, so that a slow terminal holds no stream."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    app = App(in_process(loop, verbs), owns_box=True)

    def show() -> None:
        try:
            with log_held_back(log):
                app.run()
        finally:
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=show, name="tui", daemon=True).start()
    try:
        await ended.wait()
    finally:
        app.leave()
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await ended.wait()
        except TimeoutError:
            log.warning("the terminal takes no output; it is left as it is")

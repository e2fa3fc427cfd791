"""The terminal: whether it may be drawn on, keys without Enter, and everything put back as it was found."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import termios
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

from lumenbox.tui.keys import decode

IFLAG, LFLAG, CC = 0, 3, 6
KEPT_RECORDS = 1000
SIGNAL_EXIT = 128


def may_draw(wanted: bool | None) -> bool:
    """Whether stdout takes cursor control: a terminal that can, in whose foreground we are (CONTRACT §2).

    `wanted` is --tui or --no-tui. NO_COLOR means no unless --tui is given; then only the colours go.
    """
    if wanted is False or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown", ""):
        return False
    if not wanted and os.environ.get("NO_COLOR"):
        return False
    return os.tcgetpgrp(sys.stdout.fileno()) == os.getpgrp()


def own_stdout() -> TextIO:
    """Standard output with a buffer of its own: whoever is stuck in a write to it holds no lock of anybody else."""
    return open(sys.stdout.fileno(), "w", encoding=sys.stdout.encoding, errors="replace", closefd=False)


class Keyboard:
    """The keys of a terminal, as they are pressed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> list[str]:
        """Keys that were pressed, none after `timeout_s`."""
        if not self._poll.poll(1000 * max(0.0, timeout_s)):
            return []
        try:
            return decode(os.read(self._fd, 256))
        except OSError:  # EIO: the terminal is gone
            return decode(b"")


@contextmanager
def keyboard(fd: int) -> Iterator[Keyboard]:
    """Keys come at once and are not shown; Ctrl-C stays a signal, Ctrl-Z and Ctrl-S do nothing.

    Nothing here waits for the terminal: one that has stopped must not hold us.
    """
    before = termios.tcgetattr(fd)
    mode: list[Any] = termios.tcgetattr(fd)
    mode[IFLAG] &= ~termios.IXON
    mode[LFLAG] &= ~(termios.ICANON | termios.ECHO)
    mode[CC][termios.VMIN], mode[CC][termios.VTIME], mode[CC][termios.VSUSP] = 1, 0, b"\0"
    termios.tcsetattr(fd, termios.TCSANOW, mode)
    try:
        yield Keyboard(fd)
    finally:
        try:
            termios.tcflush(fd, termios.TCIFLUSH)
            termios.tcsetattr(fd, termios.TCSANOW, before)
        except termios.error:
            pass  # it is gone


@contextmanager
def exits_on_signals() -> Iterator[None]:
    """SIGTERM, SIGHUP and Ctrl-C leave through every `finally`, with the shell's exit code."""
    with ExitStack() as stack:
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            stack.callback(signal.signal, signum, signal.signal(signum, _leave))
        yield


def _leave(signum: int, frame: object) -> None:
    sys.exit(SIGNAL_EXIT + signum)


class _Held(logging.Handler):
    """Keeps the last records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=KEPT_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def log_held_back(log: logging.Logger) -> Iterator[None]:
    """Lines for stderr wait until the picture is gone; other handlers, the log file's, are left alone."""
    loud = [handler for handler in log.handlers if type(handler) is logging.StreamHandler]
    held = _Held()
    for handler in loud:
        log.removeHandler(handler)
    log.addHandler(held)
    try:
        yield
    finally:
        log.removeHandler(held)
        for handler in loud:
            log.addHandler(handler)
            for record in held.records:
                handler.handle(record)

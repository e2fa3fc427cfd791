"""A program on a pseudo-terminal of its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path
from typing import Any

ALTERNATE, MAIN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"
COLOUR = re.compile(rb"\x1b\[[0-9;]*\b(3[0-7]|4[0-7]|9[0-7]|38|48)\b[0-9;]*m")


class Terminal:
    """Start with `run`; `output` grows as the program writes."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes = termios.tcgetattr(self._slave)
        self.output = b""
        self._news = asyncio.Event()

    async def run(self, *command: str | Path, **environment: str) -> asyncio.subprocess.Process:
        inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        asyncio.get_running_loop().add_reader(self.master, self._read)
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), self._slave)
        env = inherited | {"TERM": "xterm-256color"} | environment
        return await asyncio.create_subprocess_exec("setsid", "--ctty", *map(str, command), env=env, **streams)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    async def shows(self, what: bytes) -> None:
        """Until the program has written `what`."""
        async with asyncio.timeout(30):
            while what not in self.output:
                self._news.clear()
                await self._news.wait()

    def is_restored(self) -> bool:
        """Modes as before, main screen, cursor shown."""
        screens = [self.output.rfind(code) for code in (ALTERNATE, MAIN, HIDDEN, SHOWN)]
        return termios.tcgetattr(self._slave) == self.modes and screens[0] < screens[1] and screens[2] < screens[3]

    def _read(self) -> None:
        self.output += os.read(self.master, 1 << 16)
        self._news.set()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.master)
        os.close(self.master)
        os.close(self._slave)

"""Run by test_terminal: a box's process that shows it, logs a line meanwhile, and is told to end.

With `break` the picture breaks; with `stuck` nothing is printed at the end, as nothing could be.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tui_box import FakeBox

from lumenbox.tui.app import beside

log = logging.getLogger("lumenbox")


async def main() -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    box = FakeBox()
    showing = asyncio.create_task(beside(box.verbs()))
    while not box.calls:
        await asyncio.sleep(0.01)  # until it has looked
    log.info("a line for the log")
    if sys.argv[1:] == ["break"]:
        box.state = {"pid": 4000, "counters": {"generated_tokens": 0}, "broken": True}
    while not told.is_set():
        await asyncio.sleep(0.02)
        box.state["uptime_s"] = box.state.get("uptime_s", 0.0) + 1.0  # something to draw
    showing.cancel()
    await asyncio.wait([showing])
    if sys.argv[1:] != ["stuck"]:
        print("the end")


log.addHandler(logging.StreamHandler(sys.stderr))
log.setLevel(logging.INFO)
print("ready")
asyncio.run(main())

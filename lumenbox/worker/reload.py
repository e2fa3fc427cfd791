"""Reading the weights again after a device was lost, at the pace of the disk that a rehearsal stands for."""

from __future__ import annotations

import time
from pathlib import Path

from lumenbox.models.facts import weight_files

CHUNK_BYTES = 1 << 22


def read_again(model_dir: Path, bytes_s: float) -> None:
    """Read every weight file once, at `bytes_s` bytes a second (0: as fast as it goes)."""
    started, done = time.monotonic(), 0
    for path in weight_files(model_dir):
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                done += len(chunk)
                if bytes_s:
                    time.sleep(max(0.0, started + done / bytes_s - time.monotonic()))

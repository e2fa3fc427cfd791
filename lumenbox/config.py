"""How a box is configured: resolved once, from command line, environment, file and defaults; frozen afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lumenbox.core.state import CheckpointConfig


@dataclass(slots=True, frozen=True)
class BoxConfig:
    """Everything that `lumenbox up` decides before it starts anything. Units stand in the names."""

    model: str
    model_dir: Path
    served_name: str
    workers: int
    host: str
    port: int
    run_dir: Path
    api_keys: tuple[str, ...] = ()
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    page_size: int = 16
    kv_pages: int | None = None
    kv_bytes: int = 1 << 30
    dtype: str = "auto"
    exact: str = "auto"
    seed: int = 0
    max_queue: int = 1024
    drain_timeout_s: float = 30.0
    respawn: bool = True
    recovery: str = "box"
    generation_config: str = "request"
    checkpoint_bytes: int | None = None
    """Arena budget per holder; None: sized by live context."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    reload_bytes_s: float = 0.0
    faults: tuple[str, ...] = ()
    threads: int = 1
    created: int = 0

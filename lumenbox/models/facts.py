"""What can be said of a model folder in milliseconds: that its pieces are there and whole, and what model it is.

`lumenbox up` asks here before anything is forked. What needs the architecture (a weight that is missing or has another
shape) is the engine's to check.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lumenbox.errors import ModelError
from lumenbox.models.folder import read_json, read_optional_json, require_folder, text_config, whole_number
from lumenbox.models.safetensors_header import Header, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class ModelFacts:
    """A sound model folder. `dtype` is that of most weight bytes, in safetensors' words (F32, BF16, …)."""

    model_dir: Path
    architecture: str
    context_length: int
    vocab_size: int
    layers: int
    dtype: str
    weight_bytes: int
    has_chat_template: bool


def check(model_dir: Path) -> ModelFacts:
    """Raise ModelError, naming the file, unless config, tokenizer and every weight file are present and whole."""
    require_folder(model_dir)
    config = read_json(model_dir, "config.json")
    if not (model_dir / "tokenizer.json").is_file():
        raise ModelError(f"tokenizer.json is missing in the model folder {model_dir}")
    headers = read_headers(model_dir)
    architectures = config.get("architectures") or [text_config(config).get("model_type")]
    return ModelFacts(
        model_dir=model_dir,
        architecture=str(architectures[0]),
        context_length=whole_number(config, "max_position_embeddings", model_dir),
        vocab_size=whole_number(config, "vocab_size", model_dir),
        layers=whole_number(config, "num_hidden_layers", model_dir),
        dtype=main_dtype(headers),
        weight_bytes=sum(header.weight_bytes for header in headers),
        has_chat_template=has_chat_template(model_dir),
    )


def weight_files(model_dir: Path) -> list[Path]:
    """The weight files that count: the index's shards, else model.safetensors. A stray file beside them is ignored."""
    return [model_dir / name for name in sorted(set(shard_of_tensor(model_dir).values()))] or [model_dir / SINGLE]


def shard_of_tensor(model_dir: Path) -> dict[str, str]:
    """The index's tensor name → file name; empty when there is no index."""
    weight_map = read_optional_json(model_dir, INDEX).get("weight_map", {})
    path = model_dir / INDEX
    if path.exists() and not weight_map:
        raise ModelError(f"{path} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{path} names a weight file outside the folder: {name!r}")
    return dict(weight_map)


def read_headers(model_dir: Path) -> list[Header]:
    """The checked headers of all weight files, each holding the tensors that the index says it has."""
    headers = [read_header(path) for path in weight_files(model_dir)]
    held = {header.path.name: {tensor.name for tensor in header.tensors} for header in headers}
    for tensor, name in shard_of_tensor(model_dir).items():
        if tensor not in held[name]:
            raise ModelError(f"{model_dir / name} lacks the tensor {tensor} that {INDEX} says it holds")
    return headers


def main_dtype(headers: list[Header]) -> str:
    """The dtype that most bytes have; ties go to the first in the alphabet."""
    size: Counter[str] = Counter()
    for header in headers:
        for tensor in header.tensors:
            size[tensor.dtype] += tensor.end - tensor.start
    return min(size, key=lambda dtype: (-size[dtype], dtype))


def has_chat_template(model_dir: Path) -> bool:
    """Whether chat requests can be served."""
    if (model_dir / "chat_template.jinja").is_file() or (model_dir / "chat_template.json").is_file():
        return True
    return bool(read_optional_json(model_dir, "tokenizer_config.json").get("chat_template"))

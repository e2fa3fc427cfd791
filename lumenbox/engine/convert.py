"""GGUF → a folder of safetensors: `python -m lumenbox.engine.convert SRC.gguf DST_DIR`, run as a child process.

Quantized weights are stored as bfloat16. The block formats keep a value to some 3 % (4 bits) or 0.4 % (8 bits) of its
block's largest; bfloat16 rounds by at most 0.2 % of the value itself, takes half the memory of float32, and is what such
models were trained in. A file that holds float matrices keeps float32.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lumenbox.engine.architecture import first_line, quiet

FLOAT_TYPES = {"F16", "F32", "F64"}


def read_once() -> None:
    """Parsing the vocabulary takes seconds and transformers does it for each of config, weights and tokenizer."""
    import gguf

    gguf.GGUFReader = functools.cache(gguf.GGUFReader)


def convert(source: Path, target: Path) -> None:
    """Write config, weights, tokenizer, chat template and generation defaults of `source` into the folder `target`."""
    import transformers

    folder, gguf = source.parent, source.name
    dtype = stored_dtype(source)
    with quiet():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
        unmarked(loaded, dtype).save_pretrained(target)
        tokenizer.model_max_length = loaded.config.max_position_embeddings
        tokenizer.save_pretrained(target, save_jinja_files=False)


def stored_dtype(source: Path) -> torch.dtype:
    """bfloat16 unless a matrix of the file is stored in more bits."""
    from gguf import GGUFReader

    matrices = {tensor.tensor_type.name for tensor in GGUFReader(source).tensors if len(tensor.shape) > 1}
    return torch.float32 if matrices & FLOAT_TYPES else torch.bfloat16


def unmarked(loaded: Any, dtype: torch.dtype) -> Any:
    """The same model without the mark of a quantized one, with which transformers refuses to save it."""
    config = type(loaded.config).from_dict(loaded.config.to_dict())
    for mark in ("quantization_config", "_name_or_path"):
        config.__dict__.pop(mark, None)
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    model.generation_config = loaded.generation_config
    return model


def main(arguments: list[str]) -> int:
    """Exit 0, or 1 with one line on stderr."""
    if len(arguments) != 2:
        print("usage: python -m lumenbox.engine.convert SRC.gguf DST_DIR", file=sys.stderr)
        return 2
    source, target = map(Path, arguments)
    read_once()
    os.environ["TQDM_DISABLE"] = "1"  # transformers' reader shows a bar of its own
    try:
        convert(source, target)
    except Exception as error:  # the parent shows one line, whatever went wrong in foreign code
        print(f"{source}: cannot be converted: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""GGUF → a folder of safetensors: `python -m lumenbox.engine.convert SRC.gguf DST_DIR`, run as a child process.

Quantized weights are stored as bfloat16. The block formats keep a value to some 3 % (4 bits) or 0.4 % (8 bits) of the
largest in its block; bfloat16 rounds by at most 0.2 % of the value itself, takes half the memory of float32, and is
what such models were trained in. A file that holds float matrices keeps float32.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch

from lumenbox.engine.architecture import first_line, quiet

SPLITS_DIGITS = {"smollm"}
SPLITS_AS_TRANSFORMERS = {"default", "gpt-2", "qwen2", "llama-bpe"}
FLOAT_TYPES = {"F16", "F32", "F64"}


def tame_readers() -> None:
    """Parsing the vocabulary takes seconds and transformers does it for each of config, weights and tokenizer; and it
    shows a bar that no setting of its own hides."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reader

    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    reader.tqdm = functools.partial(reader.tqdm, disable=True)


def convert(source: Path, target: Path) -> None:
    """Write config, weights, tokenizer, chat template and generation defaults of `source` into the folder `target`."""
    import transformers

    folder, gguf = source.parent, source.name
    dtype = stored_dtype(source)
    with quiet():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
        unmarked(loaded, dtype).save_pretrained(target)
        restore_splitting(tokenizer, pre_tokenizer_name(source))
        tokenizer.model_max_length = loaded.config.max_position_embeddings
        tokenizer.save_pretrained(target, save_jinja_files=False)


def stored_dtype(source: Path) -> torch.dtype:
    """bfloat16 unless a matrix of the file is stored in more bits."""
    import gguf

    matrices = {tensor.tensor_type.name for tensor in gguf.GGUFReader(source).tensors if len(tensor.shape) > 1}
    return torch.float32 if matrices & FLOAT_TYPES else torch.bfloat16


def pre_tokenizer_name(source: Path) -> str:
    """llama.cpp's name for the way the text is split before merging (`tokenizer.ggml.pre`)."""
    import gguf

    field = gguf.GGUFReader(source).fields.get("tokenizer.ggml.pre")
    return str(field.contents()) if field else "default"


def restore_splitting(tokenizer: Any, name: str) -> None:
    """Split text as the file's name for it says, which transformers ignores (SmolLM2: each digit alone).

    Raises ValueError for a name whose splitting nobody has checked.
    """
    from tokenizers import pre_tokenizers

    if name in SPLITS_DIGITS:
        digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    elif name not in SPLITS_AS_TRANSFORMERS:
        raise ValueError(f"its tokenizer splits text by the rule {name!r}, which is not known here")


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
    tame_readers()
    try:
        convert(source, target)
    except Exception as error:  # noqa: BLE001  the parent shows one line, whatever went wrong in foreign code
        print(f"{source}: cannot be converted: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

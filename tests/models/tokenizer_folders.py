"""Model folders for tokenizer tests: sentencepiece's two shapes, trained on a line of text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = ["the sea was calm and the ship was not", "café naïve 日本語 was not the end of it", "hello hello world"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user'"
    " else m['content'] + eos_token }}{% endfor %}"
)


def sentencepiece_folder(folder: Path, *, metaspace: bool) -> Path:
    """A Llama-2 like folder: BOS by the post-processor, byte fallback, blanks as ▁."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special + bytes_, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    state["post_processor"] = json.loads(
        processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]).__getstate__()
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    state["decoder"] = json.loads(decoders.Sequence(steps).__getstate__())
    if not metaspace:
        state["pre_tokenizer"] = None
        marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        state["normalizer"] = json.loads(marks.__getstate__())
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    return write_folder(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE})


def write_folder(folder: Path, tokenizer: Tokenizer, settings: dict[str, str]) -> Path:
    """The files that Tokenizer.load reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size, "eos_token_id": 2}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder

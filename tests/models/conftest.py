"""Fixtures: the tiny model, and a cache of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lumenbox.models import tiny
from lumenbox.models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-random, made once."""
    folder = tmp_path_factory.mktemp("tiny-random")
    tiny.make(folder, 20260617)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_dir: Path) -> Tokenizer:
    """Its tokenizer."""
    return Tokenizer.load(tiny_dir)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the models folder in it."""
    monkeypatch.setenv("LUMENBOX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"

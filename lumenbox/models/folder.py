"""The JSON files of a model folder (config.json and its neighbours), read once, with the file's name in every error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lumenbox.errors import ModelError


def require_folder(model_dir: Path) -> None:
    """Refuse a path that is no folder, by name: a mistyped path is the commonest cause."""
    if not model_dir.is_dir():
        kind = "is not a folder" if model_dir.exists() else "does not exist"
        raise ModelError(f"model folder {model_dir} {kind}")


def read_json(model_dir: Path, name: str) -> dict[str, Any]:
    """The JSON object in `name`, which must be there."""
    path = model_dir / name
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{name} is missing in the model folder {model_dir}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def read_optional_json(model_dir: Path, name: str) -> dict[str, Any]:
    """The JSON object in `name`, or an empty one when the file is absent."""
    return read_json(model_dir, name) if (model_dir / name).exists() else {}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that describes the language model; multimodal configs nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def whole_number(config: dict[str, Any], key: str, model_dir: Path) -> int:
    """A positive integer that config.json must hold."""
    value = text_config(config).get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{model_dir / 'config.json'} has no usable {key} (found {value!r})")
    return value

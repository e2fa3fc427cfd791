"""What kind of model a folder holds, whether our attention can serve it, and how it is built without its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lumenbox.engine.attention import ATTENTION_NAME
from lumenbox.errors import ModelError

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def read_config(model_dir: Path) -> Any:
    """The transformers config of a text model in `model_dir`. Raises ModelError naming config.json."""
    import transformers

    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_bytes())
        with quiet():
            config = transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or 'cannot be read'}; is this the folder of a model?") from error
    except Exception as error:  # noqa: BLE001  transformers raises whatever its parsers raise
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path}: not a config that transformers reads ({first_line})") from error
    if not isinstance(raw, dict) or raw.get("quantization_config"):
        raise ModelError(f"{path}: quantized checkpoints are not served; use the float checkpoint")
    _refuse_config(path, config)
    return config


def _refuse_config(path: Path, config: Any) -> None:
    text, kind = config.get_text_config(), config.model_type
    foreign = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS
    refusals = {
        "is an encoder-decoder": config.is_encoder_decoder,
        f"has layers of kind {', '.join(sorted(foreign))}": foreign,
        "has latent attention (MLA), whose pages lumenbox does not lay out yet": getattr(text, "kv_lora_rank", None),
        "is multimodal; lumenbox serves text models": text is not config,
    }
    for reason, holds in refusals.items():
        if holds:
            raise ModelError(f"{path}: {kind} is refused: it {reason}")


def meta_model(config: Any, dtype: str) -> Any:
    """The model without memory, attention ours. Raises ModelError for what needs more than attention over pages."""
    import transformers
    from transformers.initialization import no_init_weights

    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"config.json: {config.model_type} is refused: transformers has no causal language model of it"
        )
    cls = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    if cls._is_stateful:
        raise ModelError(f"config.json: {config.model_type} is refused: it has recurrent state, which no page can hold")
    if not cls._supports_attention_backend:
        raise ModelError(f"config.json: {config.model_type} is refused: its attention cannot be replaced")
    with quiet(), torch.device("meta"), no_init_weights():
        model = cls._from_config(config, dtype=getattr(torch, dtype))
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        raise ModelError(f"config.json: {config.model_type} is refused: it needs attention sinks")
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def ties(model: Any) -> dict[str, str]:
    """Parameter names that share another's storage, with the name that owns it."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: source for name, source in model.all_tied_weights_keys.items() if name in names and name != source}


def rebuild_buffers(model: Any) -> None:
    """Give every buffer that is still on meta its memory and its value (rotary frequencies, embedding scales).

    transformers keeps them out of checkpoints and computes them in `_init_weights`; so we let it, module by module.
    """
    for module in model.modules():
        lost = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in lost:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if lost:
            model._init_weights(module)


def is_mixture(config: Any) -> bool:
    """Mixture of experts: rows per expert depend on a row's neighbours."""
    return any(
        re.fullmatch(r"num(_local)?_experts|n_routed_experts|moe_num_experts", key) and value
        for key, value in vars(config).items()
    )


@contextmanager
def quiet() -> Iterator[None]:
    """transformers' progress bars and warnings are not for operators."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()

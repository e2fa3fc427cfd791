"""What kind of model a folder holds, whether our attention can serve it, and how it is built without its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lumenbox.engine.attention import ATTENTION_NAME
from lumenbox.errors import ModelError

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


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
    except Exception as error:  # transformers raises whatever its parsers raise
        raise ModelError(f"{path}: not a config that transformers reads ({first_line(error)})") from error
    if raw.get("quantization_config"):
        raise ModelError(f"{path}: quantized checkpoints are not served; use the float checkpoint")
    _refuse_config(path, config)
    return config


def _refuse_config(path: Path, config: Any) -> None:
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS
    rope = rope_types(text) & BATCH_DEPENDENT_ROPE
    refusals = {
        "it is an encoder-decoder": config.is_encoder_decoder,
        f"it has layers of kind {', '.join(sorted(layers))}": layers,
        "its latent attention (MLA) has no page layout yet": getattr(text, "kv_lora_rank", None),
        "it is multimodal; lumenbox serves text models": text is not config,
        f"its rope scaling ({', '.join(rope)}) changes with the longest sequence in the batch": rope,
    }
    for reason, holds in refusals.items():
        if holds:
            raise ModelError(f"{path}: {config.model_type} is refused: {reason}")


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary embedding in use; some configs have one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    flat = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(each["rope_type"]) for each in flat if "rope_type" in each}


def meta_model(config: Any, dtype: str) -> Any:
    """The model without memory, attention ours. Raises ModelError for what needs more than attention over pages."""
    from transformers.initialization import no_init_weights

    cls = _causal_class(config)
    try:
        with quiet(), torch.device("meta"), no_init_weights():
            model = cls._from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:  # foreign code over a foreign config
        raise ModelError(f"config.json: {config.model_type} cannot be built from it ({first_line(error)})") from error
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        raise ModelError(f"config.json: {config.model_type} is refused: it needs attention sinks")
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def _causal_class(config: Any) -> Any:
    """transformers' class for this config, if it is a causal language model whose only state is KV."""
    import transformers

    known = transformers.AutoModelForCausalLM._model_mapping
    cls = known.get(type(config), None)
    refusals = {
        "it is no causal language model": cls is None or cls.__name__ not in (config.architectures or [cls.__name__]),
        "it has recurrent state, which no page can hold": getattr(cls, "_is_stateful", False),
        "its attention cannot be replaced": not getattr(cls, "_supports_attention_backend", True),
    }
    for reason, holds in refusals.items():
        if holds:
            raise ModelError(f"config.json: {config.model_type} is refused: {reason}")
    return cls


def first_line(error: BaseException) -> str:
    """What a foreign exception says, short enough for one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


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
    return any(getattr(config, key, None) for key in EXPERT_COUNTS)


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

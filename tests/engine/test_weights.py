"""A damaged, incomplete or foreign checkpoint is refused in one line that names the culprit; a whole one binds."""

import json
import os
import shutil
import struct

import pytest
import torch
import transformers

from lumenbox.engine import architecture, weights
from lumenbox.errors import ModelError

from . import tiny

FILE = "model.safetensors"


@pytest.fixture
def copy(llama_folder, tmp_path):
    return shutil.copytree(llama_folder, tmp_path / "copy")


def content(folder):
    """The file's bytes and its header."""
    data = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return data, length, json.loads(data[8 : 8 + length])


def rewrite(folder, header, body):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + body)


def refusal(folder, **options):
    with pytest.raises(ModelError) as caught:
        tiny.load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


DAMAGES = {
    "cut_half": lambda data, header: data[: len(data) // 2],
    "cut_one_byte": lambda data, header: data[:-1],
    "cut_in_header": lambda data, header: data[: 8 + header // 2],
    "empty": lambda data, header: b"",
    "extra_bytes": lambda data, header: data + bytes(16),
    "html_page": lambda data, header: b"<html><body>Access denied</body></html>\n" * 20,
    "lfs_pointer": lambda data, header: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n",
    "all_zero": lambda data, header: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(damage, copy):
    data, header, _ = content(copy)
    (copy / FILE).write_bytes(DAMAGES[damage](data, header))
    assert FILE in refusal(copy)


def test_a_directory_instead_of_the_file(copy):
    (copy / FILE).unlink()
    (copy / FILE).mkdir()
    assert FILE in refusal(copy)


def test_a_hole_in_the_header(copy):
    data, length, header = content(copy)
    header.pop(next(name for name in header if "layers.1" in name))
    rewrite(copy, header, data[8 + length :])
    assert FILE in refusal(copy)


def test_a_renamed_weight_is_named(copy):
    data, length, header = content(copy)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(
        copy, {("other." + key if key == name else key): value for key, value in header.items()}, data[8 + length :]
    )
    assert name in refusal(copy)


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (0.0, "zeros")])
def test_bad_numbers_are_named(value, word, copy):
    data, length, header = content(copy)
    name = "model.layers.2.self_attn.q_proj.weight"
    start, stop = header[name]["data_offsets"]
    body = bytearray(data[8 + length :])
    bad = torch.full(((stop - start) // 4 if value == 0.0 else 1,), value).numpy().tobytes()
    body[start : start + len(bad)] = bad
    rewrite(copy, header, bytes(body))
    message = refusal(copy)
    assert word in message
    assert name in message


def test_a_missing_shard_is_named(copy):
    _, _, header = content(copy)
    weight_map = {name: FILE for name in header if name != "__metadata__"}
    weight_map["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model-00002-of-00002.safetensors" in refusal(copy)


def test_shards_load_by_the_index_alone(llama_folder, tmp_path):
    model = tiny.reference(llama_folder)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / FILE).write_bytes(b"a stray from an older download")
    assert len(list(tmp_path.glob("*-of-*"))) > 1
    check_bound(tiny.load(tmp_path), model)


def test_a_stray_second_file_is_ignored(copy):
    shutil.copy(copy / FILE, copy / "old-copy.safetensors")
    with (copy / "old-copy.safetensors").open("r+b") as file:
        file.truncate(1000)
    tiny.load(copy)


def test_config_missing_or_not_json(copy):
    (copy / "config.json").write_text("{")
    assert "config.json" in refusal(copy)
    (copy / "config.json").unlink()
    assert "config.json" in refusal(copy)
    assert "does_not_exist" in refusal(copy / "does_not_exist")


def test_a_flipped_tie_is_named(copy, tmp_path):
    set_config(copy, tie_word_embeddings=True)
    assert "lm_head" in refusal(copy)
    tied = tiny.make("llama_tied", tmp_path / "tied")
    set_config(tied, tie_word_embeddings=False)
    assert "lm_head" in refusal(tied)


def set_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_config_of_another_model(copy):
    set_config(copy, num_hidden_layers=2)
    assert "layers.2" in refusal(copy)
    set_config(copy, num_hidden_layers=3, intermediate_size=256)
    assert "(256, 64)" in refusal(copy)


UNSERVED = {
    "GptOssConfig": "sinks",
    "MambaConfig": "linear_attention",
    "RwkvConfig": "recurrent",
    "Qwen3NextConfig": "linear_attention",
    "T5Config": "encoder-decoder",
    "DeepseekV3Config": "MLA",
    "BertConfig": "no causal language model",
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_attention_over_pages_cannot_serve_is_refused_by_name(name, tmp_path):
    config = getattr(transformers, name)(architectures=["BertForMaskedLM"] if name == "BertConfig" else None)
    config.save_pretrained(tmp_path)
    message = refusal(tmp_path)
    assert config.model_type in message
    assert "refused" in message
    assert UNSERVED[name] in message


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused(rope, copy):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope == "longrope" else {}
    set_config(copy, rope_parameters={"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, **factors})
    assert rope in refusal(copy)


def test_unknown_dtype_and_quantized_checkpoints(copy):
    assert "int3" in refusal(copy, dtype="int3")
    set_config(copy, quantization_config={"quant_method": "awq"})
    assert "quantized" in refusal(copy)


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_bound_parameters_and_buffers_are_the_checkpoints(kind, tmp_path):
    folder = tiny.make(kind, tmp_path)
    check_bound(tiny.load(folder, exact="off"), tiny.reference(folder))


def check_bound(loaded, model):
    bound = loaded.engine().model
    ours, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (bound, model))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert not ours[name].requires_grad


def test_dtype_is_converted_and_ties_kept(tmp_path):
    folder = tiny.make("llama_tied", tmp_path)
    model = tiny.load(folder, dtype="bfloat16").engine().model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tiny.reference(folder).lm_head.weight.bfloat16())
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_auto_takes_the_checkpoints_dtype_where_the_processor_computes_in_it(tmp_path, monkeypatch):
    config = architecture.read_config(tiny.make("llama", tmp_path, dtype="bfloat16"))
    monkeypatch.setattr(weights, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert weights.choose_dtype(config, "auto") == "bfloat16"
    monkeypatch.setattr(weights, "cpu_flags", lambda: frozenset({"avx2"}))
    assert weights.choose_dtype(config, "auto") == "float32"


def test_loading_says_nothing(llama_folder, capfd):
    tiny.load(llama_folder).engine()
    assert capfd.readouterr() == ("", "")


def test_the_segment_outlives_its_maker(llama_folder):
    loaded = tiny.load(llama_folder)
    first = loaded.engine()
    seq = tiny.greedy(0, tiny.prompt(1, 20))
    driver = tiny.Driver(first)
    driver.run([seq], 3, chunk=8)
    fd = os.dup(loaded.weight_fd)
    again = tiny.Loaded(loaded.folder, loaded.report, fd)
    other = tiny.greedy(0, tiny.prompt(1, 20))
    tiny.Driver(again.engine()).run([other], 3, chunk=8)
    assert other.tokens == seq.tokens

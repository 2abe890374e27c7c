from __future__ import annotations

import json
import struct
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import ConfigError
from engine.gguf_file import read_gguf
from engine.hf_weights import HfSource
from engine.parallel.shards import Part
from engine.quantization import Quantization
from engine.weights import LoadedModel, load_model, open_source, resolve_dtype
from tests.engine.tiny_models import checkpoint_tensors, make_config, make_oracle, write_gguf, write_hf


def all_tensors(model: LoadedModel) -> list[torch.Tensor]:
    weights = model.weights
    assert weights.embedding.weight is not None
    tensors = [weights.embedding.weight, weights.final_norm]
    for layer in weights.layers:
        tensors += [layer.attention_norm, layer.mlp_norm]
        for linear in (*layer.matrices, weights.lm_head):
            assert linear.weight is not None
            tensors += [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
    return tensors


def write_changed(tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    """A checkpoint some of whose tensors were replaced or removed (`__` stands for a dot)."""
    config = make_config()
    tensors = checkpoint_tensors(make_oracle(config))
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_gguf_and_hf_of_the_same_weights_load_equal(tmp_path: Path) -> None:
    config = make_config(attention_bias=True, mlp_bias=True)
    oracle = make_oracle(config)
    from_hf = load_model(write_hf(tmp_path / "hf", config, oracle), torch.float32)
    from_gguf = load_model(write_gguf(tmp_path / "x.gguf", oracle), torch.float32)
    pairs = list(zip(all_tensors(from_hf), all_tensors(from_gguf), strict=True))
    assert len(pairs) == 2 + 2 * (2 + 8 + 1)
    for hf, gguf in pairs:
        assert torch.equal(hf, gguf)


@pytest.mark.parametrize(("quantization", "tolerance"), [("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 1e-2)])
def test_quantized_gguf_is_expanded(tmp_path: Path, quantization: str, tolerance: float) -> None:
    config = make_config(hidden_size=96)
    oracle = make_oracle(config)
    exact = load_model(write_gguf(tmp_path / "exact.gguf", oracle), torch.float32)
    close = load_model(write_gguf(tmp_path / "close.gguf", oracle, quantization), torch.float32)
    for left, right in zip(all_tensors(exact), all_tensors(close), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def test_expanding_a_tensor_needs_little_memory_beyond_its_place(tmp_path: Path) -> None:
    config = make_config(vocab_size=1 << 15, hidden_size=96)
    path = write_gguf(tmp_path / "large.gguf", make_oracle(config), "Q8_0")
    source = open_source(path)
    target = torch.empty(source.tensors["model.embed_tokens.weight"])
    tracemalloc.start()
    source.read_into("model.embed_tokens.weight", target, Part(tuple(target.shape)))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert target.numel() * 4 >= 4 << 20
    assert peak_bytes < 2 << 20


@pytest.mark.parametrize("form", ["safetensors", "Q8_0", "F16"])
def test_pages_of_the_file_are_given_back_when_a_tensor_is_read(tmp_path: Path, form: str) -> None:
    """Mapped pages count as the process's own, and would make a second copy of the model."""
    config = make_config(vocab_size=1 << 18, hidden_size=96, tie_word_embeddings=True)
    oracle, name = make_oracle(config), "model.embed_tokens.weight"
    if form == "safetensors":
        source = open_source(write_hf(tmp_path, config, oracle))
    else:
        source = open_source(write_gguf(tmp_path / "x.gguf", oracle, form))
    target = torch.zeros(source.tensors[name])
    before = mapped_bytes()
    for _ in range(2):
        source.read_into(name, target, Part(tuple(target.shape)))
    if source.block_kind(name) is not None:
        source.read_blocks(name, torch.zeros(1 << 18, 3 * 34, dtype=torch.uint8), Part(tuple(target.shape)))
    assert mapped_bytes() - before < 8 << 20 < target.numel()
    torch.testing.assert_close(target, oracle.get_input_embeddings().weight.detach(), rtol=0, atol=1e-2)


def mapped_bytes() -> int:
    """Pages of files that are this process's now."""
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile:")
    ]
    return int(line.split()[1]) * 1024


def write_two_shards(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))


def test_shards_named_by_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    config = make_config()
    oracle = make_oracle(config)
    whole = load_model(write_hf(tmp_path / "whole", config, oracle), torch.float32)
    write_two_shards(tmp_path, config, checkpoint_tensors(oracle))
    sharded = load_model(tmp_path, torch.float32)
    for left, right in zip(all_tensors(whole), all_tensors(sharded), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_shards_are_read_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Quantization
) -> None:
    """The readers of both files meet within their first read, also of what is rounded."""
    config = make_config(hidden_size=96)
    write_two_shards(tmp_path, config, checkpoint_tensors(make_oracle(config)))
    meeting, begun, read_into = threading.Barrier(2), set(), HfSource.read_into

    def meet(source: HfSource, name: str, target: torch.Tensor, part: Part) -> None:
        if not name.endswith("norm.weight") and (file := source.file_of(name)) not in begun:
            begun.add(file)
            meeting.wait(timeout=10.0)
        read_into(source, name, target, part)

    monkeypatch.setattr(HfSource, "read_into", meet)
    load_model(tmp_path, torch.float32, quantization=quantization)
    assert begun == {0, 1}


def test_a_shard_that_cannot_be_read_ends_the_reading_of_all(tmp_path: Path) -> None:
    config = make_config()
    tensors = checkpoint_tensors(make_oracle(config))
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    write_two_shards(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match=f"{name}: expected floating-point weights but got torch.int8"):
        load_model(tmp_path, torch.float32)


def test_other_weights_beside_the_model_are_not_read(tmp_path: Path) -> None:
    """As in Mistral's directories."""
    config = make_config()
    path = write_hf(tmp_path, config, make_oracle(config))
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, path / "consolidated.safetensors")
    assert open_source(path).files == [path / "config.json", path / "model.safetensors"]
    load_model(path, torch.float32)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    config = make_config()
    path = write_hf(tmp_path, config, make_oracle(config))
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ConfigError, match=r"expected the file .*model-00002-of-00002.safetensors but it is missing"
    ):
        load_model(path, torch.float32)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config()))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x.safetensors"}}')
    with pytest.raises(ConfigError, match="expected file names"):
        load_model(tmp_path, torch.float32)


def test_stop_tokens_of_both_configs_count(tmp_path: Path) -> None:
    config = make_config(eos_token_id=2)
    write_hf(tmp_path, config, make_oracle(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load_model(tmp_path, torch.float32).spec.eos_token_ids == (2, 7)


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    config = make_config(tie_word_embeddings=True)
    model = load_model(write_hf(tmp_path, config, make_oracle(config)), torch.float32)
    assert model.weights.lm_head is model.weights.embedding


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, r"model.norm.weight: expected shape \(48,\) but it is missing"),
        (
            "lm_head.weight",
            torch.zeros(96, 47),
            r"lm_head.weight: expected shape \(96, 48\) but got \(96, 47\)",
        ),
        ("model.extra", torch.zeros(3), r"model.extra: expected no such tensor but got one of shape \(3,\)"),
        ("lm_head.weight", torch.zeros(96, 48, dtype=torch.int8), "lm_head.weight: expected floating-point"),
    ],
)
def test_wrong_tensors_are_named(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    path = write_changed(tmp_path, **{name.replace(".", "__"): tensor})
    with pytest.raises(ConfigError, match=message):
        load_model(path, torch.float32)


def test_a_stored_tied_head_and_rope_table_are_ignored(tmp_path: Path) -> None:
    config = make_config(tie_word_embeddings=True)
    tensors = checkpoint_tensors(make_oracle(config))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_model(tmp_path, torch.float32).spec.tie_embeddings


@pytest.mark.parametrize(
    "content", [b"", b"GGU", b"GGUF" + b"\xff" * 60, b"hello" * 10, struct.pack("<4sIQQ", b"GGUF", 1, 0, 0)]
)
def test_what_is_no_gguf_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="GGUF"):
        load_model(path, torch.float32)


def test_a_truncated_gguf_is_a_config_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", make_oracle(make_config()))
    whole = path.read_bytes()
    for size in (len(whole) - 64, len(whole) // 2, 400):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            load_model(path, torch.float32)


def test_gguf_fields_are_plain_values(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "x.gguf", make_oracle(make_config())))
    assert file.fields["general.architecture"] == "llama"
    assert file.fields["tokenizer.ggml.tokens"][95] == "piece 95"
    assert file.fields["tokenizer.ggml.scores"][3] == 1.5
    assert file.tensors["blk.0.attn_k.weight"].shape == (32, 48)


def test_a_path_that_is_no_checkpoint_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        load_model(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(make_config()))
    with pytest.raises(ConfigError, match="found none"):
        load_model(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(tmp_path, torch.float32)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    config = make_config()
    seen: list[tuple[int, int]] = []
    load_model(
        write_hf(tmp_path, config, make_oracle(config)), torch.float32, lambda *done: seen.append(done)
    )
    done = [now for now, _ in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1] > 0


def test_fingerprint_depends_on_content_not_on_place(tmp_path: Path) -> None:
    config = make_config()
    first, second = (make_oracle(config, seed) for seed in (0, 1))
    here = load_model(write_hf(tmp_path / "here", config, first), torch.float32)
    there = load_model(write_hf(tmp_path / "there", config, first), torch.bfloat16)
    other = load_model(write_hf(tmp_path / "other", config, second), torch.float32)
    assert here.fingerprint == there.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "chat_template.json",
    ],
)
def test_fingerprint_depends_on_what_makes_tokens_too(tmp_path: Path, name: str) -> None:
    """Wherever in the file: the same tokens must mean the same, or KV passes between strangers."""
    config = make_config()
    place = write_hf(tmp_path, config, make_oracle(config))
    found = set()
    for word in (None, "one", "two"):
        if word is not None:
            (place / name).write_text(
                json.dumps({"padding": " " * (1 << 20), "a": word, "more": " " * (1 << 20)})
            )
        found.add(load_model(place, torch.float32).fingerprint)
    assert len(found) == 3


def test_dtype_names() -> None:
    assert resolve_dtype("float32") == torch.float32
    assert resolve_dtype("bfloat16") == torch.bfloat16
    assert resolve_dtype("auto", "cuda") == torch.bfloat16
    with pytest.raises(ConfigError, match="'int4'"):
        resolve_dtype("int4")

"""GGUF files as they are found: every kind of block in one file, and models cut into several files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from contracts.errors import ConfigError
from engine import gguf_kinds
from engine.embedded import check_model
from engine.gguf_file import model_stem, read_gguf
from engine.gguf_kinds import supported_quantizations
from engine.gguf_weights import GgufSource, hf_name
from engine.parallel.shards import Part
from engine.quantization import Quantization
from engine.weights import load_model
from tests.engine.tiny_models import (
    BLOCKS,
    PROMPT,
    family_config,
    make_blocks,
    make_oracle,
    make_runner,
    run_prompt,
    write_gguf,
)

KINDS = supported_quantizations()
MIXED = {  # as quantizers of llama.cpp mix them in one file
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",
    "attn_output": "Q5_K",
    "ffn_gate": "Q5_0",
    "ffn_up": "Q5_0",
    "ffn_down": "Q8_0",
    "token_embd": "Q6_K",
    "output": "BF16",
}


def write_kinds(
    path: Path,
    kinds: list[str],
    num_layers: int,
    split: int = 0,
    order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> dict[str, np.ndarray]:
    """A qwen2, matrices of `kinds` in turn, else as MIXED; their numbers by name. `split`: tensors a file."""
    sizes = {
        "embedding_length": 256,
        "feed_forward_length": 256,
        "block_count": num_layers,
        "context_length": 256,
    }
    writer = gguf.GGUFWriter(path, "qwen2", split_max_tensors=split, endianess=order)
    for name, value in sizes.items():
        writer.add_uint32(f"qwen2.{name}", value)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    rows = {"attn_k": 128, "attn_v": 128, "token_embd": 96, "output": 96}
    names = [f"blk.{i}.{m}" for i in range(num_layers) for m in MIXED if m not in ("token_embd", "output")]
    numbers: dict[str, np.ndarray] = {}
    for index, name in enumerate(["token_embd", "output", *names]):
        module = name.split(".")[-1]
        kind = MIXED[module] if not kinds else kinds[index % len(kinds)]
        blocks = make_blocks(rows.get(module, 256), 256, kind, index)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
        with np.errstate(all="ignore"):
            numbers[f"{name}.weight"] = gguf.quants.dequantize(blocks, GGMLQuantizationType[kind])
    for i in range(num_layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(256, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def test_every_kind_that_the_library_expands_loads_beside_all_others(tmp_path: Path) -> None:
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "IQ4_XS", "BF16", "F16"} <= set(KINDS)
    numbers = write_kinds(tmp_path / "x.gguf", KINDS, num_layers=4)
    source = GgufSource(tmp_path / "x.gguf")
    assert {GGMLQuantizationType(t.kind).name for t in source._tensors.values()} == set(KINDS)
    for name, expected in numbers.items():
        target = torch.empty(expected.shape)
        source.read_into(hf_name(name), target, Part(tuple(target.shape)))
        assert np.array_equal(target.numpy(), expected), name
        assert target.isfinite().all()
        assert target.any(), name


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_a_file_of_mixed_kinds_computes_as_its_numbers(tmp_path: Path, quantization: Quantization) -> None:
    write_kinds(tmp_path / "x.gguf", [], num_layers=2)
    expanded, kept = (
        run_prompt(
            make_runner(load_model(tmp_path / "x.gguf", torch.float32, quantization=mode)), PROMPT, 32, BLOCKS
        )
        for mode in ("none", quantization)
    )
    assert expanded.isfinite().all()
    limit = 1e-4 if quantization == "auto" else 0.05
    assert (kept - expanded).norm() < limit * expanded.norm()


@pytest.mark.parametrize(
    ("quantization", "num_again"), [("none", 0), ("auto", 0), ("int8", 13), ("int4", 13)]
)
def test_what_is_rounded_a_second_time_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quantization: Quantization, num_again: int
) -> None:
    """Of seven in each of two layers the one in Q8_0 is kept; the embedding is in Q6_K, the head in bfloat16."""
    write_kinds(tmp_path / "x.gguf", [], num_layers=2)
    load_model(tmp_path / "x.gguf", torch.float32, quantization=quantization)
    told = [record.message for record in caplog.records if "a second time" in record.message]
    expected = f"engine.quantization {quantization} rounds {num_again} matrices a second time"
    assert [message.startswith(expected) for message in told] == ([True] if num_again else [])


@pytest.mark.parametrize(("number", "name"), [(GGMLQuantizationType.Q8_K, "Q8_K"), (99, "number 99")])
def test_a_kind_that_nobody_expands_is_named_with_those_that_are(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kinds(tmp_path / "x.gguf", [], num_layers=1)
    file = read_gguf(tmp_path / "x.gguf")
    file.tensors["blk.0.attn_q.weight"] = replace(file.tensors["blk.0.attn_q.weight"], kind=int(number))
    monkeypatch.setattr("engine.gguf_weights.read_gguf", lambda path: file)
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path / "x.gguf", torch.float32)
    assert caught.value.message.startswith(
        "tensor blk.0.attn_q.weight: unsupported quantization: expected one of"
    )
    assert caught.value.message.endswith(f"but got {name}")
    assert all(kind in caught.value.message for kind in KINDS)


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "F16"])
def test_half_a_download_is_refused_before_anything_is_read(kind: str, tmp_path: Path) -> None:
    """By the start of the cluster too."""
    path = tmp_path / "x.gguf"
    write_kinds(path, [kind], num_layers=1)
    whole = max(t.offset + gguf_kinds.num_bytes_of(t) for t in read_gguf(path).tensors.values())
    path.write_bytes(path.read_bytes()[: whole - 1])
    for read in (GgufSource, check_model):
        with pytest.raises(
            ConfigError, match=rf"not whole: expected at least {whole} bytes but it has {whole - 1}"
        ):
            read(path)


def test_a_file_for_other_machines_says_so(tmp_path: Path) -> None:
    write_kinds(tmp_path / "x.gguf", [], num_layers=1, order=gguf.GGUFEndian.BIG)
    with pytest.raises(
        ConfigError, match="expected a little-endian GGUF file but it is for big-endian machines"
    ):
        read_gguf(tmp_path / "x.gguf")


# --- several files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A mixed model as gguf's own writer cuts it."""
    write_kinds(tmp_path / "model.gguf", [], num_layers=2, split=8)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


def test_parts_are_one_model(parts: list[Path], tmp_path: Path) -> None:
    write_kinds(tmp_path / "whole.gguf", [], num_layers=2)
    cut, whole = (
        run_prompt(make_runner(load_model(path, torch.float32)), PROMPT, 32, BLOCKS)
        for path in (parts[0], tmp_path / "whole.gguf")
    )
    assert torch.equal(cut, whole)
    assert check_model(parts[0]).num_layers == 2
    assert GgufSource(parts[0]).files == tuple(parts)


def test_another_last_part_is_another_model(parts: list[Path], tmp_path: Path) -> None:
    first = load_model(parts[0], torch.float32).fingerprint
    content = bytearray(parts[2].read_bytes())
    content[-1] ^= 1
    parts[2].write_bytes(content)
    assert load_model(parts[0], torch.float32).fingerprint != first


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ConfigError, match=r"expected 3 parts but .*model-00002-of-00003.gguf is missing"):
        load_model(parts[0], torch.float32)


def test_a_later_part_names_the_first(parts: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"the first part, model-00001-of-00003.gguf, but got model-00002"):
        read_gguf(parts[1])


def test_a_part_of_another_model_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ConfigError, match=r"model-00003.* to be part 2 \(from 0\) of 3 but it says \(1, 3\)"):
        read_gguf(parts[0])


def test_tensors_are_counted_over_all_parts(parts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_kinds(other / "model.gguf", [], num_layers=1, split=5)
    shutil.copy(other / "model-00003-of-00003.gguf", parts[2])
    with pytest.raises(ConfigError, match=r"each tensor once but|expected 21 tensors in all parts but got"):
        read_gguf(parts[0])


def test_a_part_that_is_not_whole_is_named(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-64])
    with pytest.raises(ConfigError, match=r"model-00002-of-00003.gguf is not whole"):
        check_model(parts[0])


def test_parts_are_found_by_their_names(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(ConfigError, match=r"a name like model-00001-of-00003.gguf"):
        read_gguf(renamed)


def test_the_name_of_a_model_is_without_its_part() -> None:
    assert model_stem(Path("/m/Llama-3-70B-Q4_K_M-00001-of-00002.gguf")) == "Llama-3-70B-Q4_K_M"
    assert model_stem(Path("/m/Llama-3-8B-Q4_0.gguf")) == "Llama-3-8B-Q4_0"


# --- what headers leave out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "value"), [("rope.scaling.factor", 4.0), ("rope.scale_linear", 4.0)])
def test_a_rope_factor_without_a_type_is_linear(key: str, value: float, tmp_path: Path) -> None:
    """As llama.cpp takes it."""
    import engine.spec_gguf as spec_gguf
    from engine.spec import LinearRope

    file = read_gguf(write_gguf(tmp_path / "x.gguf", make_oracle(family_config("llama"))))
    file.fields[f"llama.{key}"] = value
    spec = spec_gguf.spec_from_gguf(file)
    assert spec.layers[0].rope.scaling == LinearRope(4.0)
    file.fields["llama.rope.scaling.type"] = "longrope"
    with pytest.raises(ConfigError, match=r"rope.scaling.type none, linear, yarn but got 'longrope'"):
        spec_gguf.spec_from_gguf(file)


def test_a_rope_factor_of_zero_is_none(tmp_path: Path) -> None:
    """As llama.cpp takes it."""
    from engine.spec_gguf import spec_from_gguf

    file = read_gguf(write_gguf(tmp_path / "x.gguf", make_oracle(family_config("llama"))))
    plain = spec_from_gguf(file)
    file.fields.update({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0})
    assert spec_from_gguf(file) == plain

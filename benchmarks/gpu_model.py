"""The engine itself on a GPU, with random weights: what `benchmarks.gpu_kernels` asks beyond single kernels.

exactness    prompts in chunks and a batch of decodes through the runner, in every form of weights and KV, against
             the same weights in float32 on the CPU; recorded decode steps against the same steps as usual
time         decode steps of an 8B model as the step loop has them computed, recorded and as usual: with planning,
             copies and launches from Python
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from engine.cuda_graphs import CudaRecorder as CudaRecorder
from engine.graphs import DecodeGraphs, Recorder
from engine.kv import FP8, KvSlab, SlabPlan
from engine.kv_scales import scales_of
from engine.model import Model
from engine.quantization import BlockKind, Quantized, quantize
from engine.runner import Runner, StepItem
from engine.spec import LayerSpec, ModelSpec, Rope
from engine.tensor_names import weight_bytes
from engine.weights import LayerWeights, Linear, LoadedModel, Mlp, ModelWeights

BLOCK_SIZE = 16
CPU = torch.device("cpu")
KINDS = {"bfloat16": None, "int8": BlockKind.Q8_0, "int4": BlockKind.Q4_1}
LIMITS = {torch.bfloat16: 0.03, FP8: 0.15}
"""Of the norm of all logits. Two layers of bfloat16; float8 keeps three bits behind the first."""
GRAPH_LIMIT = 0.02
NUM_STEPS = 20
CONTEXT = 4096
SMALL = ModelSpec(
    layers=(LayerSpec(Rope(1e4)), LayerSpec(Rope(1e4), window=24)),
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1000,
    max_position=512,
    norm_eps=1e-5,
    attention_scale=0.125,
    tie_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
)
LARGE = replace(
    SMALL,
    layers=(LayerSpec(Rope(5e5)),),
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    max_position=8192,
    attention_scale=128**-0.5,
)
LENGTHS = (40, 3, 17, 90, 1)


def random_model(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, kind: BlockKind | None
) -> LoadedModel:
    """The same numbers on every device: float weights are rounded to bfloat16, all others to `kind`."""
    generator = torch.Generator(CPU if spec is SMALL else device).manual_seed(0)

    def matrix(rows: int, columns: int) -> Linear:
        shape = (rows, columns)
        numbers = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
        numbers.normal_(std=columns**-0.5, generator=generator)
        if kind is None:
            return Linear(numbers.to(device, dtype))
        return Linear(None, quantized=Quantized(kind, quantize(numbers, kind).blocks.to(device)))

    def layer() -> LayerWeights:
        inner, heads = spec.intermediate_size, spec.num_heads + 2 * spec.num_kv_heads
        return LayerWeights(
            torch.ones(spec.hidden_size, device=device),
            matrix(heads * spec.head_dim, spec.hidden_size),
            matrix(spec.hidden_size, spec.num_heads * spec.head_dim),
            torch.ones(spec.hidden_size, device=device),
            Mlp(matrix(2 * inner, spec.hidden_size), matrix(spec.hidden_size, inner)),
        )

    embedding, head = (matrix(spec.vocab_size, spec.hidden_size) for _ in range(2))
    norm = torch.ones(spec.hidden_size, device=device)
    weights = ModelWeights(embedding, tuple(layer() for _ in spec.layers), norm, head)
    return LoadedModel(spec, weights, "random", dtype, spec)


def make_slab(model: LoadedModel, num_blocks: int, dtype: torch.dtype) -> KvSlab:
    """With a scratch block."""
    device = model.weights.final_norm.device
    scales = scales_of(model) if dtype == FP8 else None
    return SlabPlan(model.spec, num_blocks, BLOCK_SIZE, dtype, device, scales, num_scratch=1).allocate()


def table(index: int, num_blocks: int = 8) -> list[int]:
    """Disjoint blocks of sequence `index`, out of order; `num_blocks` is no multiple of 5."""
    return [num_blocks * index + 5 * i % num_blocks for i in range(num_blocks)]


def decodes(lengths: tuple[int, ...], num_blocks: int = 8) -> list[StepItem]:
    return [StepItem([7 + i], length, table(i, num_blocks), True) for i, length in enumerate(lengths)]


def answers(runner: Runner) -> Tensor:
    """Logits of prompts, one of them in two chunks, then two decode steps of all, on the CPU."""
    prompts = [list(range(i, i + length)) for i, length in enumerate(LENGTHS)]
    runner.execute([StepItem(prompts[3][:50], 0, table(3), False)])
    rest = [StepItem(p, 0, table(i), True) for i, p in enumerate(prompts) if i != 3]
    # A recorded step's logits are there until the next one.
    found = [runner.execute([*rest, StepItem(prompts[3][50:], 50, table(3), True)]).cpu().clone()]
    for step in range(2):
        found.append(runner.execute(decodes(tuple(length + step for length in LENGTHS))).cpu().clone())
    return torch.cat(found)


def error_of(got: Tensor, exact: Tensor) -> float:
    """NaN where a result is not a number: that is within no limit."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def errors(
    device: torch.device, make_recorder: Callable[[], Recorder]
) -> Iterator[tuple[str, tuple[float, float]]]:
    """name -> (error over the norm of all logits, its limit)."""
    num_blocks = 8 * len(LENGTHS)
    for name, kind in KINDS.items():
        exact_model = random_model(SMALL, CPU, torch.float32, kind)
        slab = make_slab(exact_model, num_blocks, torch.float32)
        exact = answers(Runner(Model(exact_model), slab))
        for dtype, limit in LIMITS.items():
            loaded = random_model(SMALL, device, torch.bfloat16, kind)
            slab = make_slab(loaded, num_blocks, dtype)
            model = Model(loaded)
            label = f"model {name}{' float8 kv' if dtype == FP8 else ''}"
            usual = answers(Runner(model, slab))
            yield label, (error_of(usual, exact), limit)
            captured: list[int] = []
            slab = make_slab(loaded, num_blocks, dtype)
            graphs = DecodeGraphs(model, slab, (2, 6), SMALL.max_position, make_recorder())
            runner = Runner(model, slab, graphs=graphs)
            runner.warm_up(lambda num_seqs, _s, _b, to=captured: to.append(num_seqs))  # type: ignore[misc]
            error = error_of(answers(runner), usual) if captured == [6, 2] else float("nan")
            yield f"{label}, recorded", (error, GRAPH_LIMIT)


def step_times(
    device: torch.device, num_layers: int, make_recorder: Callable[[], Recorder]
) -> Iterator[tuple[str, float, int]]:
    """(what, seconds, bytes of weights and KV) of a decode step of 16 sequences at 4,096 tokens, bfloat16."""
    spec = replace(LARGE, layers=LARGE.layers * num_layers)
    num_seqs, context = 16, CONTEXT
    num_blocks = CONTEXT // BLOCK_SIZE + 8
    loaded = random_model(spec, device, torch.bfloat16, None)
    slab = make_slab(loaded, num_seqs * num_blocks, torch.bfloat16)
    model = Model(loaded)
    embedding = 2 * spec.vocab_size * spec.hidden_size  # of which a step reads a few rows
    num_bytes = weight_bytes(spec, 2) - embedding + num_seqs * context * slab.layout.bytes_per_token
    items = decodes((context,) * num_seqs, num_blocks)
    for name in ("recorded", "as usual"):
        graphs = DecodeGraphs(model, slab, (num_seqs,), spec.max_position, make_recorder())
        runner = Runner(model, slab, graphs=graphs if name == "recorded" else None)
        runner.warm_up()
        times_s = []
        for _ in range(NUM_STEPS):
            begun_s = time.perf_counter()
            float(runner.execute(items)[0, 0])  # waits, as the sampler does
            times_s.append(time.perf_counter() - begun_s)
        yield f"engine decode step 8B, {name}", statistics.median(times_s), num_bytes

"""What quantized weights cost in quality: a model's perplexity on a text that ships with Python, per mode.

    python -m benchmarks.perplexity [--model PATH] [--json FILE] [--tokens N]

The text is the language reference in pydoc_data.topics, so it differs a little between versions of Python. It is read
in windows of 512 tokens; the first token of each has no prediction, unless the model puts a token before every text.

The modes of the embedded model are those of benchmarks/engine_models.py; int4 is what the file holds, and its expanded
numbers are what `none` computes with, so these two must agree. Of any other model they are what `engine.quantization`
does with it: int8 and int4 round what is not in 4 or 8 bits already.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from benchmarks.engine_models import MODES, Mode, load_mode
from benchmarks.result import Check, Result, Row, conclude, text_table
from contracts.errors import BatonError
from engine.embedded import ensure_embedded_model
from engine.kv import KvSlab
from engine.model import Chunk, Model, StepPlan
from engine.text.tokenizer import load_text
from engine.weights import LoadedModel, load_model, resolve_dtype

WINDOW = 512
BLOCK_SIZE = 16
NUM_TOPICS = 12
# int8 is finer than the file's own 4 bits; int4 is the file
MAX_RATIO = {"int8": 1.01, "int4": 1.001}
# Rounded here. 4 bits cost a small model more than a large one.
MAX_RATIO_ROUNDED = {"int8": 1.01, "int4": 1.25}
HEADER = ("mode", "perplexity", "ratio to none")


def windows_of(path: Path, num_tokens: int) -> Iterator[list[int]]:
    """The first tokens of the text, cut, each window behind what the model puts before a text. Raises ValueError if
    there are fewer."""
    model = load_text(path)
    begin = model.encode("")
    text = "\n\n".join(topics[name] for name in sorted(topics)[:NUM_TOPICS])
    found = model.encode(text, add_special_tokens=False)
    if len(found) < num_tokens:
        raise ValueError(f"--tokens: expected at most {len(found)}, which the text has, but got {num_tokens}")
    for low in range(0, num_tokens - 1, WINDOW):
        yield begin + found[low : min(low + WINDOW, num_tokens)]


def perplexity(model: Model, windows: Sequence[Sequence[int]]) -> float:
    """e to the mean negative log-likelihood of all tokens but each window's first."""
    return math.exp(torch.cat([_losses(model, tokens) for tokens in windows]).mean().item())


@torch.no_grad()
def _losses(model: Model, tokens: Sequence[int]) -> Tensor:
    """[T - 1], of one window, which no other precedes."""
    slab = KvSlab.allocate(model.spec, -(-len(tokens) // BLOCK_SIZE), BLOCK_SIZE, model.dtype)
    at = torch.arange(len(tokens))
    chunk = Chunk(0, len(tokens), 0, torch.arange(slab.num_blocks))
    plan = StepPlan(torch.tensor(tokens), at, at // BLOCK_SIZE, at % BLOCK_SIZE, at[:-1], (), (chunk,))
    logits = model.forward(plan, slab)
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


def load_as(mode: Mode, path: Path | None, dtype: torch.dtype) -> LoadedModel:
    """Raises ConfigError if there is no such model. `path`: None is the embedded one."""
    return load_mode(mode, dtype) if path is None else load_model(path, dtype, quantization=mode)


def checks_of(found: dict[str, float], max_ratio: dict[str, float]) -> Iterator[Check]:
    for mode, largest in max_ratio.items():
        ratio = found[mode] / found["none"] if mode in found and "none" in found else None
        yield Check(f"perplexity_{mode}", ratio, "<=", largest)


def main(argv: Sequence[str] | None = None) -> int:
    """0: no mode is worse than it may be; 1: one is; 2: it cannot be measured here."""
    parser = argparse.ArgumentParser(prog="benchmarks.perplexity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="a Hugging Face directory or a GGUF file instead of the embedded model"
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--tokens", type=int, default=2 * WINDOW, help="of the text (default 1024)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    dtype, found = resolve_dtype("auto"), dict[str, float]()
    try:
        windows = list(windows_of(arguments.model or ensure_embedded_model(), arguments.tokens))
        for mode in MODES:
            found[mode] = perplexity(Model(load_as(mode, arguments.model, dtype)), windows)
            print(f"{mode}: {found[mode]:.3f}", flush=True)
    except (BatonError, OSError, ValueError) as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = [
        {"mode": mode, "perplexity": value, "ratio to none": value / found["none"]}
        for mode, value in found.items()
    ]
    max_ratio = MAX_RATIO_ROUNDED if arguments.model else MAX_RATIO
    result = Result("perplexity", 0, rows, list(checks_of(found, max_ratio)))
    result.machine |= {"dtype": str(dtype).removeprefix("torch."), "tokens": arguments.tokens}
    result.versions["python"] = platform.python_version()
    print(text_table([[row[name] for name in HEADER] for row in rows], HEADER))
    for check in result.checks:
        print(check)
    return conclude(result, arguments.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

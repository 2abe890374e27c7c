"""How near a step of the engine comes to what the machine allows: ratios of one process, one thread, one run.

    python -m benchmarks.engine_step [--json FILE] [--rounds N]

    the machine   sustained read bandwidth; this model's linear layers alone, and its head, through oneDNN with packed
                  weights of the same type, at 1, 8, 256 and 1,024 rows
    the engine    whole steps: prefill of 256 and 1,024 tokens, decode of 1 sequence at 256 tokens and 8 at 1,000, and
                  decode of 1 with int8 and int4 weights; some of them with engine.batch_invariant
    a process     that serves: resident set after a prompt, less weights and KV pool (with Ray's libraries, without Ray)

The embedded model, in bfloat16 where the CPU has instructions for it, else in float32. Machine and engine are measured
in turns; of each the shortest time counts, since other work on the machine only ever adds. Times are those of the one
computing thread on its core, without the time it waited for one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_models import MODES, linears, load_mode, weight_bytes
from benchmarks.result import Check, Result, Row, conclude, text_table
from contracts.errors import BatonError
from engine.kv import KvSlab
from engine.model import Model
from engine.runner import Runner, StepItem
from engine.weights import resolve_dtype

BLOCK_SIZE = 16
BANDWIDTH_BYTES = 256 << 20
RSS_KV_BLOCKS = 256
RSS_TIMEOUT_S = 600.0
# check -> largest ratio to its bound
REQUIRED = {
    "prefill_1024": 1.5,
    "prefill_256": 1.4,
    "decode_b1_c256": 1.35,
    "decode_b8_c1000": 1.5,
    "int4_b1": 0.65,
    "int8_b1": 0.8,
}
MAX_OVERHEAD_MB = 450.0
HEADER = ("work", "engine ms", "bound ms", "ratio")
MB = 1e6

Work = Callable[[], object]


class Clock:
    """The shortest time of each named piece of work."""

    def __init__(self) -> None:
        self.best_ms: dict[str, float] = {}

    def run(self, name: str, work: Work) -> None:
        begun_s = time.thread_time()
        work()
        spent_ms = (time.thread_time() - begun_s) * 1e3
        self.best_ms[name] = min(spent_ms, self.best_ms.get(name, spent_ms))


class Machine:
    """The bounds: products with random weights of the model's shapes, packed by oneDNN."""

    def __init__(self, shapes: list[tuple[int, int]], head: tuple[int, int], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weights = [(columns, self._packed(rows, columns)) for rows, columns in shapes]
        self._head = (head[1], self._packed(*head))
        self._memory = torch.ones(BANDWIDTH_BYTES // 4)

    def _packed(self, rows: int, columns: int) -> Any:
        return torch.ops.mkldnn._reorder_linear_weight(torch.randn(rows, columns).to(self._dtype))

    def linears(self, num_rows: int) -> Work:
        inputs = {columns: torch.randn(num_rows, columns).to(self._dtype) for columns, _ in self._weights}
        return lambda: [_product(inputs[columns], weight) for columns, weight in self._weights]

    def head(self, num_rows: int) -> Work:
        x = torch.randn(num_rows, self._head[0]).to(self._dtype)
        return lambda: _product(x, self._head[1])

    def read(self) -> None:
        self._memory.sum()


def _product(x: torch.Tensor, weight: Any) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return found


class Engine:
    """One model with a slab that holds the largest step."""

    def __init__(self, model: Model, num_blocks: int) -> None:
        self._slab = KvSlab.allocate(model.spec, num_blocks, BLOCK_SIZE, model.dtype)
        self._slab.data.zero_()  # its pages are there
        self._runner = Runner(model, self._slab, 1)
        self._runner.warm_up()

    @property
    def kv_bytes_per_token(self) -> float:
        return self._slab.bytes_per_block / BLOCK_SIZE

    def prefill(self, num_tokens: int) -> Work:
        tokens = [1 + token * 7 % 1000 for token in range(num_tokens)]
        item = StepItem(tokens, 0, list(range(-(-num_tokens // BLOCK_SIZE))), True)
        return lambda: self._runner.execute([item])

    def decode(self, batch: int, context: int) -> Work:
        each = context // BLOCK_SIZE + 1
        tables = [list(range(each * index, each * (index + 1))) for index in range(batch)]
        items = [StepItem([1 + index], context - 1, table, True) for index, table in enumerate(tables)]
        return lambda: self._runner.execute(items)


def measure(dtype: torch.dtype, rounds: int) -> tuple[Clock, float]:
    """All times, and the bytes of KV per token."""
    clock, loaded = Clock(), load_mode("none", dtype)
    spec = loaded.spec
    machine = Machine(linears(loaded), (spec.vocab_size, spec.hidden_size), dtype)
    blocks = 8 * (1000 // BLOCK_SIZE + 1)
    engine = Engine(Model(loaded), blocks)
    invariant = Engine(Model(load_mode("none", dtype), batch_invariant=True), blocks)
    others = {mode: Engine(Model(load_mode(mode, dtype)), 32) for mode in MODES if mode != "none"}
    work: dict[str, tuple[Work, int]] = {  # and how often it is done in a round
        "read": (machine.read, 3),
        **{f"linears {rows}": (machine.linears(rows), 20 if rows < 100 else 1) for rows in (1, 8, 256, 1024)},
        **{f"head {rows}": (machine.head(rows), 20) for rows in (1, 8)},
        "prefill_1024": (engine.prefill(1024), 1),
        "prefill_256": (engine.prefill(256), 1),
        "decode_b1_c256": (engine.decode(1, 256), 20),
        "decode_b8_c1000": (engine.decode(8, 1000), 10),
        **{f"{mode}_b1": (other.decode(1, 256), 20) for mode, other in others.items()},
        "invariant_prefill_256": (invariant.prefill(256), 1),
        "invariant_b1": (invariant.decode(1, 256), 20),
        "invariant_b8": (invariant.decode(8, 1000), 10),
    }
    for _ in range(rounds):  # in turns, so that a change of the machine's load meets all of them
        for name, (step, times) in work.items():
            for _ in range(times):
                clock.run(name, step)
    return clock, engine.kv_bytes_per_token


def bounds_of(best_ms: dict[str, float], kv_bytes_per_token: float) -> dict[str, float]:
    """What each step is compared with, in ms: the work that no engine of this machine could leave out; of weights and
    sums of another kind, the plain step."""
    kv_ms = 8 * 1000 * kv_bytes_per_token / (BANDWIDTH_BYTES / best_ms["read"])
    return {
        "prefill_1024": best_ms["linears 1024"],
        "prefill_256": best_ms["linears 256"],
        "decode_b1_c256": best_ms["linears 1"] + best_ms["head 1"],
        "decode_b8_c1000": best_ms["linears 8"] + best_ms["head 8"] + kv_ms,
        "int4_b1": best_ms["decode_b1_c256"],
        "int8_b1": best_ms["decode_b1_c256"],
        "invariant_prefill_256": best_ms["prefill_256"],
        "invariant_b1": best_ms["decode_b1_c256"],
        "invariant_b8": best_ms["decode_b8_c1000"],
    }


def rows_of(best_ms: dict[str, float], kv_bytes_per_token: float) -> Iterator[Row]:
    for name, bound_ms in bounds_of(best_ms, kv_bytes_per_token).items():
        yield {
            "work": name,
            "engine ms": best_ms[name],
            "bound ms": bound_ms,
            "ratio": best_ms[name] / bound_ms,
        }
    for name in ("linears 1", "linears 8", "linears 256", "linears 1024", "head 1", "head 8"):
        yield {"work": name, "engine ms": None, "bound ms": best_ms[name], "ratio": None}


def checks_of(rows: Sequence[Row], overhead_mb: float | None) -> Iterator[Check]:
    ratios = {row["work"]: row["ratio"] for row in rows}
    for name, required in REQUIRED.items():
        yield Check(name, ratios.get(name), "<=", required)
    yield Check("rss_overhead_mb", overhead_mb, "<=", MAX_OVERHEAD_MB)


def overhead_of_a_process() -> float | None:
    """MB, measured in a process of its own; None if it did not end well."""
    command = [sys.executable, "-m", "benchmarks.engine_step", "--resident-set"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=RSS_TIMEOUT_S, check=True)
    except subprocess.SubprocessError as error:
        print(f"resident set: {error}", file=sys.stderr)
        return None
    return float(json.loads(done.stdout.splitlines()[-1])["overhead_mb"])


def print_overhead() -> None:
    """In the process that is measured: as a worker loads it, with a pool whose pages are all there."""
    import ray.serve  # noqa: F401  (a worker holds these libraries too)

    dtype = resolve_dtype("auto")
    loaded = load_mode("int4", dtype)
    num_bytes = weight_bytes(loaded.weights)
    engine = Engine(Model(loaded), RSS_KV_BLOCKS)
    del loaded
    engine.prefill(1024)()
    engine.decode(1, 256)()
    gc.collect()
    kv_bytes = engine.kv_bytes_per_token * BLOCK_SIZE * RSS_KV_BLOCKS
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    print(json.dumps({"overhead_mb": (resident - num_bytes - kv_bytes) / MB, "resident_mb": resident / MB}))


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks passed; 1: one failed; 2: it cannot be measured here."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.engine_step", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of machine and engine (default 3)")
    parser.add_argument("--resident-set", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.resident_set:
        print_overhead()
        return 0
    dtype = resolve_dtype("auto")
    try:
        clock, kv_bytes_per_token = measure(dtype, arguments.rounds)
    except (BatonError, OSError) as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 2
    rows = list(rows_of(clock.best_ms, kv_bytes_per_token))
    result = Result("engine_step", 0, rows, list(checks_of(rows, overhead_of_a_process())))
    bandwidth = BANDWIDTH_BYTES / clock.best_ms["read"] / 1e6
    result.machine |= {"dtype": str(dtype).removeprefix("torch."), "read GB/s": bandwidth, "threads": 1}
    print(f"{result.machine['cpu']}, 1 thread, {result.machine['dtype']}, reads {bandwidth:.1f} GB/s")
    print(text_table([[row[name] for name in HEADER] for row in rows], HEADER))
    for check in result.checks:
        print(check)
    return conclude(result, arguments.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

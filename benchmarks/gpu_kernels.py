"""How near the GPU kernels come to what this GPU can do, and to float64.

    python -m benchmarks.gpu_kernels [--json FILE] [--layers N]

    the machine    copies 1 GiB: bytes/s;  multiplies two 8,192 x 8,192 bfloat16 matrices: FLOP/s
    each kernel    its bytes, or FLOPs, over its time, as a share of those; one decode step of an 8B shape as well
    exactness      the same wrappers at small shapes against float64 on the GPU
    the engine     whole steps through the runner: against the CPU, and recorded against not (gpu_model.py)

Times are of replayed CUDA graphs, so that launches from Python do not count; the median of several. Exit status 2 where
there is no CUDA GPU: nothing here can be measured elsewhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.result import Check, Result, conclude, text_table

NUM_TIMES = 20
COPY_BYTES = 1 << 30
GEMM_SIZE = 8192
# row -> check, least share of what the machine does
SHARES = {
    "decode attention 64 x 8,192": ("decode_attention_share", 0.8),
    "prefill attention 8,192": ("prefill_attention_8k_share", 0.55),
    "decode step 8B": ("decode_step_8b_share", 0.75),
}
HEADER = ("kernel", "ms", "GB/s", "TFLOP/s", "share")

Work = Callable[[], object]


def graph_time_s(work: Work) -> float:
    """Seconds of `work` on the GPU, captured once and replayed.

    Everything it launches is compiled and every buffer of the allocator there after the runs before the capture, which
    take place on a side stream as capturing asks for.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times_ms = []
    for _ in range(NUM_TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return float(statistics.median(times_ms)) / 1e3


def copy_bytes_per_s(time_s: Callable[[Work], float]) -> float:
    """Bytes read and bytes written."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / time_s(lambda: target.copy_(source))


def gemm_flops_per_s(time_s: Callable[[Work], float]) -> float:
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return float(2 * GEMM_SIZE**3 / time_s(lambda: torch.mm(a, b, out=out)))


def measure(num_layers: int) -> Result:
    from benchmarks import gpu_cases, gpu_exact, gpu_model  # they import the kernels, which need Triton

    device = torch.device("cuda")
    result = Result("gpu_kernels", 0)
    result.machine["gpus"] = [torch.cuda.get_device_name(device)]
    bandwidth, rate = copy_bytes_per_s(graph_time_s), gemm_flops_per_s(graph_time_s)
    result.rows.append({"kernel": "copy", "GB/s": bandwidth / 1e9, "share": 1.0})
    result.rows.append({"kernel": "matrix product", "TFLOP/s": rate / 1e12, "share": 1.0})
    for case in gpu_cases.cases(device, num_layers):
        print(f"{case.name} …", file=sys.stderr, flush=True)
        time_s = graph_time_s(case.prepare())
        row = {"kernel": case.name, "ms": time_s * 1e3, "GB/s": case.num_bytes / time_s / 1e9}
        if case.flops:
            row |= {"TFLOP/s": case.flops / time_s / 1e12, "share": case.flops / time_s / rate}
        else:
            row["share"] = case.num_bytes / time_s / bandwidth
        result.rows.append(row)
        torch.cuda.empty_cache()
    make_recorder = partial(gpu_model.CudaRecorder, device)
    for name, time_s, num_bytes in gpu_model.step_times(device, num_layers, make_recorder):
        rate = num_bytes / time_s
        result.rows.append(
            {"kernel": name, "ms": time_s * 1e3, "GB/s": rate / 1e9, "share": rate / bandwidth}
        )
    shares = {row["kernel"]: row["share"] for row in result.rows}
    result.checks += [Check(check, shares.get(name), ">=", least) for name, (check, least) in SHARES.items()]
    whole = dict(gpu_model.errors(device, make_recorder))
    for name, (error, limit) in (gpu_exact.errors(device) | whole).items():
        result.checks.append(Check(f"error {name}", error, "<=", limit))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks passed; 1: one failed; 2: it cannot be measured here."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu_kernels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--layers", type=int, default=32, help="layers of the 8B step (default 32: 25 GB)")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("cannot measure: expected a CUDA GPU but torch sees none", file=sys.stderr)
        return 2
    if find_spec("triton") is None:
        print("cannot measure: expected the library triton but it is not installed", file=sys.stderr)
        return 2
    if torch.cuda.get_device_capability() < (8, 0):
        print("cannot measure: expected compute capability 8.0 or later", file=sys.stderr)
        return 2
    result = measure(arguments.layers)
    print(text_table([[row.get(name) for name in HEADER] for row in result.rows], HEADER))
    for check in result.checks:
        print(check)
    return conclude(result, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

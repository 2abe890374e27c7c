"""Recording on a GPU: what `engine.graphs` needs of CUDA, and no more (torch.cuda.CUDAGraph).

    runs on a side stream       Triton compiles, cuBLAS takes its workspace: neither may happen while recording
    recorded on that stream     all graphs from one pool of memory: they never run at the same time, so that each may
                                use what the others used
    replay                      on the stream of the caller

NOTE: what is held of a graph's memory, here its result, no other graph takes; what is not held, any may.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.graphs import Compute

NUM_RUNS_BEFORE = 2


class CudaRecorder:
    """Implements graphs.Recorder. To be used on one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Compute) -> Compute:
        before = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_RUNS_BEFORE):
                compute()
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Of this thread only: other threads may talk to the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def used_bytes(self) -> int:
        """By anyone: a graph takes memory that torch does not count."""
        free, total = torch.cuda.mem_get_info(self._stream.device)
        return int(total - free)

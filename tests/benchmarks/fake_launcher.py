"""Stands in for `python -m coordinator.launch`: the same lines, the same way to end, a fake server behind them.

    python fake_launcher.py [--fail] --port N --config FILE

Without prefill workers its first token comes later, so that modes differ in a known way. `--fail`: ends with a reason
instead of becoming ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path

try:
    from fake_server import FakeServer
except ImportError:  # imported by a test instead of run as a process
    from tests.benchmarks.fake_server import FakeServer

TTFT_S = {"disaggregated": 0.03, "colocated": 0.09}


async def serve(port: int, script: dict[str, float]) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = await asyncio.start_server(FakeServer(script).serve, "127.0.0.1", port)
    async with server:
        print(f"\nBaton is ready after 0.1 s: http://127.0.0.1:{port}", flush=True)
        print("  model    normal", flush=True)
        await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--port", type=int)
    parser.add_argument("--config", type=Path)
    args = parser.parse_args()
    print("[  0.0 s] starting Ray", flush=True)
    if args.fail:
        raise SystemExit("baton: start failed: as asked")
    num_prefills = json.loads(args.config.read_text())["prefill"]["num_replicas"]
    mode = "disaggregated" if num_prefills else "colocated"
    asyncio.run(serve(args.port, {"ttft_s": TTFT_S[mode], "gap_s": 0.002}))


if __name__ == "__main__":
    main()

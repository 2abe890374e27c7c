"""Command-line options of a load run, shared by every command that makes one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from benchmarks.client import Endpoint
from benchmarks.metrics import Slo
from benchmarks.spec import Arrival, Lengths, LoadSpec, PrefixSpec, TraceSpec, TurnSpec


def add_server_options(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("url", help="e.g. http://127.0.0.1:8000, with or without /v1")
    server.add_argument("--model", default="", help="default: the first that /v1/models names")
    server.add_argument("--endpoint", choices=get_args(Endpoint), default="chat")
    server.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY"
    )
    server.add_argument(
        "--plain", action="store_true", help="send OpenAI's own fields only; answers may end early"
    )
    server.add_argument("--tokenizer", type=Path, help="GGUF file or folder, if the server has no /tokenize")
    server.add_argument("--timeout-s", type=float, default=600.0, help="patience with one request")
    server.add_argument("--seed", type=int, default=0)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--arrival", choices=get_args(Arrival), default="poisson")
    load.add_argument("--rate", type=float, default=1.0, help="requests/s of open arrivals")
    load.add_argument("--burstiness", type=float, default=1.0, help="shape of gamma arrivals, 1/CV²")
    load.add_argument("--concurrency", type=int, default=1, help="of closed arrivals")
    load.add_argument("--num-requests", type=int, default=100)
    load.add_argument("--input-tokens", type=Lengths.parse, default=Lengths(256, 256), metavar="N|LOW:HIGH")
    load.add_argument("--output-tokens", type=Lengths.parse, default=Lengths(64, 64), metavar="N|LOW:HIGH")
    load.add_argument("--prefix-tokens", type=int, help="prompts begin with a shared text of this length")
    load.add_argument("--num-prefixes", type=int, default=1)
    load.add_argument("--turns", type=int, default=1, help="turns of a conversation")
    load.add_argument("--think-time-s", type=float, default=0.0, help="between two turns")
    trace = parser.add_argument_group("trace")
    trace.add_argument("--trace", help="file, or name of an excerpt in benchmarks/data: lengths and prefixes")
    trace.add_argument("--time-scale", type=float, default=1.0, help="replay this many times as fast")
    trace.add_argument("--length-scale", type=float, default=1.0, help="multiply prompt and answer lengths")
    trace.add_argument("--max-tokens", type=int, help="leave out requests longer than this after scaling")
    trace.add_argument(
        "--jitter-s", type=float, default=0.0, help="grain of the recorded times (Mooncake: 3)"
    )
    rules = parser.add_argument_group("what counts")
    rules.add_argument("--num-warmups", type=int, default=0, help="requests before the run, not recorded")
    rules.add_argument("--ramp-s", type=float, default=0.0, help="first arrivals that do not count")
    rules.add_argument("--drain-s", type=float, default=0.0, help="last arrivals that do not count")
    rules.add_argument("--slo-ttft-ms", type=float)
    rules.add_argument("--slo-tpot-ms", type=float)


def spec_from(args: argparse.Namespace) -> LoadSpec:
    """Raises ValueError for options that contradict each other."""
    trace = prefix = None
    if args.trace:
        trace = TraceSpec(args.trace, args.time_scale, args.length_scale, args.max_tokens, args.jitter_s)
    if args.prefix_tokens:
        prefix = PrefixSpec(args.prefix_tokens, args.num_prefixes)
    return LoadSpec(
        url=args.url,
        model=args.model,
        endpoint=args.endpoint,
        api_key=args.api_key,
        is_plain=args.plain,
        tokenizer=args.tokenizer,
        arrival=args.arrival,
        rate=args.rate,
        burstiness=args.burstiness,
        concurrency=args.concurrency,
        num_requests=args.num_requests,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        trace=trace,
        prefix=prefix,
        turns=TurnSpec(args.turns, args.think_time_s),
        seed=args.seed,
        slo=slo_from(args),
        num_warmups=args.num_warmups,
        ramp_s=args.ramp_s,
        drain_s=args.drain_s,
        timeout_s=args.timeout_s,
    )


def slo_from(args: argparse.Namespace) -> Slo | None:
    if args.slo_ttft_ms is None and args.slo_tpot_ms is None:
        return None
    return Slo(_seconds(args.slo_ttft_ms), _seconds(args.slo_tpot_ms))


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000.0

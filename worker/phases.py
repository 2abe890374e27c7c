"""What the chassis needs of the two phases, which `prefill` and `decode` implement and the composition root injects."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from contracts.config import EngineConfig
from contracts.errors import BatonError
from contracts.messages import HandoffState
from contracts.request import GenerateRequest
from engine.blocks import BlockPool, Hold, HoldState
from engine.loop import Emit, Phase
from engine.sequence import EndRules, Sequence


class KvSink(Protocol):
    """Where the KV of one request goes; kvtransfer.outgoing.Outgoing. Thread-safe, never blocks.

    `ready` comes first when the blocks exist (with the tokens already cached, maybe 0) and after every chunk; then
    exactly one of `finish` and `abort`, unless the request is cancelled: then the canceller aborts.
    """

    def ready(self, num_tokens: int, block_ids: SequenceOf[int]) -> None:
        """KV of tokens [0, num_tokens) is in `block_ids`, which may be read until the handoff is done."""

    def finish(self, state: HandoffState) -> None:
        """Nothing more comes; pass `state` on."""

    def abort(self) -> None:
        """No handoff: the request has ended here, and the coordinator hears so from here. Maybe before any `ready`."""


class Prefiller(Phase, Protocol):
    """prefill.phase.PrefillPhase. All methods on the engine thread."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def add(self, seq: Sequence, sink: KvSink | None, hold: Hold | None) -> None:
        """Compute `seq`'s missing tokens: into `hold` (local), or into blocks of its own that go to `sink`."""

    def cancel(self, request_id: str) -> Hold | None:
        """Forget the request. Returns the hold that the caller must release once the sink no longer reads it."""

    def handed_off(self, request_id: str, error: BatonError | None) -> None:
        """The sink no longer reads the blocks: release them."""


class Decoder(Phase, Protocol):
    """decode.phase.DecodePhase. `reserve` from any thread, the rest on the engine thread."""

    num_preemptions: int

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def reserve(self, request: GenerateRequest, state: HoldState, num_more: int = 0) -> Hold | None:
        """Blocks for all known tokens, the next one and `num_more`, or None: no room now."""

    def adopt(self, seq: Sequence) -> None:
        """Go on from KV that is all there; the first token is drawn and sent already."""

    def migrate(self, request_id: str, sink: KvSink, num_known: int, max_tokens: int) -> bool:
        """Let a running request leave while it runs; the target knows `num_known` tokens. False: it does not run."""

    def pass_on(self, request_id: str) -> None:
        """All full blocks of a request that leaves are at the target: stop it and pass on the rest."""

    def handed_off(self, request_id: str, error: BatonError | None) -> bool:
        """The sink no longer reads the blocks. Whether the request goes on here."""

    def cancel(self, request_id: str) -> None:
        """Forget the request and release its blocks."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Both phases of one worker, wired to each other."""

    prefill: Prefiller
    decode: Decoder


class PhaseFactory(Protocol):
    """How the composition root tells a worker which phases to run. Picklable by reference."""

    def __call__(self, pool: BlockPool, config: EngineConfig, ends: EndRules, emit: Emit) -> Phases: ...

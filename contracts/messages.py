"""Every message between a coordinator and a worker, and between two workers' kvtransfer.

Frames are msgpack maps {v, kind, ...fields} (see wire.py). Durations cross processes, timestamps never do.

Version log (bump PROTOCOL_VERSION when an old peer would misread a message; new optional fields need no bump):
    1  first version
    2  Hello.data_address lists every transport; small probes are echoed; Data.checksum is xxh3, 0: none;
       ChunkDone grants; Fin may come before the last bytes
    3  SamplingParams may mask (allowed and bad tokens, grammar) and ask for the prompt's logprobs, told in Token
    4  Orders; Status.duty; Migrate and Stayed; Reserve.num_more and HandoffState.output_ids: a handoff may grow
    5  Tokens are tuples
    6  Keep: slots that a connection holds; Data may follow Open at once
    7  Cached: what a worker's prefix cache has gained and lost
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from contracts.blocks import BlockAudit, BlockOwner, KvLayout
from contracts.cached import Cached
from contracts.errors import WireError
from contracts.request import Finished, GenerateRequest, Token
from contracts.roles import Duty, Orders
from contracts.steps import LinkReport, StepReport
from contracts.ticket import Ticket

PROTOCOL_VERSION = 7

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is, in this life. `role` is its pool's. `incarnation` grows with every restart; `port` serves
    coordinators, `kv_port` peers.
    """

    worker_id: str
    role: Role
    pid: int
    incarnation: int
    host: str
    port: int
    kv_port: int
    model_fingerprint: str
    layout: KvLayout
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    replica_id: str = ""


# --- connection set-up (both kinds of connection) ---


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of each side. `nonce` is answered by the peer's Proof. `fingerprint` is compared before all else."""

    sender_id: str
    incarnation: int
    purpose: str  # "commands" | "kv"
    nonce: bytes
    fingerprint: str = ""
    layout: KvLayout | None = None
    data_address: str = ""  # kv only: where the accepting side's transports listen, "name=address …"
    bind_token: bytes = b""  # kv only: which accepted data link belongs to this connection
    slot_bytes: int = 0  # kv only: size of one staging slot, an upper bound for one Data; 0: not told
    wire_dtype: str = ""  # kv only: "fp8": KV may be rounded (kvtransfer/fp8.py); "": as the layout says


@dataclass(frozen=True, slots=True)
class Proof:
    """HMAC-SHA256(secret, peer's nonce + own nonce + own sender_id + own incarnation)."""

    mac: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a connection is closed by the sender of this frame."""

    error: WireError


# --- coordinator -> worker ---


@dataclass(frozen=True, slots=True)
class Reserve:
    """Grant blocks for the whole request here. `handoff_id` "" means: this worker will prefill it itself.
    `num_more`: room for so many tokens that are drawn elsewhere while the KV is on its way here.
    """

    request: GenerateRequest
    handoff_id: str
    lease_s: float
    num_more: int = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the prompt. With a ticket: push KV from token `skip_tokens` on to the ticket's target, then stop after
    the first drawn token. Without: the reservation is on this very worker, which goes on decoding."""

    request: GenerateRequest
    ticket: Ticket | None = None
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Migrate:
    """Hand `request_id`, which is decoded here, to the ticket's target while it goes on: KV from token `skip_tokens`
    on, of at most `max_tokens` tokens in all. The ticket is for what the coordinator knew of it; what was drawn since
    follows with the state. The answer is HandedOff, Stayed, or its end.
    """

    request_id: str
    ticket: Ticket
    skip_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Forget the request, in any state, at once. Unknown ids are ignored. No answer is sent for it any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Peers:
    """The workers to hold kv connections with, all that this one may hand over to. Replaces the previous list."""

    workers: tuple[WorkerInfo, ...]


@dataclass(frozen=True, slots=True)
class AskAudit:
    call_id: int


# --- worker -> coordinator ---


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks granted. `num_cached_tokens` tokens of the prompt are already here and need not be sent."""

    request_id: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens of one step for this coordinator, one frame: (request_id, index, token_id); those that say more."""

    plain: tuple[tuple[str, int, int], ...] = ()
    detailed: tuple[tuple[str, Token], ...] = ()

    @classmethod
    def of(cls, items: Sequence[tuple[str, Token]]) -> Tokens:
        plain = tuple((name, token.index, token.token_id) for name, token in items if token.is_plain)
        return cls(plain, tuple(item for item in items if not item[1].is_plain))


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The target has everything and goes on alone. `exposed_s`: the part of the transfer not hidden behind compute."""

    request_id: str
    num_bytes: int
    exposed_s: float
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stayed:
    """A migration came to nothing before the request was out of hand: it goes on here."""

    request_id: str
    error: WireError


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal event of a request on this worker: `finished` or `error`, never both, never neither."""

    request_id: str
    finished: Finished | None = None
    error: WireError | None = None


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """Something that happened on a kv connection, `age_s` ago, in words for people."""

    age_s: float
    text: str


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A kv connection as its sending side sees it, after the self-test. `is_slow`: ready, but far below what such a
    path promises; `detail` says why. `events` are the latest, oldest first. `link`: learnt since, while ready.
    """

    worker_id: str
    is_ready: bool
    transport: str = ""
    gigabytes_per_s: float = 0.0
    detail: str = ""
    is_slow: bool = False
    events: tuple[PeerEvent, ...] = ()
    link: LinkReport | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """Heartbeat, once a second and on change. `step_age_s`: since the engine thread last proved that it is alive.

    `counters` are monotonic totals by metric name (contracts/metrics.py, the worker-owned ones). `labelled` are
    worker-owned metrics with labels of their own: name -> label values, joined by "," -> value. `reason` says why it
    is not ready. `duty` None: its pool's role. `coordinators`: ids of those that are connected, sorted. `is_draining`:
    it ends soon; whoever can shall leave, and nobody come. `num_foreign`, `num_foreign_tokens`: requests here, and
    prompt tokens to be read, of other coordinators than the one that is told.
    """

    worker_id: str
    incarnation: int
    is_ready: bool
    step_age_s: float
    num_running: int
    num_waiting: int
    audit: BlockAudit
    peers: tuple[PeerStatus, ...] = ()
    counters: dict[str, float] = field(default_factory=dict)
    steps: StepReport | None = None
    labelled: dict[str, dict[str, float]] = field(default_factory=dict)
    reason: str = ""
    duty: Duty | None = None
    coordinators: tuple[str, ...] = ()
    is_draining: bool = False
    num_foreign: int = 0
    num_foreign_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AuditReply:
    call_id: int
    audit: BlockAudit
    owners: tuple[BlockOwner, ...] = ()


# --- kvtransfer: prefill (P) <-> decode (D) ---


@dataclass(frozen=True, slots=True)
class Open:
    """P -> D: this ticket's request is here, maybe in line; its KV comes from token `start` on. It ends D's
    lease: from now on the reservation lives as long as the connection, until Fin or Abort. D may answer Abort.
    """

    ticket: Ticket
    start: int


@dataclass(frozen=True, slots=True)
class Want:
    """P -> D: chunks ready to send since Open, in total, but for those in kept slots (repeated, it adds nothing). D
    grants no more slots than that. `handoff_id` "" asks for slots for the self-test."""

    handoff_id: str
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Keep:
    """P -> D after the self-test: keep up to `num_slots` slots granted to this connection, by Grants to handoff "",
    each for one Data of any handoff that P has opened. When D is through with its bytes, it grants another."""

    num_slots: int


@dataclass(frozen=True, slots=True)
class Grant:
    """D -> P: `slots` are yours; each may carry one Data, whose tag is the slot. Handoff "": one Probe, or see Keep."""

    handoff_id: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Data:
    """P -> D: slot `slot` carries tokens [low, high), `num_bytes` bytes with `checksum`, layout of kvtransfer/pages.py.
    Sent before the bytes; D receives them only when it has read this.
    """

    handoff_id: str
    chunk: int
    slot: int
    low: int
    high: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """D -> P: the chunk is scattered (is_ok) or must be sent again; the slot is free again either way.

    `granted`: slots for the same handoff, as in Grant; one message less per chunk.
    """

    handoff_id: str
    chunk: int
    slot: int
    is_ok: bool
    granted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HandoffState:
    """What travels with the KV: everything sampling needs that the target does not already have from Reserve.

    The draw is keyed by (seed, position) and penalties follow from the tokens, so the tokens are the state. KV of all
    tokens but `first_token` is there; `output_ids` are those before it that Reserve did not know yet.
    """

    first_token: Token
    num_cached_tokens: int = 0
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fin:
    """P -> D: all chunks are acknowledged; take over from `state`. Idempotent by handoff_id."""

    handoff_id: str
    num_chunks: int
    state: HandoffState


@dataclass(frozen=True, slots=True)
class Commit:
    """D -> P: the request is D's now; P may let go of its blocks."""

    handoff_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Either side: the handoff is over, without result. After P's Abort or AbortOk, P sends no Data for it
    any more. `error` None, from P only: the request has ended there, by itself or by its coordinator's word; D
    lets go and has nothing to tell.
    """

    handoff_id: str
    error: WireError | None = None


@dataclass(frozen=True, slots=True)
class AbortOk:
    handoff_id: str


@dataclass(frozen=True, slots=True)
class Probe:
    """P -> D self-test: slot `slot` carries `num_bytes` bytes with this checksum. D answers ProbeDone."""

    slot: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ProbeDone:
    slot: int
    is_ok: bool


@dataclass(frozen=True, slots=True)
class Ping:
    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    number: int


Message = (
    Hello | Proof | Refusal
    | Reserve | Prefill | Migrate | Cancel | Peers | Orders | AskAudit
    | Reserved | Tokens | HandedOff | Stayed | Ended | Status | AuditReply | Cached
    | Open | Want | Keep | Grant | Data | ChunkDone | Fin | Commit | Abort | AbortOk | Probe | ProbeDone | Ping | Pong
)  # fmt: skip

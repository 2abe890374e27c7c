"""Every error Baton raises on purpose, and what a client or a retry may conclude from it.

    BatonError
    ├── RequestError            the caller's fault: the same request fails again          400
    │   ├── ContextLengthError  prompt (+ asked output) does not fit the context          400
    │   ├── GrammarError        no output can follow the grammar (any further)            400
    │   ├── AuthenticationError missing or wrong key                                      401
    │   ├── PermissionDenied    known caller, not allowed                                 403
    │   ├── NotFoundError       unknown model or route                                    404
    │   ├── MethodError         known route, wrong method                                 405
    │   ├── PayloadTooLarge     body over the cap                                         413
    │   └── UnsupportedError    a field we know and do not implement                      400
    ├── Fault                   ours: a bug, a bad set-up, a broken peer                  500
    │   ├── ConfigError         start-up input is wrong; names the field
    │   ├── EngineError         a step failed on the device
    │   └── ProtocolError       a peer sent what the protocol does not allow
    └── TryAgain                transient: the same request may succeed elsewhere/later   503
        ├── OverloadedError     no capacity, queue full, draining
        ├── DrainingError       the worker leaves in order and finishes nothing more
        ├── OutOfMemory         the device had no memory for a step
        ├── WorkerLostError     a worker or its connection died
        ├── HandoffError        KV could not be passed on; nothing wrong was computed
        ├── LeaseExpiredError   a reservation outlived its lease
        ├── RateLimitError      the caller's own quota is used up                         429
        ├── ConflictError       the same request is at work already                       409
        └── DeadlineError       a wait ended at its deadline                              504

Status, OpenAI `type`, string `code` and the retry flag sit on the class; `coordinator/http` maps them in one place.
Errors cross processes as `WireError` (code, message, retry_after_s) and are rebuilt by `from_wire`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


class BatonError(Exception):
    """Base of all deliberate errors. `str(error)` is safe to show to a client unless the class is a `Fault`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(BatonError):
    """The caller's fault."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"


class GrammarError(RequestError):
    code = "invalid_grammar"


class AuthenticationError(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


class NotFoundError(RequestError):
    status = 404
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class MethodError(RequestError):
    status = 405
    code = "method_not_allowed"


class PayloadTooLarge(RequestError):
    status = 413
    code = "request_too_large"


class UnsupportedError(RequestError):
    code = "unsupported"


class Fault(BatonError):
    """Ours. Its message goes to the log, not to the client."""


class ConfigError(Fault):
    code = "config_error"


class EngineError(Fault):
    code = "engine_error"


class ProtocolError(Fault):
    code = "protocol_error"


class TryAgain(BatonError):
    """Transient. The flow may retry elsewhere before the client notices; else 503 + Retry-After."""

    status = 503
    code = "overloaded"
    retryable = True


class OverloadedError(TryAgain):
    code = "overloaded"


class DrainingError(TryAgain):
    code = "draining"


class OutOfMemory(TryAgain):
    """`MemoryError` and torch's own, as an end of the requests that were in the step."""

    code = "out_of_memory"


class WorkerLostError(TryAgain):
    code = "worker_lost"


class HandoffError(TryAgain):
    code = "handoff_failed"


class LeaseExpiredError(TryAgain):
    code = "lease_expired"


class RateLimitError(TryAgain):
    """The caller's quota, not our capacity; raised before any work."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ConflictError(TryAgain):
    status = 409
    type = "invalid_request_error"
    code = "conflict"


class DeadlineError(TryAgain):
    status = 504
    code = "timeout"


@dataclass(frozen=True, slots=True)
class WireError:
    """An error on its way between processes."""

    code: str
    message: str
    retry_after_s: float | None = None


_BY_CODE: dict[str, type[BatonError]] = {
    cls.code: cls
    for cls in (
        Fault,
        RequestError,
        ContextLengthError,
        GrammarError,
        UnsupportedError,
        ConfigError,
        EngineError,
        ProtocolError,
        OverloadedError,
        DrainingError,
        OutOfMemory,
        WorkerLostError,
        HandoffError,
        LeaseExpiredError,
        DeadlineError,
    )
}


def to_wire(error: BaseException) -> WireError:
    """Any exception as a `WireError`; one that is not ours becomes `internal_error` with its type named."""
    if isinstance(error, BatonError):
        return WireError(error.code, error.message, error.retry_after_s)
    return WireError(Fault.code, f"{type(error).__name__}: {error}")


def from_wire(error: WireError) -> BatonError:
    """The error a peer reported; an unknown code (a newer peer) becomes a `Fault`."""
    return _BY_CODE.get(error.code, Fault)(error.message, retry_after_s=error.retry_after_s)

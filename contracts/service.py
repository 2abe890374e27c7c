"""What one request was promised, and in whose name it waits. Lives in the coordinator; workers never hear of it.

    header, body, key, config ──► Service ──► its place in the line, its workers, its account when it ends

Classes: interactive has somebody waiting in front of it; batch wants to be done some day; best_effort takes what is
left. The last two are the leftover classes: they use capacity that interactive requests leave, and give way to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ServiceClass = Literal["interactive", "batch", "best_effort"]
CLASSES: tuple[ServiceClass, ...] = get_args(ServiceClass)
"""In the order in which they are served."""


@dataclass(frozen=True, slots=True)
class Service:
    """`ttft_s`: from arrival to first token; `itl_s`: mean time between two tokens of the answer. None: no promise."""

    service_class: ServiceClass = "interactive"
    ttft_s: float | None = None
    itl_s: float | None = None
    tenant: str = ""

    @property
    def is_leftover(self) -> bool:
        return self.service_class != "interactive"

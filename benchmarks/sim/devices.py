"""Devices as the simulator sees them: how long a step takes, how much KV fits, how fast KV leaves.

Step times are fits of kernel tables measured with vLLM 0.24 (ai-dynamo/aiconfigurator at 095f58a, Apache-2.0), summed
up to whole models: prefill(N) = a + b·N + c·N², decode(B) = a + b·B + c·ΣKV, mean error 2–3%, at most 8%. Host time per
step is what vLLM's public latency rows need on top (8B: 1.3 ms, 70B on 4 GPUs: 3 ms). A fused step computes decodes at
the price of prompt tokens but never ends before its decodes alone would. KV bytes per token: 2·layers·kv heads·head
dim·2 bytes. KV that fits: 90% of memory less weights. Links: 400 Gbit/s per GPU, 90% of it used.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy.step_model import Coefficients, StepModel


@dataclass(frozen=True, slots=True)
class Device:
    """One worker's hardware with its model. Times in seconds; `square_s` multiplies (past + new)² - past²;
    `fused_stream_s`: of a decode beside prompts, None for that of a prompt token.
    """

    name: str
    prefill_base_s: float
    token_s: float
    square_s: float
    decode_base_s: float
    stream_s: float
    context_s: float
    host_s: float
    kv_bytes_per_token: int
    kv_tokens: int
    link_bytes_per_s: float
    max_streams: int = 512
    fused_stream_s: float | None = None

    def decode_step_s(self, num_decodes: int, context: float) -> float:
        return self.host_s + self.decode_base_s + self.stream_s * num_decodes + self.context_s * context

    def step_s(self, new_tokens: int, attended: float, num_decodes: int, context: float) -> float:
        fused_stream_s = self.token_s if self.fused_stream_s is None else self.fused_stream_s
        fused_s = (
            self.host_s
            + self.prefill_base_s
            + self.token_s * new_tokens
            + fused_stream_s * num_decodes
            + self.square_s * attended
            + self.context_s * context
        )
        return max(fused_s, self.decode_step_s(num_decodes, context)) if num_decodes else fused_s

    def step_model(self, error: float = 0.0) -> StepModel:
        """What a start-up sweep would have found, all of it wrong by `error` (0.3: believed 30% slower)."""
        factor = 1.0 + error
        return StepModel(
            Coefficients(
                factor * (self.host_s + self.decode_base_s),
                decode_s=factor * self.stream_s,
                context_s=factor * self.context_s,
            ),
            Coefficients(
                factor * (self.host_s + self.prefill_base_s),
                factor * self.token_s,
                factor * self.square_s,
                factor * (self.token_s if self.fused_stream_s is None else self.fused_stream_s),
                factor * self.context_s,
            ),
            doubt=0.1,
        )


def _device(
    name: str, prefill: tuple[float, float, float], decode: tuple[float, float, float], rest: _Rest
) -> Device:
    """`prefill` in ms, µs, ns; `decode` in ms, µs, ns: the units of the published fits."""
    return Device(
        name,
        prefill[0] * 1e-3,
        prefill[1] * 1e-6,
        prefill[2] * 1e-9,
        decode[0] * 1e-3,
        decode[1] * 1e-6,
        decode[2] * 1e-9,
        *rest,
    )


_Rest = tuple[float, int, int, float]
_KIB = 1024
_LLAMA_8B_KV, _LLAMA_70B_KV = 128 * _KIB, 320 * _KIB
_LINK = 45e9

DEVICES = {
    device.name: device
    for device in (
        _device(
            "h100-8b", (3.18, 18.04, 0.662), (6.30, 10.8, 41.5), (1.3e-3, _LLAMA_8B_KV, 425_000, _LINK)
        ),
        _device(
            "h200-8b", (1.98, 18.43, 0.647), (4.92, 10.5, 30.0), (1.3e-3, _LLAMA_8B_KV, 845_000, _LINK)
        ),
        _device(
            "h100-70b-tp4", (8.65, 58.0, 0.969), (15.6, 34.7, 27.1), (3e-3, _LLAMA_70B_KV, 450_000, 4 * _LINK)
        ),
        _device(
            "h200-70b-tp4", (5.97, 58.1, 0.962), (12.4, 34.2, 19.4), (3e-3, _LLAMA_70B_KV, 1_120_000, 4 * _LINK)
        ),
    )
}  # fmt: skip

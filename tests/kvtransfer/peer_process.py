"""An endpoint in a process of its own: `decode` waits for handoff "h", `prefill` opens it and never ends it.

Arguments: role, transport, port of the peer.
"""

from __future__ import annotations

import asyncio
import sys

from tests.kvtransfer.tools import HOST, Handoff, Pair, Side, make_config, make_info, until

NUM_TOKENS = 100
NUM_READY = 60


async def main(role: str, transport: str, port: int) -> None:
    side = Side(role[0], 1 if role == "prefill" else 2, make_config(transport=transport))
    own_port = await side.endpoint.start(HOST)
    handoff = Handoff(Pair(side, side, port), NUM_TOKENS, 0, handoff_id="h")
    if role == "decode":
        handoff.expect()
    else:
        side.endpoint.set_peers([make_info(port)])
        await until(lambda: side.endpoint.peer_statuses()[0].is_ready)
        handoff.open(NUM_READY)
    print(own_port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await side.endpoint.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))

"""The listening end of a link in a process of its own: accepts, posts nothing, lives until its input ends."""

from __future__ import annotations

import asyncio
import sys

from kvtransfer.transport import TOKEN_BYTES
from tests.kvtransfer.links import make_transport

TOKEN = b"p" * TOKEN_BYTES


async def main(name: str) -> None:
    transport = make_transport(name)
    print(await transport.listen(), flush=True)
    link = await transport.accept(TOKEN, 60.0)
    print("accepted", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await link.close()
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

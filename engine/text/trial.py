"""Grammars are tried where they can do no harm: a hostile one may crash the library that compiles it, or never end.

    GrammarTrial.check(source) ──a socket──► nursery ──fork──► a process of its own: compiled, and followed a while
                                                                  └► passed │ why not │ it crashed │ its time is over

A process that somebody else ended is asked for again.

Several are tried at once, each with a bound on its processor time, a few of one tenant; so what one of them costs, the
others hardly notice. What passed here is compiled again by the workers, which ask no questions: the same library, the
same limits.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import weakref
from collections import OrderedDict, defaultdict
from contextlib import suppress
from dataclasses import dataclass

from contracts.errors import OverloadedError, RequestError
from engine.text.grammar import NUM_KEPT, check_size
from engine.text.nursery import KILLED, PASSED
from engine.text.tokenizer import TextModel

CPU_S = 1.0  # of one grammar
ANSWER_TIMEOUT_S = 30.0  # of one that has begun
START_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 30.0
NUM_AT_ONCE, NUM_AT_ONCE_OF_ONE = 8, 3
_NUM_TRIES = 2  # whoever ended the first was no grammar: what a grammar ends is its own child
_PIECE_BYTES = 1 << 16
# Threads that would be of no use there, and are in the way of a fork.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class GrammarTrial:
    """Of one model. Its nursery starts with the first grammar, and ends with this object or with its own process."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._holder: list[_Nursery] = []
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)
        self._slots_of: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(NUM_AT_ONCE_OF_ONE)
        )
        self._answers: OrderedDict[str, _Answer] = OrderedDict()  # by source
        weakref.finalize(self, _end, self._holder)

    async def check(self, source: str, tenant: str = "") -> str:
        """The source as workers compile it.

        Raises RequestError for what no output can follow, what crashes the compiler, and what costs too much;
        OverloadedError if others' grammars, or the tenant's own, are in its way for WAIT_TIMEOUT_S.
        """
        check_size(source)
        answer = self._answers.get(source)
        if answer is None:
            try:
                async with asyncio.timeout(WAIT_TIMEOUT_S) as patience, self._slots_of[tenant], self._slots:
                    patience.reschedule(None)
                    answer = self._answers.get(source)  # somebody before in the line may have had the same
                    if answer is None:
                        answer = await self._tried(source)
            except TimeoutError as error:
                raise OverloadedError("too many new grammars at once", retry_after_s=5.0) from error
            self._answers[source] = answer
            if len(self._answers) > NUM_KEPT:
                self._answers.popitem(last=False)
        if answer.refusal:
            raise RequestError(answer.refusal)
        return answer.source

    async def _tried(self, source: str) -> _Answer:
        for _ in range(_NUM_TRIES):
            async with self._starting:
                if not self._holder or self._holder[0].process.poll() is not None:
                    await self._start()
                nursery = self._holder[0]
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    answer = await _ask(nursery.control, source.encode())
            except TimeoutError as error:
                raise OverloadedError("the process that compiles grammars did not answer") from error
            except EOFError:  # it is ending, or has ended
                nursery.end()
                continue
            if answer.startswith(PASSED):
                return _Answer(answer.removeprefix(PASSED).decode())
            if answer != KILLED:
                return _Answer("", refusal=answer.decode())
        raise OverloadedError("the process that compiles grammars was ended from outside")

    async def _start(self) -> None:
        """Raises OverloadedError if the nursery does not come up."""
        _end(self._holder)
        starting = [_Nursery()]
        try:
            parts = await asyncio.to_thread(lambda: json.dumps(self._text.parts()).encode())
            async with asyncio.timeout(START_TIMEOUT_S):
                await _ask(starting[0].control, parts)
            self._holder.append(starting.pop())
        except (TimeoutError, EOFError) as error:
            raise OverloadedError("the process that compiles grammars did not start") from error
        finally:  # also if whoever asked first has left meanwhile
            _end(starting)


@dataclass(frozen=True, slots=True)
class _Answer:
    source: str
    refusal: str = ""


class _Nursery:
    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        command = [sys.executable, "-m", "engine.text.nursery", str(os.getpid()), str(CPU_S)]
        with theirs:
            # A session of its own: a Ctrl-C is for whoever made it.
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), start_new_session=True, env=os.environ | _ENVIRONMENT
            )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


async def _ask(control: socket.socket, question: bytes) -> bytes:
    """The whole answer. Raises EOFError if there is nobody any more who could give one."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    found = b""
    with ours, suppress(ConnectionError):
        with theirs:
            socket.send_fds(control, [b"?"], [theirs.fileno()])
        ours.setblocking(False)
        await loop.sock_sendall(ours, question)
        ours.shutdown(socket.SHUT_WR)
        while piece := await loop.sock_recv(ours, _PIECE_BYTES):
            found += piece
    if not found:
        raise EOFError
    return found


def _end(holder: list[_Nursery]) -> None:
    while holder:
        nursery = holder.pop()
        nursery.control.close()
        nursery.end()

"""Grammars are tried where they can do no harm: a hostile one may crash the library that compiles it, or never end.

    GrammarTrial.check(source) ──line──► a process of its own: Grammars.compile ──line──► passed │ why not
            └ no answer in time, or the process has crashed: the grammar is refused, and the next one gets a new process

What passed here is compiled again by the workers, which ask no questions: the same library, the same limits.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from contracts.errors import OverloadedError, RequestError
from engine.text.grammar import NUM_KEPT, Grammars, regex_grammar
from engine.text.tokenizer import TextModel

COMPILE_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
WAIT_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1


class GrammarTrial:
    """Of one model. Its process starts with the first grammar, and ends with this object or with its own process."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._thread = ThreadPoolExecutor(
            1, "grammar-trial"
        )  # one grammar at a time; others wait in its line
        self._holder: list[subprocess.Popen[bytes]] = []
        self._answers: OrderedDict[str, str] = OrderedDict()  # by source: why it is refused, "" if it is not
        weakref.finalize(self, _finish, self._thread, self._holder)

    async def check(self, source: str) -> None:
        """Raises RequestError for what no output can follow, what crashes the compiler, and what takes it longer than
        COMPILE_TIMEOUT_S; OverloadedError if others' grammars keep it busy for WAIT_TIMEOUT_S.
        """
        answer = self._answers.get(source)
        if answer is None:
            try:
                async with asyncio.timeout(WAIT_TIMEOUT_S):
                    answer = await asyncio.wrap_future(self._thread.submit(self._tried, source))
            except TimeoutError as error:
                raise OverloadedError(
                    "too many new grammars at once", retry_after_s=COMPILE_TIMEOUT_S
                ) from error
            self._answers[source] = answer
            if len(self._answers) > NUM_KEPT:
                self._answers.popitem(last=False)
        if answer:
            raise RequestError(answer)

    def _tried(self, source: str) -> str:
        if answer := self._answers.get(source):
            return answer  # somebody before in the line had the same
        if not self._holder or self._holder[0].poll() is not None:
            self._start()
        try:
            return str(_ask(self._holder[0], source, COMPILE_TIMEOUT_S))
        except TimeoutError:
            _end(self._holder)
            return f"expected a grammar that compiles within {COMPILE_TIMEOUT_S:g} s"
        except EOFError:
            _end(self._holder)
            return "expected a grammar that its compiler can take but it crashed"

    def _start(self) -> None:
        """Raises OverloadedError if the process does not come up."""
        _end(self._holder)
        command = [sys.executable, "-m", "engine.text.trial", str(os.getpid())]
        # A session of its own: a Ctrl-C is for whoever made it.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._holder.append(process)
        try:
            _ask(process, self._text.parts(), START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            _end(self._holder)
            raise OverloadedError("the process that compiles grammars did not start") from error


def _ask(process: subprocess.Popen[bytes], what: object, timeout_s: float) -> object:
    """Raises TimeoutError, and EOFError if there is nobody any more."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(what).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise EOFError from error
    deadline_s, found = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not found.endswith(b"\n"):
            if not selector.select(max(deadline_s - time.monotonic(), 0.0)):
                raise TimeoutError
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                raise EOFError
            found += piece
    return json.loads(found)


def _end(holder: list[subprocess.Popen[bytes]]) -> None:
    while holder:
        process = holder.pop()
        process.kill()
        with suppress(BrokenPipeError):  # what it was told and did not read
            process.communicate()


def _finish(thread: ThreadPoolExecutor, holder: list[subprocess.Popen[bytes]]) -> None:
    thread.shutdown(wait=False, cancel_futures=True)
    _end(holder)


def main() -> None:
    """Answers on stdout, a line for each line of stdin: first the tokenizer, then sources."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # whoever asked is gone already
    grammars = Grammars(TextModel.of_parts(json.loads(sys.stdin.readline())))
    grammars.compile(regex_grammar("a?"))  # makes the token tree
    print('""', flush=True)
    for line in sys.stdin:
        answer = ""
        try:
            grammars.compile(json.loads(line))
        except RequestError as error:
            answer = error.message
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

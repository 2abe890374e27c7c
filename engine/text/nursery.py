"""The process in which grammars are tried: it holds the model's tokens, and forks a child for each grammar.

    stdin: a socket ──► connections ──► the first: the tokenizer ─► "ready"
                                        each other one: a source ─► fork ─► the child's answer: PASSED, or why not
                                                                    what ended a child without one, the nursery tells,
                                                                    KILLED if that was none of its grammar's doing

A child is bounded by the kernel: processor time by a timer, since no Python runs while the library is at work, and
memory. It is nice: those who generate go first.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

import numpy as np

from contracts.errors import RequestError
from engine.text.grammar import Grammars, GrammarState, regex_grammar, translated
from engine.text.shortest import check_shortest
from engine.text.tokenizer import TextModel

PASSED = b"passed:"
"""Before a source as workers compile it."""
KILLED = b"killed"
"""No answer: somebody else ended the child, which says nothing of the grammar."""
_MAX_MEMORY_BYTES = 512 << 20  # beyond what the nursery has
_NICENESS = 5
_MAX_FDS = 1024
_NUM_WALKS, _NUM_STEPS = 2, 64
_TOO_LONG = "expected a grammar that compiles and begins within {:g} s of processor time"
_CRASHED = "expected a grammar that its compiler can take but it crashed"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Arguments: the process that it serves, and the seconds that a child may take."""
    _end_with(int(sys.argv[1]))
    cpu_s = float(sys.argv[2])
    control = socket.socket(fileno=os.dup(0))
    first = _connection(control)
    if first is None:
        return
    with first:
        grammars = Grammars(TextModel.of_parts(json.loads(_read(first))))
        grammars.compile(regex_grammar("a?"))  # makes the token tree
        first.sendall(b"ready")
    _serve(control, grammars, cpu_s)


def _serve(control: socket.socket, grammars: Grammars, cpu_s: float) -> None:
    """Until whoever asks is gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    selector.unregister(key.fileobj)
                    pid, connection = key.data
                    _tell_end(key.fd, pid, connection, cpu_s)
                elif (asked := _connection(control)) is None:
                    return
                else:
                    pid = os.fork()
                    if pid == 0:
                        _be_child(asked, grammars, cpu_s)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asked))


def _tell_end(fd: int, pid: int, connection: socket.socket, cpu_s: float) -> None:
    os.close(fd)
    _, status = os.waitpid(pid, 0)
    with connection, suppress(OSError):  # nobody waits any more
        if status != 0:
            ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            told: dict[int | None, bytes] = {
                signal.SIGPROF: _TOO_LONG.format(cpu_s).encode(),
                signal.SIGKILL: KILLED,
            }
            connection.sendall(told.get(ended_by, _CRASHED.encode()))


def _be_child(connection: socket.socket, grammars: Grammars, cpu_s: float) -> NoReturn:
    status = 1
    try:
        _end_with(os.getppid())
        # The others' connections: whoever waits for their end would wait for this child's.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, _MAX_FDS)
        os.nice(_NICENESS)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        most = _memory_bytes() + _MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        connection.sendall(_verdict(grammars, _read(connection).decode()))
        status = 0
    finally:
        os._exit(status)


def _verdict(grammars: Grammars, source: str) -> bytes:
    try:
        source = translated(source)
        check_shortest(source)
        for seed in range(_NUM_WALKS):
            _follow(grammars.compile(source), seed)
    except RequestError as error:
        return error.message.encode()
    return PASSED + source.encode()


def _follow(state: GrammarState, seed: int) -> None:
    """Any output, for a while: what compiles at once may still explode with the first tokens. Always the same one.

    Raises RequestError.
    """
    dice = random.Random(seed)
    for _ in range(_NUM_STEPS):
        allowed = np.flatnonzero(state.allowed())
        if not len(allowed) or state.error is not None:
            break
        state.advance(int(allowed[dice.randrange(len(allowed))]))
    if state.error is not None:
        raise state.error


def _connection(control: socket.socket) -> socket.socket | None:
    """The next one; None: there will be none any more."""
    data, fds, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=fds[0]) if data and fds else None


def _read(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def _memory_bytes() -> int:
    """Of addresses: what RLIMIT_AS counts."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _end_with(parent: int) -> None:
    """Die when `parent` does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    main()

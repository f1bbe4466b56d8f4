"""Ctrl-C and SIGTERM: an answer within a second, and an end that keeps what a command has.

Python runs a signal's handler between two of its own instructions, so not while XLA compiles or computes, which may
take many seconds. A thread therefore hears of the signal at once and says so. The handler's exception is lost where
it meets a callback that ignores exceptions, as jax's of the garbage collector does; until somebody has seen it
(`acknowledge`) the thread sends the signal again, once a second.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading

_ANSWERS = {
    signal.SIGINT: "stopping after what is being computed; once more ends at once",
    signal.SIGTERM: "terminating after what is being computed",
}
AGAIN_SECONDS = 1.0

_seen = threading.Event()


class Terminated(KeyboardInterrupt):
    """SIGTERM. What keeps rows on Ctrl-C keeps them on this too."""


def listen() -> None:
    """From now on both signals are answered in words and raise in the main thread; a second Ctrl-C ends the process."""
    heard, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    for number in _ANSWERS:
        signal.signal(number, _raise)
    usual = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if isinstance(lost.exc_value, KeyboardInterrupt) else usual(lost)
    threading.Thread(target=_answer, args=(heard, told), daemon=True, name="signals").start()


def acknowledge() -> None:
    """The exception has arrived: it is raised no more, so that what is kept now is kept whole."""
    _seen.set()


def _raise(number: int, frame: object) -> None:
    if not _seen.is_set():
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _answer(heard: socket.socket, told: socket.socket) -> None:
    sent, interrupts, last = 0, 0, None
    while True:
        is_waiting = last is not None and not _seen.is_set()
        if not select.select([heard], [], [], AGAIN_SECONDS if is_waiting else None)[0]:
            assert last is not None
            sent += 1
            signal.pthread_kill(threading.main_thread().ident or 0, last)
            continue
        for number in heard.recv(64):
            if sent and number == last:
                sent -= 1  # our own
                continue
            interrupts += number == signal.SIGINT
            if interrupts > 1:
                _say("ended")
                os._exit(128 + signal.SIGINT)
            if number in _ANSWERS:
                last = signal.Signals(number)
                _say(_ANSWERS[last])
    del told  # kept until here, or its number would become another file's


def _say(words: str) -> None:
    try:
        os.write(sys.stderr.fileno(), f"\necho-jax: {words}\n".encode())
    except (OSError, ValueError):
        pass  # there is nowhere to say it

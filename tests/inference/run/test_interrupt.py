"""The first signal ends a run in good order, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from opal_deploy.inference.run.interrupt import Interrupt, handle_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_request_during_a_run_and_interrupts_as_ever_before_and_after(number: signal.Signals) -> None:
    said: list[str] = []
    with handle_signals(said.append) as interrupt:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert not interrupt.requested
        with interrupt.running():
            items = interrupt.stop_when_requested(range(10))
            assert next(items) == 0
            os.kill(os.getpid(), number)
            assert list(items) == []
        assert (interrupt.stopped, len(said)) == (True, 1)
        # a second signal would end this process
        interrupt.requested = False
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_images_that_end_by_themselves_were_not_stopped() -> None:
    interrupt = Interrupt()
    assert list(interrupt.stop_when_requested(range(3))) == [0, 1, 2]
    assert not interrupt.stopped


@pytest.mark.parametrize("error", [None, ValueError("x")], ids=["returns", "raises"])
def test_handlers_are_what_they_were_afterwards(error: Exception | None) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with contextlib.suppress(ValueError), handle_signals(lambda _: None):
        assert signal.getsignal(signal.SIGTERM) != before[1]
        if error is not None:
            raise error
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with handle_signals(lambda _: None) as interrupt:
            seen.append((signal.getsignal(signal.SIGINT), interrupt.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


TWICE = """
import os, signal, sys
from opal_deploy.inference.run.interrupt import handle_signals
with handle_signals(lambda text: print(text, file=sys.stderr)) as interrupt, interrupt.running():
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("never here", flush=True)
"""


def test_a_second_signal_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (130, "still here\n", 2)

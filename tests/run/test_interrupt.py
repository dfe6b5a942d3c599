"""The first signal ends a run in good order, the second at once."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from opal_deploy.run.options import handle_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request_during_a_run_and_interrupts_as_ever_before_and_after(number):
    said, before = [], signal.getsignal(number)
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
    assert signal.getsignal(number) == before


def test_outside_the_main_thread_nothing_is_installed():
    def work():
        with handle_signals(lambda _: None):
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(work).result() == signal.getsignal(signal.SIGINT)

"""An engine's stages by CUDA events: the same answers, nothing overlapped, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opal_deploy.errors import StoppedEarly
from opal_deploy.runtime.session import StagedSession
from opal_deploy.synthetic import example_images


@pytest.mark.parametrize("count", [1, 4, 7])
def test_the_answers_are_those_of_a_plain_run(open_engine_for: Callable[..., Any], tiny_fp16: Path, count: int) -> None:
    session = open_engine_for(tiny_fp16, (1, 2, 4))
    pictures = example_images(count, 64, 96)
    assert isinstance(session, StagedSession)

    outputs, stages = session.run_staged(pictures)

    expected = session.run(pictures)
    np.testing.assert_array_equal(outputs.logits, expected.logits)
    np.testing.assert_array_equal(outputs.argmax, expected.argmax)
    assert min(stages.host_to_device, stages.compute, stages.device_to_host) > 0
    session.close()


def test_its_events_are_given_back(stand: Any) -> None:
    session = stand.open()
    before = stand.cudart.events_alive

    session.run_staged(example_images(2, 64, 96))

    assert stand.cudart.events_alive == before
    session.close()


def test_a_device_that_is_lost_is_said_and_its_events_are_given_back(stand: Any) -> None:
    session = stand.open()
    before = stand.cudart.events_alive
    stand.cudart.fail("cudaMemcpyAsync")

    with pytest.raises(StoppedEarly, match="cudaMemcpyAsync failed"):
        session.run_staged(example_images(1, 64, 96))

    assert stand.cudart.events_alive == before
    stand.cudart.failing.clear()
    session.close()

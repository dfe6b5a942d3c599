"""The callbacks of long jobs."""

import logging

from opal_deploy.logs import Estimate, WarningLine, log_line


def test_a_line_is_logged_at_its_level_whatever_it_says(caplog):
    caplog.set_level(logging.INFO, "opal_deploy")
    for line in (WarningLine("low disk"), "warning: is the name of a file"):
        log_line(line)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_the_rest_is_estimated_once_without_the_slow_first_step_and_what_was_done_before():
    times, lines = iter((0, 1, 2, 3)), []
    estimate = Estimate(lines.append, after=20, clock=lambda: next(times))
    # a resumed job: 500 of 1,000 are done, 10 per second
    for done in (500, 510, 520, 530):
        estimate(done, 1_000)
    assert lines == ["about 0:00:48 left, at 10 images/s"]

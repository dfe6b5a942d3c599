"""The callbacks of long jobs."""

from opal_deploy.logs import Estimate


def test_the_rest_is_estimated_once_without_the_slow_first_step_and_what_was_done_before():
    times, lines = iter((0, 1, 2, 3)), []
    estimate = Estimate(lines.append, after=20, clock=lambda: next(times))
    # a resumed job: 500 of 1,000 are done, 10 per second
    for done in (500, 510, 520, 530):
        estimate(done, 1_000)
    assert lines == ["about 0:00:48 left, at 10 images/s"]

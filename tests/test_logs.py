"""The callbacks of long jobs."""

import logging

from opal_deploy.logs import WarningLine, log_line


def test_a_line_is_logged_at_its_level_whatever_it_says(caplog):
    caplog.set_level(logging.INFO, "opal_deploy")
    for line in (WarningLine("low disk"), "warning: is the name of a file"):
        log_line(line)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]

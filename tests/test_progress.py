"""Lines of text, and progress bars and lines, of long commands and of calls from Python."""

import io
import logging

import opal_deploy
from opal_deploy.logs import ProgressLines, WarningLine, log_line, show_progress


def test_a_line_is_logged_at_its_level_whatever_it_says(caplog):
    caplog.set_level(logging.INFO, "opal_deploy")
    for line in (WarningLine("low disk"), "warning: is the name of a file"):
        log_line(line)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def lines(capsys, title, *calls):
    """What is printed when progress is reported at (seconds, done, total, note)."""
    clock = iter([0, *(seconds for seconds, *_ in calls)])
    advance = ProgressLines(title, clock=lambda: next(clock))
    for _, *arguments in calls:
        advance(*arguments)
    return capsys.readouterr().err.splitlines()


def test_a_log_gets_a_line_each_half_minute_with_the_present_rate_and_the_time_left(capsys):
    # 1,000 were there before; ten a second, then two; the total is known after a while
    assert lines(
        capsys, "images",
        (1, 1_000), (20, 1_190), (31, 1_300), (60, 1_590, 5_000), (61, 1_600, 5_000, "1 failed"), (91, 1_660, 5_000),
    ) == [
        "images: 1,300, 10.0/s",
        "images: 1,600 of 5,000 (32%), 10.0/s, 0:05:40 left; 1 failed",
        "images: 1,660 of 5,000 (33%), 2.0/s, 0:27:50 left",
    ]  # fmt: skip


def open_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def test_a_total_is_shown_once_it_is_known(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with show_progress("images") as advance:
        advance(0, 543)
        assert "0/543" in terminal.getvalue()


def test_a_call_from_python_shows_a_bar_when_asked(monkeypatch, exact_model, make_pictures, tmp_path):
    terminal = open_terminal(monkeypatch)
    pictures = make_pictures(tmp_path / "in", 3)
    model = opal_deploy.load(exact_model, threads=1)
    model.predict(pictures)
    opal_deploy.run_inference(pictures, model, out=tmp_path / "silent")
    assert terminal.getvalue() == ""
    model.predict(pictures, progress=True)
    assert "predict" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    opal_deploy.run_inference(pictures, model, out=tmp_path / "out", progress=True)
    assert "run inference" in terminal.getvalue()
    calls = []
    model.predict(pictures, progress=lambda *call: calls.append(call))
    assert calls == [(1, 3, ""), (2, 3, ""), (3, 3, "")]


def test_what_is_short_prints_nothing_and_what_follows_counts_anew(capsys):
    reading = (1, 10, 20), (29, 20, 20)
    assert lines(capsys, "training", *reading) == []
    assert lines(capsys, "training", *reading, (50, 100, 1_000), (60, 110, 1_000), (90, 130, 1_000)) == [
        "training: 100 of 1,000 (10%)",
        "training: 130 of 1,000 (13%), 45.0/min, 0:19:20 left",
    ]

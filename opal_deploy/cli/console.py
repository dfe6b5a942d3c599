"""Console output: messages on stderr, data on stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from opal_deploy.logs import one_line as one_line
from opal_deploy.logs import print_message as print_message
from opal_deploy.progress import Advance as Advance
from opal_deploy.progress import show_progress

progress = show_progress


def print_line(text: str) -> None:
    """Print one line on stderr, with line breaks (in a file name) escaped."""
    print_message(one_line(text))


def print_json(document: Any) -> None:
    """Print a document as indented JSON on stdout."""
    print_json_line(json.dumps(document, indent=2, ensure_ascii=True))


def print_json_line(text: str) -> None:
    """Print a line on stdout; a closed pipe (`| head`) is ignored."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # to the end of the process

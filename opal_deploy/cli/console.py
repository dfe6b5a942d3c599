"""Console output: messages on stderr, data on stdout, and the text of `--help`.

Help fits 80 columns, with options in groups and nothing cut off.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from typer.core import TyperCommand, TyperGroup

from opal_deploy.errors import StoppedEarly
from opal_deploy.logs import one_line as one_line
from opal_deploy.logs import print_message as print_message
from opal_deploy.logs import show_progress

progress = show_progress
_ARGUMENTS, _OPTIONS, _BASIC = "Arguments", "Options", "Basic"
# panels shown before the others, and after them
_FIRST, _LAST = (_ARGUMENTS, _OPTIONS, _BASIC, "Data"), "Advanced"


class GroupedCommand(TyperCommand):
    """A command whose help lists its options by the `panel` that each declares."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, one list for each panel; options without one are basic if others have one."""
        panels = {param.name: getattr(param, "rich_help_panel", None) for param in self.params}
        default = _BASIC if any(panels.values()) else _OPTIONS
        records: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                panel = _ARGUMENTS if is_argument else panels.get(param.name) or default
                records.setdefault(panel, []).append(record)
        for panel in sorted(records, key=_rank):
            with formatter.section(panel):
                formatter.write_dl(records[panel])


def _rank(panel: str) -> int:
    return _FIRST.index(panel) if panel in _FIRST else len(_FIRST) + (panel == _LAST)


class CommandGroup(TyperGroup):
    """A group whose help has each command's whole summary."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with the first paragraph of their help."""
        summaries = [(name, (command.help or "").partition("\n\n")[0]) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(summaries)


def print_line(text: str) -> None:
    """Print one line on stderr, with line breaks (in a file name) escaped."""
    print_message(one_line(text))


def print_json(document: Any) -> None:
    """Print a document as indented JSON on stdout."""
    print_output(json.dumps(document, indent=2, ensure_ascii=True))


def print_output(text: str) -> None:
    """Print lines on stdout, each escaped by `one_line`; a closed pipe (`| head`) is ignored.

    Raises:
        StoppedEarly: stdout cannot be written, such as on a full disk.
    """
    try:
        print("\n".join(map(one_line, text.split("\n"))), flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # to the end of the process
    except OSError as error:
        raise StoppedEarly(f"stdout cannot be written ({error.strerror}); redirect it elsewhere") from None

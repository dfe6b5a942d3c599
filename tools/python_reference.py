"""Write the signatures of the Python API into docs/reference/python.md, for those who read it without the site.

The page names what is documented, as directives that `make docs` fills in and this reads.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/reference/python.md"
BLOCK = re.compile(r"<!-- signatures -->\n.*?<!-- /signatures -->\n\n", re.DOTALL)
_DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?: +.*\n)*)", re.MULTILINE)
_MEMBERS = re.compile(r"members: \[([^\]]*)\]")


def fill(page: str) -> str:
    """Return the page with the signatures of all that its directives name."""
    entries = []
    for path, options in _DIRECTIVE.findall(page):
        members = _MEMBERS.search(options)
        module, _, name = path.rpartition(".")
        named = getattr(import_module(module), name)
        if not inspect.ismodule(named):
            entries.append(_describe(name, named))
        for member in members[1].split(", ") if members else ():
            label = member if inspect.ismodule(named) else f"{name}.{member}"
            entries.append(_describe(label, getattr(named, member)))
    block = "<!-- signatures -->\n```text\n" + "\n".join(entries) + "\n```\n<!-- /signatures -->\n\n"
    bare = BLOCK.sub("", page)
    head, _, rest = bare.partition("::: ")
    return f"{head}{block}::: {rest}"


def _describe(name: str, named: Any) -> str:
    """Return a signature without its types, and the first sentence of the docstring."""
    function = named.fget if isinstance(named, property) else named
    text = name
    if callable(named) and not (isinstance(named, type) and issubclass(named, Exception)):
        text += f"({', '.join(_list_parameters(named))})"
    lines = textwrap.wrap(text, 112, subsequent_indent="        ", break_long_words=False, break_on_hyphens=False)
    summary = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    return "\n".join([*lines, *textwrap.wrap(summary, 112, initial_indent="    ", subsequent_indent="    ")])


def _list_parameters(named: Any) -> list[str]:
    try:
        parameters = list(inspect.signature(named).parameters.values())
    except ValueError:
        return []
    found = []
    for number, parameter in enumerate(parameters):
        if parameter.name == "self" or parameter.name.startswith("_"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and (number == 0 or parameters[number - 1].kind != parameter.kind):
            found.append("*")
        default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
        is_plain = isinstance(default, (str, int, float, bool, tuple, type(None)))
        shown = repr(default) if is_plain else getattr(default, "__name__", "...").replace("<lambda>", "...")
        label = f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name
        found.append(label if default is parameter.empty else f"{label}={shown}")
    return found


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

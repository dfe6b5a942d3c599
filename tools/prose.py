"""Count the prose of README and docs, and check it against the limits that `make check` keeps.

    python tools/prose.py                   # totals, and what breaks a rule
    python tools/prose.py docs/limits.md    # figures of some pages, with their long sentences

Prose is text without code, tables, comments and directives. Sentences are counted in words of letters or digits. The
patterns are looked for in CHANGELOG, too, and in the package's strings: help, messages and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# limits of all pages together
WORDS, SEMICOLONS = 15_400, 60
# words of a sentence that nine of ten do not exceed
LONG = 20
# pattern and what to write instead
PATTERNS = {
    r"\balso (?:a|an|in|with|where|if|after|for|at)\b": "even, or `too` at the end",
    r"\bstrangeness|stranger\b": "OOD score",
    r"\bnone of the classes\b": "out of distribution",
    r"\bwhat else\b": "the other things",
    r"\bbug of ours\b": "internal error",
    r"\bin work\b": "in flight or pending",
    r"\bbeside\b": "next to",
    r"\bexists already\b": "the file exists",
    r"\bby far\b": "a figure",
    r"\bfrom which no\b": "split the sentence",
    r"\bmost is gained\b": "say what helps",
    r"\bthat there is no\b": "without",
}
_DROPPED_DOTALL = re.compile(r"\A---\n.*?\n---\n|```.*?```|<!--.*?-->", re.DOTALL)
_DROPPED_LINES = re.compile(
    r"^:::.*(?:\n +.*)*|^ *\|.*$|^ *#.*$|^\[[^\]]+\]:.*$|<[^<>]+>|(?<=\n\n)(?: {4}.*\n)+", re.MULTILINE
)


def read_prose(path: Path) -> str:
    """Return a page without code, tables, headings, comments and the targets of links."""
    text = _DROPPED_LINES.sub("", _DROPPED_DOTALL.sub("", path.read_text(encoding="utf-8")))
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def split_sentences(prose: str) -> Iterator[str]:
    """Yield the sentences of prose; a list's item is one even without a full stop."""
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", prose):
        text = " ".join(block.split())
        # code in line is one word
        text = re.sub(r"`[^`]*`", "code", text)
        yield from filter(None, re.split(r"(?<=[.!?:])\s+(?=[A-Z*\"(])", text))


def count_words(text: str) -> int:
    """Return the number of words that have a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def find_patterns(place: str, text: str) -> list[str]:
    """Return a line per pattern found in the text."""
    return [
        f"{place}: {match[0]!r}; write {better}"
        for pattern, better in PATTERNS.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def main() -> int:
    """Print the figures; return 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages whose figures and long sentences are printed")
    given = {path.resolve() for path in parser.parse_args().pages}
    lengths: list[int] = []
    semicolons, problems = 0, []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name, prose = path.relative_to(ROOT), read_prose(path)
        sentences = [(count_words(sentence), sentence) for sentence in split_sentences(prose)]
        lengths += [length for length, _ in sentences]
        semicolons += prose.count(";")
        problems += find_patterns(str(name), prose)
        if path in given:
            print(f"{name}: {sum(length for length, _ in sentences):,} words, {prose.count(';')} semicolons")
            long = (f"    {length} words: {text}" for length, text in sentences if length > LONG)
            print(*long, sep="\n", flush=True)
    problems += find_patterns("CHANGELOG.md", read_prose(ROOT / "CHANGELOG.md"))
    for path in sorted((ROOT / "opal_deploy").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                problems += find_patterns(f"{path.relative_to(ROOT)}:{node.lineno}", node.value)
    words, percentile = sum(lengths), sorted(lengths)[int(0.9 * len(lengths))]
    print(f"{words:,} words, nine of ten sentences up to {percentile} words, {semicolons} semicolons")
    limits = {"words": (words, WORDS), "words in nine of ten sentences": (percentile, LONG)}
    for what, (value, limit) in (limits | {"semicolons": (semicolons, SEMICOLONS)}).items():
        if value > limit:
            problems.append(f"{what}: {value:,}, expected at most {limit:,}")
    print(*problems, sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

"""The glossary: one text for the pages' tooltips and the documentation."""

from pathlib import Path

from opal_deploy.visualization.glossary import GLOSSARY

PAGE = Path(__file__).parents[2] / "docs/reference/glossary.md"


def test_the_page_has_the_words_and_sentences_of_the_tooltips():
    head, *sections = PAGE.read_text("utf-8").split("\n## ")
    assert head.startswith("# Glossary\n")
    words = {word.lower(): " ".join(text.split()) for word, _, text in (each.partition("\n") for each in sections)}
    assert list(words.items()) == list(GLOSSARY.items())

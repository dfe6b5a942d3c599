"""`opal-deploy bench report`: measurements as Markdown, and as one page of HTML with charts.

`content` turns measurements into sections of tables, whose rows `rows` names; `page` writes them. The `charts` between
the tables are made of the elements of `drawing`, which also writes them as files for `--chart` of other commands.
"""

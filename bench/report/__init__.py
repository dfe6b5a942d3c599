"""`opal-deploy bench report`: measurements as Markdown, and as one page of HTML with charts.

`content` turns measurements into sections of tables, whose rows `rows` names; `markdown` and `page` write them. The
`charts` beside tables have the layouts of `axes` and the elements of `drawing`; `chart_file` writes them for `--chart`
of other commands.
"""

"""`opal-deploy bench report`: measurements as Markdown, and as one page of HTML with charts.

`content` turns measurements into sections of tables, `charts` into charts made of the elements of `drawing`; `page`
writes both.
"""

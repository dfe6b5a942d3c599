"""`opal-deploy bench report`: measurements as Markdown, and as one page of HTML with plots.

`content` turns measurements into sections of tables (`tables`, `provenance`, `words`); `markdown` and `page` write
them; `charts` and its neighbours draw what a page shows beside each table.
"""

"""The paper's tables: train what a table needs, and print our metrics beside the paper's.

paper     the tables as data (`paper.toml`): rows, columns, the paper's numbers
plan      the runs that a table needs, their directories, and an estimate of their GPU hours
results   training the runs, and reading the metrics of finished ones
render    the table as text, Markdown or JSON
"""

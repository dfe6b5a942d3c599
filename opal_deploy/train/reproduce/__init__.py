"""The paper's tables: train what a table needs, and print our metrics next to the paper's.

plan      the tables as data, the runs that a table needs, an estimate of their GPU hours
results   training the runs, reading their metrics, differences and averages
render    a table as text, Markdown or JSON; Fig. 4 as a chart
"""

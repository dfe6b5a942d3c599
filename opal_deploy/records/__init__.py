"""Records: the answer or the error of one image, a line of results.jsonl.

`record` declares them, `build` makes them from a model's outputs, `lines` writes and reads them, `names` encodes names
of files; `tables` converts them to CSV, Parquet, pandas and COCO.
"""

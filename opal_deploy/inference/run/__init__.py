"""One run of `opal-deploy infer`: from requests to a run directory that can be resumed.

In the order in which a run passes them; `run.run` puts them together, and is where to start reading:

    directory   acquire the directory, find out whether a run is to be resumed there; run.json, summary.json
    results     results.jsonl: where to go on, append records
    backend     what turns requests into records: this process, or (in `cluster`) many machines
    drawing     overlays, evidence sheets and report.html
    summary     counts over the records, accuracy, the limit of errors
    interrupt   Ctrl-C and SIGTERM
"""

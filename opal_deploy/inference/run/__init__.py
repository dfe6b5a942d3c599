"""One run of `opal-deploy infer`: from images to a run directory that can be resumed.

In the order in which a run passes them; `run.run` connects them: start there.

    directory   acquire the directory, find a run to resume; run.json, summary.json
    results     results.jsonl: where to resume, append records
    run         the backend that turns images into records: this process, or (in `cluster`) many machines
    drawing     overlays and evidence sheets; `report` writes report.html
    summary     counts over the records, accuracy, the limit of errors
    interrupt   Ctrl-C and SIGTERM
"""

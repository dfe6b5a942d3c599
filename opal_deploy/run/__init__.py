"""One run of `opal-deploy infer`: from images to a run directory that can be resumed.

In the order in which a run passes them; `run.run` connects them: start there.

    options     the options of `run_inference`
    inputs      the images of a run, with crops and labels, and their number
    directory   acquire the directory, find a run to resume; run.json, summary.json
    bucket      the same for a directory in a bucket
    results     results.jsonl: where to resume, append records
    run         the backend that turns images into records: this process, or (in `cluster`) many machines
    drawing     overlays and evidence sheets, and report.html
    draw_pool   these as encoded files, drawn in worker processes
    sheets      the content of evidence sheets
    summary     counts over the records, accuracy, the limit of errors
    interrupt   Ctrl-C and SIGTERM
"""

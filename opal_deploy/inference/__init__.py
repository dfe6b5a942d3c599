"""Images in, records out: everything between a call and its results.

In the order in which an image passes them:

    sources      find images in folders, lists and archives, with their boxes and labels
    types        `InputImage`, `Prepared`, `Result`, and `InferenceOptions`: start reading here
    decoding     from an `InputImage` to a `Prepared`
    isolation    worker processes, for whatever may crash, hang or run out of memory
    prediction   from a batch of `Prepared` to their `Result` and record
    executor     `predict_batches`: all of these, with decoding ahead of the sessions
    run          a run directory with records, drawings and a report, as `opal-deploy infer` writes it
    run_files    names of a run directory's files
    api          `opal_deploy.load` and `Model.explain`
    service      images that arrive one by one, for servers
    explanation  records that display themselves in a notebook
    sheets       evidence sheets
    drawings     overlays and sheets as files, drawn in worker processes
    timing       seconds by stage and by thread
"""

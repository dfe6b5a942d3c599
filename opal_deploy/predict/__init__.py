"""From images to records: decode them, batch them, run a session, build one record per image.

In the order in which an image passes them:

    prepare          from one `InputImage` to a `Prepared`: read, hash, decode, orient, crop, resize; `InferenceOptions`
    decoder_pool     the same for batches, ahead of the session, in threads or worker processes (`isolate`)
    executor         from batches of `Prepared` to their `Result` and record; `predict_batches` connects all of these
    setup            open the model of a command, and check that it supports the options
    explain_tensors  the tensors of an explain model, in `serve` and in Triton
"""

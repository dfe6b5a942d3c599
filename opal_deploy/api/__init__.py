"""The functions behind `opal_deploy`'s public names and the commands that run a model on images.

model        `load`, and `Model.predict` and `Model.stream`
explanation  records that display themselves in a notebook
service      `Service`: images that arrive one by one, from any thread; servers build on it
infer        `run_inference`: a run directory with records, drawings and a report
explain      `write_sheets`: evidence sheets, one per image
"""

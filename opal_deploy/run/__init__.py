"""One run of `opal-deploy infer`: from images to a run directory that can be resumed; `infer` tells it, start there."""

"""The atlas of a model: the training patches with the strongest evidence per class and slot, and statistics.

`collector` gathers both from records, `entries` holds them and chooses exemplars, `storage` writes
and reads the folder with its page. The package runs no model; `opal_deploy.api.atlas` does.
"""

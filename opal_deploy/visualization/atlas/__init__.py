"""The atlas of a model: for each class and slot, the training patches with the strongest evidence, and statistics.

`collector` gathers patches and statistics from records, `entries` holds them and lists the slots that do not do their
part (the findings), `storage` writes and reads the folder, `page` its `atlas.html`; `exemplars` selects patches to show
beside another image. The package runs no model: `opal-deploy atlas` does, and hands the records over.
"""

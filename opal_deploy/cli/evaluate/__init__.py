"""`opal-deploy evaluate`: accuracy and explanation metrics of models, in the runtime that will run them."""

from opal_deploy.cli.evaluate.command import evaluate

__all__ = ["evaluate"]

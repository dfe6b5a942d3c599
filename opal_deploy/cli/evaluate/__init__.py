"""`opal-deploy evaluate`: how good is a model, and are its explanations true, in the engine that will run it?"""

from opal_deploy.cli.evaluate.command import evaluate

__all__ = ["evaluate"]

"""Run `opal-deploy` as `python -m opal_deploy`, which torchrun needs."""

import sys

from opal_deploy.cli import main

# usage lines must not call the program __main__.py
sys.argv[0] = "opal-deploy"
main()

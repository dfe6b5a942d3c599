"""`python -m opal_deploy` is `opal-deploy`: what torchrun needs to start it."""

import sys

from opal_deploy.cli import main

# usage lines must not call the program __main__.py
sys.argv[0] = "opal-deploy"
main()

"""opal-deploy: put OPAL image classifiers, which explain themselves, into production."""

from __future__ import annotations

from opal_deploy._version import __version__

__all__ = ["__version__"]

"""Builds extensions. There are none yet; pyproject.toml holds everything else."""

from setuptools import setup

setup()

"""For those who run `python setup.py build` or `install`; pyproject.toml says what is built."""

from setuptools import setup

setup()

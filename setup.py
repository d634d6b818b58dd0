"""For those who run `python setup.py build` or `install`; pyproject.toml says what is built."""

import sys

try:
    import setuptools

    version = int(setuptools.__version__.partition(".")[0])
except ImportError:
    version = 0
if version < 77:
    found = f"version {setuptools.__version__} was found" if version else "it is not installed"
    sys.exit(
        f"setup.py needs setuptools 77 or newer, but {found}\nhint: pip install --upgrade setuptools, or: pip install ."
    )

setuptools.setup()

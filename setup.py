"""For those who run `python setup.py build` or `install`; pyproject.toml says what is built.

`python setup.py build --preinitialize-optimized` also compiles the kernels of known layers, for TORCH_CUDA_ARCH_LIST or
9.0, and puts them into the package, so that nothing is compiled where it runs. It needs torch, Triton and the extra
`cli` here, but no GPU.
"""

import sys
from pathlib import Path
from typing import ClassVar

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

from setuptools.command.build import build


class Build(build):
    """Builds the package, and its kernels on request."""

    user_options: ClassVar = [
        *build.user_options,
        ("preinitialize-optimized", None, "compile kernels ahead of time and put them into the package"),
        ("shapes=", None, "layers to compile for, separated by semicolons; as `deep-ep warm --shape` takes them"),
        ("ranks=", None, "sizes of groups to compile for, separated by commas"),
    ]
    boolean_options: ClassVar = [*build.boolean_options, "preinitialize-optimized"]

    def initialize_options(self) -> None:
        """Set the options that are ours."""
        super().initialize_options()
        self.preinitialize_optimized = False
        self.shapes = self.ranks = None

    def run(self) -> None:
        """Build."""
        super().run()
        if self.preinitialize_optimized:
            sys.path.insert(0, str(Path(__file__).parent / "src"))
            from deep_ep import warm

            shapes = [warm.parse_shape(text) for text in self.shapes.split(";")] if self.shapes else warm.DEFAULT_SHAPES
            ranks = [int(text) for text in self.ranks.split(",")] if self.ranks else warm.DEFAULT_RANKS
            folder = Path(self.build_lib) / "deep_ep" / "prebuilt"
            num_kernels = warm.warm(shapes, ranks, warm.choose_capabilities([]), folder)
            self.announce(f"{num_kernels} kernels are in {folder}", level=2)


if __name__ == "__main__":  # the processes that compile import this file
    setuptools.setup(cmdclass={"build": Build})

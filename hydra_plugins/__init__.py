"""Hydra's plugins: ours, and those that are installed or elsewhere on the path.

This is a package, because one of this name on PYTHONPATH would hide ours otherwise. Such a package is left out: Hydra's
plugins are in folders without an __init__.py.
"""

from pathlib import Path
from pkgutil import extend_path

OURS = str(Path(__file__).parent)
__path__ = [OURS, *(place for place in extend_path([], __name__) if not (Path(place) / "__init__.py").exists())]

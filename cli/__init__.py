"""--help, Hydra, and the work of sample.py, eval.py and export.py."""

import common  # noqa: F401  # which refuses an older Python before anything else is imported

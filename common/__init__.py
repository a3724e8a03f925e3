"""Errors, settings, text, files and the console, for every package to import."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # before a module is imported that an older Python cannot read
    found = "error: tinygpt needs Python 3.11 or later, and this is " + sys.version.split()[0]
    raise SystemExit(found + ": make a virtual environment with a newer one, as in python3.12 -m venv venv.")

"""Prints what pyproject.toml requires, a line each: `python requirements.py FILE [EXTRA ...]`, for layers of images."""

import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(line for extra in sys.argv[2:] for line in extras[extra]), sep="\n")

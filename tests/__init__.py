"""Tests by what they need: see README.md."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # what runs `python -m tests...` starts here

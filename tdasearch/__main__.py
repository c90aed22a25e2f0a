"""``python -m tdasearch``."""

from tdasearch.cli import main

main()

"""`python -m lumenbox` is `lumenbox`."""

from lumenbox.cli import main

main()

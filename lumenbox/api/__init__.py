"""The HTTP side of a box: see README.md in this folder."""

"""How the command line shows progress: bars on a terminal, plain lines elsewhere."""

from lumenbox.cli.models import progress_on_stderr

__all__ = ["progress_on_stderr"]

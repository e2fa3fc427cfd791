"""The synchronous side: a fork server that keeps torch warm, and the children it forks (loader, workers)."""

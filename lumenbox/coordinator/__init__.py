"""The asyncio shell: processes, sockets, timers, streams. It performs what the core commands, and tells it the rest."""

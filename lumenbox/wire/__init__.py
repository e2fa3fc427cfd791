"""Messages between coordinator and processes: `frames` has the words, `stream` the bytes."""

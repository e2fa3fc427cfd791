"""Models by name: catalogue and cache, what a folder holds, its tokenizer. Bytes and text only: never torch."""

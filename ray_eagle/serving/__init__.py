"""The speculative server: the reference engine, its Ray Serve app, and clients of it."""

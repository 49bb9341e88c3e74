EXIT_INTERRUPTED = 130
"""After Ctrl-C, as shells have it."""

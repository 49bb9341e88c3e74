EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

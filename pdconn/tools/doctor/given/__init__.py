"""Parses the way a user starts an engine, without vLLM.

shell         parses a script as a shell does: words, variables, arrays, here-documents
launch        finds vLLM in a command: behind ``env``, ``docker run``, ``bash -c`` and the like
documents     Compose, Kubernetes and other YAML or JSON, and systemd units
arguments     parses vLLM's command line as its FlexibleArgumentParser does
given_config  the relevant options of one engine
read          finds the engines in a text, file or line
judge         findings about such an engine: does not start, hand over or fall back
"""

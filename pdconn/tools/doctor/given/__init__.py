"""How an engine is started, as a user wrote it, read without vLLM.

shell         a script as a shell reads it: words, variables, arrays, here-documents
launch        the vLLM in a command: behind ``env``, ``docker run``, ``bash -c`` and the like
documents     Compose, Kubernetes and other YAML or JSON, and systemd units
arguments     vLLM's own command line, as its FlexibleArgumentParser takes it
given_config  the options that matter here, of one engine
read          one text, file or line to the engines in it
judge         what keeps such an engine from starting, handing over or falling back
"""

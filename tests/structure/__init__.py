"""How large and how tangled the source is: counted from the files, and from a traced pull.

    python -m tests.structure [--root DIR] [--json]           files, lines, names that exist twice
    python -m tests.structure.traced [--root DIR] [--json]    files that one request runs through

``--root`` names another checkout, so that two states can be set side by side.
"""

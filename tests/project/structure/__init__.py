"""How large and how tangled the source is: counted from the files, and from a traced pull.

    python -m tests.project.structure [--root DIR] [--json]         files, lines, names, classes
    python -m tests.project.structure.traced [--root DIR] [--json]  files that requests run through

``--root`` names another checkout, so that two states can be set side by side.
"""

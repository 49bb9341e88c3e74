"""Changes of vLLM for the lab's engines on a small machine without a GPU; one variable each.

vLLM loads :mod:`~pdconn.tools.lab.cpu_engines.plugin` as its plugin ``pdconn-cpu``.
"""

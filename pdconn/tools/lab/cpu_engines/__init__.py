"""What the lab's engines need of vLLM on a small machine without a GPU; each by its variable.

vLLM loads :mod:`~pdconn.tools.lab.cpu_engines.plugin` as its plugin ``pdconn-cpu``.
"""

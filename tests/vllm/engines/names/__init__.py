"""Engines that run pdconn under the name of vLLM's in-tree connector."""

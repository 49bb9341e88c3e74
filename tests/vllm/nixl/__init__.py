"""pdconn in the place of vLLM's in-tree NixlConnector."""

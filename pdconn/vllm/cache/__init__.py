"""What pdconn changes in vLLM's prefix cache, and which of its blocks it keeps.

lagging      hits of full attention beside windows that lag behind, completed by a pull
partial      blocks that a pull wrote in part, which are found by nobody
quarantine   blocks that a read which hangs may still write
retention    windows of lent prompts, kept for decode's last token
"""

"""What the tools ask OpenAI-compatible servers, and how they read the answers, once.

completions    requests for greedy completions, and their answers, whole or streamed    pure
served_models  the models that a server lists                                           pure
async_client   pages and completions of a server over aiohttp

``pdconn.tools.lab.client`` is the same for threads: it blocks, and times its answers.
"""

"""The tools' requests to OpenAI-compatible servers, and their parsers of the answers.

completions    requests for greedy completions, and their answers, whole or streamed    pure
served_models  the models that a server lists                                           pure
async_client   pages and completions of a server over aiohttp

``pdconn.tools.lab.lab_client`` is the blocking counterpart for threads, which times its answers.
"""

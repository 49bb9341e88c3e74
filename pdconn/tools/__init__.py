"""What people run beside engines and the router, which import nothing of it.

::

    cli      the command line: one module a command
    doctor   questions to engines, routers and configurations, and what their answers mean
    plan     what a model's KV weighs, and what a pull or a stored prefix costs
    bench    transfers and served requests, measured
    lab      engines and a router on this machine, for demonstrations and benchmarks
    openai   requests to OpenAI-compatible servers, and their answers
    output   the result of a command, described once, as text or as JSON
"""

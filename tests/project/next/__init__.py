"""Does pdconn fit the next vLLM, before there is a build of it for CPUs?  ``make check-next``.

vLLM is published for CPUs a while after it is for GPUs.  Nearly all that pdconn meets of it is
Python, so the next version's Python files, over the compiled libraries of the version that is
installed, are a vLLM that runs here::

    .work/next/0.33.0/vllm/**/*.py                 of the wheel of 0.33.0
    .work/next/0.33.0/vllm/*.so                    ──► those of the installed one
    .work/next/0.33.0/vllm-0.33.0+cpu.dist-info    so that vLLM takes itself for one for CPUs

The folder is put first on the path of child processes, and of engines.  Nothing is installed.

    tree        fetches and unpacks
    uses        what pdconn uses of vLLM beside what it imports
    facts       describes both in one vLLM: run in a child process under each
    compare     the two descriptions
    pair        prefill and decode against one engine alone
    __main__    the steps, a line for each
"""

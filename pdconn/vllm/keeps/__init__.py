"""Blocks that are kept for sessions whose next turn is to come.

keeping    the scheduler's part: keeps what a finished turn leaves, releases it, tells what broke
needs      how many blocks requests lack
"""

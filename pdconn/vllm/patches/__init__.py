"""What pdconn changes in vLLM's insides, one file each: what, why, and the check at the start.

early_check      our configuration is checked before weights are loaded
leans            what is believed of vLLM, checked at the start; versions not tested are refused
built            the scheduler that binds us is found, and what its methods use is checked
deferred_frees   blocks that a step in flight may still write are freed once it is over
failed_loads     optional loads that fail are recomputed, whatever the policy says
cache_resets     resets of the prefix cache are seen by all that keep something of it
engine_calls     calls that may change weights are told before they are made
"""

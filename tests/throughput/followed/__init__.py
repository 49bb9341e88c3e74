"""Hand-overs with both engines asked at once, beside those after prefill's answer."""

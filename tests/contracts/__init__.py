"""Other people's routers, as their sources say what they send, in front of our code."""

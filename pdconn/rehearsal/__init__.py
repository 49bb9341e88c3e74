"""A pull from ourselves at the start, so that the first request's pull does nothing for the first time.

rehearse   one whole pull between two transports of this process
borrowed   a transport that its user cannot close
"""  # noqa: E501

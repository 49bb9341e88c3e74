"""Our index beside Dynamo's: the same events and look-ups, one core each."""

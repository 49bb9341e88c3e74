"""Spans of pulls, for their requests' traces."""

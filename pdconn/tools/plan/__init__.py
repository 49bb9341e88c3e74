"""Predicts the cost of a pull from the shapes of two engines.  Pure: no engine, no GPU."""

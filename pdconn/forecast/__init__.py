"""What a pull will cost, foretold from two engines' shapes.  Pure: no engine, no GPU."""

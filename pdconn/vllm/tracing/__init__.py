"""What a pull adds to its request's trace."""

"""What a pull costs the threads of a decode engine, and a Python thread beside them."""

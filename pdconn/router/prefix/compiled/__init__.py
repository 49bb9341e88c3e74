"""The part of the prefix index that is compiled, where a compiler was there at installation."""

"""Shapes of models from their Hugging Face configurations."""

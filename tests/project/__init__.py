"""What the project shows beside its code: documents, images, packages, structure."""

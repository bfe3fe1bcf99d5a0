"""Sessions on disk (`toolroll serve --out`)."""

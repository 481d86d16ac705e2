"""Images in training: pixels as the engine has them, and the towers of models (docs/models.md)."""

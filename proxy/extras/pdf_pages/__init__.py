"""The pages of a PDF as pictures, for a model that reads images."""

"""Recorded sessions as training data of this and other projects."""

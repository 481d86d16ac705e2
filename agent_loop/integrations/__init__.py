"""Our trials inside other people's trainers."""

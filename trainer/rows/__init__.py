"""How the paths of a batch are laid out in rows and pieces, and what pieces hand on."""

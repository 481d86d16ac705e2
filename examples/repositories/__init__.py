"""Small repositories to find, fix, rename and set things in, for agents with their own tools."""

"""Other libraries' names over this core."""

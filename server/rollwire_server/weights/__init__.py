"""The weights that serve, and the updates that replace them."""

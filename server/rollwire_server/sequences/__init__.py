"""The sequences of a server: admitted, sampled, read, kept to be picked up."""

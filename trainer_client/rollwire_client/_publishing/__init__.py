"""Publishing a policy to the servers of a fleet."""

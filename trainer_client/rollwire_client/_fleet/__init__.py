"""A fleet of rollout servers: its servers, which of them gets a sequence, and the sequences."""

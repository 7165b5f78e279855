"""The processes of a sharded trainer publish together: all gather, rank 0 sends."""

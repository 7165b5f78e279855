"""Batches of groups: over-sampling, tails, staleness, evaluation, saved buffers."""

"""Engines that sample; the server sees them through ``base`` alone."""

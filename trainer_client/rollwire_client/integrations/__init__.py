"""Trainers' frameworks on rollwire: one package for each, with an extra of the same name."""

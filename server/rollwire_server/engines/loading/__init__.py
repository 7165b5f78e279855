"""Memory for weight updates and copies into place, for any engine."""

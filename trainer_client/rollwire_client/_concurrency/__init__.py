"""Event loops, threads and tasks, and who owns them."""

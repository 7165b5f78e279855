"""How an engine in other processes takes weights: staging memory, copies in place, fingerprints."""

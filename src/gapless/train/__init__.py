"""Training from a config: what to train is read, built, planned if asked for, and trained."""

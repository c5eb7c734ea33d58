"""Models as people write them: for tests, examples and benchmarks."""

"""What tests of the engine share: oracles, executors and calls of its command line."""

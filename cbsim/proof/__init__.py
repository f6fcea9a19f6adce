"""What proves the rest: conformance, recorded runs, studies, bars, the benchmark. Only the command line imports it."""

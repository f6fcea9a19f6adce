"""Functions that draw one figure each: from frames of `loading.LoadedRun`, by the run's label, to a `Chart`."""

"""One figure a function: from frames to a `Chart`. Frames are those of `loading.LoadedRun`, by the run's label."""

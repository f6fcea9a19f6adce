"""One figure a function: from frames to a `Chart`. Frames are those of `analysis.load.Run`, by the run's label."""

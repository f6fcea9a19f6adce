"""One figure a function: from frames to a `Chart`. Frames are those of `loading.Run`, by the run's label."""

"""Questions that many runs or published numbers answer together, each asked by a function `study`."""

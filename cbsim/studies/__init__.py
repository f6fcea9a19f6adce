"""Questions that many runs or published numbers answer together, each a module with a function `study`."""

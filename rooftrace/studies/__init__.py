"""One thing changed, planned and timed again: sizes, limits, meshes, what-ifs, graph breaks."""

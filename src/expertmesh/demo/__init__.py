"""The whole way in a few minutes on a laptop: `expertmesh demo`. It needs no downloads."""

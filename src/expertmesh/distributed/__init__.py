"""Ranks: the mesh and its two views, collectives, and errors that all ranks raise together. Knows no model."""

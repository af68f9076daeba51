"""The measurements of ``logquarry bench``."""

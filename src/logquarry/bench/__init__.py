"""What ``logquarry bench`` measures: writing, reading, checking and recovering stores."""

"""Files of one size that are written through their maps, and joined into one offset space."""

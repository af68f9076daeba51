"""Every sound message of a damaged store into a new, sound one (docs/salvage.md)."""

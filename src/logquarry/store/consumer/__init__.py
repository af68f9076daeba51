"""Groups that consume a store: what they want, how far they are, and who has which queue."""

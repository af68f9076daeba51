"""What expires, and why: a plan found by reading, and then the steps that carry it out."""

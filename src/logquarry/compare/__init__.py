"""Two stores beside each other: a master and its slave, or a store and its copy."""

"""Numbers of a store as Prometheus reads them; needs the extra ``metrics``."""

"""Metrics of a store or a broker for Prometheus; needs the extra ``metrics``."""

"""Tools for testing programs that use stores: a faulty disk, a model store, clocks, builders."""

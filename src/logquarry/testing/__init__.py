"""Tools for tests of programs that use stores: faulty disk, model store, clocks, builders."""

"""The sinks: DataFrames and streams into stores, exactly once."""

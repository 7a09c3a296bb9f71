"""Other libraries' interfaces to the engine; each needs its library, which is an extra."""

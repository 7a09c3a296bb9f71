"""The modules a decoder is built of."""

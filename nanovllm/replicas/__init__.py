"""Engines in processes of their own, one or several alike, behind the protocol `Engine`."""

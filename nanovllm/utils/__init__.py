"""Utilities that several layers share."""

"""Integrations with other libraries; each requires its library, an extra."""

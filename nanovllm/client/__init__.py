"""Front ends of engines: the loop that steps one, and engines in processes of their own, one or several."""

"""Files of requests: what their lines ask for, and the lines that answer them."""

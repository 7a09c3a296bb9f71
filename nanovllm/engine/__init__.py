"""The host side: requests, scheduling, paged memory, and the runner of one device."""

"""The server's endpoints by subject; each router finds the engine by `ServiceDep`."""

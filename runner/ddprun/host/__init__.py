"""What one machine offers to the ranks on it: network, devices, shared memory, processes."""

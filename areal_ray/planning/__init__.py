"""What follows from a config, told before anything starts."""

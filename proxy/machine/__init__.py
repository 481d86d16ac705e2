"""What the operating system gives: ports, locks, secrets, logs, walls' rule sets, command lines."""
